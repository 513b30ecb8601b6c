"""What ``ds_npu check --model`` prints of a pipeline: picture, bubble, and what each rank holds."""

from __future__ import annotations

import itertools
import json
import re
import xml.etree.ElementTree as ElementTree

import pytest
import transformers

from ds_npu.cli.main import main
from ds_npu.cli.planned_model import mean_idle
from ds_npu.parallel.pipeline.schedules import SCHEDULES
from ds_npu.parallel.pipeline.timeline import Costs, timeline

LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}


@pytest.fixture
def check(tmp_path, capsys):
    """Calls ``ds_npu check`` for a model and a pipeline; (exit code, lines, errors)."""

    def call(parallel, pipeline, ranks, *options, **changes):
        config = transformers.LlamaConfig(**LLAMA | {"tie_word_embeddings": False} | changes)
        config.save_pretrained(tmp_path / "model")
        path = tmp_path / "ds_config.json"
        section = {"parallel": parallel, "pipeline": pipeline}
        zero = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 1}}
        path.write_text(json.dumps(zero | {"ds_npu": section}))
        model = ("--model", str(tmp_path / "model"))
        code = main(["check", str(path), "--world-size", str(ranks), *model, *map(str, options)])
        done = capsys.readouterr()
        return code, [line.strip() for line in done.out.splitlines()], done.err

    return call


def test_memory_of_checkpoints(tmp_path, capsys):
    """Of bf16 and ZeRO 1 over two ranks: weights in 2 bytes, half of masters and moments in 12; copies are as large."""
    large = {"hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 32000}
    transformers.LlamaConfig(**LLAMA | large).save_pretrained(tmp_path / "model")
    section = {"checkpoint": {"asynchronous": True, "peer_copies": 8, "peer_folder": "copies"}}
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "train_batch_size": 2, "ds_npu": section}
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    given = ("--world-size", "2", "--model", str(tmp_path / "model"))
    assert main(["check", str(tmp_path / "ds_config.json"), *given]) == 0
    out = capsys.readouterr().out
    count = int(re.search(r"([\d,]+) parameters", out)[1].replace(",", ""))
    gib = f"{8 * count / 2**30:,.1f} GiB"
    assert f"Pinned host memory of rank 0 for asynchronous saves: {gib}" in out
    assert f"copies of checkpoints: {gib} pinned and {16 * count / 2**30:,.1f} GiB, twice that while" in out


def rows(lines):
    """Of each rank: stages, layers, parameters, peak activations, and work and waiting in per cent."""
    found, begin = {}, lines.index("Pipeline ranks") + 2
    for line in itertools.takewhile(lambda line: not line.startswith("Parameters"), lines[begin:]):
        rank, stages, layers, parameters, peak, work, waits = re.split("  +", line)
        numbers = int(parameters.replace(",", "")), int(peak), int(work.rstrip("%")), int(waits.rstrip("%"))
        found[int(rank)] = (stages, layers, *numbers)
    return found


HIDDEN, INNER, WORDS = LLAMA["hidden_size"], LLAMA["intermediate_size"], LLAMA["vocab_size"]
BLOCK = 3 * HIDDEN * INNER + 3 * HIDDEN * HIDDEN
"""Numbers of a block's matrices; keys and values have half of the heads."""


