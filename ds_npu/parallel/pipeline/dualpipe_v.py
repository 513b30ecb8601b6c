"""DualPipeV: a forward of one micro-batch paired with the backward of another, on the two stages of each rank.

Its eight phases, as DeepSeek's description of it counts them; rank r of P has stages r (0) and 2P-1-r (1):

    1  F0             2 (P-1-r) times
    2  F0 F1          r+1
    3  I1 W F1        P-1-r
    4  F0 B1 F1 B0    M-2P+r+1
    5  B1 F1 B0       P-1-r
    6  B1 B0          r+1; the weight parts of the second half of these backwards wait
    7  W I0           P-1-r
    8  W              r+1

Source: deepseek-ai/DualPipe (dualpipe/dualpipev.py); the DeepSeek-V3 report (arXiv 2412.19437).
"""

from __future__ import annotations

from collections import Counter, deque

from ds_npu.parallel.pipeline.schedule import Action, Kind, Schedule


def dualpipe_v(ranks: int, micro_batches: int) -> Schedule:
    """Make the schedule of at least 2P micro-batches; a rank keeps 2P+1 halves of its activations."""
    return Schedule.of([_row(ranks, rank, micro_batches) for rank in range(ranks)])


def _row(ranks: int, rank: int, micro_batches: int) -> list[Action]:
    behind, last = ranks - 1 - rank, rank + 1
    cooling = [f"{kind}{chunk}" for kind, chunk in zip("B" * last + "I" * last, "10" * last, strict=True)]
    phases = (
        ("F0", 2 * behind),
        ("F0 F1", last),
        ("I1 W F1", behind),
        ("F0 B1 F1 B0", micro_batches - 2 * ranks + last),
        ("B1 F1 B0", behind),
        (" ".join(cooling), 1),
        ("W I0", behind),
        ("W", last),
    )
    counts: Counter[str] = Counter()
    weights: deque[Action] = deque()
    row: list[Action] = []
    for word in (word for words, times in phases for _ in range(times) for word in words.split()):
        if word == "W":
            row.append(weights.popleft())
            continue
        kind, stage = Kind(word[0]), (rank, 2 * ranks - 1 - rank)[int(word[1])]
        # One count for all backwards of a stage, whole (B) or not (I).
        counted = f"{stage}{kind is Kind.FORWARD}"
        row.append(Action(stage, kind, counts[counted]))
        counts[counted] += 1
        if kind is Kind.BACKWARD_INPUT:
            weights.append(Action(stage, Kind.BACKWARD_WEIGHT, row[-1].micro_batch))
    return row
