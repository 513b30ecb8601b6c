"""Schedules in which a forward of one micro-batch and a backward of another overlap on a rank.

The tokens of one travel between the ranks of experts while the other computes (``parallel.runtime.paired_passes``). A
pair begins when both can, and its results leave when both have ended: a schedule needs slack for that. DualPipeV has
it; 1F1B has it where a rank keeps two micro-batches more than the next one, and not one more. Sources: DualPipe
(deepseek-ai, arXiv 2412.19437); Megatron-LM (combined 1F1B); torch.distributed.pipelining (OVERLAP_F_B).
"""

from __future__ import annotations

from collections.abc import Callable

from ds_npu.parallel.pipeline.dualpipe_v import dualpipe_v
from ds_npu.parallel.pipeline.schedule import Action, Kind, Schedule
from ds_npu.parallel.pipeline.schedules import interleaved


def paired(schedule: Schedule, forward_first: bool) -> Schedule:
    """Pair each forward of ``schedule`` with the whole backward that follows it, of another micro-batch.

    Without ``forward_first`` pair each backward with the forward that follows it, and put the forward before it.
    """
    rows, pairs = [], []
    for row in schedule.rows:
        made: list[Action] = []
        for action in row:
            last = made[-1] if made else None
            if last is not None and last not in pairs and (len(made) < 2 or made[-2] not in pairs):
                forward, backward = (last, action) if forward_first else (action, last)
                kinds = forward.kind is Kind.FORWARD and backward.kind is Kind.BACKWARD
                if kinds and forward.micro_batch != backward.micro_batch:
                    made[-1:] = [forward, backward]
                    pairs.append(forward)
                    continue
            made.append(action)
        rows.append(made)
    return Schedule.of(rows, pairs)


PAIRED: dict[str, Callable[[int, int, int], Schedule]] = {
    "1f1b": lambda ranks, micro_batches, chunks: paired(interleaved(ranks, micro_batches, 1), forward_first=False),
    "interleaved": lambda ranks, micro_batches, chunks: paired(interleaved(ranks, micro_batches, chunks), False),
    "dualpipe_v": lambda ranks, micro_batches, chunks: paired(dualpipe_v(ranks, micro_batches), forward_first=True),
}
"""Makers of schedules from (ranks, micro-batches, chunks of each rank), by value of ``ds_npu.pipeline.schedule``."""
