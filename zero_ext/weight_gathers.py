"""Gathers of ZeRO 3 by a plan, in place of DeepSpeed's PartitionedParameterCoordinator.

DeepSpeed's hooks of modules call it before and after each forward and backward of a module, and it keeps that class's
marks of weights (0.19.8 runtime/zero/partitioned_param_coordinator.py). The first micro-batch is recorded; from then on
messages are sent ahead by ``gather_plan``. A message has memory of its own, which the next one uses again, and weights
are copied out of it on a stream of their own. That stream waits for all that was computed before a message is sent, so
memory of released weights is used again at once, and the host waits for nothing. In DeepSpeed the allocator keeps such
memory until the device has come so far, and the host therefore waits for every third fetch.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from threading import RLock
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params, update_recompute_parameters
from deepspeed.utils import z3_leaf_module
from torch import nn

from ds_npu.config.deepspeed_keys import value_at
from ds_npu.config.zero_buckets import PREFETCH, why_not_planned
from ds_npu.parallel.runtime.marks import Mark
from ds_npu.zero_ext.earlier_engines import offloads_of
from ds_npu.zero_ext.gather_messages import (
    GatheringStreams,
    MessageInFlight,
    MessageMemory,
    Weight,
    is_whole_here,
    show_shard,
)
from ds_npu.zero_ext.gather_plan import AHEAD, GatherMessage, GatherPlan, Limits, Use, message_elements, plan_gathers
from ds_npu.zero_ext.method_wraps import MethodLevel, wrap_method

COORDINATOR = "param_coordinator"
DEFAULT = 50_000_000
"""DeepSpeed's own stage3_prefetch_bucket_size."""


class MicroBatchRecord:
    """The modules that have fetched weights in a micro-batch, and the uses of these weights."""

    def __init__(self) -> None:
        self.modules: list[int] = []
        """Their ds_id, in order."""
        self.weights: dict[int, Weight] = {}
        self._uses: list[Use] = []
        self._opened: dict[int, int] = {}
        """For each weight that is in use, the index of that use in ``_uses``."""

    def begin_use(self, weight: Weight, position: int) -> None:
        """Begin a use of a weight, unless another module is using it."""
        number = weight.ds_id
        if number not in self._opened:
            self.weights[number] = weight
            self._opened[number] = len(self._uses)
            self._uses.append(Use(number, position, position))

    def end_use(self, weight: int, position: int) -> None:
        """End the use of a weight, where there is one."""
        if weight in self._opened:
            index = self._opened.pop(weight)
            self._uses[index] = self._uses[index]._replace(last=position)

    def ended(self, position: int) -> Sequence[Use]:
        """End all uses; returns them."""
        for weight in list(self._opened):
            self.end_use(weight, position)
        return self._uses


