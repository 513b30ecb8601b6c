"""The grid of ranks in text: the groups along each axis, and a picture; large worlds are abbreviated."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from ds_npu.planner.communicators import GROUP_BUFFER, PAIR_BUFFER, Communicator, default_mib
from ds_npu.topology.degrees import AXES, DENSE, NAMES, Axis, Degrees
from ds_npu.topology.machine import Machine

ZERO = {
    None: "ZeRO (its stage is not known yet) works",
    0: "ZeRO is off; gradients are summed",
    1: "ZeRO 1 shards optimizer states",
    2: "ZeRO 2 shards gradients and optimizer states",
    3: "ZeRO 3 shards weights, gradients and optimizer states",
}
SHOWN = 8
"""Most printed groups of an axis, ranks of a group and cells of a row; at most twice as many rows are printed."""
DOTS = "..."


def axes_table(degrees: Degrees) -> Iterator[str]:
    """One line an axis: its size and, where that is more than 1, its groups of global ranks."""
    yield f"{'Axis':<20} {'size':>6} {'groups':>7}   global ranks of each group"
    for axis in AXES if degrees.ep * degrees.etp > 1 else DENSE:
        size = degrees.size(axis)
        shown = f"{degrees.world_size // size:>7}   {_groups(degrees, axis)}" if size > 1 else f"{'-':>7}"
        yield f"{f'{NAMES[axis]} ({axis})':<20} {size:>6} {shown}"


def nodes_line(degrees: Degrees, machine: Machine) -> str:
    """The axes whose groups lie within nodes of ``machine``, which launchers fill with ranks one after the other."""
    spread = {axis: nodes_of_a_group(degrees, axis, machine.node) for axis in AXES if degrees.size(axis) > 1}
    within = [NAMES[axis] for axis, nodes in spread.items() if nodes == 1]
    over = [f"{NAMES[axis]} over {nodes:,}" for axis, nodes in spread.items() if nodes > 1]
    parts = [*([f"{', '.join(within)} each within a node"] if within else []), *over]
    return f"Groups on nodes of {machine.name}, {machine.node} ranks each: {'; '.join(parts) or 'none'}"


def nodes_of_a_group(degrees: Degrees, axis: Axis, node: int) -> int:
    """How many nodes of ``node`` ranks a group along ``axis`` touches at most.

    How a group lies in nodes depends on its first rank modulo ``node``, so only few groups of a large world are tried.
    """
    ((stride, size),) = degrees.box(axis)
    blocks = range(min(degrees.world_size // (stride * size), node))
    firsts = [block * stride * size + index for block in blocks for index in range(min(stride, node))]
    return max(len({(first + step * stride) // node for step in range(size)}) for first in firsts)


def zero_line(degrees: Degrees, stage: int | None) -> str:
    """The tensors that ZeRO shards, and over which ranks."""
    size = degrees.dp * degrees.cp
    where = f"{size} ranks: {_groups(degrees, 'dp', 'cp')}" if size > 1 else "which is a single rank"
    return f"{ZERO[stage]} over data * context, {where}"


def grid_picture(degrees: Degrees) -> Iterator[str]:
    """The dense view: a row for each (pp, dp), in the row a cell for each cp, in the cell the ranks along tp."""
    yield "Grid of global ranks: a row for each pipeline and data rank, a cell for each context rank"
    width = len(str(degrees.world_size - 1))
    peers = degrees.cp * degrees.tp
    for row in _shown(degrees.pp * degrees.dp, 2 * SHOWN):
        if row is None:
            yield f"  {DOTS}"
            continue
        pp, dp = divmod(row, degrees.dp)
        cells = [
            DOTS if cp is None else _ranks(row * peers + cp * degrees.tp, 1, degrees.tp, width)
            for cp in _shown(degrees.cp, SHOWN)
        ]
        yield f"  pp {pp:<{len(str(degrees.pp - 1))}}  dp {dp:<{len(str(degrees.dp - 1))}}   " + " | ".join(cells)


def communicator_table(communicators: Sequence[Communicator]) -> Iterator[str]:
    """A line for each communicator of a rank: MiB of device memory and what it carries; then the sums."""
    yield "HCCL communicators of each rank, each with two buffers of device memory"
    yield f"  {'group':<24} {'number':>6} {'MiB':>7}   messages"
    for each in communicators:
        row = f"  {each.name:<24} {each.count:>6} {each.device_mib:>7,}   "
        messages = f"set to {each.mib:,} MiB a buffer; {each.messages}" if each.is_set else each.messages
        yield from textwrap.wrap(messages, 116, initial_indent=row, subsequent_indent=" " * len(row))
    yield f"  {'all':<24} {sum(c.count for c in communicators):>6} {sum(c.device_mib for c in communicators):>7,}"
    text = (
        f"A buffer holds the largest message, at most {GROUP_BUFFER} ({default_mib(GROUP_BUFFER)} MiB), unless "
        "ds_npu.hccl.buffer_mib sets it. That is taken for the world, and where no size is known; of hidden states and "
        "tokens --model tells the most: as many as the model has positions. Two ranks that send to each other have a "
        f"communicator with {PAIR_BUFFER} ({default_mib(PAIR_BUFFER)} MiB). Experts' communicators are opened if the "
        "model has weights of experts. Groups of the script's own come on top."
    )
    yield from textwrap.wrap(text, 116, initial_indent="  ", subsequent_indent="  ")


def _groups(degrees: Degrees, *axes: Axis) -> str:
    """The groups along neighbouring axes, at most SHOWN.

    ``Degrees.groups`` would list all of a large world.
    """
    ((stride, size),) = degrees.box(*axes)
    return " ".join(
        DOTS if index is None else f"[{_ranks(index // stride * stride * size + index % stride, stride, size)}]"
        for index in _shown(degrees.world_size // size, SHOWN)
    )


def _ranks(first: int, stride: int, count: int, width: int = 0) -> str:
    return " ".join(DOTS if index is None else f"{first + index * stride:>{width}}" for index in _shown(count, SHOWN))


def _shown(count: int, most: int) -> list[int | None]:
    """The indices 0 .. count - 1; where there are more than ``most``, None stands for the middle."""
    return list(range(count)) if count <= most else [*range(most // 2), None, count - 1]
