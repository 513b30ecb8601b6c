"""Dry runs, which compute no numbers, against runs that do: the same tasks, times and peaks of memory."""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import simulated
from hypothesis import given
from hypothesis import strategies as st

from ds_npu.simulator.environment import routing_of

slow = pytest.mark.slow  # the libraries are compiled first, if they are not yet
BEGINS, ENDS = "aclnnLinspace", "aclnnEye"
"""The marks of tests/npu/training_steps.py."""
BUCKETS = {"reduce_bucket_size": 10_000, "allgather_bucket_size": 10_000}


def config(stage: int, **section: Any) -> dict[str, Any]:
    made = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, **(BUCKETS if stage else {})},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    if stage == 3:
        made["zero_optimization"] |= {"stage3_param_persistence_threshold": 0}
        del made["zero_optimization"]["allgather_bucket_size"]
    return made | ({"ds_npu": section} if section else {})


CASES = [
    ("llama", config(0)),
    ("llama", config(1)),
    ("llama", config(2)),
    ("llama", config(3)),
    ("llama", config(1, parallel={"pipeline": 2}, pipeline={"micro_batches": 2})),
    ("llama", config(2, parallel={"context": 2}, recompute={"layers": "all"})),
    ("llama", config(1, parallel={"tensor": 2, "sequence_parallel": True})),
    ("llama", config(0, swap={"activations": True}, optimizer_memory={"swap": True})),
    ("qwen3_moe", config(1, parallel={"expert": 2}, recompute={"layers": "all"})),
    ("qwen3_moe", config(3, parallel={"expert": 2})),
]


class Ran(NamedTuple):
    """What a run of CASES recorded and printed."""

    tasks: dict[int, list[list[tuple]]]
    """By NPU: of each case the tasks of its streams, in the order in which the host put them there."""
    peaks: list[tuple[int, list[int]]]
    losses: list[float]


def tasks_of(path: Path) -> tuple[int, list[list[tuple]]]:
    lines = [json.loads(line.rstrip(",")) for line in path.read_text().splitlines()[1:]]
    found: list[list[tuple]] = []
    inside = False
    for line in sorted(lines, key=lambda line: line["args"]["place"]):
        if line["name"] == BEGINS:
            found.append([])
        inside = line["name"] == BEGINS or (inside and line["name"] != ENDS)
        if inside and line["tid"]:
            told = line["args"]
            parts = (told.get(part) for part in ("kind", "flop", "read", "written", "seconds", "products"))
            found[-1].append((line["name"], line["tid"], line["dur"], *map(str, parts)))
    return lines[0]["pid"], found


def ran(folder: Path, *options: str) -> Ran:
    folder.mkdir()
    cases = folder / "cases"
    cases.write_text(json.dumps(CASES))
    command = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    path = os.pathsep.join((str(simulated.ROOT), str(simulated.ROOT / "tests" / "support")))
    done = simulated.sim(
        *("--devices", "2", "--routing", "zipf:1@3", "--trace", str(folder), *options, "--", *command),
        *("tests/npu/training_steps.py", str(cases)),
        timeout=600,
        TASK_QUEUE_ENABLE="0",
        PYTHONPATH=path,
    )
    said = [json.loads(line) for line in simulated.printed(done) if line.startswith('{"rank"')]
    by_rank = defaultdict(list)
    for each in said:
        by_rank[each["rank"]].append(each["peaks"])
    tasks = dict(tasks_of(path) for path in folder.glob("*.json") if BEGINS in path.read_text())
    return Ran(tasks, sorted(by_rank.items()), [each["loss"] for each in said])


@slow
def test_a_dry_run_has_the_tasks_and_the_memory_of_one_that_computes(tmp_path):
    computed, dry = ran(tmp_path / "computed"), ran(tmp_path / "dry", "--dry")
    assert set(dry.losses) == {1.0} and not set(computed.losses) & {1.0}
    assert dry.peaks == computed.peaks and [len(peaks) for _, peaks in dry.peaks] == [len(CASES)] * 2
    assert sorted(dry.tasks) == sorted(computed.tasks) == [0, 1]
    for npu, cases in computed.tasks.items():
        assert len(cases) == len(dry.tasks[npu]) == len(CASES)
        for case, tasks, same in zip(CASES, cases, dry.tasks[npu], strict=True):
            assert len(tasks) > 500 and tasks == same, case


UNKNOWN = """
import torch, torch_npu
x = torch.ones(64, 64, device="npu")
print(x.sum().item(), (x > 0).any().item(), torch.arange(5, device="npu").sum().item(), x.dtype)
print(torch.topk(x, 2)[1].flatten().unique().numel() > 30)
large = torch.ones(1 << 31, device="npu")  # 8 GiB, none of which is touched
large.mul_(2)
torch.npu.synchronize()
pages = int(open("/proc/self/statm").read().split()[1]) * 4096
print(pages < 2 << 30)
torch.nonzero(torch.tensor([0, 3]).npu()).cpu()
torch.nonzero(x[0] > 0).cpu()
"""


@slow
def test_the_host_reads_ones_no_memory_is_touched_and_a_size_that_is_unknown_is_an_error():
    done = simulated.python(UNKNOWN, "--devices", "1", "--dry")
    assert done.returncode != 0
    assert done.stdout.splitlines() == ["1.0 False 10 torch.float32", "True", "True"]
    assert "aclnnNonzero: the size of its result depends on numbers that a dry run does not compute" in done.stderr
    assert "dry: numbers are not computed" in done.stderr


@slow
def test_matrices_that_do_not_fit_are_an_error_though_nothing_is_multiplied():
    code = "import torch, torch_npu; torch.nn.Linear(32, 8).npu()(torch.ones(4, 31).npu()); torch.npu.synchronize()"
    done = simulated.python(code, "--devices", "1", "--dry")
    assert done.returncode != 0 and "matrices of 31 columns and 32 rows have no product" in done.stderr


@given(st.floats(0, 999).map(lambda x: round(x, 3)), st.integers(0, 10**9 - 1))
def test_routing_is_read(exponent, seed):
    assert routing_of("uniform") == "0 0" and routing_of(f"uniform@{seed}") == f"0 {seed}"
    text = f"{exponent:.3f}"
    assert routing_of(f"zipf:{text}@{seed}") == f"{text} {seed}"


@pytest.mark.parametrize("text", ["", "zipf", "zipf:", "zipf:-1", "uniform@", "uniform:1", "zipf:1e3", "zipf:1 2", "x"])
def test_what_is_no_routing_is_refused(text):
    with pytest.raises(ValueError, match=r"uniform, or zipf:EXPONENT"):
        routing_of(text)
