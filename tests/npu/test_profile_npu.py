"""A profile of NPUs through the real torch_npu.profiler: kernels, their times, and the rank that is slower."""

from __future__ import annotations

import json
import resource
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import tiny_models
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from small_engines import engine_of, llama
from small_engines import step as take_step
from torch.utils._python_dispatch import TorchDispatchMode

from ds_npu.log import logger
from ds_npu.step_time.intervals import HOST
from ds_npu.step_time.profile_folder import traces_in
from ds_npu.topology.machine import machine_of

WIDTH, COUNT = 4096, 6


class Products(TorchDispatchMode):
    """Counts products of matrices and their shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket._qualified_op_name == "aten::mm":
            self.shapes.append((*args[0].shape, args[1].shape[1]))
        return func(*args, **(kwargs or {}))


def train(folder: str, section: dict, stage: int) -> None:
    """Train four steps, in which rank 1 computes COUNT more products; steps 1 and 2 are profiled on both ranks."""
    profile = {"steps": [1, 2], "ranks": "all", "folder": folder}
    engine = engine_of(llama(), {**section, "profile": profile}, stage)
    square = torch.ones(WIDTH, WIDTH, device=engine.device)
    for step in range(4):
        ids = tiny_models.tokens(2, 8).to(engine.device)
        if dist.get_rank() == 1:
            for _ in range(COUNT):
                square @ square
        if step == 3:
            with Products() as products:
                engine.backward(engine(input_ids=ids, labels=ids).loss)
            Path(folder, f"products{dist.get_rank()}").write_text(json.dumps(products.shapes))
        else:
            engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()


@pytest.mark.parametrize(("axis", "section", "stage"), [("data", {}, 1), ("tensor", {"parallel": {"tensor": 2}}, 0)])
def test_the_slower_npu_is_named(tmp_path, axis, section, stage):
    run_on_ranks(2, train, str(tmp_path), section, stage, backend="hccl")
    figures = json.loads((tmp_path / "report.json").read_text())
    machine = machine_of(torch.npu.get_device_name())
    assert figures["machine"] == machine.name
    moved = 3 * WIDTH * WIDTH * 4
    more = COUNT * machine.operator_seconds(machine.product_seconds(WIDTH, WIDTH, WIDTH, 4), moved)
    slowest = figures["slowest_ranks"][0]
    assert slowest["slowest"] == 1 and axis in slowest["axes"]
    # Both take as long: rank 0 waits so much more, where one collective after another is late for its host in part.
    waits, hosts = (
        [
            sum(time for name, time in rank["activities"].items() if name.startswith(kind)) / 2
            for rank in figures["ranks"]
        ]
        for kind in ("waits for ranks", "waits for the host")
    )
    assert waits[0] + hosts[0] - waits[1] - hosts[1] == pytest.approx(more, rel=0.05)
    assert more / 2 < waits[0] < figures["step_seconds"] and waits[1] < more / 10
    first, second = traces_in(tmp_path)
    extra = [each for each in second.operations if each.work and (WIDTH, WIDTH) in each.work.shapes]
    assert len(extra) == 2 * COUNT
    (begun, ended) = extra[0].pieces[0]
    assert (ended - begun) * 1e-9 == pytest.approx(more / COUNT, rel=1e-3)
    # A mode of torch sees the products of a forward in a further step; those of a backward are on autograd's thread.
    expected = Counter(map(tuple, json.loads((tmp_path / "products0").read_text())))
    found = Counter(
        (each.work.shapes[0][0], each.work.shapes[0][1], each.work.shapes[-1][1])
        for each in first.operations
        if each.kind == "products" and each.work is not None and len(each.work.shapes[0]) == 2
    )
    assert expected and all(found[shape] >= 2 * count for shape, count in expected.items()), (found, expected)
    for rank in figures["ranks"]:
        assert sum(rank["activities"].values()) == pytest.approx(rank["seconds"]) and rank["activities"][HOST] > 0


def beside_the_scripts_profiler(folder: str) -> None:
    import torch_npu

    engine = engine_of(llama(), {"profile": {"steps": [0, 0], "folder": f"{folder}/own"}})
    handler = torch_npu.profiler.tensorboard_trace_handler(f"{folder}/script", analyse_flag=False)
    ids = tiny_models.tokens(2, 8).to(engine.device)
    refused = pytest.raises(RuntimeError, match="another profiler runs already")
    with torch_npu.profiler.profile(on_trace_ready=handler), refused:
        engine(input_ids=ids, labels=ids)


def test_the_scripts_own_profiler_is_left_alone(tmp_path):
    run_on_ranks(1, beside_the_scripts_profiler, str(tmp_path), backend="hccl")
    assert list((tmp_path / "script").glob("*_ascend_pt/PROF_*"))


def without_room(folder: str) -> None:
    """Profile where no file may have more than 16 KiB: the run goes on, and one error names rank and folder."""
    engine = engine_of(llama(), {"profile": {"steps": [1, 1], "folder": folder}})
    ids = tiny_models.tokens(2, 8).to(engine.device)
    said: list[str] = []
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with mock.patch.object(logger(), "error", lambda text, *args: said.append(text % args)):
        for step in range(4):
            if step == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, limits[1]))
            take_step(engine, ids)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(said) == 1 and f"no profile of rank 0: {folder}/rank0_" in said[0], said
    assert "MiB are free there. What to do: name another folder" in said[0], said
    assert engine.global_steps == 4


@pytest.mark.slow
def test_a_full_disk_ends_the_profile_and_not_the_run(tmp_path):
    run_on_ranks(1, without_room, str(tmp_path), backend="hccl")
