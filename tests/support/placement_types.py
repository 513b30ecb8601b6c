"""Types the tensors of a forward along the axes of the grid, in one process on a fake process group, with spmd_types.

Along an axis a tensor is I (the same on every rank, as is its gradient), R (the same, its gradient a summand on each
rank), V (each rank has another part) or P (a summand of the whole). A gradient's type is that of its tensor, with R and
P exchanged: so the types of a forward say what backward computes. Where a reduction is missing, or is done twice, some
operation has operands whose types do not go together, and raises SpmdTypeError. Source: meta-pytorch/spmd_types.

What spmd_types cannot see stands here: what crossings do, the types of parameters and of a rank's own tokens, and the
rules of autograd functions, whose insides are trusted (tests of ranks compare those with one process).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import spmd_types as spmd
import spmd_types.checker
import torch
import torch.distributed as dist
from spmd_types import I, P, R, SpmdTypeError, V, rules
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds_npu.comm import crossing
from ds_npu.comm.collectives import all_gather
from ds_npu.comm.pending import Pending
from ds_npu.features.context_parallel.sharded_batch import ShardedBatch
from ds_npu.features.tensor_parallel import experts
from ds_npu.ops.attention import operator
from ds_npu.parallel.context import blockwise_attention, ulysses
from ds_npu.parallel.runtime.placement import placement_of
from ds_npu.parallel.tensor import chunked_loss, cross_entropy, linear
from ds_npu.parallel.tensor.weight_gradient import PartialSum
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology

AXES = ("tp", "cp")
DUAL = {R: P, P: R, I: I, V: V}
"""The type of a tensor's gradient."""
MOVES = {
    crossing._same: {(I, I), (R, R), (V, V), (P, P), (I, R), (R, I)},
    crossing._sum: {(P, I), (P, R)},
    crossing._slice: {(I, V), (R, V)},
    crossing._gather: {(V, I), (V, R)},
    crossing._scatter: {(P, V)},
}
"""What each collective of a crossing makes of which type, in either direction."""


@contextmanager
def fake_world(degrees: Degrees) -> Iterator[Topology]:
    """Rank 0 of a world whose collectives move nothing."""
    dist.init_process_group("fake", rank=0, world_size=degrees.world_size, store=FakeStore())
    try:
        yield Topology(degrees)
    finally:
        dist.destroy_process_group()


@contextmanager
def typed(model: nn.Module, topology: Topology) -> Iterator[None]:
    """Type ``model`` and all that is computed inside; raises SpmdTypeError at the first operation without a type."""
    groups = {axis: topology.group(axis) for axis in AXES if topology.size(axis) > 1}
    with pytest.MonkeyPatch.context() as patch:
        for function, rule in RULES.items():
            patch.setattr(function, "spmd_typecheck", staticmethod(rule), raising=False)
        _see_functions(patch)
        patch.setattr(ShardedBatch, "shard", _taking_own_tokens(ShardedBatch.shard))
        patch.setattr(ShardedBatch, "gather_index", property(_gather_index))
        patch.setattr(experts, "all_gather", _gathered)
        with spmd.set_current_mesh(list(groups.values())), spmd.checker.typecheck(strict_mode="strict"):
            for parameter in model.parameters():
                spmd.assert_type(parameter, {groups[axis]: _placed(parameter, axis) for axis in groups})
            for buffer in model.buffers():
                spmd.assert_type(buffer, dict.fromkeys(groups.values(), R))
            yield


def of_all_ranks(x: torch.Tensor, topology: Topology) -> torch.Tensor:
    """Type ``x`` as data that every rank was given."""
    return spmd.assert_type(x, {topology.group(axis): R for axis in AXES if topology.size(axis) > 1})


def is_invariant(x: torch.Tensor, topology: Topology) -> bool:
    """Whether ``x`` is the same on every rank, and its gradient too: what backward may start from."""
    return [*spmd.get_local_type(x).values()] == [I for axis in AXES if topology.size(axis) > 1]


def _placed(parameter: nn.Parameter, axis: str) -> object:
    """The type of a parameter along ``axis`` by its placement, with which the hooks that sum its gradient agree."""
    placement = placement_of(parameter)
    if axis in placement.data_axes:
        return R  # ZeRO reduces its gradient.
    hooks = (parameter._backward_hooks or {}).values()
    sums = sum(isinstance(hook, PartialSum) for hook in hooks)
    if sums != (axis in placement.partial) or (sums and axis in placement.sharded):
        raise SpmdTypeError(f"{sums} sums over {axis} of the gradient of {tuple(parameter.shape)}, placed {placement}")
    return V if axis in placement.sharded else R if sums else I


def _type(x: torch.Tensor, group: dist.ProcessGroup) -> object:
    return spmd.get_local_type(x).get(spmd.normalize_axis(group))


def _stamp(out: object, x: torch.Tensor, changes: dict[dist.ProcessGroup, object]) -> None:
    changes = {group: found for group, found in changes.items() if group.size() > 1}
    for each in out if isinstance(out, tuple) else (out,):
        spmd.assert_type_like(each, x, changes)


