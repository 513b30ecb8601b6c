"""A checkpoint of another layout as one state: the contents of this rank's files, taken from all ranks' files."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS
from torch import nn

from ds_npu.checkpoint.files import CheckpointError
from ds_npu.checkpoint.manifest import MODULE
from ds_npu.checkpoint.selection import Selection
from ds_npu.checkpoint.written import WrittenCheckpoint
from ds_npu.engine.checkpoints.layer_files import states_of
from ds_npu.engine.checkpoints.weights_only import PARTITIONS
from ds_npu.engine.checkpoints.written_files import OF_RANKS, layout_description, numel_of, partition_start
from ds_npu.features.experts.relocation import EXPERT_MAP
from ds_npu.models.zero3 import unpartitioned_shape
from ds_npu.parallel.runtime.placement import placement_of
from ds_npu.zero_ext.optimizer_layout import PLAIN, ZERO, OptimizerLayout

State = dict[str, Any]
REASSEMBLED = "ds_npu_reassembled"
"""The key that marks a reassembled state, which has the content of all of this rank's files."""
OF_PRECISION = (
    "loss_scaler",
    "dynamic_loss_scale",
    "overflow",
    "cur_scale",
    "cur_iter",
    "last_overflow_iter",
    "scale_factor",
    "scale_window",
)
"""Keys in state dicts of DeepSpeed's optimizers whose values are copied as they are, where both runs have them."""


