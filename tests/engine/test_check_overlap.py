"""``ds_npu check`` says how each product of sequence parallelism overlaps with its message."""

from __future__ import annotations

import json

import pytest

from ds_npu.cli.main import main

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 2,
    "vocab_size": 1024,
}


@pytest.fixture
def said(tmp_path, capsys):
    def check(section: dict, *arguments: str, ranks: int = 8, bf16: bool = True) -> list[str]:
        config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": bf16}, "ds_npu": section}
        (tmp_path / "ds.json").write_text(json.dumps(config))
        (tmp_path / "config.json").write_text(json.dumps(LLAMA))
        command = ["check", str(tmp_path / "ds.json"), "--world-size", str(ranks), "--model", str(tmp_path)]
        assert main([*command, *arguments]) == 0
        out = capsys.readouterr().out.splitlines()
        first = next((index for index, line in enumerate(out) if line.startswith("Sequence parallelism over")), None)
        return [] if first is None else out[first : out.index("", first)]

    return check


SECTION = {"parallel": {"tensor": 8, "sequence_parallel": True}}


def test_each_product_has_a_row(said):
    lines = said(SECTION, "--sequence-length", "4096")
    assert lines[0] == "Sequence parallelism over 8 tensor ranks: how each product overlaps with its message is chosen:"
    rows = {
        tuple(line.split()[0:1] + [each for each in line.split() if each.endswith("ward")]): line for line in lines[4:]
    }
    assert len(rows) == 8
    for name, direction, taken in (
        ("mlp.down_proj", "forward", "one kernel"),
        ("mlp.down_proj", "backward", "one kernel"),
        ("mlp.gate_proj", "forward", "one kernel"),
        # Weight gradients hide this message, and a sum of two products has no kernel.
        ("mlp.gate_proj", "backward", "none"),
    ):
        assert rows[f"model.layers.{{0..1}}.{name}", direction].endswith(f"  {taken}")


def test_float32_has_no_kernels(said):
    lines = said(SECTION, "--sequence-length", "4096", bf16=False)
    assert all(" -  " in line and not line.endswith("kernel") for line in lines[4:])


def test_what_is_missing_is_asked_for(said):
    (line,) = said(SECTION)
    assert line.endswith("is chosen by estimates; to see them, say --sequence-length N and a micro-batch")


@pytest.mark.parametrize(
    "section",
    [SECTION | {"tensor_overlap": "none"}, SECTION | {"tensor_overlap": "fused"}, {"parallel": {"tensor": 8}}, {}],
)
def test_nothing_is_left_to_choose(said, section):
    assert said(section, "--sequence-length", "4096") == []
