"""Figures of predictions against sums made by hand, and predictions that are refused."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import transformers

from ds_npu.checkpoint.loading import meta_model
from ds_npu.cli.main import main
from ds_npu.cli.predict import requested
from ds_npu.cli.prediction import dry_run as dry_run_module
from ds_npu.cli.prediction import figures
from ds_npu.cli.prediction.dry_run import PredictionError, Request, StageReport
from ds_npu.cli.prediction.model_flop import model_flop
from ds_npu.cli.prediction.picture import step_svg, write_trace
from ds_npu.cli.prediction.sensitivity import Sensitivity
from ds_npu.cli.prediction.text import comparison, prediction_text
from ds_npu.simulator.environment import Simulation
from ds_npu.simulator.replay.recording import RecordedAction
from ds_npu.simulator.replay.replay import Span
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.machine import A2

US = 1000
DEGREES = Degrees(pp=2, dp=4, tp=2)


def span(begun: int, ended: int, kind: str | None, ready: int | None = None, **told: Any) -> Span:
    """A task from ``begun`` to ``ended`` us, to which its stream came at ``ready``."""
    known = {"dispatch": "operator", "detail": "", "kind": kind, "flop": 1e9} | told
    action = RecordedAction("7", 0, 1, 0, f"aclnn {kind}", known, 0, 0)
    return Span(action, begun * US, ended * US, (begun if ready is None else ready) * US)


TENSOR, DATA, PIPELINE = {"npus": [0, 1]}, {"npus": [0, 2, 4, 6]}, {"npus": [0, 8]}
STEP = [
    span(10, 30, "cube"),
    span(20, 50, "collective", **TENSOR),
    span(45, 60, "streaming"),
    span(70, 80, "copy", host=100),
    span(75, 90, "collective", **DATA),
    span(120, 130, "message", ready=100, **PIPELINE),
    span(140, 150, "collective", ready=130, **DATA),
    span(0, 200, None),
]
BY_HAND = [
    (figures.HOST, 0, 10),
    (figures.COMPUTES, 10, 30),
    (figures.EXPOSED + "tensor", 30, 45),
    (figures.COMPUTES, 45, 60),
    (figures.HOST, 60, 70),
    (figures.COPIES, 70, 75),
    (figures.EXPOSED + "data", 75, 90),
    (figures.HOST, 90, 100),
    (figures.BUBBLE, 100, 120),
    (figures.EXPOSED + "pipeline", 120, 130),
    (figures.WAITS + "data", 130, 140),
    (figures.EXPOSED + "data", 140, 150),
    (figures.BUBBLE, 150, 200),
]


def test_activities_fill_the_step_and_computing_hides_what_runs_meanwhile():
    found = figures.activities(STEP, DEGREES, 200 * US)
    assert [(each.activity, each.begun // US, each.ended // US) for each in found] == BY_HAND
    alone = figures.activities(STEP[:1], Degrees(), 200 * US)
    assert alone[-1] == figures.Interval(figures.HOST, 30 * US, 200 * US)


@pytest.mark.parametrize(
    ("degrees", "told", "axes"),
    [
        (DEGREES, {"npus": [0, 1]}, "tensor"),
        (DEGREES, {"npus": [0, 8]}, "pipeline"),
        (DEGREES, {"npus": [0, 1, 8, 9]}, "pipeline x tensor"),
        (DEGREES, {"npus": [*range(16)]}, "all ranks"),
        (Degrees(dp=8), {"npus": [*range(8)]}, "data"),
        (Degrees(dp=8, ep=4), {"npus": [0, 1, 2, 3], "collective": "all_to_all"}, "expert"),
        (Degrees(dp=8, ep=8), {"npus": [*range(8)], "collective": "all_to_all"}, "expert"),
        (Degrees(dp=8, ep=8), {"npus": [*range(8)], "collective": "all_reduce"}, "data"),
        (Degrees(dp=4, cp=2, tp=8), {"npus": [*range(0, 64, 8)]}, "data x context"),
        (Degrees(dp=4, cp=2, tp=8, ep=4), {"npus": [0, 4, 8, 12]}, "expert data"),
        (Degrees(dp=2, cp=4), {"npus": [*range(8)], "collective": "all_gather"}, "all ranks"),
    ],
)
def test_communication_is_named_after_its_axes(degrees, told, axes):
    assert figures.axes_of(span(0, 1, "collective", **told).action, degrees) == axes


def prediction(**changes: Any) -> figures.Prediction:
    request = Request("", {}, "model", 1024, 2, 8, 16, [0, 8])
    report = StageReport(0, "7", 1.0, 2.0, {}, 7 << 30, 8 << 30, 1 << 30, 1 << 30, 3 << 30, 6e12)
    intervals = figures.activities(STEP, DEGREES, 200 * US)
    stages = tuple(figures.PredictedStage(replace(report, rank=rank), intervals) for rank in (0, 8))
    made = figures.Prediction(request, DEGREES, A2, True, 0.5, stages, tuple(STEP), 3e14)
    return replace(made, **changes)


def test_rates_are_those_of_the_whole_world():
    found = prediction()
    assert found.tokens == 1024 * 2 * 8 * 4
    assert found.tokens_per_second == 65536 / 0.5 / 16
    assert found.mfu == pytest.approx(6e12 * 64 / (0.5 * 16 * A2.peak))
    assert found.hfu == pytest.approx(3e14 / (0.5 * 16 * A2.peak))
    assert sum(prediction(step_seconds=200e-6).shares().values()) == pytest.approx(1.0)
    assert figures.busiest(STEP, 1) == [("aclnn collective", 3, pytest.approx(55e-6))]


def test_the_text_answers_first_and_says_what_does_not_fit(tmp_path):
    text = "\n".join(prediction_text(prediction()))
    assert text.splitlines()[3].split() == ["fits", "yes:", "rank", "0", "needs", "9.0", "of", "64", "GiB"]
    assert "NO; what follows" in "\n".join(prediction_text(prediction(fits=False)))
    one = figures.as_json(prediction(step_seconds=200e-6))
    other = figures.as_json(prediction(step_seconds=100e-6))
    rows = {line.rsplit(maxsplit=3)[0].strip(): line.split()[-1] for line in comparison(("a", "b"), (one, other))}
    assert rows["step seconds"] == "0.500" and rows["mfu"] == "2.000"
    known = (Sensitivity("matmul", 0.07, "derived, trust high"), Sensitivity("hop", 0.0, "claimed, trust low"))
    *_, row, rest = prediction_text(prediction(sensitivity=known))
    assert row.split() == ["matmul", "+7.0%", "derived,", "trust", "high"] and rest.endswith(": hop")
    svg = step_svg(prediction(step_seconds=200e-6))
    assert "rank 0" in svg and "rank 8" in svg and figures.EXPOSED + "tensor" in svg
    write_trace(prediction(), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert len(events) == len(STEP) and events[0]["ts"] == 10 and events[0]["dur"] == 20


def saved(folder: Path, family: str) -> Path:
    tiny_models.config_of(family).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2"])
def test_the_flop_of_a_model_are_those_of_its_products(tmp_path, family):
    path = saved(tmp_path, family)
    model = meta_model(transformers.AutoModelForCausalLM, path, torch.float32)
    config = model.config
    tokens, hidden = 24, config.hidden_size
    if family == "llama":
        heads, kv, width = config.num_attention_heads, config.num_key_value_heads, hidden // config.num_attention_heads
        layer = hidden * width * (2 * heads + 2 * kv) + 3 * hidden * config.intermediate_size
    elif family == "qwen3_moe":
        heads, kv, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        experts = hidden * config.num_experts + config.num_experts_per_tok * 3 * hidden * config.moe_intermediate_size
        assert config.mlp_only_layers == [0] and config.num_hidden_layers == 2
        layer = hidden * width * (2 * heads + 2 * kv) + (experts + 3 * hidden * config.intermediate_size) / 2
    else:
        heads, width = config.n_head, hidden // config.n_head
        layer = 12 * hidden * hidden
    products = config.num_hidden_layers * (layer + 2 * heads * width * tokens) + hidden * config.vocab_size
    assert model_flop(model, str(path), tokens) == 3 * 2 * tokens * products


CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, "ds_npu": {"parallel": {"tensor": 2}}}


@pytest.mark.parametrize(
    ("config", "flags", "said"),
    [
        ({}, {"--world-size": "3"}, "ds_npu.parallel.tensor: found 2; a divisor of the world size 3"),
        ({}, {"--machine": "A9"}, "found 'A9', which is no machine"),
        ({}, {"--model": "nothing"}, "a Hugging Face config.json, or a folder with one"),
        ({}, {"--json": "nowhere/a.json"}, "nowhere/a.json cannot be written"),
        ({"train_micro_batch_size_per_gpu": "auto"}, {}, 'found "auto"; an integer >= 1'),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
            {},
            "offload_optimizer.device: found",
        ),
        ({"tensor_parallel": {"autotp_size": 2}, "ds_npu": {}}, {}, "tensor_parallel.autotp_size: found"),
        ({"sequence_parallel_size": 2, "ds_npu": {}}, {}, "sequence_parallel_size: found"),
        ({}, {"--sequence-length": None}, "it also needs --sequence-length"),
    ],
)
def test_one_error_says_why_nothing_is_predicted(tmp_path, monkeypatch, capsys, config, flags, said):
    monkeypatch.chdir(tmp_path)
    Path("ds_config.json").write_text(json.dumps(CONFIG | config))
    given = {"--model": str(saved(tmp_path, "llama")), "--world-size": "4", "--sequence-length": "64"} | flags
    words = [word for pair in given.items() if pair[1] is not None for word in pair]
    try:
        code = main(["predict", "ds_config.json", *words])
    except SystemExit as error:
        code = error.code
    shown = capsys.readouterr()
    assert code in (1, 2) and shown.out == ""
    assert said in shown.err.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("keys", "degrees", "tokens"),
    [
        ({"tensor_parallel": {"autotp_size": 2}}, Degrees(dp=4, tp=2), 4 * 3 * 64),
        ({"sequence_parallel_size": 8}, Degrees(dp=1, cp=8), 1 * 3 * 64),
        ({"expert_parallel": {"enabled": True, "autoep_size": 4}}, Degrees(dp=8, ep=4), 8 * 3 * 64),
        ({"expert_parallel": {"enabled": False, "autoep_size": 4}}, Degrees(dp=8), 8 * 3 * 64),
    ],
)
def test_degrees_of_deepspeed_s_own_axes(tmp_path, keys, degrees, tokens):
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps({"train_micro_batch_size_per_gpu": 3} | keys))
    request, checked = requested(
        Namespace(
            config=str(file),
            model=str(saved(tmp_path, "llama")),
            world_size=8,
            sequence_length=64,
            gradient_checkpointing=False,
        )
    )
    assert checked.degrees == degrees and request.present == [0]
    assert figures.Prediction(request, checked.degrees, A2, True, 1.0, (), (), 0.0).tokens == tokens


PLAIN = {"train_micro_batch_size_per_gpu": 1}
MOE = {"expert_parallel": {"enabled": True, "autoep_size": 2}}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"tensor_parallel": {"autotp_size": 3}}, "tensor_parallel.autotp_size: found 3"),
        (
            {"sequence_parallel_size": 3},
            "sequence_parallel_size: found 3; an integer >= 1 that divides the world size, 128",
        ),
        ({"sequence_parallel_size": 64}, "sequence_parallel_size: found 64; a divisor of the tokens of a sample, 96"),
        ({"tensor_parallel": {"autotp_size": 2}} | MOE, "expert_parallel.autoep_size: found 2; 1: several of"),
        ({"sequence_parallel_size": 2} | MOE, "expert_parallel.autoep_size: found 2; 1: several of"),
        ({"train_batch_size": 6, "gradient_accumulation_steps": 1}, "train_batch_size: found 6"),
    ],
)
def test_deepspeed_s_own_axes_that_are_not_predicted(tmp_path, monkeypatch, capsys, keys, said):
    monkeypatch.chdir(tmp_path)
    Path("ds_config.json").write_text(json.dumps(PLAIN | keys))
    words = ["--model", str(saved(tmp_path, "llama")), "--world-size", "128", "--sequence-length", "96"]
    assert main(["predict", "ds_config.json", *words]) == 1
    assert said in capsys.readouterr().err


def test_a_rank_that_died_is_named_and_not_those_that_were_ended_with_it(tmp_path, monkeypatch):
    worker = "import sys, time; time.sleep(60 if sys.argv[-1] == '0' else 0); print('RuntimeError: no'); sys.exit(3)"
    (tmp_path / "dying_rank.py").write_text(worker)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(dry_run_module, "WORKER", "dying_rank")
    request = Request(str(tmp_path), {}, "model", 8, 1, 1, 16, [0, 8])
    with pytest.raises(PredictionError, match="the process of rank 8 ended with code 3: RuntimeError: no"):
        dry_run_module.dry_run(request, Simulation(16), tmp_path, lambda line: None)


def test_files_that_are_no_predictions_are_not_compared(tmp_path, capsys):
    file = tmp_path / "a.json"
    for content in ("", "{}", "[]", '{"ds_npu predict": 1, "figures": 3}'):
        file.write_text(content)
        assert main(["predict", "--compare", str(file), str(file)]) == 1
        assert "it is no file of ds_npu predict --json" in capsys.readouterr().err