class Reassembly:
    """The content of the files of one rank of an engine, reassembled from a checkpoint of another layout.

    A weight of the model that the checkpoint does not have keeps its own values, and has no state of the optimizer.
    """

    def __init__(self, engine: Any, written: WrittenCheckpoint, partitions_alone: bool = False) -> None:
        """``partitions_alone``: under ZeRO 3, the weights without the state of their optimizer."""
        self.engine, self.written, self.partitions_alone = engine, written, partitions_alone
        self.layout: OptimizerLayout | None = None if partitions_alone else engine.optimizer_layout
        if engine.optimizer is not None and self.layout is None and not partitions_alone:
            optimizer = type(engine.optimizer).__name__
            mine = layout_description(engine)
            raise CheckpointError(
                f"{written.folder} was written at another layout ({written.layout}; this run: {mine}), and it is not "
                f"known what {optimizer} holds where with the offloading of this config. What to do: the layout that "
                "wrote it, or weights only: engine.save_pretrained in the former run, from_pretrained in this one"
            )
        self.is_partitioned: bool = engine.zero_optimization_partition_weights()
        self.weights: dict[str, nn.Parameter] = dict(engine.module.named_parameters(remove_duplicate=False))
        self.names = written.plain_weights().keys()

    def state(self) -> State:
        """The content of all files in one dict: the model's, with the run's counters, and the optimizer's."""
        found = self.written.model_state()
        theirs = self.written.of_optimizer((ZERO, PLAIN), OF_PRECISION)
        found |= {
            REASSEMBLED: True,
            MODULE: self._module(),
            EXPERT_MAP: None,
            PLAIN: None,
            FROZEN_PARAM_FRAGMENTS: None,
            "dp_world_size": self.engine.seq_dp_world_size,
            "mp_world_size": self.engine.mp_world_size,
        }
        if self.partitions_alone:
            found[PARTITIONS] = dict(self._fragments())
        elif self.is_partitioned:
            found[FROZEN_PARAM_FRAGMENTS] = dict(self._fragments())
        if self.layout is not None:
            root = str(self.layout.states[0])
            found[root] = self.engine.optimizer.state_dict()
            self._fill(found, self.layout)
            for key in OF_PRECISION:
                if key in theirs and key in found[root]:
                    found[root][key] = theirs[key]
        return found

    def _module(self) -> State:
        found = {}
        for name, tensor in states_of(self.engine).items():
            weight = self.weights.get(name)
            if (weight is not None and self.is_partitioned) or not isinstance(tensor, torch.Tensor):
                found[name] = tensor
            elif name in self.names:
                found[name] = self.written.value(name) if weight is None else self._weight(name, weight)
        return found

    def _weight(self, name: str, weight: nn.Parameter) -> torch.Tensor:
        """This rank's part of a weight, in the dtype that is cheapest to read."""
        is_narrow = self.written.has_narrow(name, weight.dtype)
        found = self.written.value(name, self._mine(weight), is_narrow=is_narrow)
        return found.view(unpartitioned_shape(weight))

    def _mine(self, weight: nn.Parameter, first: int = 0, numel: int | None = None) -> Selection:
        """The selection of ``numel`` elements, from ``first`` on, of this rank's part of a weight."""
        shards = placement_of(weight).sharded.items()
        ranks = [(sharding, self.engine.topology.rank(axis)) for axis, sharding in shards]
        return Selection(ranks, first, numel)

    def _fragments(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Under ZeRO 3, this rank's partition of each weight, by name; trained ones with ``partitions_alone`` only."""
        for name, weight in self.engine.module.named_parameters():
            if weight.requires_grad and numel_of(weight) > 0 and not self.partitions_alone:
                continue
            held = weight.ds_tensor
            if held.numel() == 0 < numel_of(weight):
                raise CheckpointError(
                    f"{name} is not in memory (zero_optimization.offload_param): weights alone cannot be loaded into "
                    "it. What to do: load_optimizer_states=True with load_module_only=False, or from_pretrained"
                )
            if name not in self.names:
                yield name, held.detach().to("cpu", copy=True)
                continue
            part = held.new_zeros(held.shape, device="cpu").view(-1)
            first = partition_start(weight)
            numel = max(min(held.numel(), numel_of(weight) - first), 0)
            if numel:
                part[:numel] = self.written.value(name, self._mine(weight, first, numel))
            yield name, part.view(held.shape)

    def _fill(self, found: State, layout: OptimizerLayout) -> None:
        """Put the optimizer's weights, their state and its settings where ``layout`` has them in ``found``."""
        names = {id(weight): name for name, weight in self.weights.items()}
        flats = self._own_flats(found, layout, names)
        states: dict[int, State] = {}
        settings: dict[int, Mapping[str, Any]] = {}
        for key, run in layout.runs.items():
            name = names[key]
            weight = self.weights[names[key]]
            if name not in self.names:
                continue
            settings[run.group] = settings.get(run.group) or self.written.settings(name)
            mine = slice(run.start, run.start + run.numel)
            wanted = self._mine(weight, run.first, run.numel)
            if layout.values is not None:
                flats[run.flat].view(-1)[mine] = (
                    self.written.value(name, wanted)
                    if self.is_partitioned or self.written.has_narrow(name, weight.dtype)
                    else found[MODULE][name].reshape(-1)[run.first : run.first + run.numel]
                )
            for each, value in self.written.state(name, wanted).items():
                own = states.setdefault(run.flat, {})
                if not isinstance(value, torch.Tensor) or value.dim() == 0:
                    own[each] = copy.deepcopy(value)  # Each weight counts its own steps.
                    continue
                flat = own.setdefault(each, torch.zeros(flats[run.flat].shape, dtype=value.dtype))
                flat.view(-1)[mine] = value
        if layout.values is not None:
            # Copies, since the lists in the state dict are the optimizer's own.
            held = [[*each] if isinstance(each, list) else each for each in _at(found, layout.values)]
            _at(found, layout.values[:-1])[layout.values[-1]] = held
            for run in layout.runs.values():
                _at(held, run.keys[:-1])[run.keys[-1]] = flats[run.flat]
        inner = _at(found, layout.states)
        inner["state"] = states
        for index, group in enumerate(inner["param_groups"]):
            group.update({key: value for key, value in settings.get(index, {}).items() if key not in OF_RANKS})

    def _own_flats(self, found: State, layout: OptimizerLayout, names: Mapping[int, str]) -> list[torch.Tensor]:
        """Host tensors shaped as the optimizer's: zeros, or its own values where the checkpoint has no weight."""
        flats = [torch.zeros(each.shape, dtype=each.dtype) for each in layout.flats]
        if layout.values is not None:
            held = _at(found, layout.values)
            for key, run in layout.runs.items():
                if names[key] not in self.names:
                    flats[run.flat].copy_(_at(held, run.keys).detach().view(flats[run.flat].shape))
        return flats


def _at(found: Any, keys: Sequence[str | int]) -> Any:
    for key in keys:
        found = found[key]
    return found


class Overlaid:
    """Stands for the object ``plain``; the attributes in ``others`` replace its own."""

    def __init__(self, plain: object, **others: object) -> None:
        self.plain = plain
        self.__dict__.update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)
