"""``ds_npu predict`` on simulated NPUs: ranks that have no process, against runs in which each rank has one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models

from ds_npu.cli.main import main
from ds_npu.cli.prediction.dry_run import Request, dry_run
from ds_npu.config.check import check
from ds_npu.simulator.build import built
from ds_npu.simulator.environment import Simulation
from ds_npu.simulator.replay.replay import Replay
from ds_npu.topology.machine import A2

slow = pytest.mark.slow  # the libraries are compiled first, if they are not yet
LENGTH, WORLD = 64, 4


def config(stage: int, samples: int = 1, **section: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": samples,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    return made | ({"ds_npu": section} if section else {})


IN_STAGES = {"parallel": {"pipeline": 2, "tensor": 2}, "pipeline": {"micro_batches": 4}}
ROUTED = "plain ZeRO 2, AutoEP"
"""A case in which ranks send unlike numbers of tokens. An absent rank is taken to send what this one sends."""
CASES = {
    "plain ZeRO 3": config(3),
    "ZeRO 0": config(0, parallel={}),
    "ZeRO 1": config(1, parallel={}),
    "ZeRO 2, ring": config(2, parallel={"context": 2}, context_parallel={"algorithm": "ring"}),
    "ZeRO 2, Ulysses": config(2, parallel={"context": 2}, context_parallel={"algorithm": "ulysses"}),
    "ZeRO 1, tensor": config(1, parallel={"tensor": 2, "sequence_parallel": True}),
    "ZeRO 1, stages of tensor ranks": config(1, 4, **IN_STAGES),
    "plain ZeRO 1, AutoTP": config(1) | {"tensor_parallel": {"autotp_size": 2}},
    "plain ZeRO 3, Ulysses": config(3, 2) | {"sequence_parallel_size": 2},
    ROUTED: config(2) | {"expert_parallel": {"enabled": True, "autoep_size": 2}},
}
ALIKE = ("plain ZeRO 3", "ZeRO 0", "ZeRO 1, tensor", "ZeRO 1, stages of tensor ranks")
"""Cases in which all ranks of a stage do the same, so that nobody waits for an absent one longer than for itself.

