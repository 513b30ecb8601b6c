"""Masters and optimizer state of bucketed partitions, in DeepSpeed's order while something reads or writes them there.

Checkpoints keep DeepSpeed's order, so that other layouts, universal checkpoints and plain DeepSpeed read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ds_npu.memory.host_snapshot import HostSnapshot
from ds_npu.parallel.runtime.tensor_attribute import TensorAttribute
from ds_npu.zero_ext.bucket_memory import BucketedGroup
from ds_npu.zero_ext.bucket_plan import Run
from ds_npu.zero_ext.partition_exchange import to_bucketed, to_plain

Arrays = dict[str, torch.Tensor]
Functions = dict[str, Callable[..., Any]]
MASTER = "master"
"""The name of the master among the arrays of a group; other names are keys of the optimizer's state."""
VALUES, RUNS = TensorAttribute[Functions]("ds_npu_values"), TensorAttribute[Sequence[Run]]("ds_npu_runs")
"""Marks of a weight whose partition is bucketed: its WeightValues' functions, and its runs in this rank's partition."""


class BucketedState:
    """Masters and state of one DeepSpeedZeroOptimizer."""

    snapshot: HostSnapshot | None = None
    """The snapshot of a save that runs now, whose host memory receives state in DeepSpeed's order; else None."""

    def __init__(self, optimizer: Any, groups: Mapping[int, BucketedGroup], own_parts: Callable[[], list[Any]]) -> None:
        """``groups``: those over several ranks; ``own_parts`` makes DeepSpeed's list of partitions of the weights."""
        self._optimizer, self._groups, self._own_parts = optimizer, groups, own_parts
        self.is_plain = False
        """Whether masters, state and partitions are in DeepSpeed's order now."""

    def use_own_parts(self) -> None:
        """Let DeepSpeed see the partitions in the order of buckets."""
        self._optimizer.parallel_partitioned_bit16_groups = self._own_parts()
        for found in self._fragments():
            # DeepSpeed's addresses are wrong in this order: nobody may read by them.
            found.hp_fragment = None
            found.optim_fragment = None

    def plain_parts(self) -> list[list[Any]]:
        """DeepSpeed's own list: views of the flat weights, by group and rank."""
        flats = enumerate(self._optimizer.bit16_groups_flat)
        return [self._optimizer.get_data_parallel_partitions(flat, index) for index, flat in flats]

    @contextmanager
    def in_plain_order(self, changes: bool) -> Iterator[None]:
        """Within the block masters, state and partitions are in DeepSpeed's order: copies, in host memory.

        With ``changes``, their values at its end are taken over. All data ranks enter it at the same time.
        """
        if self.is_plain:
            yield
            return
        self.is_plain = True
        before = {index: self._arrays(index) for index in self._groups}
        try:
            for index, arrays in before.items():
                self._put(index, {name: self._plain(index, each) for name, each in arrays.items()})
            self._optimizer.parallel_partitioned_bit16_groups = self.plain_parts()
            self._show_fragments()
            yield
        except BaseException:
            for index, arrays in before.items():
                self._put(index, arrays)
            raise
        else:
            for index, arrays in before.items():
                self._put(index, self._bucketed(index, arrays) if changes else arrays)
        finally:
            self.is_plain = False
            self.use_own_parts()

    def _arrays(self, index: int) -> Arrays:
        master = self._optimizer.single_partition_of_fp32_groups[index]
        state = self._optimizer.optimizer.state.get(master, {})
        found = {MASTER: master.data}
        for name, each in state.items():
            if isinstance(each, torch.Tensor) and each.shape == master.shape:
                found[name] = each
        return found

    def _put(self, index: int, arrays: Mapping[str, torch.Tensor]) -> None:
        master = self._optimizer.single_partition_of_fp32_groups[index]
        master.data = arrays[MASTER]
        state = {name: each for name, each in arrays.items() if name != MASTER}
        if state:
            # The dict of before may be in a state dict that was returned.
            states = self._optimizer.optimizer.state
            states[master] = {**states.get(master, {}), **state}

    def _plain(self, index: int, x: torch.Tensor) -> torch.Tensor:
        group, snapshot = self._groups[index], self.snapshot
        if snapshot is None:
            return to_plain(x, torch.empty_like(x, device="cpu"), group.plan, group.ranks)
        with snapshot.behind():
            plain = to_plain(x, snapshot.memory_like(x), group.plan, group.ranks, waits=False)
        snapshot.keep(x)
        return plain

    def _bucketed(self, index: int, before: Mapping[str, torch.Tensor]) -> Arrays:
        """The present arrays in the order of buckets, in the memory of those in ``before`` where they fit."""
        group, found = self._groups[index], {}
        for name, each in self._arrays(index).items():
            home = before.get(name)
            if home is None or home.dtype != each.dtype:
                home = torch.empty_like(each, device=before[MASTER].device)
            found[name] = to_bucketed(each, home, group.plan, group.ranks)
        return found

    def _show_fragments(self) -> None:
        """Point DeepSpeed's addresses of each weight to the present masters and state."""
        for found in self._fragments():
            master = self._optimizer.single_partition_of_fp32_groups[found.param_group_index]
            address = found.hp_fragment_address
            found.hp_fragment = master.data.narrow(0, address.start, address.numel)
            found.set_optim_state_fragment(master, self._optimizer.optimizer.state.get(master, {}))

    def _fragments(self) -> Iterator[Any]:
        for group in self._groups.values():
            for weight in group.weights:
                holder: Any = weight
                if holder._hp_mapping is not None:
                    yield holder._hp_mapping


