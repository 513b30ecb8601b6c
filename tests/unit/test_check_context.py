"""What ``ds_npu check`` says about context parallelism, and how it reads a model's config.json."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys

import pytest
import transformers

from ds_npu.cli.main import main
from ds_npu.config.problems import ConfigError
from ds_npu.models.plan import AttentionShape
from ds_npu.planner.model_file import attention_of

LLAMA = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}


@pytest.fixture
def check(tmp_path):
    """``ds_npu check`` of a section, with a model if there is one: exit code, output and errors."""

    def check(section, *options, model=None, **deepspeed_keys):
        config = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "ds_npu": section} | deepspeed_keys
        (tmp_path / "ds_config.json").write_text(json.dumps(config))
        if model is not None:
            (tmp_path / "config.json").write_text(model if isinstance(model, str) else json.dumps(model))
            options += ("--model", str(tmp_path))
        out, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            code = main(["check", str(tmp_path / "ds_config.json"), *map(str, options)])
        return code, out.getvalue(), errors.getvalue()

    return check


NAME = slice(4, 36)


def part(said):
    """The lines about context parallelism, and the rows of the table by their algorithm."""
    lines = said.split("Context parallelism")[1].split("\n\n")[0].splitlines()
    return lines, {line[NAME].strip(): line for line in lines if len(numbers(line)) == 9}


def numbers(row):
    """The numbers behind the name; none in a line that is no row."""
    try:
        return [float(each.replace(",", "")) for each in row[NAME.stop :].split()]
    except ValueError:
        return []


def test_a_chosen_algorithm_with_all_candidates(check):
    code, said, _ = check({"parallel": {"context": 8}}, "--world-size", 8, "--sequence-length", 8192, model=LLAMA)
    lines, rows = part(said)
    assert code == 0 and lines[0] == " over 8 ranks: ulysses (chosen: the fastest by the estimate)"
    assert "Estimated, not measured: what one causal layer (32 heads of 128, 8 for keys and values; 2 samples" in said
    assert "of an A2: 8 ranks a node" in " ".join(said.split())
    assert set(rows) == {
        "ulysses",
        "allgather",
        "ring",
        "ring (window 2)",
        "ring (window 4)",
        "hybrid (ulysses 2)",
        "hybrid (ulysses 2, window 2)",
        "hybrid (ulysses 4)",
    }
    assert [name for name, row in rows.items() if row.startswith("  * ")] == ["ulysses"]
    totals = [numbers(row)[0] for row in rows.values()]
    assert totals == sorted(totals) and max(map(len, lines[1:])) <= 120
    for row in rows.values():
        total, attention, exposed, copying, *_ = numbers(row)
        assert total == pytest.approx(attention + exposed + copying, abs=0.02)


def test_a_given_algorithm_stands_among_the_others(check):
    section = {"parallel": {"context": 8}, "context_parallel": {"algorithm": "ring", "window": 2}}
    code, said, _ = check(section, "--sequence-length", 8192, "--machine", "A3", model=LLAMA)
    lines, rows = part(said)
    assert code == 0 and lines[0] == " over 8 ranks: ring (window 2) (as given)"
    assert len(rows) == 8 and rows["ring (window 2)"].startswith("  * ") and "Assumed of an A3" in said


def test_of_many_candidates_the_slow_ones_are_counted(check):
    section = {"parallel": {"context": 64}, "context_parallel": {"algorithm": "allgather"}}
    code, said, _ = check(section, "--sequence-length", 1 << 20, model=LLAMA | {"num_attention_heads": 64})
    lines, rows = part(said)
    assert code == 0 and len(rows) == 13 and rows["allgather"].startswith("  * ") and "that are slower" in lines[-1]
    assert max(map(len, lines)) <= 120 and len({len(row) for row in rows.values()}) == 1


def test_what_is_impossible_is_said(check):
    model = LLAMA | {"num_attention_heads": 8}
    _, said, _ = check({"parallel": {"context": 16}}, "--sequence-length", 4096, model=model)
    assert "    Not possible: ulysses: 16 Ulysses ranks need a query head each, and a tensor rank has 8\n" in said


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({}, "the algorithm is chosen by estimates"),
        ({"algorithm": "ulysses"}, "ulysses, as given"),
        ({"ulysses": 4}, "ulysses, as given"),
        ({"algorithm": "ring"}, "the algorithm is chosen by estimates"),
        ({"algorithm": "ring", "window": 1}, "ring, as given"),
    ],
)
def test_what_is_missing_to_choose(check, keys, line):
    section = {"parallel": {"context": 4}, "context_parallel": keys}
    for options, model, missing in (
        ((), None, "--model PATH and --sequence-length N"),
        ((), LLAMA, "--sequence-length N"),
        (("--sequence-length", 8), None, "--model PATH"),
    ):
        code, said, _ = check(section, "--world-size", 4, *options, model=model)
        assert code == 0 and f"\nContext parallelism over 4 ranks: {line}; to see estimates, say {missing}\n" in said


def test_nothing_is_said_without_a_context_axis(check):
    code, said, _ = check({}, "--world-size", 4, "--sequence-length", 8, model=LLAMA)
    assert code == 0 and "Context" not in said


@pytest.mark.parametrize(
    ("keys", "number"),
    [
        ({}, 2),
        ({"bf16": {"enabled": False}}, 4),
        ({"bf16": {"enabled": "auto"}}, 2),
        ({"bf16": {"enabled": False}, "fp16": {"enabled": True}}, 2),
    ],
)
def test_the_width_of_numbers_is_the_configs(check, keys, number):
    said = check({"parallel": {"context": 2}}, "--sequence-length", 64, model=LLAMA, **keys)[1]
    assert f"{number} bytes a number" in " ".join(said.split())


def test_heads_that_leave_no_algorithm_are_a_mistake_in_the_config(check):
    section = {"parallel": {"context": 16}, "context_parallel": {"algorithm": "ulysses"}}
    code, said, errors = check(section, "--sequence-length", 4096, model=LLAMA | {"num_attention_heads": 8})
    assert (code, said) == (1, "")
    assert errors == (
        "1 mistake in the DeepSpeed config:\n"
        '  ds_npu.parallel.context, ds_npu.context_parallel.algorithm: found [16, "ulysses"]; sizes that leave an '
        "algorithm to this model and sequence (ulysses: 16 Ulysses ranks need a query head each, and a tensor rank has "
        "8)\n"
    )


@pytest.mark.parametrize(
    ("model", "problems"),
    [
        ("{", ["line 1, column 2: found"]),
        ("[1]", ["--model: found [1]; a Hugging Face config.json, or a folder with one"]),
        (
            {},
            [
                "num_attention_heads: found null; an integer >= 1 and <= 1048576, here or as n_head",
                "hidden_size: found null",
            ],
        ),
        (LLAMA | {"num_attention_heads": "32"}, ['num_attention_heads: found "32"; an integer >= 1']),
        (LLAMA | {"num_key_value_heads": 5}, ["num_key_value_heads: found 5; a divisor of num_attention_heads, which"]),
        (LLAMA | {"hidden_size": 31}, ["hidden_size: found 31; a multiple of num_attention_heads, which is 32"]),
        (LLAMA | {"head_dim": 0}, ["head_dim: found 0; an integer >= 1"]),
        (LLAMA | {"qk_nope_head_dim": 128}, ["qk_rope_head_dim: found null", "v_head_dim: found null"]),
    ],
)
def test_a_file_that_tells_no_heads(check, tmp_path, model, problems):
    code, said, errors = check({"parallel": {"context": 2}}, "--sequence-length", 64, model=model)
    assert (code, said) == (1, "")
    first, *rest = errors.splitlines()
    assert first.endswith(f"in {tmp_path / 'config.json'}:") and len(rest) == len(problems)
    for line, problem in zip(rest, problems, strict=True):
        assert line.startswith(f"  {problem}")


def test_a_file_that_is_not_there(tmp_path):
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "none.json", tmp_path, tmp_path / "bytes.json"):
        with pytest.raises(ConfigError, match="--model: found"):
            attention_of(str(path))


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (transformers.LlamaConfig(num_key_value_heads=4), AttentionShape(32, 4, 128, 128)),
        (transformers.Qwen3Config(head_dim=96), AttentionShape(32, 32, 96, 96)),
        (transformers.GPT2Config(), AttentionShape(12, 12, 64, 64)),
        (transformers.DeepseekV3Config(), AttentionShape(128, 128, 192, 128, 128)),
        (transformers.Gemma3Config(), AttentionShape(8, 4, 256, 256)),
        (transformers.FalconConfig(), AttentionShape(71, 1, 64, 64)),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, AttentionShape) else "",
)
def test_configs_as_transformers_writes_them(tmp_path, config, shape):
    config.save_pretrained(tmp_path)
    assert attention_of(str(tmp_path)) == attention_of(str(tmp_path / "config.json")) == shape


def test_estimates_need_no_torch(check, tmp_path):
    assert check({"parallel": {"context": 4}}, "--sequence-length", 64, model=LLAMA)[0] == 0
    command = ["check", str(tmp_path / "ds_config.json"), "--model", str(tmp_path), "--sequence-length", "64"]
    code = f"import sys; from ds_npu.cli.main import main; main({command}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "total attention" in done.stdout and done.stdout.endswith("\nFalse\n")