class WeightGathers:
    """Fetches and releases the weights of one engine's model, as DeepSpeed's hooks ask for it."""

    hierarchy = 0
    """DeepSpeed's optimizer sets it."""

    def __init__(self, root: nn.Module, limits: Limits, streams: GatheringStreams | None) -> None:
        """``root``: the module whose forward begins a micro-batch. ``streams``: None on the CPU."""
        self._root, self._limits, self._streams = root, limits, streams
        self._memory = deque(MessageMemory() for _ in range(AHEAD))
        self._in_flight: deque[MessageInFlight] = deque()
        self._weights = _by_number(root)
        self._kept: frozenset[int] = frozenset()
        self._plan: GatherPlan | None = None
        self._planned: Sequence[Use] = ()
        """The uses that the plan is made for."""
        self._sizes: Mapping[int, int] = {}
        """The elements of each weight in the plan, in the order of first uses, on the rank that has the most of it."""
        self._sent_behind: Mapping[int, Sequence[GatherMessage]] = {}
        self._order: Sequence[int] = ()
        """The modules that the plan expects, by their ds_id."""
        self._holding: dict[int, bool] = {}
        """Whether a module holds weights, by its ds_id."""
        self._follows = False
        """Whether this micro-batch has been as planned."""
        self._is_in_forward = False
        """Whether a forward of the root has begun and not ended."""
        self._position = 0
        self._record = MicroBatchRecord()
        self._in_backward: dict[int, Any] = {}
        self._lock = RLock()
        """Backwards of a model on several devices run on several threads."""

    # DeepSpeed's interface of its coordinator

    def trace_prologue(self, sub_module: nn.Module) -> None:
        """Do nothing: a fetch compares the order itself."""

    def is_record_trace(self) -> bool:
        return False

    def is_invalid_trace(self) -> bool:
        return self._plan is None

    def _invalidate_trace(self) -> None:
        """Forget the plan: DeepSpeed gives the modules other numbers."""
        self._plan, self._follows, self._record = None, False, MicroBatchRecord()

    def reset_step(self) -> None:
        """Begin a micro-batch; where the one before was not as planned, those from now on are planned as it was."""
        self.settle()
        if self._record.modules and not self._follows:
            self._make_plan()
        self._follows = self._plan is not None
        self._is_in_forward = True
        self._position = 0
        self._record = MicroBatchRecord()
        self._send_behind(-1)

    def fetch_sub_module(self, current_submodule: Any, forward: bool) -> None:
        """Let the current stream wait for the weights of a module, and send the messages that follow."""
        with self._lock, torch.no_grad():
            is_in_backward = torch._C._current_graph_task_id() != -1
            # A script may run modules of the model by themselves. Modules without weights are not in the order: experts
            # call their activations as often as experts have tokens, which differs between ranks and micro-batches.
            number = current_submodule.ds_id
            if number not in self._holding:
                self._holding[number] = _holds_weights(current_submodule)
            is_in_micro_batch = (self._is_in_forward or is_in_backward) and self._holding[number]
            if is_in_micro_batch:
                self._follows = self._follows and self._order[self._position : self._position + 1] == (number,)
                self._record.modules.append(number)
            if not forward:
                self._in_backward[number] = current_submodule
            weights = _weights_of(current_submodule)
            self._send(weights)
            while self._in_flight and any(each.ds_status == ZeroParamStatus.INFLIGHT for each in weights):
                self._in_flight.popleft().arrive()
            for weight in weights:
                weight.ds_active_sub_modules.add(number)
                if forward and is_in_backward and self._in_backward and not weight.requires_grad:
                    update_recompute_parameters(next(reversed(self._in_backward.values())), weight)
                if is_in_micro_batch and not (weight.ds_persist or is_whole_here(weight)):
                    self._record.begin_use(weight, self._position)
            if is_in_micro_batch:
                self._send_behind(self._position)
                self._position += 1

    def release_sub_module(self, submodule: Any, forward: bool = False) -> None:
        """Release the weights of a module that nobody computes with and that are not kept."""
        with self._lock, torch.no_grad():
            weights = {weight.ds_id: weight for weight in _weights_of(submodule)}
            if not forward:
                weights.update((weight.ds_id, weight) for weight in submodule.ds_recompute_parameters)
                submodule.ds_recompute_parameters.clear()
                self._in_backward.pop(submodule.ds_id, None)
            for weight in weights.values():
                weight.ds_active_sub_modules.discard(submodule.ds_id)
                self._release_unless_kept(weight)
            if forward and submodule is self._root:
                self._is_in_forward = False

    def release_backward_leftovers(self) -> None:
        """Release the weights of modules whose backward did not end in DeepSpeed's hook."""
        while self._in_backward:
            _, module = self._in_backward.popitem()
            self.release_sub_module(module)

    def release_and_reset_all(self, module: nn.Module) -> None:
        """Release all weights of ``module``."""
        with self._lock:
            self._arrive()
            for weight in iter_params(module, recurse=True):
                weight.ds_active_sub_modules.clear()
                _release(weight)

    # Ours

    def settle(self) -> None:
        """Let what is in flight arrive, and release what was gathered ahead and not used."""
        self._arrive()
        for weight in self._weights.values():
            if not (weight.ds_persist or (self._plan is not None and weight.ds_id in self._plan.carried)):
                _release(weight)

    def keep(self, size: int) -> int:
        """Keep weights of up to ``size`` bytes gathered from one step to the next, the same on every rank.

        Returns the bytes of those kept; 0 where no micro-batch has been as the one before, and there is no plan.
        Weights that are used first are kept first.
        """
        kept, total = [], 0
        for number, elements in self._sizes.items() if self._plan is not None else ():
            weight_bytes = elements * self._weights[number].ds_tensor.itemsize
            if total + weight_bytes > size:
                break
            kept.append(number)
            total += weight_bytes
        self._kept = frozenset(kept)
        if kept:
            self._plan_again()
        return total

    def gather(self, weights: Iterable[Weight]) -> None:
        """Gather those of ``weights`` that are not there, in one message for each dtype and group."""
        with self._lock, torch.no_grad():
            self._send(weights)
            self._arrive()

    def _release_unless_kept(self, weight: Weight) -> None:
        if weight.ds_active_sub_modules:
            return
        number = weight.ds_id
        self._record.end_use(number, self._position - 1)
        is_kept = weight.ds_persist or weight.is_external_param
        if self._plan is not None:
            is_kept = is_kept or number in self._kept or (self._follows and self._plan.keeps(number, self._position))
        if not is_kept:
            _release(weight)

    def _send_behind(self, position: int) -> None:
        for message in self._sent_behind.get(position, ()) if self._follows else ():
            self._send([self._weights[number] for number in message.weights])

    def _send(self, weights: Iterable[Weight]) -> None:
        """Gather those of ``weights`` that nobody has gathered."""
        missing = []
        for weight in weights:
            if weight.ds_status == ZeroParamStatus.NOT_AVAILABLE:
                if is_whole_here(weight):
                    show_shard(weight)
                else:
                    missing.append(weight)
        if not missing:
            return
        if len(self._in_flight) == AHEAD:
            self._in_flight.popleft().arrive()
        self._in_flight.append(MessageInFlight(missing, self._memory[0], self._streams))
        self._memory.rotate(-1)

    def _arrive(self) -> None:
        while self._in_flight:
            self._in_flight.popleft().arrive()

    def _make_plan(self) -> None:
        uses = self._record.ended(self._position - 1)
        # A module may use weights of others.
        self._weights = {**_by_number(self._root), **self._record.weights}
        self._order = tuple(self._record.modules)
        _check_same(repr((self._order, [(use.first, use.last) for use in uses])))
        # Ranks may hold other experts and larger shards, and make one plan.
        numbers = list(dict.fromkeys(use.weight for use in uses))
        most = _most_of_any_rank([self._weights[number].ds_numel for number in numbers])
        self._planned, self._sizes = uses, dict(zip(numbers, most, strict=True))
        self._plan_again()

    def _plan_again(self) -> None:
        self._plan = plan_gathers(self._planned, self._sizes, self._limits, self._kept)
        self._sent_behind = self._plan.sent_behind()


