"""Reports of profiled steps: traces with times written by hand, and random work against a look at each time."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_npu.cli.main import main
from ds_npu.step_time.intervals import BUBBLE, EXPOSED, HOST, WAITS, TimedPart, one_after_another
from ds_npu.step_time.least_seconds import least_seconds
from ds_npu.step_time.profile_folder import traces_in, write_header
from ds_npu.step_time.rank_times import UNNAMED
from ds_npu.step_time.step_report import operator_times, report_svg, report_text, slowest_ranks, step_report
from ds_npu.step_time.torch_trace import MARK
from ds_npu.step_time.trace import (
    ATTENTION,
    ELEMENTWISE,
    PRODUCTS,
    Header,
    OperatorTensors,
    Scheduled,
    TraceError,
    kind_of,
)
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.machine import MACHINES

MAIN, GLOO_DATA, GLOO_TENSOR = 1, 2, 3
GROUPS = {"0": (0, 1, 2, 3), "dp": (0, 2), "tp": (0, 1), "pair": (0, 1)}
A2 = MACHINES["A2"]


def event(thread: int, begun: float, ended: float, name: str, category: str = "cpu_op", **more: object) -> dict:
    """An event of a trace, from ``begun`` to ``ended`` microseconds."""
    times = {"ts": begun, "dur": ended - begun}
    return {"ph": "X", "cat": category, "name": name, "pid": 7, "tid": thread, **times, "args": more}


def note(thread: int, begun: float, ended: float, name: str) -> dict:
    return event(thread, begun, ended, name, "user_annotation")


FACTORS = {"Input Dims": [[3], [128, 64], [64, 256]], "Input type": ["float", "float", "float"]}
EVENTS = [
    note(MAIN, 0, 100, "ProfilerStep#1"),
    note(MAIN, 100, 200, "ProfilerStep#2"),
    note(MAIN, 200, 900, "ProfilerStep#3"),
    # A product inside of a composite, which allocates and copies: 10 to 40.
    event(MAIN, 8, 41, "aten::linear"),
    event(MAIN, 10, 40, "aten::addmm", **FACTORS),
    event(MAIN, 12, 15, "aten::copy_"),
    # An element-wise operator that calls another one: 50 to 52, 55 to 60 and 52 to 55.
    event(MAIN, 50, 60, "aten::add_"),
    event(MAIN, 52, 55, "aten::mul"),
    # An attention with a product in it.
    event(MAIN, 60, 70, "aten::_scaled_dot_product_attention_math"),
    event(MAIN, 62, 64, "aten::bmm"),
    # A node of autograd is the host's but for what it calls.
    event(MAIN, 100, 120, "autograd::engine::evaluate_function: MulBackward0"),
    event(MAIN, 110, 118, "aten::mul"),
    # A collective whose call was marked, and one of the same thread that was not.
    note(MAIN, 71, 90, f"{MARK}all_reduce dp"),
    note(GLOO_DATA, 72, 88, "gloo:all_reduce"),
    event(GLOO_DATA, 74, 76, "aten::view"),
    note(GLOO_DATA, 105, 115, "gloo:all_gather"),
    # Of another communicator, while an operator runs; and one that nothing names.
    note(MAIN, 119, 121, f"{MARK}all_gather_single tp"),
    note(GLOO_TENSOR, 120, 130, "gloo:all_gather"),
    note(9, 140, 150, "gloo:all_reduce"),
    # A message on the thread itself.
    note(MAIN, 160, 171, f"{MARK}recv pair"),
    note(MAIN, 161, 170, "gloo:recv"),
]


def header(rank: int = 0, **more: object) -> Header:
    told = {"degrees": Degrees(dp=2, tp=2), "steps": (4, 5), "machine": "A2", "device": "cpu"}
    return Header(**{"rank": rank, "communicators": GROUPS, "trace": f"rank{rank}.trace.json", **told, **more})


def written(folder: Path, own: Header, events: list[dict]) -> None:
    write_header(folder, own)
    content = {"baseTimeNanoseconds": 10**18, "traceEvents": events}
    (folder / own.trace).write_text(json.dumps(content))


def test_a_trace_of_one_rank(tmp_path):
    written(tmp_path, header(), EVENTS)
    (trace,) = traces_in(tmp_path)
    assert trace.ended - trace.begun == 200_000, "two steps; the third one has begun behind the window"
    report = step_report([trace])
    micro = {name: round(seconds * 1e6) for name, seconds in report.ranks[0].activities.items()}
    data, tensor, late = f"{EXPOSED}data", f"{EXPOSED}tensor", f"{EXPOSED}{UNNAMED}"
    # 72 to 88 and 105 to 110; 120 to 130 and the message; the mul runs from 110 to 118.
    assert micro == {
        PRODUCTS: 30,
        ELEMENTWISE: 10 + 8,
        ATTENTION: 10,
        data: 16 + 5,
        tensor: 10 + 9,
        late: 10,
        HOST: 200 - 30 - 18 - 10 - 21 - 19 - 10,
    }
    times = {each.name: (each.calls, round(each.seconds * 1e6)) for each in operator_times(report)}
    attention = "aten::_scaled_dot_product_attention_math"
    assert times == {"aten::addmm": (1, 30), attention: (1, 10), "aten::add_": (1, 7), "aten::mul": (2, 11)}
    (product,) = (each for each in operator_times(report) if each.name == "aten::addmm")
    assert product.least_seconds == pytest.approx(A2.product_seconds(128, 256, 64, 4))
    text = "\n".join(report_text(report))
    assert "steps 4 to 5" in text and "data 2 x tensor 2" in text and "0.1 ms a step" in text
    assert slowest_ranks(report) == []


def shifted(events: list[dict], changes: dict[str, tuple[float, float]]) -> list[dict]:
    """``events`` with other times for those of some names."""
    return [
        {**each, "ts": changes[each["name"]][0], "dur": changes[each["name"]][1] - changes[each["name"]][0]}
        if each["name"] in changes
        else each
        for each in events
    ]


def test_ranks_together_know_who_was_late(tmp_path):
    own = [
        note(MAIN, 0, 100, "ProfilerStep#1"),
        note(MAIN, 10, 12, f"{MARK}all_reduce dp"),
        note(GLOO_DATA, 11, 71, "gloo:all_reduce"),
        note(MAIN, 75, 77, f"{MARK}all_reduce dp"),
        note(GLOO_DATA, 76, 80, "gloo:all_reduce"),
    ]
    late = shifted(own, {f"{MARK}all_reduce dp": (60, 62), "gloo:all_reduce": (61, 71)})
    late = [*late[:3], *own[3:4], note(GLOO_DATA, 76, 82, "gloo:all_reduce")]
    written(tmp_path, header(0, steps=(4, 4)), own)
    written(tmp_path, header(2, steps=(4, 4)), late)
    report = step_report(traces_in(tmp_path))
    (slowest,) = slowest_ranks(report)
    assert (slowest.name, slowest.ranks, slowest.axes, slowest.calls) == ("all_reduce", (0, 2), "data", 2)
    # Calls of 60 and 4 microseconds on rank 0, of 10 and 6 on rank 2.
    assert (slowest.slowest, slowest.last) == (2, 1) and slowest.by_seconds == pytest.approx(48e-6)
    first, second = ({name: round(seconds * 1e6) for name, seconds in each.activities.items()} for each in report.ranks)
    assert first == {f"{WAITS}data": 50, f"{EXPOSED}data": 10 + 4, HOST: 36}
    assert second == {f"{WAITS}data": 2, f"{EXPOSED}data": 10 + 4, HOST: 84}


def test_messages_between_stages_are_the_bubble(tmp_path):
    planned = Scheduled("1f1b", 4, 0.25)
    common = {"degrees": Degrees(pp=2), "steps": (0, 0), "schedule": planned}
    sends = [
        note(MAIN, 0, 100, "ProfilerStep#1"),
        note(MAIN, 60, 66, f"{MARK}isend pair"),
        note(MAIN, 61, 65, "gloo:send"),
    ]
    receives = [
        note(MAIN, 0, 100, "ProfilerStep#1"),
        note(MAIN, 10, 66, f"{MARK}recv pair"),
        note(MAIN, 15, 65, "gloo:recv"),
    ]
    written(tmp_path, header(0, **common), sends)
    written(tmp_path, header(1, **common), receives)
    report = step_report(traces_in(tmp_path))
    assert round(report.ranks[1].activities[BUBBLE] * 1e6) == 50
    assert BUBBLE not in report.ranks[0].activities
    text = "\n".join(report_text(report))
    assert "bubble                 25.0% of the step; 1f1b over 2 ranks with 4 micro-batches has 25.0%" in text, text


PARTS = st.builds(
    lambda precedence, begun, length: TimedPart(precedence, f"{EXPOSED}{precedence}", begun, begun + length),
    st.integers(0, 3),
    st.integers(0, 30),
    st.integers(0, 10),
)


@given(st.lists(PARTS, max_size=12))
def test_each_time_has_the_activity_of_the_first_that_runs(parts):
    found = one_after_another(parts, 30)
    assert found[0].begun == 0 and found[-1].ended == 30
    for each, following in pairwise(found):
        assert each.ended == following.begun and each.activity != following.activity
    for now in range(30):
        running = [each for each in parts if each.begun <= now < each.ended]
        expected = min(running).activity if running else HOST
        assert [each.activity for each in found if each.begun <= now < each.ended] == [expected]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mm", PRODUCTS),
        ("aten::addmm_", PRODUCTS),
        ("aten::baddbmm", PRODUCTS),
        ("aten::mkldnn_convolution", PRODUCTS),
        ("aten::_grouped_mm", PRODUCTS),
        ("MatMulV3", PRODUCTS),
        ("GroupedMatmul", PRODUCTS),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", ATTENTION),
        ("FlashAttentionScore", ATTENTION),
        ("aten::mul", ELEMENTWISE),
        ("aten::add", ELEMENTWISE),
        ("Mul", ELEMENTWISE),
        ("RmsNorm", ELEMENTWISE),
    ],
)
def test_kinds(name, kind):
    assert kind_of(name) == kind


def test_the_least_time_of_an_operator():
    both = OperatorTensors(((2, 128, 64), (2, 64, 256)), (2, 2))
    moved = 2 * (2 * 128 * 64 + 2 * 64 * 256) + 2 * 2 * 64 * 256
    expected = max(A2.product_seconds(128, 256, 64, 2, 2), A2.memory_seconds(moved))
    assert least_seconds(A2, "aten::bmm", both) == pytest.approx(expected)
    # CANN multiplies a transposed second factor, and names the result.
    other = OperatorTensors(((4096, 512), (1024, 512), (4096, 1024)), (2, 2, 2), 1)
    assert least_seconds(A2, "MatMulV3", other) == pytest.approx(A2.product_seconds(4096, 1024, 512, 2))
    shared = OperatorTensors(((8, 512, 512), (512, 1024), (8, 512, 1024)), (2, 2, 2), 1)
    assert least_seconds(A2, "Matmul", shared) == pytest.approx(A2.product_seconds(4096, 1024, 512, 2))
    q, kv = (2, 8, 512, 64), (2, 2, 1024, 64)
    flop = 4 * 2 * 8 * 512 * 1024 * 64
    causal = OperatorTensors((q, kv, kv), (2, 2, 2), 0, is_causal=True)
    name = "aten::scaled_dot_product_attention"
    assert least_seconds(A2, name, causal) == pytest.approx(A2.attention_seconds(flop / 2, 1024))
    assert least_seconds(A2, "aten::mul", OperatorTensors(((10,), (10,)), (4, 4))) == pytest.approx(
        A2.memory_seconds(120)
    )
    assert least_seconds(A2, "aten::mul", None) is None
    assert least_seconds(A2, "FlashAttentionScore", causal) is None


def test_a_picture_has_a_lane_of_each_rank(tmp_path):
    written(tmp_path, header(0), EVENTS)
    written(tmp_path, header(2), EVENTS)
    root = ElementTree.fromstring(report_svg(step_report(traces_in(tmp_path))))
    lanes = [each.get("data-lane") for each in root.iter() if each.get("data-lane")]
    assert lanes == ["rank 0", "rank 2"]


def test_the_command(tmp_path, capsys):
    written(tmp_path, header(0), EVENTS)
    files = [str(tmp_path / name) for name in ("figures.json", "window.svg")]
    assert main(["profile", str(tmp_path), "--json", files[0], "--svg", files[1]]) == 0
    assert "Slowest operators" in capsys.readouterr().out
    figures = json.loads(Path(files[0]).read_text())
    assert figures["step_seconds"] == pytest.approx(1e-4) and figures["host_bound"] == pytest.approx(0.46)
    assert Path(files[1]).read_text().startswith("<svg")


def test_folders_that_cannot_be_read(tmp_path, capsys):
    for folder, content, said in [
        ("absent", None, "there is no such folder"),
        ("empty", {}, "no profile is there"),
        ("broken", {"rank0.json": "{"}, "it is no file of ds_npu.profile"),
        ("cut", {"rank0.trace.json": '{"traceEvents": ['}, "no trace of torch.profiler can be read there"),
        ("without", {"rank0.trace.json": '{"traceEvents": []}'}, "the trace has no step"),
    ]:
        path = tmp_path / folder
        if content is not None:
            path.mkdir()
            if folder in ("cut", "without"):
                write_header(path, header())
            for name, text in content.items():
                (path / name).write_text(text)
        assert main(["profile", str(path)]) == 1, folder
        assert said in capsys.readouterr().err, folder


def test_files_of_an_earlier_run_are_left_out(tmp_path):
    written(tmp_path, header(3, run="earlier"), EVENTS)
    time.sleep(0.01)
    written(tmp_path, header(0, run="later"), EVENTS)
    (trace,) = traces_in(tmp_path)
    assert trace.header.rank == 0 and trace.header.notes == ("files of another run are left out: ranks 3",)
    written(tmp_path, header(2, run="later", steps=(5, 6)), EVENTS)
    with pytest.raises(TraceError, match="different steps"):
        traces_in(tmp_path)


def test_a_hundred_thousand_events_take_less_than_ten_seconds(tmp_path):
    events = [note(MAIN, 0, 10**6, "ProfilerStep#1")]
    for index in range(25_000):
        at = 40 * index
        events += [
            event(MAIN, at, at + 20, "aten::linear"),
            event(MAIN, at + 2, at + 18, "aten::addmm", **FACTORS),
            event(MAIN, at + 21, at + 24, "aten::mul"),
            note(GLOO_DATA, at + 10, at + 35, "gloo:all_reduce"),
        ]
    written(tmp_path, header(steps=(0, 0)), events)
    begun = time.process_time()
    report = step_report(traces_in(tmp_path))
    "\n".join(report_text(report)), report_svg(report)
    # Of the processor: tests of others run on the same one.
    assert time.process_time() - begun < 10