def test_a_row_for_each_rank(check):
    code, lines, _ = check({"pipeline": 2, "tensor": 2}, {"split": [5, 3]}, 4)
    found = rows(lines)
    assert code == 0
    # Norms are whole on each tensor rank, all else is sharded.
    first, last = (
        5 * (BLOCK // 2 + 2 * HIDDEN) + WORDS * HIDDEN // 2,
        3 * (BLOCK // 2 + 2 * HIDDEN) + HIDDEN + WORDS * HIDDEN // 2,
    )
    assert found[0][:4] == ("0", "5 (model.layers.{0..4})", first, 2)
    assert found[1][:4] == ("1", "3 (model.layers.{5..7})", last, 1)
    assert found[0][4] == 100
    assert found[1][4] == round(100 * (3 * BLOCK + WORDS * HIDDEN) / (5 * BLOCK))
    assert "Pipeline over 2 ranks, 8 micro-batches (one for each sample of train_micro_batch_size_per_gpu)" in lines
    assert any(re.match(r"rank 0 +F0 F1 \.+B0 +F2 B1", line) for line in lines)
    # 1F1B: (P - 1) of (M + P - 1) parts.
    (bubble,) = (line for line in lines if line.startswith("Bubble: "))
    assert bubble.startswith("Bubble: 11.1% of the makespan") and "11.1% on average" in bubble


def test_a_rank_with_two_stages_has_a_tied_weight_once(check):
    pipeline = {"schedule": "zb_v", "split": [2, 2, 2, 2], "micro_batches": 4}
    code, lines, _ = check({"pipeline": 2}, pipeline, 2, tie_word_embeddings=True)
    found = rows(lines)
    assert code == 0 and "Pipeline over 2 ranks, 4 micro-batches (ds_npu.pipeline.micro_batches)" in lines
    assert found[0][:4] == (
        "0, 3",
        "2 + 2 (model.layers.{0..1,6..7})",
        4 * (BLOCK + 2 * HIDDEN) + HIDDEN + WORDS * HIDDEN,
        4,
    )
    assert found[1][:4] == ("1, 2", "2 + 2 (model.layers.{2..5})", 4 * (BLOCK + 2 * HIDDEN), 4)


def test_two_ranks_have_a_copy_each_of_a_tied_weight(check):
    found = rows(check({"pipeline": 2}, {"split": [4, 4]}, 2, tie_word_embeddings=True)[1])
    whole = 4 * (BLOCK + 2 * HIDDEN) + WORDS * HIDDEN
    assert [found[0][2], found[1][2]] == [whole, whole + HIDDEN]


def test_more_micro_batches_than_samples(check):
    lines = check({"pipeline": 2}, {"micro_batches": 64}, 2)[1]
    text = "Pipeline over 2 ranks, 8 micro-batches (the samples of a batch, of which ds_npu.pipeline.micro_batches 64"
    assert any(line.startswith(text) for line in lines)


def test_recomputation_is_shown(check):
    code, lines, _ = check({"pipeline": 2}, {"split": [5, 3], "recompute": "inline"}, 2)
    assert code == 0 and rows(lines)[0][3] == rows(lines)[1][3] == 1
    assert any(re.match(r"rank 0 +F0 F1 R0 \.*B0 +F2 R1", line) for line in lines)
    assert any("from its second forward (R) on" in line for line in lines)


def test_no_pipeline(check):
    code, lines, _ = check({"tensor": 2}, {}, 2)
    assert code == 0 and "Pipeline ranks" not in lines


def test_the_schedule_is_drawn(check, tmp_path):
    lines = check({"pipeline": 4}, {"schedule": "zb_h1"}, 4, "--svg", tmp_path / "ranks.svg")[1]
    assert f"The schedule is drawn in {tmp_path / 'ranks_schedule.svg'}" in lines
    root = ElementTree.parse(tmp_path / "ranks_schedule.svg").getroot()
    # Of 4 ranks and 8 micro-batches F, I and W.
    boxes = [each for each in root.iter() if each.tag.endswith("rect") and each.get("stroke") == "white"]
    assert len(boxes) == 4 * 8 * 3


@pytest.mark.parametrize(
    ("parallel", "pipeline", "said"),
    [
        ({"pipeline": 2}, {"split": [5, 4]}, r"ds_npu.pipeline.split: found \[5, 4\]; 2 numbers, for the stages, that"),
        ({"pipeline": 16}, {}, "ds_npu.parallel.pipeline: found 16; a division of LlamaForCausalLM into stages; 8 bl"),
        ({"pipeline": 2}, {"schedule": "zb_q"}, 'ds_npu.pipeline.schedule: found "zb_q"'),
        ({"pipeline": 2}, {"schedule": "no.csv"}, 'ds_npu.pipeline.schedule: found "no.csv"; a file with a row of act'),
        ({"pipeline": 3}, {"noop_layers": [1, 2]}, r"ds_npu.pipeline.noop_layers: found \[1, 2\]; a division of Llam"),
    ],
)
def test_refusals(check, parallel, pipeline, said):
    code, lines, errors = check(parallel, pipeline, parallel["pipeline"])
    assert code == 1 and not lines
    assert re.search(said, " ".join(errors.split())), errors


@pytest.mark.parametrize("name", SCHEDULES)
def test_equal_stages_take_the_time_of_the_timeline(name):
    schedule = SCHEDULES[name].make(3, 7, SCHEDULES[name].chunks or 2)
    run, own = timeline(schedule, Costs()), timeline(schedule, Costs(stages=[1.0] * schedule.stages))
    assert own.makespan == run.makespan
    assert [own.work(rank) for rank in range(3)] == [3.0 * 7 * schedule.stages / 3] * 3


def test_stages_that_differ():
    """GPipe of 2 ranks and 2 micro-batches; F, I, W of 1 and 3: 0F 0..1..2, 1F 1..4..7, 1B 7..13..19, 0B 13, 19..21."""
    own = timeline(SCHEDULES["gpipe"].make(2, 2, 1), Costs(stages=[1.0, 3.0]))
    assert (own.makespan, own.work(0), own.work(1)) == (21.0, 6.0, 18.0)
    assert (own.idle(0), own.idle(1), mean_idle(own)) == pytest.approx((15 / 21, 3 / 21, 9 / 21))