def _weights_of(module: nn.Module) -> list[Weight]:
    weights: Collection[Weight] = set(iter_params(module, recurse=z3_leaf_module(module)))
    return sorted(weights, key=lambda weight: int(weight.ds_id))


def _holds_weights(module: nn.Module) -> bool:
    """Whether ``module`` or one inside of it has a weight, or ``module`` uses one of another."""
    return next(iter(iter_params(module, recurse=True)), None) is not None


def _by_number(root: nn.Module) -> Mapping[int, Weight]:
    weights: Iterable[Weight] = root.parameters()
    return {weight.ds_id: weight for weight in weights}


def _release(weight: Weight) -> None:
    """Free a weight that nobody computes with. The stream that gathers waits before it uses the memory again."""
    if weight.ds_status == ZeroParamStatus.AVAILABLE and not weight.ds_active_sub_modules:
        weight.data = torch.empty(0, dtype=weight.dtype, device=weight.device)
        weight.ds_status = ZeroParamStatus.NOT_AVAILABLE


def _check_same(order: str) -> None:
    """Raise RuntimeError on all ranks where their orders of modules differ."""
    digest = hashlib.sha256(order.encode()).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(get_accelerator().current_device_name())
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    others = [rank for rank, each in enumerate(torch.stack(found).cpu()) if not torch.equal(each, found[0].cpu())]
    if others:
        raise RuntimeError(
            f"ZeRO 3: rank {others[0]} ran other modules than rank 0 in a micro-batch, or in another order. Weights "
            "are gathered when a module needs them, so all ranks have to run the same modules in one order. What to "
            "do: let all ranks take the same branches of the model, or use ZeRO 1 or 2"
        )


def _most_of_any_rank(elements: Sequence[int]) -> list[int]:
    most = torch.tensor(elements, dtype=torch.int64, device=get_accelerator().current_device_name())
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    found: list[int] = most.tolist()
    return found


GATHERS = Mark[WeightGathers]("weight_gathers")
"""The mark of an optimizer whose weights are gathered by a plan."""


def install_gathers(engine: Any, optimizer: Any) -> str | None:
    """Gather the weights of ``optimizer``, ZeRO 3's, by a plan; or return why DeepSpeed's own code does it."""
    offload = optimizer.parameter_offload
    config = engine._config._param_dict
    reason = why_not_planned(config) or _why_not(optimizer)
    if reason is not None:
        return reason
    [elements] = _most_of_any_rank([sum(weight.ds_numel for weight in engine.module.parameters())])
    gathered = offload._max_available_parameters_in_numel
    message = offload._prefetch_bucket_sz
    if value_at(config, PREFETCH) is None and message == DEFAULT:
        message = message_elements(elements)
    limits = Limits(min(message, gathered), gathered, offload._max_reuse_distance_in_numel)
    accelerator = get_accelerator()
    is_host = accelerator.is_synchronized_device()
    streams = None if is_host else GatheringStreams(accelerator.Stream(), accelerator.Stream())
    gathers = WeightGathers(engine.module, limits, streams)
    for each in (offload, *offloads_of(engine.module)):
        each.partition_all_parameters()
        setattr(each, COORDINATOR, gathers)
    GATHERS.set(optimizer, gathers)

    def end_forward(*_: object) -> None:
        # DeepSpeed's hooks run without gradients, and cannot tell whether there is a backward to come.
        if not torch.is_grad_enabled():
            gathers.settle()

    engine.module.register_forward_hook(end_forward)

    def end_step(post_step: Any, timer_names: Any) -> None:
        gathers.gather(optimizer.persistent_parameters)
        post_step(timer_names)

    wrap_method(optimizer, "_post_step", end_step, MethodLevel.BUCKETS)
    return None


def _why_not(optimizer: Any) -> str | None:
    weights = [weight for group in optimizer.fp16_groups for weight in group]
    if all(dist.get_world_size(weight.ds_process_group) == 1 for weight in weights):
        return "there is one data rank"
    if any(weight.ds_secondary_tensor is not None or hasattr(weight.ds_tensor, "ds_quant_scale") for weight in weights):
        return "weights have a second partition, or are quantised"
    return None