With AutoTP DeepSpeed's norm of gradients goes over the parameters of a rank's part, which are more on some ranks.
"""
ORDER = slice(0, 3)
"""Stream, operator and kind of a task."""


def saved(folder: Path, family: str = "llama", **changes: Any) -> str:
    tiny_models.config_of(family, **changes).save_pretrained(folder)
    return str(folder)


def ran(folder: Path, ds_config: dict[str, Any], present: list[int]) -> list[list[tuple[Any, ...]]]:
    """The tasks of each process with their virtual times, and what its host does, but for queries."""
    folder.mkdir()
    steps = 1
    samples = ds_config["train_micro_batch_size_per_gpu"]
    # DeepSpeed's AutoEP does not collect the logits of routers with transformers 5.23.
    sparse = {"family": "qwen3_moe", "output_router_logits": False}
    model = saved(folder / "model", **(sparse if "expert_parallel" in ds_config else {}))
    request = Request(str(folder), ds_config, model, LENGTH, samples, steps, WORLD, present)
    simulation = Simulation(WORLD, dry=True, machine=A2, present=tuple(present))
    run = dry_run(request, simulation, built(), lambda line: None)
    assert run.fits and [report.rank for report in run.reports] == present
    found: dict[str, list[tuple[Any, ...]]] = {}
    for span in sorted(Replay(run.recording, A2, shares=False).run(), key=lambda span: span.action.number):
        action = span.action
        if not action.of_host:
            parts = (action.told.get(part) for part in ("kind", "flop", "read", "written", "npus", "bytes"))
            task = (action.stream, action.name, *map(str, parts), span.begun, span.ended)
            found.setdefault(action.process, []).append(task)
    return [found[process] for process in sorted(found, key=int)]


def in_streams(tasks: list[tuple[Any, ...]], parts: slice) -> dict[int, list[tuple[Any, ...]]]:
    streams: dict[int, list[tuple[Any, ...]]] = {}
    for task in tasks:
        streams.setdefault(task[0], []).append(task[parts])
    return streams


@slow
@pytest.mark.parametrize("name", CASES)
def test_the_present_rank_does_the_same_whether_others_have_processes(tmp_path, name):
    ds_config = CASES[name]
    stages = check(ds_config, WORLD).degrees.pp
    firsts = [stage * WORLD // stages for stage in range(stages)]
    alone = ran(tmp_path / "alone", ds_config, firsts)
    together = ran(tmp_path / "together", ds_config, [*range(WORLD)])
    assert len(alone) == stages and len(together) == WORLD
    compared = slice(0, None) if name in ALIKE else ORDER if name == ROUTED else slice(0, -2)
    for first, tasks in zip(firsts, alone, strict=True):
        assert len(tasks) > 300
        assert in_streams(tasks, compared) == in_streams(together[first], compared)


@slow
def test_a_prediction_from_the_command_line(tmp_path, capsys):
    file, small = tmp_path / "ds_config.json", tmp_path / "small.json"
    file.write_text(json.dumps(CASES["ZeRO 1, stages of tensor ranks"]))
    model = saved(tmp_path / "model")
    words = ["predict", str(file), "--model", model, "--world-size", "8", "--sequence-length", str(LENGTH)]
    outputs = {flag: tmp_path / f"out{flag}" for flag in ("--json", "--svg", "--trace")}
    assert main([*words, *(str(word) for pair in outputs.items() for word in pair)]) == 0
    said = capsys.readouterr().out
    assert "on 8 NPUs of A2: pipeline 2 x data 2 x tensor 2; 512 tokens a step" in said
    found = json.loads(outputs["--json"].read_text())
    step = found["figures"]["step_seconds"]
    assert [stage["rank"] for stage in found["stages"]] == [0, 4]
    for stage in found["stages"]:
        assert sum(stage["activities"].values()) == pytest.approx(step)
        assert sum(stage["memory"].values()) == stage["allocated"]
    assert found["figures"]["tokens_per_second_and_npu"] == pytest.approx(512 / step / 8)
    assert {event["pid"] for event in json.loads(outputs["--trace"].read_text())["traceEvents"]} == {0, 4}
    assert "rank 4" in outputs["--svg"].read_text()
    too_little = int(found["figures"]["peak_gib"] * 2**30) - (1 << 20)
    entry = {"value": too_little, "unit": "B", "mark": "assumed", "trust": "low", "source": "a test"}
    small.write_text(json.dumps({"machines": {"small": {"like": "A2", "hbm": entry}}}))
    assert main([*words, "--machine", str(small)]) == 0
    assert "NO; what follows is as if the memory were larger" in capsys.readouterr().out


@slow
def test_a_model_that_a_feature_refuses_ends_in_its_error(tmp_path, capsys):
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(config(1, parallel={"tensor": 8})))
    words = ["--model", saved(tmp_path / "model"), "--world-size", "8", "--sequence-length", str(LENGTH)]
    assert main(["predict", str(file), *words]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "ds_npu.parallel.tensor: found 8" in shown.err and "4 heads cannot be sharded over 8" in shown.err


@slow
def test_products_that_are_fused_with_messages_run_dry(tmp_path):
    file, out = tmp_path / "ds_config.json", tmp_path / "out.json"
    section = {"parallel": {"tensor": 2, "sequence_parallel": True}, "tensor_overlap": "fused"}
    file.write_text(json.dumps(config(1, **section)))
    model = saved(tmp_path / "model", hidden_size=512, intermediate_size=512, num_attention_heads=4)
    words = ["--model", model, "--world-size", "8", "--sequence-length", "256", "--json", str(out)]
    assert main(["predict", str(file), *words]) == 0
    found = {each["name"] for each in json.loads(out.read_text())["operators"]}
    assert {"aclnnAllGatherMatmul", "aclnnMatmulReduceScatter"} <= found


@slow
def test_gradient_checkpointing_computes_each_block_again(tmp_path):
    file, out = tmp_path / "ds_config.json", tmp_path / "out.json"
    file.write_text(json.dumps(config(3)))
    words = ["predict", str(file), "--model", saved(tmp_path / "model"), "--world-size", "2", "--sequence-length", "64"]

    def activations(*flags: str) -> int:
        """Calls of SiLU forward."""
        assert main([*words, "--json", str(out), *flags]) == 0
        return {each["name"]: each["calls"] for each in json.loads(out.read_text())["operators"]}["aclnnSilu"]

    assert activations("--gradient-checkpointing") == 2 * activations()
