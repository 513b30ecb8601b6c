"""DeepSpeed's checkpoints load at any layout: other sizes of all axes, other stages of ZeRO, another cut into stages.

DeepSpeed (0.19.8) loads a checkpoint where it was written: each rank reads its own files. Here every rank writes beside
them what is in them (``ds_npu.checkpoint.manifest``). Where this run's layout differs, each rank puts together, of all
ranks' files, what its own would hold, and gives that to DeepSpeed's loading in their place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS
from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn

from ds_npu.checkpoint.files import CheckpointError
from ds_npu.checkpoint.manifest import (
    MODULE,
    Manifest,
    WrittenCheckpoint,
    WrittenPart,
    WrittenRun,
    manifest_path,
)
from ds_npu.engine.checkpoint_files import CheckpointTransaction
from ds_npu.features.experts.relocation import PLACES, restore_places
from ds_npu.log import logger
from ds_npu.parallel.placement import has_experts, placement_of
from ds_npu.topology.topology import Topology
from ds_npu.zero_ext.optimizer_layout import PLAIN, ZERO, OptimizerLayout, layout_of_optimizer

State = dict[str, Any]
REASSEMBLED = "ds_npu_reassembled"
"""The key of a state that was put together, and has all that this rank's files would."""
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
"""Keys of DeepSpeed's optimizers that go over as they are, where both have them."""
OF_RANKS = ("params", "name", "moe", "param_names")
"""Settings of a parameter group that say which weights it has, not how they are stepped."""


