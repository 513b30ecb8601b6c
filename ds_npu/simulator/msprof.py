"""A stand-in of CANN's ``msprof``: writes the database of a profile that the simulated ``aclprof`` recorded.

``msprof --export=on --type=db --output=PROF_...`` writes ``msprof_<time>.db`` with the tables that torch_npu copies
into its own database. Times are those of the virtual clock, from the moment on at which the profile began. It runs
by itself, with Python alone. Source of tables and columns: torch_npu 2.13, profiler/analysis/prof_view/prof_db_parse,
and the description of the database in MindStudio's documents.
"""

from __future__ import annotations

import json
import sqlite3
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HELP = "msprof, simulated by ds_npu: --export=on --type=db --output=FOLDER; --analyze=on does nothing"
TYPES = {
    "Float": "FLOAT",
    "Half": "FLOAT16",
    "BFloat16": "DT_BF16",
    "Double": "DOUBLE",
    "Long": "INT64",
    "Int": "INT32",
    "Short": "INT16",
    "Char": "INT8",
    "Byte": "UINT8",
    "Bool": "BOOL",
}
"""CANN's names of torch's types."""
COLLECTIVES = {
    "HcclAllReduce": "hcom_allReduce_",
    "HcclReduce": "hcom_reduce_",
    "HcclReduceScatter": "hcom_reduceScatter_",
    "HcclReduceScatterV": "hcom_reduceScatterV_",
    "HcclBroadcast": "hcom_broadcast_",
    "HcclScatter": "hcom_scatter_",
    "HcclAllGather": "hcom_allGather_",
    "HcclAllGatherV": "hcom_allGatherV_",
    "HcclAlltoAll": "hcom_alltoall_",
    "HcclAlltoAllV": "hcom_alltoallv_",
    "HcclAlltoAllVC": "hcom_alltoallvc_",
    "HcclBarrier": "hcom_barrier_",
    "HcclSend": "hcom_send_",
    "HcclRecv": "hcom_receive_",
    "HcclBatchSendRecv": "hcom_batchSendRecv_",
}
READ, WRITTEN = 0, 1
"""The numbers by which a profile says how a task touches a tensor; 2: it reads and writes it."""
NONE = 2**32 - 1
"""CANN's number of a context or model that a task does not have."""
TABLES = """
CREATE TABLE STRING_IDS (id INTEGER PRIMARY KEY, value TEXT);
CREATE TABLE TASK (startNs INTEGER, endNs INTEGER, deviceId INTEGER, connectionId INTEGER, globalTaskId INTEGER,
    globalPid INTEGER, taskType INTEGER, contextId INTEGER, streamId INTEGER, taskId INTEGER, modelId INTEGER);
CREATE TABLE COMPUTE_TASK_INFO (name INTEGER, globalTaskId INTEGER PRIMARY KEY, blockNum INTEGER, mixBlockNum INTEGER,
    taskType INTEGER, opType INTEGER, inputFormats INTEGER, inputDataTypes INTEGER, inputShapes INTEGER,
    outputFormats INTEGER, outputDataTypes INTEGER, outputShapes INTEGER, attrInfo INTEGER);
CREATE TABLE COMMUNICATION_OP (opName INTEGER, startNs INTEGER, endNs INTEGER, connectionId INTEGER, groupName INTEGER,
    opId INTEGER PRIMARY KEY, relay INTEGER, retry INTEGER, dataType INTEGER, algType INTEGER, count NUMERIC,
    opType INTEGER, deviceId INTEGER);
CREATE TABLE CANN_API (startNs INTEGER, endNs INTEGER, type INTEGER, globalTid INTEGER,
    connectionId INTEGER PRIMARY KEY, name INTEGER);
CREATE TABLE RANK_DEVICE_MAP (rankId INTEGER, deviceId INTEGER);
"""


class Database:
    """The database of a profile; texts are written once and named by their number."""

    def __init__(self, path: Path) -> None:
        self.connection = sqlite3.connect(path)
        self.connection.executescript(TABLES)
        self.numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        """The number of ``text`` in STRING_IDS."""
        return self.numbers.setdefault(text, len(self.numbers))

    def add(self, table: str, *values: object) -> None:
        """Add a row to ``table``."""
        marks = ", ".join("?" * len(values))
        self.connection.execute(f"INSERT INTO {table} VALUES ({marks})", values)

    def close(self) -> None:
        """Write the texts, and end."""
        self.connection.executemany(
            "INSERT INTO STRING_IDS VALUES (?, ?)", ((n, text) for text, n in self.numbers.items())
        )
        self.connection.commit()
        self.connection.close()


