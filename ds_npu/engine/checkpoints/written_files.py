"""Positions of weights in the files that a rank of an engine writes, and the classes in these files."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS
from deepspeed.runtime.fp16 import loss_scaler
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch import nn

from ds_npu.checkpoint.manifest import MODULE, Manifest, WrittenPart, WrittenRun
from ds_npu.checkpoint.written import Plain
from ds_npu.engine.checkpoints.layer_files import layer_positions, states_of
from ds_npu.models.zero3 import partition, unpartitioned_shape
from ds_npu.parallel.runtime.placement import placement_of
from ds_npu.topology.degrees import DENSE, EXPERT, NAMES
from ds_npu.zero_ext.optimizer_layout import ZERO, OptimizerLayout

CLASSES: tuple[Any, ...] = (
    loss_scaler.LossScaler,
    loss_scaler.DynamicLossScaler,
    ZeroStageEnum,
    fragment_address,
    argparse.Namespace,
    # Arrays, as the state of NumPy's random numbers is.
    numpy.empty(0).__reduce__()[0],
    numpy.ndarray,
    numpy.dtype,
    *{type(numpy.dtype(kind)) for kind in "?bhilqBHILQefd"},
)
"""Classes of objects in the files of DeepSpeed 0.19.6 to 0.19.8 and in many a ``client_state``; none runs code."""
OF_RANKS = ("params", "name", "moe", "param_names")
"""Settings of a parameter group that say which weights it has, not how they are stepped."""


def manifest_of(engine: Any, folder: Path, leaves_out_frozen: bool = False) -> Manifest:
    """The manifest that this rank writes into ``folder``.

    It names no positions in files where the layout of the module or of the optimizer is not known.
    """
    layout: OptimizerLayout | None = engine.optimizer_layout
    is_known = engine.has_manifests and (engine.optimizer is None or layout is not None)
    parts, of_model = {}, None
    if engine.has_manifests:
        files = _Files(engine, folder, layout, leaves_out_frozen)
        parts = dict(files.parts())
        of_model = files.of_model
    if not is_known:
        parts = {name: replace(part, value=None, state=None, group=None) for name, part in parts.items()}
    groups = [] if layout is None else [_settings(group) for group in layout.inner.param_groups]
    words = layout_description(engine)
    return Manifest(parts, dist.get_world_size(), groups, of_model, words, is_known, leaves_out_frozen)


def layout_description(engine: Any) -> str:
    """The layout of an engine, in words for an error."""
    axes = dict.fromkeys((*DENSE, *EXPERT))
    sizes = [
        f"{NAMES[axis]} {engine.topology.size(axis)}"
        for axis in axes
        if axis not in ("dp", "edp") and engine.topology.size(axis) > 1
    ]
    zero = engine._config.zero_config
    devices = {"offload_param": zero.offload_param, "offload_optimizer": zero.offload_optimizer}
    offloaded = [
        f"{key} {OffloadDeviceEnum(each.device).value}"
        for key, each in devices.items()
        if each is not None and each.device != OffloadDeviceEnum.none
    ]
    kind = [] if engine.has_manifests else [type(engine.module).__name__]
    return ", ".join([f"{dist.get_world_size()} ranks", *sizes, f"ZeRO {int(zero.stage)}", *offloaded, *kind])


def plain_weights(engine: Any) -> dict[str, Plain]:
    """Shape and dtype in the plain model, by name, of each weight and persistent buffer on this rank."""
    weights = dict(engine.module.named_parameters(remove_duplicate=False))
    found = {}
    for name, tensor in states_of(engine).items():
        weight = weights.get(name)
        if weight is not None:
            part = WrittenPart(unpartitioned_shape(weight), dict(placement_of(weight).sharded))
            found[name] = Plain(part.plain_shape, str(weight.dtype))
        elif isinstance(tensor, torch.Tensor):
            found[name] = Plain(tuple(tensor.shape), str(tensor.dtype))
    return found


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in group.items():
        plain = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        if key not in OF_RANKS and (plain is None or isinstance(plain, bool | int | float | str | list | tuple)):
            found[key] = plain
    return found


class _Files:
    """The files of a rank in the ``folder`` of a checkpoint, and the weights in each."""

    def __init__(self, engine: Any, folder: Path, layout: OptimizerLayout | None, leaves_out_frozen: bool) -> None:
        self.engine, self.layout, self.leaves_out_frozen = engine, layout, leaves_out_frozen
        where = str(folder.parent), folder.name
        self.of_model = Path(engine._get_ckpt_name(*where)).name if engine.save_non_zero_checkpoint else None
        has_own = layout is not None and layout.states[0] == ZERO and engine.save_zero_checkpoint
        self.of_zero = Path(engine._get_zero_ckpt_name(*where)).name if has_own else None
        self.of_experts = engine.expert_file(folder).name if engine.writes_experts else None
        self.is_partitioned = engine.zero_optimization_partition_weights()
        self.layers = layer_positions(engine, folder) if isinstance(engine.module, PipelineModule) else None

    def _position(self, name: str, file: str | None) -> tuple[str | None, tuple[str, ...]]:
        """The file of a weight or buffer that this rank writes, and its path in it; ``file``: that of the model."""
        if self.layers is None:
            return file, (MODULE, name)
        return (self.layers[name][0], (self.layers[name][1],)) if name in self.layers else (None, ())

    def parts(self) -> Iterator[tuple[str, WrittenPart]]:
        """Names and written parts of weights and persistent buffers."""
        names = dict(self.engine.module.named_parameters(remove_duplicate=False))
        for name, tensor in states_of(self.engine).items():
            weight = names.get(name)
            if weight is None:
                file, way = self._position(name, self.of_model)
                if isinstance(tensor, torch.Tensor) and file is not None:
                    value = _all_of(tensor, file, way)
                    yield name, WrittenPart(tuple(tensor.shape), value=value, dtype=str(tensor.dtype))
                continue
            part = self._part(name, weight)
            if part is not None:
                yield name, part

    def _part(self, name: str, weight: nn.Parameter) -> WrittenPart | None:
        placement = placement_of(weight)
        of_model = self.of_experts if placement.is_expert and not self.is_partitioned else self.of_model
        file, way = self._position(name, of_model)
        holder = file
        value = state = group = None
        is_narrow = weight.element_size() == 2 and not self.is_partitioned and self._is_in_optimizer(weight)
        # Below ZeRO 3 a file of the model has the weight itself, where the optimizer's has float32 masters.
        narrow = _all_of(weight, file, way) if is_narrow and file is not None else None
        if self.layout is not None and (run := self.layout.runs.get(id(weight))) is not None:
            values = self.layout.values
            states = self.layout.states
            group = run.group
            holder = self.of_zero if states[0] == ZERO else of_model
            if values is not None and holder is not None:
                value = WrittenRun(holder, (*values, *run.keys), run.start, run.first, run.numel)
            elif values is None and file is not None:
                value = _all_of(weight, file, way)
            if holder is not None:
                state = WrittenRun(holder, (*states, "state", run.flat), run.start, run.first, run.numel)
        elif not self._is_in_optimizer(weight) and file is not None:
            value = self._frozen(name, weight, file) if partition(weight) is not None else _all_of(weight, file, way)
        if file is None and holder is None:
            return None
        if self.leaves_out_frozen and not weight.requires_grad:
            value = None
        shape = unpartitioned_shape(weight)
        shardings = dict(placement.sharded)
        ranks = {axis: self.engine.topology.rank(axis) for axis in shardings}
        return WrittenPart(shape, shardings, ranks, value, state, group if state else None, str(weight.dtype), narrow)

    def _is_in_optimizer(self, weight: nn.Parameter) -> bool:
        """Whether its float32 values are in an optimizer's file, where other ranks have them."""
        has_file = self.layout is not None and self.layout.states[0] == ZERO
        return has_file and weight.requires_grad and numel_of(weight) > 0

    def _frozen(self, name: str, weight: nn.Parameter, file: str) -> WrittenRun | None:
        held: Any = partition(weight)
        first = partition_start(weight)
        numel = max(min(held.numel(), numel_of(weight) - first), 0)
        return WrittenRun(file, (FROZEN_PARAM_FRAGMENTS, name), 0, first, numel)


def numel_of(weight: nn.Parameter) -> int:
    """The number of elements of a weight that ZeRO 3 may have partitioned."""
    return int(getattr(weight, "ds_numel", weight.numel()))


def partition_start(weight: Any) -> int:
    """The first element of this rank's even part of a weight under ZeRO 3."""
    return int(weight.ds_tensor.numel() * dist.get_rank(group=weight.ds_process_group))


def _all_of(tensor: torch.Tensor, file: str, keys: tuple[str | int, ...]) -> WrittenRun:
    return WrittenRun(file, keys, 0, 0, tensor.numel())
