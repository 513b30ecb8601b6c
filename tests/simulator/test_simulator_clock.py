"""Virtual time on simulated NPUs: what events say, and begin and end of each task, against sums made by hand."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import simulated

from ds_npu.simulator.replay.recording import RecordedRun, read_recording
from ds_npu.simulator.replay.replay import Replay
from ds_npu.topology.machine import MACHINES, Machine

pytestmark = pytest.mark.slow  # the libraries are compiled first, if they are not yet

US = 1e6
MACHINE = MACHINES["910B2"]
DISPATCH, AUTOGRAD, EVENT, LAUNCH = (
    US * seconds for seconds in (MACHINE.dispatch, MACHINE.dispatch_autograd, MACHINE.dispatch_event, MACHINE.launch)
)
ADD, SUM = (US * MACHINE.operator_seconds(0.0, tensors * 2 * (1 << 20)) for tensors in (2, 3))
PRODUCT = US * MACHINE.operator_seconds(MACHINE.product_seconds(2048, 2048, 2048, 2), 3 * 2 * 2048**2)


def events(**environ: str) -> dict[str, float]:
    (line,) = simulated.printed(
        simulated.sim("--devices", "1", "--", sys.executable, "tests/npu/virtual_times.py", **environ)
    )
    return json.loads(line)


def test_events_tell_the_time_of_chains_forks_joins_and_of_a_slow_host():
    # The device waits for the host's dispatches of an add, and the host for the device's products.
    assert ADD < DISPATCH < PRODUCT and EVENT < LAUNCH < DISPATCH
    found = events()
    # The last add ends after the event behind it is launched; both events are launched LAUNCH after their dispatch.
    assert found["adds"] == pytest.approx(10 * DISPATCH + ADD, abs=0.01)
    # The first product begins when it is launched, the event before it when that is.
    assert found["products"] == pytest.approx(DISPATCH + 5 * PRODUCT, abs=0.01)
    # Join: the streams begin together after the first product, and the longer one decides.
    assert found["longer here"] == found["longer there"] == pytest.approx(DISPATCH + 4 * PRODUCT, abs=0.01)
    # The queue's thread launches more slowly than the host dispatches events.
    assert found["waits"] == pytest.approx(101 * LAUNCH, abs=0.01)
    # 20 products with a number, and the sum of two gradients in a third tensor.
    assert found["backward"] == pytest.approx(21 * AUTOGRAD + SUM, abs=0.01)
    # The host that asks in a loop has waited for the product; then it dispatches the second event.
    assert found["asks"] == pytest.approx(DISPATCH + PRODUCT + EVENT + LAUNCH, abs=0.01)


def test_without_a_queue_the_host_launches_what_it_dispatches():
    found = events(TASK_QUEUE_ENABLE="0")
    assert found["adds"] == pytest.approx(10 * (DISPATCH + LAUNCH) + EVENT + LAUNCH, abs=0.01)
    assert found["waits"] == pytest.approx(101 * (EVENT + LAUNCH), abs=0.01)
    assert found["products"] == pytest.approx(DISPATCH + LAUNCH + 5 * PRODUCT, abs=0.01)


def test_a_queue_that_hides_dispatches_has_no_times():
    done = simulated.sim("--devices", "1", "--", sys.executable, "tests/npu/virtual_times.py", TASK_QUEUE_ENABLE="2")
    assert done.returncode != 0 and "TASK_QUEUE_ENABLE=2 hides" in done.stderr


def traced(folder: Path) -> list[list[dict]]:
    """By NPU: the tasks of its streams, in the order in which the host put them there."""
    found = {}
    for path in folder.glob("*.json"):
        lines = [json.loads(line.rstrip(",")) for line in path.read_text().splitlines()[1:]]
        tasks = sorted((line for line in lines if line["tid"]), key=lambda line: line["args"]["place"])
        if tasks:
            found[tasks[0]["pid"]] = tasks
    return [found[device] for device in sorted(found)]


def run_ranks(folder: Path, *options: str) -> Path:
    command = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "tests/npu/rank_times.py")
    done = simulated.sim("--devices", "2", *options, "--trace", str(folder), "--", *command, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return run_ranks(tmp_path_factory.mktemp("ranks"))


def test_a_collective_begins_with_its_last_rank_and_a_message_with_both_ends(folder):
    first, second = traced(folder)
    end = {id(task): task["ts"] + task["dur"] for task in first + second}

    def named(tasks: list[dict], name: str) -> dict:
        return [task for task in tasks if task["name"] == name][-1]

    (product, reduced), (late, met) = (
        (named(tasks, "aclnnMm"), named(tasks, "HcclAllReduce")) for tasks in (first, second)
    )
    assert late["dur"] > 5 * product["dur"]
    assert reduced["ts"] == met["ts"] == pytest.approx(end[id(late)], abs=1e-3)
    bytes_reduced = 4 * (1 << 20)
    seconds = MACHINE.collective_seconds("all_reduce", bytes_reduced, near=2, nodes=1)
    assert reduced["dur"] == met["dur"] == pytest.approx(seconds * US, abs=1e-3)
    sent, received = named(first, "HcclSend"), named(second, "HcclRecv")
    assert sent["ts"] == received["ts"] and sent["dur"] == received["dur"]
    assert sent["dur"] == pytest.approx((MACHINE.message + bytes_reduced / MACHINE.link) * US, abs=1e-3)
    assert sent["ts"] > end[id(reduced)]


def test_virtual_times_are_the_same_in_every_run(folder, tmp_path):
    for tasks, again in zip(traced(folder), traced(run_ranks(tmp_path)), strict=True):
        for task, same in zip(tasks, again, strict=True):
            parts = ("name", "ts", "dur", "tid")
            assert [task[part] for part in parts] == [same[part] for part in parts]


def replayed(recording: RecordedRun, machine: Machine) -> dict[tuple[int, int], tuple[str, int, int]]:
    """Name and times of each task of a stream, by its NPU and place among those of its streams."""
    spans = sorted(Replay(recording, machine, shares=False).run(), key=lambda span: span.action.number)
    found, counts = {}, Counter()
    for span in spans:
        if not span.action.of_host:
            counts[span.action.device] += 1
            found[span.action.device, counts[span.action.device]] = (span.action.name, span.begun, span.ended)
    return found


def test_a_replay_has_the_times_of_the_run_on_each_machine(folder, tmp_path):
    recording = read_recording(folder)
    spans = Replay(recording, MACHINES["910B2"], shares=False).run()
    assert len(spans) == len(recording.actions) > 100
    for span in spans:
        assert (span.begun, span.ended) == (span.action.begun, span.action.ended) or span.action.of_host, span
    # The record of one chip's run gives the times of a run on another one.
    run_ranks(tmp_path, "--soc", "910_9391")
    ran = {}
    for device, tasks in enumerate(traced(tmp_path)):
        for place, task in enumerate(tasks, 1):
            begun = round(task["ts"] * 1000)
            ran[device, place] = (task["name"], begun, begun + round(task["dur"] * 1000))
    assert replayed(recording, MACHINES["A3"]) == ran != replayed(recording, MACHINES["910B2"])


FULL = """
import torch, torch_npu
x = torch.ones(8192, 8192, dtype=torch.bfloat16, device="npu")
out, side = torch.empty_like(x), torch.npu.Stream()
first, last = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
first.record()
for _ in range(2100):
    torch.mm(x, x, out=out)
for _ in range(4200):
    last.record(side)
torch.npu.synchronize()
print(first.elapsed_time(last))
"""


def test_a_full_stream_holds_up_the_launch_and_a_full_queue_the_dispatch(tmp_path):
    product = US * MACHINE.operator_seconds(MACHINE.product_seconds(8192, 8192, 8192, 2), 3 * 2 * 8192**2)
    (line,) = simulated.printed(simulated.python(FULL, "--devices", "1", "--dry", "--trace", str(tmp_path)))
    # The first event is reached after the ones are filled, when products are launched already. It and 2100 products are
    # 2101 tasks: the last is launched when the 52nd product has ended, and all others after it.
    begun = 52 * product
    assert begun > 2100 * DISPATCH + 4096 * EVENT
    assert float(line) * 1e3 == pytest.approx(begun + LAUNCH * 4201, abs=0.1)
    for span in Replay(read_recording(tmp_path), MACHINE, shares=False).run():
        assert (span.begun, span.ended) == (span.action.begun, span.action.ended) or span.action.of_host, span