def export(folder: Path) -> None:
    """Write the database of the profile in ``folder``; raises OSError or ValueError where there is none."""
    begin = json.loads((folder / "host" / "start_info").read_text())
    shift = int(begin["collectionTimeBegin"]) * 1000 - int(begin["virtualNanoseconds"])
    database = Database(folder / f"msprof_{time.strftime('%Y%m%d%H%M%S')}.db")
    for device in sorted(folder.glob("device_*")):
        number = int(device.name.partition("_")[2])
        for index, task in enumerate(_tasks(device / "data" / "tasks.jsonl")):
            _add_task(database, number, index, task, shift)
    database.close()


def _tasks(path: Path) -> Iterator[Mapping[str, Any]]:
    """The tasks of streams, without those that take no time."""
    with path.open() as file:
        for line in file:
            task = json.loads(line.rstrip().removesuffix(","))
            if "kind" in task["args"] and task["tid"] != 0:
                yield task


def _add_task(database: Database, device: int, index: int, task: Mapping[str, Any], shift: int) -> None:
    told, name = task["args"], task["name"]
    is_message = told["kind"] in ("collective", "message")
    begun = round(task["ts"] * 1000) + shift
    ended = round((task["ts"] + task["dur"]) * 1000) + shift
    if is_message:
        # HCCL's kernels wait for the other ranks, and the time counts as theirs.
        begun = round(told["ready"] * 1000) + shift
    kind = "COMMUNICATION" if is_message else _core(told)
    number = database.number
    database.add(
        *(
            "TASK",
            begun,
            ended,
            device,
            index,
            index,
            0,
            number(kind),
            0xFFFFFFFF,
            task["tid"],
            index % 65536,
            0xFFFFFFFF,
        )
    )
    if is_message:
        kind = COLLECTIVES.get(name, f"hcom_{name.removeprefix('Hccl')}_")
        suffix = sum(map(ord, told["communicator"])) % 1000
        named = number(f"{kind}_{suffix}_{told.get('call', index)}_1")
        group = number(told["communicator"])
        told_of = (index, group, index, 0, 0, number("FP32"), number("NA"), 0, number(kind), device)
        database.add("COMMUNICATION_OP", named, begun, ended, *told_of)
    elif kind != "MEMCPY_ASYNC":
        _add_kernel(database, index, task, kind)


def _core(told: Mapping[str, Any]) -> str:
    if told.get("host"):
        return "MEMCPY_ASYNC"
    return "AI_CORE" if told["kind"] in ("cube", "attention", "cube_collective") else "AI_VECTOR_CORE"


def _add_kernel(database: Database, index: int, task: Mapping[str, Any], core: str) -> None:
    told, number = task["args"], database.number
    own = task["name"].removeprefix("aclnn")
    kind = "MatMulV3" if told["kind"] == "cube" and "matmul" not in own.lower() else own
    sides: list[int] = []
    for skipped in (WRITTEN, READ):
        tensors = [(name, sizes) for access, name, sizes in told["shapes"] if access != skipped]
        formats = ";".join("ND" for _ in tensors)
        types = ";".join(TYPES.get(name, name.upper()) for name, _ in tensors)
        shapes = ";".join(",".join(map(str, sizes)) for _, sizes in tensors)
        sides += [number(formats), number(types), number(f'"{shapes}"')]
    named = number(f"{task['name']}_{kind}_{kind}")
    database.add("COMPUTE_TASK_INFO", named, index, 24, 0, number(core), number(kind), *sides, number(""))


def run_msprof(arguments: list[str]) -> int:
    """Run ``msprof`` with ``arguments``; returns the exit code."""
    options = dict(each.removeprefix("--").partition("=")[::2] for each in arguments)
    if "help" in options or not options:
        sys.stdout.write(f"{HELP}\n")
        return 0
    if options.get("export") == "on":
        if options.get("type") != "db":
            sys.stderr.write(f"{HELP}\n")
            return 1
        try:
            export(Path(options["output"]))
        except (OSError, ValueError, KeyError) as error:
            sys.stderr.write(f"msprof: {error!r}\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(run_msprof(sys.argv[1:]))
