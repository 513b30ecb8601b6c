"""Where an engine keeps the weights of experts and their optimizer state: each tensor, and which ranks have what of it.

Read from DeepSpeed 0.19.8, runtime: without ZeRO each rank has the whole weight and the optimizer's state of it. In
ZeRO 1 and 2 it has the whole weight, and of the float32 copy and the state its part of the group of weights
(zero/stage_1_and_2.py, utils/tensor_fragment.py). In ZeRO 3 it has the same part of all three (zero/stage3.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.ops.adam import FusedAdam
from deepspeed.ops.lion import FusedLion
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn, optim

from ds_npu.parallel.expert.expert_map import Elements, HeldElements, HeldRange
from ds_npu.parallel.runtime.tensor_attribute import TensorAttribute
from ds_npu.topology.topology import Topology
from ds_npu.zero_ext.bucketed_state import RUNS

ELEMENTWISE = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Adagrad),
    *(optim.Adadelta, FusedAdam, FusedLion),
)
"""Optimizers that step each element by itself: an expert's state moves with it."""
PART, WHOLE_SIZE = TensorAttribute[Any]("ds_tensor"), TensorAttribute[int]("ds_numel")
"""This rank's part of a parameter that ZeRO 3 has partitioned, and the number of elements of the whole."""


def why_not_moved(engine: Any) -> str | None:
    """Why experts of ``engine`` cannot be moved between ranks, in words; None where they can."""
    zero = engine._config.zero_config
    optimizer = engine.optimizer
    for key in ("offload_optimizer", "offload_param"):
        setting = dict(zero)[key]
        if setting is not None and setting.device != "none":
            return (
                f"zero_optimization.{key}.device is {setting.device}, and only what is on devices moves; leave it out"
            )
    for key in ("zero_quantized_weights", "zenflow"):
        if dict(zero).get(key):
            return f"zero_optimization.{key} keeps weights in a form of its own; leave it out"
    if zero.round_robin_gradients and zero.stage in (1, 2):
        # DeepSpeed 0.19.8 tells where a weight's float32 copy is by the order before it was changed.
        return "zero_optimization.round_robin_gradients changes the order of weights; leave it out"
    if zero.zero_hpz_partition_size > 1:
        return (
            f"zero_optimization.zero_hpz_partition_size is {zero.zero_hpz_partition_size}: a second copy; leave it out"
        )
    if isinstance(optimizer, ZeROOptimizer):
        if type(optimizer) not in (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3):
            return f"it is not known where {type(optimizer).__name__} keeps weights; zero_optimization.stage 0 to 3"
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, ELEMENTWISE):
        known = ", ".join(each.__name__ for each in ELEMENTWISE)
        return f"{type(optimizer).__name__} is none of the optimizers whose state is known to move: {known}"
    return None


