"""DeepSpeed's float32 masters and the inner optimizer's state, kept in another form between steps.

Read from DeepSpeed 0.19.6 to 0.19.8, runtime. Each of its optimizers for 16 bits has masters, the weights of the same
elements, and an inner optimizer that steps the masters; then it copies the masters into the weights. Here the inner
``step`` steps chunks (``memory.chunked_step``) and rounds them into the weights itself; the masters then are the
weights, so that DeepSpeed's copy changes nothing. At any other time a master is a placeholder of its shape that reads
as NaN. While something reads or writes masters and state (checkpoints, ``safe_get_full_fp32_param``), both are there
as ever, in float32, in host memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.tensor_fragment import get_full_hp_param, set_full_hp_param
from torch import optim

from ds_npu.memory.chunked_step import ChunkedStep
from ds_npu.memory.state_chunks import Keeping, MasterError, StateChunk, StateShard
from ds_npu.zero_ext.bucketed_state import VALUES
from ds_npu.zero_ext.bucketed_zero import BUCKETED
from ds_npu.zero_ext.method_wraps import MethodLevel, bind_to_weight, replace_method, wrap_method

Function = Callable[..., Any]
Pieces = Sequence[torch.Tensor]
KEY = "ds_npu.optimizer_memory"
ADAM = (optim.Adam, optim.AdamW, FusedAdam)
WRAPPERS = (
    *(DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3, BF16_Optimizer),
    *(FP16_Optimizer, FP16_UnfusedOptimizer),
)
READERS = ("state_dict", "load_state_dict", "refresh_fp32_params", "_restore_from_bit16_weights", "update_lp_params")
"""Methods of wrappers that read or write masters and state of all weights."""
READERS_OF_ONE = {"get_full_hp_param": get_full_hp_param, "set_full_hp_param": set_full_hp_param}
"""Functions that read or write a weight's part of a flat master."""
READERS_OF_STAGE_3 = {
    "get_full_hp_param": 0,
    "set_full_hp_param": 1,
    "get_local_fp32_param": 0,
    "set_local_hp_param": 1,
}
"""Methods of ZeRO 3's wrapper that read or write one weight, with the weight's position among the arguments."""
READING = ("state_dict", "get_full_hp_param", "get_local_fp32_param", "update_lp_params")
"""Methods among these that change nothing."""
MOVERS = ("offload_states", "reload_states")
LOADING = "load_state_dict"


def why_not_kept(optimizer: Any) -> str | None:
    """Why the state of an engine's ``optimizer`` cannot be kept in another form, in words; None where it can."""
    if type(optimizer) not in WRAPPERS:
        known = ", ".join(each.__name__ for each in WRAPPERS)
        return f"the engine's optimizer is {type(optimizer).__name__}; one of {known} works"
    inner = optimizer.optimizer
    if type(inner) not in ADAM:
        known = ", ".join(each.__name__ for each in ADAM)
        return f"{type(inner).__name__} is none of the optimizers whose steps can be divided into chunks: {known}"
    for group in inner.param_groups:
        for flag in ("amsgrad", "capturable", "differentiable"):
            if group.get(flag):
                return f"{type(inner).__name__}({flag}=True) was not tried; leave it out"
    dtypes = {str(weight.dtype) for _, weights in masters_of(optimizer) for weight in weights}
    return None if dtypes <= {"torch.bfloat16"} else f"weights are {', '.join(sorted(dtypes))}; bf16 works"


