"""Reads the database that torch_npu.profiler writes: kernels, copies and calls of communicators of one NPU.

The window is from the first kernel to the end of the last one: steps of the host, which runs ahead, say nothing of
when the device begins and ends them. Source of the tables: torch_npu 2.13, profiler/analysis/prof_view/prof_db_parse.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

from ds_npu.step_time.trace import CommunicatorCall, Header, Operation, OperatorTensors, RankTrace, TraceError, kind_of

DATABASES = "ASCEND_PROFILER_OUTPUT/ascend_pytorch_profiler*.db"
"""A glob of the databases in the folder of a trace."""
ITEMSIZES = {
    **dict.fromkeys(("DOUBLE", "INT64", "UINT64", "COMPLEX64"), 8),
    **dict.fromkeys(("FLOAT", "INT32", "UINT32"), 4),
    **dict.fromkeys(("FLOAT16", "DT_BF16", "INT16", "UINT16"), 2),
    **dict.fromkeys(("INT8", "UINT8", "BOOL"), 1),
}
"""Bytes of CANN's types; of others 4."""
KERNELS = """
SELECT kind.value, task.startNs, task.endNs, ins.value, inTypes.value, outs.value, outTypes.value
FROM COMPUTE_TASK_INFO AS info
JOIN TASK AS task ON task.globalTaskId = info.globalTaskId
JOIN STRING_IDS AS kind ON kind.id = info.opType
LEFT JOIN STRING_IDS AS ins ON ins.id = info.inputShapes
LEFT JOIN STRING_IDS AS inTypes ON inTypes.id = info.inputDataTypes
LEFT JOIN STRING_IDS AS outs ON outs.id = info.outputShapes
LEFT JOIN STRING_IDS AS outTypes ON outTypes.id = info.outputDataTypes
"""
CALLS = """
SELECT name.value, communicator.value, call.startNs, call.endNs FROM COMMUNICATION_OP AS call
JOIN STRING_IDS AS name ON name.id = call.opName
LEFT JOIN STRING_IDS AS communicator ON communicator.id = call.groupName
"""
COPIES = """
SELECT task.startNs, task.endNs FROM TASK AS task JOIN STRING_IDS AS kind ON kind.id = task.taskType
WHERE kind.value LIKE 'MEMCPY%'
"""
CALL = re.compile(r"hcom_([a-zA-Z]+?)(?:v|vc|V)?_")
NAMES = {
    "allReduce": "all_reduce",
    "reduceScatter": "reduce_scatter",
    "allGather": "all_gather",
    "alltoall": "all_to_all",
    "receive": "recv",
    "batchSendRecv": "batch_send_recv",
}
"""torch's names of HCCL's calls, where they differ."""


def read_npu_trace(path: Path, header: Header) -> RankTrace:
    """The trace in the folder ``path``; raises TraceError where there is none, or no kernel ran."""
    found = sorted(path.glob(DATABASES))
    if not found:
        raise TraceError(f"{path}: torch_npu.profiler has left no {DATABASES} there; its own lines in the log say why")
    try:
        with closing(sqlite3.connect(f"file:{found[0]}?mode=ro", uri=True)) as database:
            groups = {**header.communicators, **_groups(database)}
            operations = tuple(_operations(database))
            messages = tuple(_messages(database, groups))
            copies = tuple((begun, ended) for begun, ended in database.execute(COPIES))
    except (sqlite3.Error, ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{found[0]}: no database of torch_npu.profiler can be read there ({error!r})") from error
    times = [piece for each in operations for piece in each.pieces] + [(each.begun, each.ended) for each in messages]
    if not times:
        raise TraceError(f"{found[0]}: no kernel ran while the trace was recorded")
    return RankTrace(
        header, min(begun for begun, _ in times), max(ended for _, ended in times), operations, messages, copies
    )


def _groups(database: sqlite3.Connection) -> dict[str, tuple[int, ...]]:
    """The global ranks of HCCL's communicators, by their names."""
    row = database.execute("SELECT value FROM META_DATA WHERE name = 'parallel_group_info'").fetchone()
    content = json.loads(row[0]) if row else {}
    return {name: tuple(group["global_ranks"]) for name, group in content.items()}


def _operations(database: sqlite3.Connection) -> Iterator[Operation]:
    for name, begun, ended, *shapes in database.execute(KERNELS):
        yield Operation(name, kind_of(name), ((begun, ended),), _work(*shapes))


def _messages(database: sqlite3.Connection, groups: Mapping[str, tuple[int, ...]]) -> Iterator[CommunicatorCall]:
    for name, communicator, begun, ended in database.execute(CALLS):
        found = CALL.match(name)
        called = found[1] if found else name
        yield CommunicatorCall(NAMES.get(called, called), groups.get(communicator, ()), begun, ended)


def _work(ins: str | None, in_types: str | None, outs: str | None, out_types: str | None) -> OperatorTensors | None:
    """Shapes as CANN writes them, ``"2,3;4"``, with the types of each."""
    shapes, itemsizes = _shapes(ins, in_types)
    results, result_sizes = _shapes(outs, out_types)
    return (
        OperatorTensors((*shapes, *results), (*itemsizes, *result_sizes), len(results)) if shapes or results else None
    )


def _shapes(text: str | None, types: str | None) -> tuple[list[tuple[int, ...]], list[int]]:
    plain = (text or "").strip('"')
    if not plain or plain == "N/A":
        return [], []
    shapes = [tuple(int(size) for size in each.split(",") if size.strip()) for each in plain.split(";")]
    names = [*(types or "").split(";"), *([""] * len(shapes))]
    return shapes, [ITEMSIZES.get(name, 4) for name in names[: len(shapes)]]