class WeightValues:
    """Functions in place of those that DeepSpeed binds to a weight, for one whose partition is bucketed.

    Each returns or takes the whole weight, flat values in float32; all data ranks call them.
    """

    def __init__(self, optimizer: Any, index: int, group: BucketedGroup, position: int) -> None:
        self._optimizer, self._index, self._group = optimizer, index, group
        self._weight = group.weights[position]
        self.runs = [run for run in group.runs if run.weight == position]

    def functions(self) -> Functions:
        """The functions by the names that DeepSpeed binds."""
        return {
            "get_full_hp_param": self.get_full_hp_param,
            "set_full_hp_param": self.set_full_hp_param,
            "get_full_hp_grad": self.get_full_hp_grad,
            "set_full_hp_grad": self.set_full_hp_grad,
        }

    def get_full_hp_param(self, optim_state_key: str | None = None) -> torch.Tensor:
        """The float32 weight, or its state of the given key."""
        return self._whole(self._state(optim_state_key))

    def set_full_hp_param(self, value: torch.Tensor, optim_state_key: str | None = None) -> None:
        """Set the float32 weight, or its state of the given key, on every data rank."""
        self._set(self._state(optim_state_key), value)

    def get_full_hp_grad(self) -> torch.Tensor:
        """The reduced gradient."""
        return self._whole(self._gradient())

    def set_full_hp_grad(self, value: torch.Tensor) -> None:
        """Set the reduced gradient, on every data rank."""
        self._set(self._gradient(), value)

    def _state(self, key: str | None) -> torch.Tensor:
        master: torch.Tensor = self._optimizer.single_partition_of_fp32_groups[self._index]
        if key is None:
            return master.data
        found = self._optimizer.optimizer.state.get(master, {}).get(key)
        if not isinstance(found, torch.Tensor) or found.shape != master.shape:
            raise ValueError(f"{key} not found in optimizer state fragment")
        return found

    def _gradient(self) -> torch.Tensor:
        found = self._optimizer.averaged_gradients.get(self._index)
        if found is None:
            raise ValueError("Gradients are only available immediately after backward and before engine step")
        flat: torch.Tensor = found.flat_partition
        return flat

    @torch.no_grad()
    def _whole(self, partition: torch.Tensor) -> torch.Tensor:
        weight = self._weight
        whole = torch.zeros(weight.numel(), dtype=torch.float32, device=weight.device)
        for run in self.runs:
            whole[run.first : run.first + run.numel].copy_(partition[run.start : run.start + run.numel])
        if self._group.size > 1:
            dist.all_reduce(whole, group=self._group.ranks)
        return whole.view(weight.shape)

    @torch.no_grad()
    def _set(self, partition: torch.Tensor, value: torch.Tensor) -> None:
        flat = value.flatten()
        for run in self.runs:
            partition[run.start : run.start + run.numel].copy_(flat[run.first : run.first + run.numel])
