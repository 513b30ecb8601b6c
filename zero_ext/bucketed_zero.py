"""ZeRO 1 and 2 with overlapped communication: of gradients during the backward, of weights during the next forward.

DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py) all-reduces buckets of gradients and keeps its part of them, after the
backward unless ``overlap_comm`` is set, and gathers all weights in one message before its step returns. Here its
groups, flat buffers and step are kept; a rank's partition is its part of each bucket (``bucket_plan``), so that one
reduce-scatter and one all-gather of each bucket use all links, and the first layers are there first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from ds_npu.comm.collectives import gather_into
from ds_npu.comm.pending import Work
from ds_npu.config.zero_buckets import why_not_in_buckets
from ds_npu.parallel.runtime.marks import Mark
from ds_npu.parallel.tensor.awaited_weights import AwaitedWeights, is_read_unseen, uses_of
from ds_npu.zero_ext.bucket_memory import BucketedGroup, Key
from ds_npu.zero_ext.bucket_plan import plan_of
from ds_npu.zero_ext.bucketed_gradients import BucketedGradients, ended_early
from ds_npu.zero_ext.bucketed_state import RUNS, VALUES, BucketedState, WeightValues
from ds_npu.zero_ext.method_wraps import MethodLevel, bind_to_weight, replace_method, wrap_method

Function = Callable[..., Any]


def why_not_bucketed(engine: Any, optimizer: Any) -> str | None:
    """Why DeepSpeed's own code must reduce gradients and gather weights of ``optimizer``; None where ds_npu can."""
    if type(optimizer) is not DeepSpeedZeroOptimizer:
        return f"it is a {type(optimizer).__name__}"
    if reason := why_not_in_buckets(engine._config._param_dict):
        return reason
    alone = all(dist.get_world_size(each) == 1 for each in optimizer.real_dp_process_group)
    return "there is one data rank" if alone else None


class OwnPart:
    """This rank's part of a group of weights as DeepSpeed's step sees it, which copies a master into its ``data``."""

    def __init__(self, slices: Sequence[torch.Tensor]) -> None:
        """``slices``: views of its part of each bucket, in the flat weights."""
        self._slices = slices

    @property
    def data(self) -> OwnPart:
        return self

    def copy_(self, master: torch.Tensor) -> None:
        parts = torch.split(master, [each.numel() for each in self._slices])
        torch._foreach_copy_(list(self._slices), list(parts))


class OwnParts(list[Any]):
    """DeepSpeed's list of partitions of the weights, by group and rank; only this rank's own are in it."""

    def __init__(self, parts: Sequence[Any], gather: Callable[[], None]) -> None:
        super().__init__(parts)
        self.gather = gather
        """Sends this rank's parts to all ranks."""