def masters_of(optimizer: Any) -> list[tuple[torch.Tensor, Pieces]]:
    """The float32 masters of one of WRAPPERS, each with the model's weights of the same elements, in order."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return _pairs(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_partitioned_groups_flat)
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        masters = optimizer.single_partition_of_fp32_groups
        bucketed = BUCKETED.get(optimizer)
        if bucketed is not None:
            return [(master, bucketed.own_slices(index)) for index, master in enumerate(masters)]
        return _pairs(masters, _own(optimizer, optimizer.parallel_partitioned_bit16_groups))
    if isinstance(optimizer, BF16_Optimizer):
        return _pairs(optimizer.fp32_groups_flat_partition, _own(optimizer, optimizer.bf16_partitioned_groups))
    if isinstance(optimizer, FP16_Optimizer):
        return _pairs(optimizer.fp32_groups_flat, optimizer.fp16_groups_flat)
    groups = zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True)
    return [pair for masters, weights in groups for pair in _pairs(masters, [each.data for each in weights])]


def _pairs(masters: Sequence[Any], weights: Sequence[Any]) -> list[tuple[torch.Tensor, Pieces]]:
    return [(master, [weight]) for master, weight in zip(masters, weights, strict=True)]


def _own(optimizer: Any, partitions: Sequence[Any]) -> list[torch.Tensor]:
    """This rank's part of each group."""
    groups = zip(partitions, optimizer.real_dp_process_group, strict=True)
    return [parts[dist.get_rank(group)] for parts, group in groups]