class ExpertElements:
    """The tensors of experts' ``parameters`` in an engine, with the elements that each rank of the expert view has.

    Every rank makes it at the same time, when its engine is complete.
    """

    def __init__(self, engine: Any, parameters: Sequence[nn.Parameter], topology: Topology) -> None:
        self._optimizer = engine.optimizer
        self._topology = topology
        self._groups: dict[int, int] = {}
        if isinstance(engine.optimizer, DeepSpeedZeroOptimizer):
            for index, group in enumerate(engine.optimizer.bit16_groups):
                self._groups.update(dict.fromkeys(map(id, group), index))
        own = [self._own_spans(each) for each in parameters]
        everyones = [own] * topology.size("edp")
        if topology.size("edp") > 1:
            dist.all_gather_object(everyones, own, group=topology.group("edp"))
        self._spans = {id(each): [spans[index] for spans in everyones] for index, each in enumerate(parameters)}

    def of(self, parameter: nn.Parameter) -> Iterator[HeldElements]:
        """Yield the weight, then its float32 copy and its state.

        On every rank these are as many tensors, in the same order.
        """
        whole = self._of_ranks(parameter, as_whole=True)
        part = self._of_ranks(parameter, as_whole=False)
        shard = PART.get(parameter)
        if shard is None:
            yield HeldElements(parameter.data.view(-1), whole)
        else:
            yield HeldElements(shard.data.view(-1), part)
        is_zero = isinstance(self._optimizer, ZeROOptimizer)
        for tensor in self._tensors(parameter):
            yield HeldElements(tensor, part if is_zero else whole)

    def gather_again(self) -> None:
        """Give weights that ZeRO 3 keeps gathered (small ones) the values that their parts have now."""
        if isinstance(self._optimizer, DeepSpeedZeroOptimizer_Stage3) and self._optimizer.persistent_parameters:
            persistent: Sequence[Any] = self._optimizer.persistent_parameters
            persistent[0].partition(persistent)
            persistent[0].all_gather(persistent)

    def _own_spans(self, parameter: Any) -> tuple[HeldRange, ...]:
        """The flat elements of the rank's experts that are in this edp rank's part."""
        total = _elements(parameter)
        shard = PART.get(parameter)
        runs = RUNS.get(parameter)
        if shard is not None:
            size = shard.ds_numel
            start = min(size * self._topology.rank("edp"), total)
            return (HeldRange(start, min(start + size, total)),)
        if id(parameter) not in self._groups:
            return (HeldRange(0, total),)
        if runs is not None:
            return tuple(HeldRange(run.first, run.first + run.numel, run.start) for run in runs)
        found = parameter._hp_mapping
        if found is None:
            return ()
        address = found.lp_fragment_address
        return (HeldRange(address.start, address.start + address.numel, found.hp_fragment_address.start),)

    def _of_ranks(self, parameter: nn.Parameter, as_whole: bool) -> list[Elements | None]:
        """The elements of each rank of the expert view; None for ranks with other columns, or with other copies."""
        topology = self._topology
        found = list[Elements | None]()
        total = _elements(parameter)
        for copy in range(topology.size("edp")):
            spans = (HeldRange(0, total),) if as_whole else self._spans[id(parameter)][copy]
            for ep_rank in range(topology.size("ep")):
                for etp_rank in range(topology.size("etp")):
                    is_alike = etp_rank == topology.rank("etp") and (not as_whole or copy == topology.rank("edp"))
                    found.append(Elements(ep_rank, spans) if is_alike else None)
        return found

    def _tensors(self, parameter: Any) -> Iterable[torch.Tensor]:
        """The optimizer's tensors of this rank's part: the float32 copy with ZeRO, and the state by key."""
        optimizer = self._optimizer
        if not isinstance(optimizer, ZeROOptimizer):
            return [each.view(-1) for each in _states(optimizer, parameter)]
        if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
            if (known := optimizer.get_param_id(parameter)) not in optimizer.grad_position:
                return []  # It is not trained.
            group, first, _ = optimizer.grad_position[known]
            flat = optimizer.fp32_partitioned_groups_flat[group]
            held = sum(span.stop - span.start for span in self._own_spans(parameter))
            return [each.data.narrow(0, first, held) for each in (flat, *_states(optimizer.optimizer, flat))]
        if id(parameter) not in self._groups:
            return []
        flat = optimizer.single_partition_of_fp32_groups[self._groups[id(parameter)]]
        return [each.data for each in (flat, *_states(optimizer.optimizer, flat))]


def _elements(parameter: nn.Parameter) -> int:
    """The number of elements of this rank's experts."""
    return WHOLE_SIZE.get(parameter) or parameter.numel()


def _states(optimizer: optim.Optimizer, stepped: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of the optimizer's state that have an element for each one of ``stepped``, by key."""
    state = optimizer.state.get(stepped, {})
    found = [state[key] for key in sorted(state)]
    return [each for each in found if isinstance(each, torch.Tensor) and each.shape == stepped.shape]