class BucketedZero:
    """The buckets of one engine's optimizer, from ``install`` on."""

    def __init__(self, engine: Any, optimizer: Any) -> None:
        self._engine, self._optimizer = engine, optimizer
        self._groups = dict(_groups_of(optimizer))
        self._shared = {index: group for index, group in self._groups.items() if group.size > 1}
        """Groups of weights over several data ranks."""
        order = _forward_order(self._groups, engine.module)
        self._order = [key for key in order if key[0] in self._shared]
        self.gradients = BucketedGradients(optimizer, self._groups, order[::-1])
        self.state = BucketedState(optimizer, self._shared, self._own_parts)
        shared = [(index, *each) for index, group in self._shared.items() for each in enumerate(group.weights)]
        self._awaited = AwaitedWeights([weight for _, _, weight in shared])
        self._buckets = [
            [(index, piece.bucket) for piece in self._shared[index].plan.pieces(position)]
            for index, position, _ in shared
        ]
        """The buckets that hold each awaited weight."""
        self._works: dict[Key, Work] = {}
        self._uses: dict[int, int] = {}
        self._is_stepping = False

    def install(self) -> None:
        """Take the communication over: wrap or replace the optimizer's methods that communicate."""
        optimizer = self._optimizer
        self._restore()
        _tell_partitions(optimizer, self._groups)
        _bind_values(self._optimizer, self._groups)
        self.state.use_own_parts()
        replace = partial(replace_method, optimizer, level=MethodLevel.BUCKETS)
        replace("process_gradients", function=self._process_gradients)
        replace("setup_buckets", function=_do_nothing)
        replace("reduce_ready_partitions_and_remove_grads", function=lambda weight, index: self.gradients.fill(weight))
        replace("reduce_gradients", function=lambda pipeline_parallel=False: self._end_backward())
        replace("overlapping_partition_gradients_reduce_epilogue", function=self._end_backward)
        replace("_restore_from_bit16_weights", function=self._restore)
        replace("_lazy_init_hp_params_optimizer_state", function=_do_nothing)
        wraps: dict[str, Function] = {
            "step": self._step,
            "_update_model_bit16_weights": self._with_arrived,
            "clear_backward_seen_flag": self._begin_forward,
            "backward_prologue": self._begin_backward,
            "update_lp_params": self._update_weights,
            "_link_all_hp_params": self._link_again,
            "state_dict": partial(self._in_plain_order, False),
            "load_state_dict": partial(self._in_plain_order, True),
            "offload_states": self._move,
            "reload_states": self._move,
        }
        for name, wrapper in wraps.items():
            wrap_method(optimizer, name, wrapper, MethodLevel.BUCKETS)
        self.count_uses()

    def arrive(self) -> None:
        """Let the current stream wait for all weights."""
        self._awaited.arrive()
        for work in self._works.values():
            work.wait()
        self._works.clear()

    def own_slices(self, index: int) -> list[torch.Tensor]:
        """This rank's part of each bucket of a group, in the flat weights."""
        group = self._groups[index]
        flat = self._optimizer.bit16_groups_flat[index]
        shards = ((bucket.start + group.rank * bucket.shard, bucket.shard) for bucket in group.plan.buckets)
        return [flat[first : first + numel] for first, numel in shards] or [flat]

    def count_uses(self) -> None:
        """Count the tensors that share the memory of weights now; more of them later are other code's."""
        self._uses = {index: uses_of(self._optimizer.bit16_groups_flat[index]) for index in self._shared}

    # Gradients

    def _process_gradients(self, weight: nn.Parameter, index: int) -> None:
        """Replaces DeepSpeed's, which its hook on each gradient calls."""
        optimizer = self._optimizer
        if optimizer._coalesce_grad_reduction:
            return
        if optimizer.use_grad_accum_attribute:
            optimizer._fill_param_grad_accum_attribute(weight)
        holder: Any = weight
        if not getattr(holder, "ds_grad_is_ready", True):
            return
        # A PipelineEngine sets no boundary on its optimizer, and reduces after its schedule.
        is_last = optimizer.is_gradient_accumulation_boundary() and not self._engine.pipeline_parallelism
        if optimizer.partition_gradients or (is_last and not self._engine.inside_no_sync_ctxt):
            self.gradients.come(weight)

    def _end_backward(self) -> None:
        optimizer = self._optimizer
        self.gradients.end_backward()
        for index in range(len(optimizer.bit16_groups)):
            optimizer.all_grad_tensors[index] = None
        optimizer._clear_param_grad_only()
        optimizer._epilogue_ran_this_backward = True
        optimizer.ready_for_gradients = False

    def _begin_forward(self, clear: Function) -> None:
        if self.gradients.is_open:
            raise ended_early("sends gradients behind a backward")
        clear()

    def _begin_backward(self, begin: Function) -> None:
        # The weights of a graph that was kept from before the step were awaited by no forward since.
        self._awaited.arrive()
        begin()

    # Weights

    def _step(self, step: Function, *args: Any, **kwargs: Any) -> Any:
        self.arrive()
        is_unseen = self._has_aliases() or is_read_unseen(self._engine.module)
        self._is_stepping = True
        try:
            found = step(*args, **kwargs)
        finally:
            self._is_stepping = False
        if is_unseen or not self._works:
            self.arrive()
        else:
            self._awaited.wait_for(lambda index: [self._works[key] for key in self._buckets[index]])
            self._works.clear()
        return found

    def _gather(self) -> None:
        """Send this rank's parts of all buckets, those of the first layers first."""
        for index, position in self._order:
            group = self._shared[index]
            bucket = group.plan.buckets[position]
            whole = self._optimizer.bit16_groups_flat[index][bucket.start : bucket.start + bucket.numel]
            part = whole[group.rank * bucket.shard : (group.rank + 1) * bucket.shard]
            self._works[index, position] = gather_into(whole, part, group.ranks)

    def _has_aliases(self) -> bool:
        """Whether tensors of other code share the memory of weights.

        Such code may read the weights, and torch would tell nobody.
        """
        flats = self._optimizer.bit16_groups_flat
        return any(uses_of(flats[index]) > uses for index, uses in self._uses.items())

    def _with_arrived(self, update: Function, *args: Any, **kwargs: Any) -> None:
        # A step sets each weight to the memory that it has already.
        if not self._is_stepping:
            self.arrive()
            update(*args, **kwargs)

    def _update_weights(self, update: Function) -> None:
        self.arrive()
        update()
        self.arrive()

    @torch.no_grad()
    def _restore(self) -> None:
        """Copy the weights into the masters; replaces DeepSpeed's."""
        self.arrive()
        for index, master in enumerate(self._optimizer.single_partition_of_fp32_groups):
            if self.state.is_plain:
                group = self._groups[index]
                master.data.copy_(self.state.plain_parts()[index][group.rank])
            else:
                master.data.copy_(torch.cat(self.own_slices(index)))

    def _own_parts(self) -> OwnParts:
        parts = self.state.plain_parts()
        for index, group in self._shared.items():
            parts[index] = [None] * group.size
            parts[index][group.rank] = OwnPart(self.own_slices(index))
        return OwnParts(parts, self._gather)

    # State

    def _in_plain_order(self, changes: bool, method: Function, *args: Any, **kwargs: Any) -> Any:
        self.arrive()
        with self.state.in_plain_order(changes):
            return method(*args, **kwargs)

    def _link_again(self, link: Function) -> None:
        link()
        _bind_values(self._optimizer, self._groups)
        if not self.state.is_plain:
            self.state.use_own_parts()

    def _move(self, move: Function, *args: Any, **kwargs: Any) -> Any:
        """Call ``offload_states`` or ``reload_states``, which divide flat weights into partitions anew."""
        self.arrive()
        # DeepSpeed empties these lists; views of the flat weights in ours would keep the memory in use.
        self._optimizer.parallel_partitioned_bit16_groups = []
        try:
            return move(*args, **kwargs)
        finally:
            self.state.use_own_parts()
            self.count_uses()


