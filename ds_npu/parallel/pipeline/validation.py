"""Validation of schedules: every cell on its rank and in order, every action once, and no deadlock."""

from __future__ import annotations

from collections.abc import Iterator

from ds_npu.parallel.pipeline.schedule import Action, Kind, Schedule, ScheduleError
from ds_npu.parallel.pipeline.timeline import Costs, timeline


def check_schedule(schedule: Schedule) -> None:
    """Raise ScheduleError, with every cell at fault or the ranks that would wait for each other."""
    problems = [*_wrong_cells(schedule), *_wrong_pairs(schedule), *_missing(schedule)]
    if problems:
        raise ScheduleError("; ".join(problems))
    timeline(schedule, Costs())


def _wrong_cells(schedule: Schedule) -> Iterator[str]:
    owner: dict[int, int] = {}
    seen: set[Action] = set()
    for rank, row in enumerate(schedule.rows):
        for index, action in enumerate(row):
            where = f"rank {rank}, cell {index} ({action})"
            first = owner.setdefault(action.stage, rank)
            if first != rank:
                yield f"{where}: stage {action.stage} is on rank {first}"
            if action in seen:
                yield f"{where}: stands twice"
            seen.add(action)
            before = [each for each in schedule.needs(action) if each.stage == action.stage]
            missing = [each for each in before if each in schedule.cells and each not in seen]
            if missing:
                yield f"{where}: stands before {missing[0]}, which it needs"


def _wrong_pairs(schedule: Schedule) -> Iterator[str]:
    for rank in range(len(schedule.rows)):
        for step in schedule.steps(rank):
            kinds = [each.kind for each in step]
            goes = kinds[0] is Kind.FORWARD and kinds[-1] in (Kind.BACKWARD, Kind.BACKWARD_INPUT)
            is_pair = len(step) == 2 and goes and step[0].micro_batch != step[1].micro_batch
            if step[0] in schedule.paired and not is_pair:
                found = " and ".join(map(str, step))
                yield f"rank {rank}: {found} run together; a forward and a backward of other micro-batches do"


def _missing(schedule: Schedule) -> Iterator[str]:
    cells = schedule.cells
    for stage in range(schedule.stages):
        for micro_batch in range(schedule.micro_batches):
            has = {kind: Action(stage, kind, micro_batch) in cells for kind in Kind}
            where = f"stage {stage}, micro-batch {micro_batch}"
            if not has[Kind.FORWARD]:
                yield f"{where}: has no forward (F)"
            parts = has[Kind.BACKWARD_INPUT], has[Kind.BACKWARD_WEIGHT]
            if has[Kind.BACKWARD] == any(parts) or any(parts) != all(parts):
                found = ", ".join(kind.value for kind, is_there in has.items() if is_there) or "none"
                yield f"{where}: needs a whole backward (B) or both its parts (I and W), and has {found}"
