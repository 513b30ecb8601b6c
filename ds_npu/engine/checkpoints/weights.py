"""Whole weights out of an engine whose model is sharded over tensor ranks, or cut into stages."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.module import PipelineModule

from ds_npu.checkpoint.files import UNTOUCHED, tensor_bytes, why_not_written
from ds_npu.engine.failures.joint_calls import joint
from ds_npu.engine.topology_engine import TopologyEngine
from ds_npu.models.zero3 import unpartitioned_shape
from ds_npu.parallel.pipeline.pass_through import stages_in
from ds_npu.parallel.runtime.placement import has_experts
from ds_npu.topology.degrees import Axis

SAVE_16BIT = "engine.save_16bit_model"


class WholeWeights(TopologyEngine):
    """The weights of an engine's model as one process would have them. Every rank calls these together."""

    @property
    def stages(self) -> int:
        """The number of ranks that hold stages of the model; 1 where each holds all of it, and for a PipelineModule."""
        return self.topology.size("pp") if stages_in(self.module) else 1

    @property
    def is_sharded(self) -> bool:
        """Whether this rank holds a part of the weights: tensor ranks, expert ranks or stages share the model."""
        return bool(self.topology.size("tp") > 1 or self.stages > 1 or has_experts(self.module))

    def whole_state_dict(self) -> dict[str, torch.Tensor]:
        """The plain model's state dict, on the CPU of global rank 0; empty on every other rank.

        Names and shapes are those of the model before it was sharded, so that it loads into the plain one. Weights are
        gathered one at a time.
        """
        # It imports transformers, which need not be installed.
        from ds_npu.checkpoint.saving import whole_state_dict

        weights: dict[str, torch.Tensor] = {}
        with self._on_all_ranks("engine.whole_state_dict"):
            holders = self._holders(every_rank=False)
            gather = self._gather
            # ZeRO-3 gathers over data ranks, which take part and keep nothing.
            needed = gather is _gathered and self.topology.rank("pp") == 0
            if holders.dense is not None or holders.experts is not None or needed:
                weights = whole_state_dict(self.module, holders, gather=gather)
        # On NPUs collectives are only queued when they return: a rank may end after this, and its part must be sent.
        get_accelerator().synchronize()
        return weights

    def whole_weights(self, device: torch.device | str | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole tensor) of the plain model on every rank, one at a time, for an inference engine.

        Names, shapes and order are those of the plain model's state dict; a tensor with several names (a tied head)
        comes once, under the first. A tensor is a copy that is the caller's own, on ``device`` (None: the model's).
        Every rank takes all of them together, and trains none meanwhile: each step gathers one weight. A rank needs
        memory for one whole tensor and one shard of it (under ZeRO 3: and for what it gathers of that shard).
        Raises ValueError for a PipelineModule in stages.
        """
        if isinstance(self.module, PipelineModule) and self.topology.size("pp") > 1:
            raise ValueError(
                "engine.whole_weights: the stages of a PipelineModule name their layers themselves. What to do: save a "
                "checkpoint, or cut the plain model into stages with ds_npu.parallel.pipeline"
            )
        from ds_npu.checkpoint.saving import whole_weights

        found = whole_weights(
            self.module,
            self._holders(every_rank=True),
            device=None if device is None else torch.device(device),
            gather=self._gather,
        )
        return self._begun_by_all(found)

    def _begun_by_all(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        with self._on_all_ranks("engine.whole_weights"):
            pass
        yield from weights
        # See whole_state_dict.
        get_accelerator().synchronize()

    def _on_all_ranks(self, name: str) -> AbstractContextManager[None]:
        """A block that no rank begins before all of them do, where ranks hold parts of the weights."""
        holds_part = self.is_sharded or self._gather is _gathered
        return self.joint_calls.call(name) if holds_part else nullcontext()

    def _holders(self, every_rank: bool) -> Any:
        """The ranks that gather the weights of each view; without ``every_rank`` only the groups of global rank 0."""
        from ds_npu.checkpoint.saving import Holders, ViewHolders

        topology, stages = self.topology, self.stages
        dense: tuple[Axis, ...] = ("pp", "tp") if stages > 1 else ("tp",)

        def has_part(axes: tuple[Axis, ...], others: tuple[Axis, ...]) -> bool:
            return every_rank or all(topology.rank(axis) == 0 for axis in others if axis not in axes)

        held = Holders.tensor_ranks(topology.group(*dense), stages) if has_part(dense, ("pp", "dp", "cp")) else None
        experts: tuple[Axis, ...] = ("pp", "ep", "etp") if stages > 1 else ("ep", "etp")
        # Some of several stages may have no experts.
        has_any = has_experts(self.module) or (stages > 1 and topology.size("ep", "etp") > 1)
        if not has_any or not has_part(experts, ("pp", "edp")):
            return ViewHolders(held)
        sizes: dict[Axis, int] = {"ep": topology.size("ep"), "etp": topology.size("etp")}
        return ViewHolders(held, Holders(topology.group(*experts), sizes, stages))

    @property
    def _gather(self) -> Callable[[Any], AbstractContextManager[Any]]:
        return _gathered if self.zero_optimization_partition_weights() else nullcontext

    @joint("engine.save_pretrained")
    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the model, whole, as Hugging Face's ``save_pretrained`` does, for ``from_pretrained`` to read.

        Raises RuntimeError on every rank where global rank 0 could not write; ``folder`` is then as it was.
        """
        from ds_npu.checkpoint.saving import save_pretrained

        self._write(lambda weights: save_pretrained(self.module, Path(folder), weights), folder)

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """As DeepSpeed's, but of whole weights where this rank holds a part of the model."""
        final = Path(save_dir, save_filename)
        unfinished = Path(save_dir, f".{save_filename}.unfinished")
        if not self.is_sharded:
            with self._on_all_ranks(SAVE_16BIT), _renamed_by_all(unfinished, final, self.module.state_dict()):
                return bool(super().save_16bit_model(save_dir, unfinished.name, exclude_frozen_parameters))
        left_out = self._frozen() if exclude_frozen_parameters else set()

        def write(weights: dict[str, torch.Tensor]) -> None:
            chosen = {name: each for name, each in weights.items() if name not in left_out}
            with _renamed_by_all(unfinished, final, chosen):
                final.parent.mkdir(parents=True, exist_ok=True)
                torch.save(chosen, unfinished)

        with self._on_all_ranks(SAVE_16BIT):
            self._write(write, save_dir)
        return True

    # What accelerate and the Hugging Face Trainer ask DeepSpeed's engine for under ZeRO-3.

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        return self.is_sharded or bool(super().zero_gather_16bit_weights_on_model_save())

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> Any:
        """As DeepSpeed's, but of whole weights where this rank holds a part of the model."""
        if not self.is_sharded:
            with self._on_all_ranks("the gathering of a model's weights"):
                return super()._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
        left_out = self._frozen() if exclude_frozen_parameters else set()
        return {name: each for name, each in self.whole_state_dict().items() if name not in left_out}

    def _frozen(self) -> set[str]:
        """The names of frozen parameters, of all stages; every rank calls it."""
        own = {name for name, each in self.module.named_parameters() if not each.requires_grad}
        everyones: list[set[str]] = [own] * self.stages
        if self.stages > 1:
            dist.all_gather_object(everyones, own, group=self.topology.group("pp"))
        return set().union(*everyones)

    def _write(self, write: Any, path: str | os.PathLike[str]) -> None:
        """Let global rank 0 ``write`` the whole weights; all ranks learn of its failure."""
        weights = self.whole_state_dict()
        failure: list[str | None] = [None]
        if dist.get_rank() == 0:
            try:
                write(weights)
            except Exception as error:
                failure = [f"{type(error).__name__}: {error}"]
        dist.broadcast_object_list(failure, src=0)
        if failure[0] is not None:
            raise RuntimeError(f"{os.fspath(path)}: the whole model could not be written there: {failure[0]}")


@contextmanager
def _renamed_by_all(unfinished: Path, final: Path, weights: dict[str, Any]) -> Iterator[None]:
    """Rename ``unfinished``, which the block writes on one rank, to ``final``; raise OSError with the reason if not."""
    try:
        yield
        if dist.get_rank() == 0 and unfinished.exists():
            unfinished.replace(final)
    except (OSError, RuntimeError) as error:
        with suppress(OSError):
            unfinished.unlink()
        why = why_not_written(error, final, tensor_bytes(weights))
        raise OSError(f"{final} was not written: {why}. {UNTOUCHED}") from error


def _gathered(parameter: Any) -> AbstractContextManager[Any]:
    if 0 in unpartitioned_shape(parameter):
        return nullcontext()  # An expert on other ranks, which DeepSpeed cannot gather.
    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters([parameter])
    return context
