"""Loads a checkpoint's weights without the optimizer's state, and updates what DeepSpeed leaves as it was.

DeepSpeed 0.19.8 (runtime/engine.py) leaves two things behind. Without ZeRO, ``load_optimizer_states=False`` loads the
16-bit weights and keeps the float32 masters, which the next step writes back. Under ZeRO 3 ``load_module_only=True``
loads nothing, because the files of models hold no weights; ``load_optimizer_states=False`` reads the weights of the
checkpoint that ``latest`` names, whatever tag was given, and knows neither tensor ranks nor experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ds_npu.checkpoint.files import CheckpointError
from ds_npu.checkpoint.rank_files import LATEST
from ds_npu.checkpoint.wholeness import name_in
from ds_npu.engine.topology_engine import TopologyEngine

PARTITIONS = "ds_npu_partitions"
"""The key of a state that holds, by name, this rank's partition of each weight under ZeRO 3."""


class Asked(NamedTuple):
    """The arguments of DeepSpeed's load_checkpoint that follow the tag."""

    load_module_strict: bool = True
    load_optimizer_states: bool = True
    load_lr_scheduler_states: bool = True
    load_module_only: bool = False
    custom_load_fn: object = None

    @property
    def leaves_states_out(self) -> bool:
        """Whether weights alone are asked for."""
        return self.load_module_only or not self.load_optimizer_states


class WeightsOnly(TopologyEngine):
    """An engine that loads weights alone; all ranks call it together."""

    def load_checkpoint(self, load_dir: Any, tag: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """As DeepSpeed's; float32 masters are then refreshed from the weights that were loaded."""
        path, client_state = super().load_checkpoint(load_dir, tag, *args, **kwargs)
        has_masters = not self.zero_optimization() and hasattr(self.optimizer, "refresh_fp32_params")
        if path is not None and has_masters and Asked(*args, **kwargs).leaves_states_out:
            self.optimizer.refresh_fp32_params()
        return path, client_state

    def load_module_state_dict(self, checkpoint: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """As DeepSpeed's; under ZeRO 3 also copy the partitions in ``checkpoint``, while no weight is gathered."""
        super().load_module_state_dict(checkpoint, *args, **kwargs)
        partitions = checkpoint.get(PARTITIONS) or {}
        with torch.no_grad():
            for name, weight in self.module.named_parameters():
                if name in partitions:
                    held: Any = weight
                    held.ds_tensor.copy_(partitions[name])

    def _load_zero_checkpoint(self, *args: Any, **kwargs: Any) -> bool:
        """As DeepSpeed's; False where partitions were loaded, so that DeepSpeed makes masters of the weights."""
        if self.reassembled is not None and PARTITIONS in self.reassembled:
            return False
        return bool(super()._load_zero_checkpoint(*args, **kwargs))


def check_partitions_load(folder: Path, asked: Asked, is_plain: bool) -> None:
    """Raise CheckpointError where DeepSpeed, under ZeRO 3, would load other weights than those in ``folder``.

    The manifests in ``folder`` do not say what is where, or there are none. ``is_plain``: no rank has a shard of a
    weight, ZeRO's partitions apart.
    """
    is_latest = name_in(folder.parent / LATEST) == folder.name
    if asked.load_module_only or not is_latest or not is_plain:
        raise CheckpointError(
            f"{folder} has no manifests (ds_npu_layout_rank_*.json) that say what is where, and is to be loaded under "
            "ZeRO 3 without the optimizer's state: DeepSpeed would leave the model as it is, or load other weights. "
            "What to do: load_optimizer_states=True with load_module_only=False, or weights only: "
            "engine.save_pretrained in the former run, from_pretrained in this one"
        )