class AnyLayoutCheckpoints:
    """How an engine writes what its checkpoints hold, and loads one of another layout; every rank calls it together."""

    module: nn.Module
    topology: Topology
    optimizer: Any
    checkpoint_engine: Any
    save_zero_checkpoint: bool
    save_non_zero_checkpoint: bool
    seq_dp_world_size: int
    mp_world_size: int
    zero_optimization_partition_weights: Callable[[], bool]
    load_universal_checkpoint: Callable[[], bool]
    _reassembled: State | None = None
    """What this rank's files would hold, while it is loaded."""

    def load_checkpoint(self, load_dir: Any, tag: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's, of a checkpoint of any layout.

        Raises CheckpointError for one whose files are not all there, or whose optimizer's state has other shapes.
        """
        upstream: Any = super()
        written = _written_in(load_dir, tag) if self.has_manifests and not self.load_universal_checkpoint() else None
        if written is None or self._is_layout_of(written):
            return upstream.load_checkpoint(load_dir, tag, *args, **kwargs)
        if self.zero_optimization_partition_weights() and _leaves_states_out(*args, **kwargs):
            raise CheckpointError(
                f"{written.folder} was written at another layout: under ZeRO 3 weights come with the optimizer's "
                "state. What to do: load_optimizer_states=True, load_module_only=False, or from_pretrained"
            )
        if has_experts(self.module):
            # Wherever the experts of the former run were, those of this one begin in the plain order.
            restore_places(self.module, None, self.topology)
        said = "%s was written at another layout: this rank's part is taken from the files of %s ranks"
        logger().info(said, written.folder, len(written.manifests))
        self._reassembled = _Reassembly(self, written).state()
        plain = self.checkpoint_engine
        self.checkpoint_engine = _Given(plain, self._reassembled)
        try:
            return upstream.load_checkpoint(load_dir, tag, *args, **kwargs)
        finally:
            self.checkpoint_engine, self._reassembled = plain, None

    def _save_checkpoint(self, save_dir: str, tag: str, *args: Any, **kwargs: Any) -> None:
        upstream: Any = super()
        upstream._save_checkpoint(save_dir, tag, *args, **kwargs)
        manifest = self._manifest(Path(save_dir, str(tag))) if self.has_manifests else None
        if manifest is not None:
            path, engine = manifest_path(Path(save_dir, str(tag)), dist.get_rank()), self.checkpoint_engine
            text = manifest.to_json()
            if isinstance(engine, CheckpointTransaction):
                engine.write_text(path, text)
            else:
                path.write_text(text)

    def _get_all_ckpt_names(self, folder: str, tag: str) -> list[str]:
        upstream: Any = super()
        if self._reassembled is not None:
            return [str(next(Path(folder, str(tag)).glob("*model_states.pt")))] * self.mp_world_size
        names: list[str] = upstream._get_all_ckpt_names(folder, tag)
        if self.load_universal_checkpoint() or _written_in(folder, tag) is None:
            return names
        # Of the same name there may have been a checkpoint of more ranks.
        own = {upstream._get_ckpt_name(folder, tag, f"{rank:02d}") for rank in range(self.mp_world_size)}
        return [name for name in names if name in own]

    def _get_all_zero_checkpoints(self, folder: str, tag: str) -> Any:
        upstream: Any = super()
        if self._reassembled is None:
            return upstream._get_all_zero_checkpoints(folder, tag)
        return [self._reassembled[ZERO]] * self.seq_dp_world_size

    def _is_layout_of(self, written: WrittenCheckpoint) -> bool:
        """Whether all ranks find in ``written`` what they would have written."""
        mine, theirs = self._manifest(written.folder), written.manifest(dist.get_rank())
        found: list[bool] = [False] * dist.get_world_size()
        dist.all_gather_object(found, mine is not None and theirs is not None and mine.like(theirs))
        return all(found)

    def _manifest(self, folder: Path) -> Manifest | None:
        """What this rank writes into ``folder``; None where it is not known how it could be put together again."""
        layout = self.optimizer_layout
        if self.optimizer is not None and layout is None:
            return None
        groups = [] if layout is None else [_settings(group) for group in layout.inner.param_groups]
        files = _Files(self, folder, layout)
        return Manifest(dict(files.parts()), dist.get_world_size(), groups, files.of_model)

    @property
    def has_manifests(self) -> bool:
        """Whether the checkpoints are of one model by its names; a PipelineModule has files of layers."""
        return not isinstance(self.module, PipelineModule)

    @property
    def optimizer_layout(self) -> OptimizerLayout | None:
        """Where the optimizer has its weights and their state; None without one, or where that is not known."""
        return layout_of_optimizer(self.optimizer, list(self.module.parameters()))


def _written_in(load_dir: Any, tag: str | None) -> WrittenCheckpoint | None:
    latest = Path(load_dir, "latest")
    if tag is None and not latest.is_file():
        return None
    found = WrittenCheckpoint(Path(load_dir, str(tag or latest.read_text().strip())))
    return found if found.has_manifests else None


def _leaves_states_out(
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: object = None,
) -> bool:
    """Whether DeepSpeed's load_checkpoint, called so, loads weights alone."""
    return load_module_only or not load_optimizer_states


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Of a parameter group, how its weights are stepped; as JSON has it."""
    found = {}
    for key, value in group.items():
        plain = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        if key not in OF_RANKS and (plain is None or isinstance(plain, bool | int | float | str | list | tuple)):
            found[key] = plain
    return found


class _Files:
    """Which of a rank's files have which weights, in the ``folder`` of a checkpoint."""

    def __init__(self, engine: Any, folder: Path, layout: OptimizerLayout | None) -> None:
        self.engine, self.layout = engine, layout
        where = str(folder.parent), folder.name
        self.of_model = Path(engine._get_ckpt_name(*where)).name if engine.save_non_zero_checkpoint else None
        has_own = layout is not None and layout.states[0] == ZERO and engine.save_zero_checkpoint
        self.of_zero = Path(engine._get_zero_ckpt_name(*where)).name if has_own else None
        self.of_experts = engine.expert_file(folder).name if engine.writes_experts else None
        self.is_partitioned = engine.zero_optimization_partition_weights()

    def parts(self) -> Iterator[tuple[str, WrittenPart]]:
        """By name, what is written of weights and persistent buffers."""
        names = dict(self.engine.module.named_parameters(remove_duplicate=False))
        for name, tensor in self.engine.module_state_dict().items():
            weight = names.get(name)
            if weight is None:
                if isinstance(tensor, torch.Tensor) and self.of_model is not None:
                    yield name, WrittenPart(tuple(tensor.shape), value=_all_of(tensor, self.of_model, (MODULE, name)))
                continue
            part = self._part(name, weight)
            if part is not None:
                yield name, part

    def _part(self, name: str, weight: nn.Parameter) -> WrittenPart | None:
        placement = placement_of(weight)
        file = self.of_experts if placement.is_expert and not self.is_partitioned else self.of_model
        shape = getattr(weight, "ds_shape", weight.shape)
        value = state = group = None
        if self.layout is not None and (run := self.layout.runs.get(id(weight))) is not None:
            values, states, group = self.layout.values, self.layout.states, run.group
            file = self.of_zero if states[0] == ZERO else file
            if file is not None:
                way = (MODULE, name) if values is None else (*values, *run.keys)
                value = WrittenRun(file, way, run.start, run.first, run.numel)
                state = WrittenRun(file, (*states, "state", run.flat), run.start, run.first, run.numel)
        elif not self._is_in_optimizer(weight) and file is not None:
            value = self._frozen(name, weight, file)
        if file is None:
            return None
        places = {axis: self.engine.topology.rank(axis) for axis in placement.sharded}
        return WrittenPart(tuple(shape), dict(placement.sharded), places, value, state, group if state else None)

    def _is_in_optimizer(self, weight: nn.Parameter) -> bool:
        """Whether its float32 values are in an optimizer's file, where other ranks have them."""
        return self.layout is not None and self.layout.states[0] == ZERO and weight.requires_grad and _numel(weight) > 0

    def _frozen(self, name: str, weight: nn.Parameter, file: str) -> WrittenRun | None:
        held = getattr(weight, "ds_tensor", None)
        if held is None:
            return _all_of(weight, file, (MODULE, name))
        first = _partition_start(weight)
        numel = max(min(held.numel(), _numel(weight) - first), 0)
        return WrittenRun(file, (FROZEN_PARAM_FRAGMENTS, name), 0, first, numel)


def _numel(weight: nn.Parameter) -> int:
    return int(getattr(weight, "ds_numel", weight.numel()))


def _partition_start(weight: Any) -> int:
    """The first element of this rank's even part of a weight under ZeRO 3."""
    return int(weight.ds_tensor.numel() * dist.get_rank(group=weight.ds_process_group))


def _all_of(tensor: torch.Tensor, file: str, keys: tuple[str | int, ...]) -> WrittenRun:
    return WrittenRun(file, keys, 0, 0, tensor.numel())


class _Reassembly:
    """What the files of one rank of an engine would hold, put together from a checkpoint of another layout."""

    def __init__(self, engine: Any, written: WrittenCheckpoint) -> None:
        self.engine, self.written = engine, written
        self.layout: OptimizerLayout | None = engine.optimizer_layout
        if engine.optimizer is not None and self.layout is None:
            raise CheckpointError(
                f"{written.folder} was written at another layout, and what {type(engine.optimizer).__name__} holds "
                "where is not known with the offloading of this config. What to do: the layout that wrote it, or "
                "weights only: engine.save_pretrained in the former run, from_pretrained in this one"
            )
        self.is_partitioned: bool = engine.zero_optimization_partition_weights()
        self.weights: dict[str, nn.Parameter] = dict(engine.module.named_parameters(remove_duplicate=False))

    def state(self) -> State:
        """All files as one: of the model, with the run's counters, and of the optimizer."""
        found = self.written.model_state()
        theirs = self.written.of_optimizer((ZERO, PLAIN))
        found |= {
            REASSEMBLED: True,
            MODULE: self._module(),
            PLACES: None,
            PLAIN: None,
            FROZEN_PARAM_FRAGMENTS: None,
            "dp_world_size": self.engine.seq_dp_world_size,
            "mp_world_size": self.engine.mp_world_size,
        }
        if self.is_partitioned:
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
        for name, tensor in self.engine.module_state_dict().items():
            weight = self.weights.get(name)
            if (weight is not None and self.is_partitioned) or not isinstance(tensor, torch.Tensor):
                found[name] = tensor
            elif weight is None:
                found[name] = self.written.value(name)
            elif self.written.has(name):
                found[name] = self._own(weight, self.written.value(name))
        return found

    def _own(self, weight: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor of the shape of the plain weight."""
        for axis, sharding in placement_of(weight).sharded.items():
            whole = sharding.take(whole, self.engine.topology.rank(axis))
        return whole

    def _fragments(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Of weights that are not trained, under ZeRO 3, this rank's even part."""
        for name, weight in self.engine.module.named_parameters():
            if weight.requires_grad and _numel(weight) > 0:
                continue
            held = weight.ds_tensor
            part = held.new_zeros(held.shape, device="cpu").view(-1)
            flat = self._own(weight, self.written.value(name)).reshape(-1)
            first = _partition_start(weight)
            mine = flat[first : first + held.numel()]
            part[: mine.numel()] = mine
            yield name, part.view(held.shape)

    def _fill(self, found: State, layout: OptimizerLayout) -> None:
        """Put the optimizer's weights, their state and its settings where ``layout`` has them in ``found``."""
        flats = [torch.zeros(each.shape, dtype=each.dtype) for each in layout.flats]
        states: dict[int, State] = {}
        settings: dict[int, Mapping[str, Any]] = {}
        names = {id(weight): name for name, weight in self.weights.items()}
        for key, run in layout.runs.items():
            name, weight = names[key], self.weights[names[key]]
            settings.setdefault(run.group, self.written.settings(name))
            mine = slice(run.start, run.start + run.numel), slice(run.first, run.first + run.numel)
            if layout.values is not None:
                part = self._own(weight, self.written.value(name)) if self.is_partitioned else found[MODULE][name]
                flats[run.flat].view(-1)[mine[0]] = part.reshape(-1)[mine[1]]
            for each, value in self.written.state(name).items():
                own = states.setdefault(run.flat, {})
                if not isinstance(value, torch.Tensor) or value.dim() == 0:
                    own[each] = copy.deepcopy(value)  # Each weight counts its own steps.
                    continue
                flat = own.setdefault(each, torch.zeros(flats[run.flat].shape, dtype=value.dtype))
                flat.view(-1)[mine[0]] = self._own(weight, value).reshape(-1)[mine[1]]
        if layout.values is not None:
            # The lists are the optimizer's own.
            held = [[*each] if isinstance(each, list) else each for each in _at(found, layout.values)]
            _at(found, layout.values[:-1])[layout.values[-1]] = held
            for run in layout.runs.values():
                _at(held, run.keys[:-1])[run.keys[-1]] = flats[run.flat]
        inner = _at(found, layout.states)
        inner["state"] = states
        for index, group in enumerate(inner["param_groups"]):
            group.update(settings.get(index, {}))


def _at(found: Any, keys: Sequence[str | int]) -> Any:
    for key in keys:
        found = found[key]
    return found


class _Given:
    """A checkpoint engine that reads, whatever file is asked for, ``state``."""

    def __init__(self, plain: Any, state: State) -> None:
        self._plain, self._state = plain, state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def load(self, path: str, *args: Any, **kwargs: Any) -> State:
        return self._state