def _require(x: torch.Tensor | None, group: dist.ProcessGroup, wanted: object, what: str) -> None:
    if x is not None:
        rules.ignore(x)
        # A summand is a part whose sum is meant.
        if group.size() > 1 and _type(x, group) is not wanted and (wanted, _type(x, group)) != (P, V):
            raise SpmdTypeError(f"{what} along {group.group_desc}: found {_type(x, group)}, not {wanted}")


def ends(forward: Callable, conjugate: Callable) -> tuple[object, object]:
    """The types before and after a crossing: those that ``forward`` takes and gives, and whose duals ``conjugate``
    takes and gives. Raises SpmdTypeError for two collectives that are no crossing."""
    found = [(src, dst) for src, dst in MOVES[forward] if (DUAL[dst], DUAL[src]) in MOVES[conjugate]]
    if len(found) != 1:
        raise SpmdTypeError(f"{forward.__name__} with {conjugate.__name__} backward: {found}")
    return found[0]


def _cross(out, *, x, crossing, conjugate, group):
    before, after = ends(crossing, conjugate)
    _require(x, group, before, crossing.__name__)
    _stamp(out, x, {group: after})


def _columns(out, *, x, axis, parameters):
    _require(x, axis.group, V if axis.sequence_parallel else I, "a region's input")
    for each in parameters:
        # Key heads that ranks share are whole on each, and their gradients are summed.
        whole = each is not None and _type(each, axis.group) is R
        _require(each, axis.group, R if whole else V, "a column weight")
    _stamp(out, x, {axis.group: V})


def _row(out, *, x, axis, weight):
    _require(x, axis.group, V, "a row linear's input")
    _require(weight, axis.group, V, "a row weight")
    _stamp(out, x, {axis.group: V if axis.sequence_parallel else I})


def _loss(out, *, logits_TV, targets_T, group):
    _require(logits_TV, group, V, "logits")
    rules.ignore(targets_T)
    _stamp(out, logits_TV, {group: I})


def _chunked_loss(out, *, hidden_TH, weight_VH, chunking):
    group = chunking.head.group
    if group is not None:
        _require(hidden_TH, group, I, "hidden states before the head")
        _require(weight_VH, group, V, "the head's weight")
    rules.ignore(hidden_TH)
    rules.ignore(weight_VH)
    _stamp(out, hidden_TH, {} if group is None else {group: I})


def _alike(out, first, *others):
    rules.ignore(first)
    for each in others:
        rules.ignore(each)
        if spmd.get_local_type(each) != spmd.get_local_type(first):
            raise SpmdTypeError(f"found {spmd.get_local_type(each)} beside {spmd.get_local_type(first)}")
    _stamp(out, first, {})


RULES = {
    crossing._Cross: _cross,
    linear._Columns: _columns,
    linear._Row: _row,
    cross_entropy._VocabParallelCrossEntropy: _loss,
    chunked_loss._ChunkedLoss: _chunked_loss,
    ulysses._Post: lambda out, *, x: _alike(out, x),
    ulysses._Wait: lambda out, *, posted: _alike(out, posted),
    blockwise_attention._BlockwiseAttention: lambda out, *, q, keys_and_values: _alike(out, q, *keys_and_values),
    operator._Attend: lambda out, *, q, k, v: _alike(out, q, k, v),
}
"""Any other autograd function is refused until it has a rule."""


def _see_functions(patch: pytest.MonkeyPatch) -> None:
    """ds_npu binds ``Function.apply`` at import, before spmd_types wraps it."""
    for name, module in [*sys.modules.items()]:
        for key, value in [*vars(module).items()] if name.startswith("ds_npu.") else ():
            bound = getattr(value, "__self__", None)
            if isinstance(bound, type) and issubclass(bound, torch.autograd.Function):
                patch.setattr(module, key, lambda *args, function=bound: function.apply(*args))


GATHER_INDEX = ShardedBatch.gather_index.func


def _gather_index(batch: ShardedBatch) -> torch.Tensor:
    """Made by writing into an empty tensor, which has no type."""
    with spmd.no_typecheck():
        found = GATHER_INDEX(batch)
    return spmd.assert_type(found, dict.fromkeys(spmd.current_mesh(), R))


def _gathered(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> Pending[torch.Tensor]:
    """The experts of all tokens: integers, gathered beside autograd."""
    with spmd.no_typecheck():
        whole = all_gather(x, dim, group).wait()
    _stamp(whole, x, {group: R})
    return Pending(whole, None)


def _taking_own_tokens(shard: Callable) -> Callable:
    """Which tokens are a rank's is plain indexing: what it finds is a part along cp."""

    def sharded(batch: ShardedBatch, x: torch.Tensor, *args: int) -> torch.Tensor:
        return spmd.mutate_type(shard(batch, x, *args).clone(), batch.group, src=R, dst=V)

    return sharded