BUCKETED = Mark[BucketedZero]("bucketed_zero")
"""The mark of an optimizer whose communication is in buckets."""


def install_buckets(engine: Any, optimizer: Any) -> str | None:
    """Install a BucketedZero where it fits; returns the reason where DeepSpeed's own code communicates."""
    for weight in engine.module.parameters():
        for mark in (RUNS, VALUES):
            mark.remove(weight)
    reason = why_not_bucketed(engine, optimizer)
    if reason is None:
        bucketed = BucketedZero(engine, optimizer)
        bucketed.install()
        BUCKETED.set(optimizer, bucketed)
    return reason


def _bind_values(optimizer: Any, groups: Mapping[int, BucketedGroup]) -> None:
    """Bind to each weight the functions that find its values in the buckets."""
    for index, group in groups.items():
        for position, weight in enumerate(group.weights):
            values = WeightValues(optimizer, index, group, position)
            functions = values.functions()
            RUNS.set(weight, values.runs)
            VALUES.set(weight, functions)
            for name, function in functions.items():
                bind_to_weight(weight, name, function)


def _tell_partitions(optimizer: Any, groups: Mapping[int, BucketedGroup]) -> None:
    """Tell DeepSpeed's optimizer which weights have elements in this rank's partition."""
    for index, group in groups.items():
        of_runs = [group.weights[run.weight] for run in group.runs]
        here = {id(weight) for weight in of_runs}
        optimizer.params_in_partition[index] = of_runs
        optimizer.params_not_in_partition[index] = [each for each in group.weights if id(each) not in here]


def bucket_limits(optimizer: Any) -> list[int]:
    """The most elements of a bucket, by the keys of DeepSpeed's config."""
    return [optimizer.reduce_bucket_size, optimizer.allgather_bucket_size]


def _groups_of(optimizer: Any) -> Iterator[tuple[int, BucketedGroup]]:
    for index, flat in enumerate(optimizer.bit16_groups_flat):
        ranks = optimizer.real_dp_process_group[index]
        weights = optimizer.round_robin_bit16_groups[index]
        starts = [(each.data_ptr() - flat.data_ptr()) // flat.element_size() for each in weights]
        addresses = [(start, each.numel()) for start, each in zip(starts, weights, strict=True)]
        size = dist.get_world_size(ranks)
        rank = dist.get_rank(ranks)
        plan = plan_of(addresses, flat.numel(), size, bucket_limits(optimizer))
        yield index, BucketedGroup(weights, flat.device, plan, ranks, size, rank, tuple(plan.runs(rank)))


def _forward_order(groups: Mapping[int, BucketedGroup], module: nn.Module) -> list[Key]:
    """The order in which a forward needs buckets, as far as the order of weights in modules tells it."""
    positions = {id(weight): index for index, weight in enumerate(module.parameters())}
    firsts: dict[Key, int] = {}
    for index, group in groups.items():
        firsts.update(dict.fromkeys(((index, each) for each in range(len(group.plan.buckets))), len(positions)))
        for position, weight in enumerate(group.weights):
            for piece in group.plan.pieces(position):
                key = index, piece.bucket
                firsts[key] = min(firsts[key], positions.get(id(weight), len(positions)))
    return sorted(firsts, key=lambda key: (firsts[key], key))


def _do_nothing(*args: Any) -> None:
    pass
