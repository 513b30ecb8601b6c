"""Experts that move between ranks: the expert map, the load of each expert, and the exchange of weights and states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ds_npu.comm.collectives import exchange_rows
from ds_npu.parallel.expert.dispatch import pairs_of
from ds_npu.parallel.expert.expert_map import Elements, ExpertMap, Move, slots_of


class MappedExperts:
    """The expert map of one layer, and how often this rank's tokens chose each expert since experts last moved.

    A router numbers experts as the plain model does; ranks hold them by slot, in the order of ``expert_map``.
    """

    def __init__(self, expert_map: ExpertMap) -> None:
        self.expert_map = expert_map
        self._slots: torch.Tensor | None = None
        self._loads: torch.Tensor | None = None

    @property
    def experts(self) -> int:
        return sum(map(len, self.expert_map))

    def start_again(self, expert_map: ExpertMap, loads: Sequence[int] = ()) -> None:
        """Set the expert map, and how often each expert was chosen: ``loads``, or 0 where it is left out."""
        self.expert_map, self._slots = expert_map, None
        self._loads = torch.tensor(loads, dtype=torch.int64) if loads else None

    def slots(self, ids_TK: torch.Tensor) -> torch.Tensor:
        """The slot of each expert of ``ids`` [T, K] int64 in the list of all ranks' experts; -1 for no expert."""
        if self._slots is None or self._slots.device != ids_TK.device:
            # Made once after each relocation. The ids -1 and E are no expert and map to -1.
            self._slots = torch.tensor([-1, *slots_of(self.expert_map), -1], device=ids_TK.device)
        known = (ids_TK + 1).clamp(0, self.experts + 1)
        return self._slots.index_select(0, known.flatten()).view_as(ids_TK)

    def count(self, ids_TK: torch.Tensor) -> None:
        """Count the experts ``ids`` of this rank's tokens, on their device; the host does not wait."""
        mine = pairs_of(ids_TK, self.experts)
        self._loads = mine if self._loads is None else self._loads.to(mine.device).add_(mine)

    def loads(self, device: torch.device) -> torch.Tensor:
        """[E] int64 on ``device``: how often each expert was chosen by tokens of this rank."""
        if self._loads is None:
            return torch.zeros(self.experts, dtype=torch.int64, device=device)
        return self._loads.to(device)


@dataclass(frozen=True)
class HeldElements:
    """The elements this rank holds of one tensor of its experts: the weight, its float32 copy, or a moment."""

    values: torch.Tensor
    """Flat, in the order of the tensor [experts of the rank, ...]; overwritten in place."""
    of_ranks: Sequence[Elements | None]
    """The elements that each rank of the exchange sends and receives; None for a rank that takes no part."""


def exchange_experts(held: HeldElements, size: int, moves: Sequence[Move], group: dist.ProcessGroup) -> int:
    """Carry out ``moves`` in one exchange, which sends only the elements of experts that move.

    ``size``: the elements of one expert. Every rank of ``group`` calls it with the same moves. Returns the bytes that
    this rank sent to others.
    """
    rank, values = dist.get_rank(group), held.values
    mine = held.of_ranks[rank]
    assert mine is not None
    between: dict[tuple[int, int], list[Move]] = {}
    for move in moves:
        between.setdefault((move.source[0], move.target[0]), []).append(move)
    sent = [_pieces(between, size, mine, other) for other in held.of_ranks]
    received = [_pieces(between, size, other, mine) for other in held.of_ranks]
    # Copies, because received elements overwrite the ones that are sent.
    parts = [values.narrow(0, source, length) for pieces in sent for source, _, length in pieces]
    outgoing = torch.cat(parts) if parts else values.new_empty(0)
    counts, expected = ([sum(length for *_, length in each) for each in pieces] for pieces in (sent, received))
    arrived = exchange_rows(outgoing, counts, expected, group).wait()
    begin = 0
    for _, target, length in (piece for pieces in received for piece in pieces):
        values.narrow(0, target, length).copy_(arrived.narrow(0, begin, length))
        begin += length
    return (sum(counts) - counts[rank]) * values.element_size()


def _pieces(
    between: Mapping[tuple[int, int], Sequence[Move]], size: int, sender: Elements | None, receiver: Elements | None
) -> list[tuple[int, int, int]]:
    if sender is None or receiver is None:
        return []
    moves = between.get((sender.ep_rank, receiver.ep_rank), ())
    return [piece for move in moves if (piece := move.pieces(size, sender, receiver)) is not None]