class KeptState:
    """The state of one engine's optimizer, from ``install`` on."""

    def __init__(self, optimizer: Any, keeping: Keeping, resident: float | None = None) -> None:
        """``resident``: the bytes of state that are kept on the device; None: all of it."""
        self.optimizer, self.inner, self.keeping = optimizer, optimizer.optimizer, keeping
        pairs = masters_of(optimizer)
        self.shards = [StateShard(*pair, keeping, index) for index, pair in enumerate(pairs)]
        if resident is not None:
            for chunk in self.chunks:
                resident -= chunk.weight.numel() * keeping.bytes_per_weight()
                chunk.on_host = resident < 0
        if (bucketed := BUCKETED.get(optimizer)) is not None:
            bucketed.count_uses()
        self._is_open = False
        self._half_changed: str | None = None
        """The error that ended a step, or a load, which had begun to change weights or state; None: both are whole."""

    @property
    def chunks(self) -> list[StateChunk]:
        """The chunks of all shards, in order."""
        return [chunk for shard in self.shards for chunk in shard.chunks]

    def __str__(self) -> str:
        kept = sum(chunk.weight.numel() for chunk in self.chunks if not chunk.on_host)
        moved = sum(chunk.weight.numel() for chunk in self.chunks if chunk.on_host)
        each = self.keeping.bytes_per_weight()
        parts = [f"of {kept:,} weights on the device"] * (kept > 0) + [f"of {moved:,} in host memory"] * (moved > 0)
        return f"Adam's state, {each:g} bytes a weight, {' and '.join(parts)} of this rank"

    def install(self) -> None:
        """Take the state over: wrap or replace the optimizer's methods that use it."""
        optimizer = self.optimizer
        for shard in self.shards:
            shard.take(self.inner.state.pop(shard.master, {}))
        stepping = ChunkedStep(self.inner, self.shards)
        replace_method(self.inner, "step", stepping, MethodLevel.STATE)
        wrap_method(optimizer, "step", functools.partial(self._step, stepping), MethodLevel.STATE)
        for name in READERS:
            if hasattr(type(optimizer), name):
                wrap_method(optimizer, name, functools.partial(self._read, name), MethodLevel.STATE)
        for name in MOVERS:
            if hasattr(type(optimizer), name):
                replace_method(optimizer, name, functools.partial(_refuse, name), MethodLevel.STATE)
        if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
            for name, position in READERS_OF_STAGE_3.items():
                reader = functools.partial(self._read_of_stage_3, name, position)
                wrap_method(optimizer, name, reader, MethodLevel.STATE)
            keep_pieces_of_stage_3(optimizer, self.shards)
        elif isinstance(optimizer, DeepSpeedZeroOptimizer):
            keep_pieces(optimizer, self.shards)
        self._link_weights()

    @contextmanager
    def open(self, shards: Sequence[StateShard], changes: bool) -> Iterator[None]:
        """Within the block, masters and state of ``shards`` are there, in float32, in host memory."""
        if self._is_open:
            yield
            return
        self._is_open = True
        try:
            for shard in shards:
                shard.master.data, arrays = shard.whole() if self._half_changed is None else shard.anew()
                if shard.scalars or arrays:
                    self.inner.state[shard.master] = {**shard.scalars, **arrays}
                self._point(shard)
        except BaseException:
            self._close(shards, changes=False)
            raise
        try:
            yield
        finally:
            self._close(shards, changes)

    def _close(self, shards: Sequence[StateShard], changes: bool) -> None:
        self._is_open = False
        with ExitStack() as stack:
            for shard in shards:
                stack.callback(self._leave, shard, changes)

    def _leave(self, shard: StateShard, changes: bool) -> None:
        state = self.inner.state.pop(shard.master, {})
        try:
            if changes:
                with self._changing(lambda error: not isinstance(error, MasterError)):
                    shard.take(state)
        finally:
            shard.close()
            self._point(shard)

    def check_whole(self, call: str) -> None:
        """Raise RuntimeError where a step, or a load, has changed a part of weights and state only."""
        if self._half_changed is not None:
            raise RuntimeError(
                f"{call}: {KEY} was changing weights and optimizer state when this ended it: {self._half_changed}. A "
                "part of them is changed, and cannot be saved or trained on. What to do: load the last checkpoint, "
                "with its optimizer state"
            )

    @contextmanager
    def _changing(self, has_begun: Callable[[BaseException], bool]) -> Iterator[None]:
        """Let the block change weights and state.

        Both count as half changed where it raises an error for which ``has_begun`` is true.
        """
        try:
            yield
        except BaseException as error:
            if has_begun(error):
                self._half_changed = f"{type(error).__name__}: {error}"
            raise

    def _step(self, stepping: ChunkedStep, step: Function, *args: Any, **kwargs: Any) -> Any:
        self.check_whole("step")
        stepping.has_changed = False
        # ZeRO 3 gives the group that it steps its master, and takes it away behind the step.
        groups = [(group, group["params"]) for group in self.inner.param_groups]
        self._is_open = True
        try:
            with self._changing(lambda _: stepping.has_changed):
                return step(*args, **kwargs)
        finally:
            self._is_open = False
            for group, masters in groups:
                group["params"] = masters
            for shard in self.shards:
                shard.use_pieces(None)
                shard.close()

    def _read(self, name: str, method: Function, *args: Any, **kwargs: Any) -> Any:
        """Call ``method``, one of READERS, while masters and state of all weights are there."""
        changes = name not in READING
        if name != LOADING:
            self.check_whole(name)
        with self._changing(lambda _: changes), self.open(self.shards, changes):
            # DeepSpeed returns its masters, which are placeholders again by the time that they are saved.
            whole = {id(shard.master): shard.master.data for shard in self.shards}
            found = method(*args, **kwargs)
            found = _with_values(found, whole) if name == "state_dict" else found
        if changes:
            self._half_changed = None
            self._link_weights()
        return found

    def _read_of_stage_3(self, name: str, position: int, method: Function, *args: Any, **kwargs: Any) -> Any:
        """Call ``method``, one of READERS_OF_STAGE_3, while the master of its weight is there."""
        weight = kwargs["param"] if "param" in kwargs else args[position]
        if not weight.requires_grad:
            return method(*args, **kwargs)
        group, *_ = self.optimizer.grad_position[self.optimizer.get_param_id(weight)]
        return self._read_shard(group, name, method, *args, **kwargs)

    def _link_weights(self) -> None:
        """Make the functions that ``link_hp_params`` binds to weights open their master first."""
        for group, weights in enumerate(linked_weights(self.optimizer)):
            for weight in weights:
                for name, function in READERS_OF_ONE.items():
                    bucketed = VALUES.get(weight)
                    read = functools.partial(function, weight) if bucketed is None else bucketed[name]
                    bind_to_weight(weight, name, functools.partial(self._read_shard, group, name, read))
            self._point(self.shards[group])

    def _read_shard(self, group: int, name: str, function: Function, *args: Any, **kwargs: Any) -> Any:
        self.check_whole(name)
        with self.open([self.shards[group]], name not in READING):
            return function(*args, **kwargs)

    @torch.no_grad()
    def _point(self, shard: StateShard) -> None:
        """Let the weights of ``shard`` know where its master and state are now."""
        linked = linked_weights(self.optimizer)
        for weight in linked[shard.index] if linked else ():
            if (found := weight._hp_mapping) is not None and not VALUES.is_on(weight):
                address = found.hp_fragment_address
                found.hp_fragment = shard.master.narrow(0, address.start, address.numel)
                found.set_optim_state_fragment(shard.master, self.inner.state.get(shard.master, {}))


def keep_pieces(optimizer: Any, shards: Sequence[StateShard]) -> None:
    """Keep ZeRO 1 and 2 from making one float32 tensor of a shard's gradient.

    DeepSpeed asks ``_get_preflattened_grad_partition`` for one that is there already (DeepCompile's; from 0.19.7 on).
    """

    def _get_preflattened_grad_partition(group: int) -> torch.Tensor:
        shards[group].use_pieces(optimizer.averaged_gradients[group])
        return shards[group].factor()

    def unscale_and_clip_grads(unscale: Function, gradients: Sequence[torch.Tensor], norm: Any) -> None:
        unscale([each[:1] if each.stride() == (0,) else each for each in gradients], norm)

    name = "_get_preflattened_grad_partition"
    if hasattr(type(optimizer), name):
        replace_method(optimizer, name, _get_preflattened_grad_partition, MethodLevel.STATE)
    wrap_method(optimizer, "unscale_and_clip_grads", unscale_and_clip_grads, MethodLevel.STATE)


def keep_pieces_of_stage_3(optimizer: Any, shards: Sequence[StateShard]) -> None:
    """Keep ZeRO 3 from making one float32 tensor of a shard's gradient."""

    def _prepare_fp32_grad_for_sub_group(group: int) -> None:
        pieces = optimizer.averaged_gradients[group]
        shard = shards[group]
        if not get_accelerator().is_synchronized_device():
            for each in pieces:
                each.record_stream(get_accelerator().current_stream())
        shard.use_pieces(pieces)
        shard.master.grad = shard.factor()
        optimizer.averaged_gradients[group] = None

    def unscale_and_clip_grads(unscale: Function, group: int, norm: Any) -> None:
        master = shards[group].master
        gradient, placeholder = master.grad, master.data
        assert gradient is not None
        master.grad, master.data = None, placeholder[:1]
        master.grad = gradient[:1]
        unscale(group, norm)
        master.grad, master.data = None, placeholder
        master.grad = gradient

    replace_method(optimizer, "_prepare_fp32_grad_for_sub_group", _prepare_fp32_grad_for_sub_group, MethodLevel.STATE)
    wrap_method(optimizer, "unscale_and_clip_grads", unscale_and_clip_grads, MethodLevel.STATE)


def linked_weights(optimizer: Any) -> Sequence[Sequence[Any]]:
    """Weights that know their part of a flat master, by group; none of wrappers that link none."""
    if isinstance(optimizer, BF16_Optimizer):
        groups: Sequence[Sequence[Any]] = optimizer.bf16_groups
        return groups
    linked: Sequence[Sequence[Any]] = optimizer.bit16_groups if type(optimizer) is DeepSpeedZeroOptimizer else ()
    return linked


def _with_values(found: Any, values: Mapping[int, torch.Tensor]) -> Any:
    """``found`` with other tensors in place of those whose ids are in ``values``."""
    if isinstance(found, torch.Tensor):
        return values.get(id(found), found)
    if isinstance(found, dict):
        return type(found)((key, _with_values(each, values)) for key, each in found.items())
    return [_with_values(each, values) for each in found] if isinstance(found, list) else found


def _refuse(name: str, *args: Any, **kwargs: Any) -> None:
    raise ValueError(f"{name}(): found a call; {KEY} keeps the optimizer's state in a form of its own: leave it out")
