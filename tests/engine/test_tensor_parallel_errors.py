"""What users read who ask for a tensor parallelism that cannot be, from deepspeed.initialize and before training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gradient_rule as rule
import pytest
import tiny_models
import torch
import transformers
from ranks import run_on_ranks
from torch import nn

from ds_npu.parallel.runtime.placement import sharding_of

ROOT = Path(__file__).resolve().parents[2]
TP = {"parallel": {"tensor": 2}}
SEQUENCE = {"parallel": {"tensor": 2, "sequence_parallel": True}}
TABLE_AND_LINEARS = {"0": "embedding", "1": "column", "2": "norm", "3": "row"}


def llama(**changes: object) -> nn.Module:
    return tiny_models.tiny("llama", torch.float32, **changes)


def one_head() -> nn.Module:
    return llama(num_attention_heads=1, num_key_value_heads=1)


def narrow() -> nn.Module:
    return llama(vocab_size=1, intermediate_size=1, pad_token_id=None)


def own() -> nn.Module:
    return nn.Sequential(*rule.layers())


def pipeline() -> nn.Module:
    from deepspeed.pipe import PipelineModule

    return PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], num_stages=1, loss_fn=nn.MSELoss())


CASES: dict[str, tuple[Callable[[], nn.Module], dict, str, list[str]]] = {
    "more ranks than heads": (
        one_head,
        TP,
        "ValueError: ds_npu.parallel.tensor: found 2; these modules of LlamaForCausalLM cannot be sharded over so ",
        [
            "model.layers.{0..1}.self_attn.q_proj (query, 32 wide): 1 heads cannot be sharded over 2 tensor ranks",
            "model.layers.{0..1}.self_attn.k_proj (key, 32 wide): 1 heads",
            "model.layers.{0..1}.self_attn.o_proj (attention_output, 32 wide): 1 heads",
        ],
    ),
    "more ranks than words and columns": (
        narrow,
        TP,
        "ValueError: ds_npu.parallel.tensor: found 2; these modules",
        [
            "model.layers.{0..1}.mlp.gate_proj (gate, 1 wide): 1 columns",
            "model.layers.{0..1}.mlp.down_proj (down, 1 wide): 1 columns",
            "model.embed_tokens (embedding, 1 wide): 1 words",
            "lm_head (head, 1 wide): 1 words",
        ],
    ),
    "unknown glob": (
        llama,
        TP | {"plan": {"model.layer.*": "block"}},
        "PlanError: LlamaForCausalLM is a decoder of transformers, which ds_npu knows but for what is named here.\n",
        [
            "1 mistake in the plan of LlamaForCausalLM",
            '"model.layer.*": matches no module, did you mean "model.layers.*"',
        ],
    ),
    "unknown glob on one tensor rank": (
        llama,
        {"plan": {"model.layer.*": "block"}},
        "PlanError: LlamaForCausalLM is a decoder of transformers, which ds_npu knows but for what is named here.\n",
        [
            "1 mistake in the plan of LlamaForCausalLM",
            '"model.layer.*": matches no module, did you mean "model.layers.*"',
        ],
    ),
    "unknown role": (
        llama,
        TP | {"plan": {"model.layers.*": "blok"}},
        "ConfigError: 1 mistake in the DeepSpeed config",
        ["ds_npu.plan.model.layers.*: found \"blok\"; one of 'block', "],
    ),
    "a role that does not fit": (
        llama,
        TP | {"plan": {"model.norm": "column"}},
        "PlanError: LlamaForCausalLM is a decoder of transformers",
        ["\n1 mistake in the plan", "model.norm (LlamaRMSNorm, weight [32]): column is for a linear"],
    ),
    "a model that nobody knows": (
        own,
        TP,
        "PlanError: Sequential is a model of your own: ds_npu knows the parts of Hugging Face's decoders only.\n",
        [
            "Data parallelism and ZeRO work without a plan; tensor parallelism needs one; context parallelism is the "
            "script's (ds_npu.parallel.context_attention).\n4 mistakes in the plan of Sequential",
            "0 (Embedding, weight [13, 8]): nothing says what it is",
            '"ds_npu": {"plan": {',
            '{"**": "replicated"}',
        ],
    ),
    "a pipeline without a plan": (
        pipeline,
        TP,
        "PlanError: PipelineModule is a model of your own",
        [
            "\n1 mistake in the plan of PipelineModule",
            "{0..1} (Linear, weight [4, 4], bias [4]): nothing says what it is",
        ],
    ),
    "sequence shards without blocks": (
        own,
        SEQUENCE | {"plan": TABLE_AND_LINEARS},
        "ValueError: ds_npu.parallel.sequence_parallel: found true; outside of blocks",
        ["Sequential shards 1 (column), 3 (row).", "the role block in ds_npu.plan"],
    ),
    "no kernel": (
        llama,
        SEQUENCE | {"tensor_overlap": "fused"},
        'ConfigError: 1 mistake in the DeepSpeed config:\n  ds_npu.tensor_overlap: found "fused"; its kernels are not ',
        ["What to do: "],
    ),
    "overlap of nothing": (
        llama,
        TP | {"tensor_overlap": "pipelined"},
        "ConfigError: 1 mistake",
        ["ds_npu.tensor_overlap: found \"pipelined\"; 'none', or ds_npu.parallel.sequence_parallel true"],
    ),
    "overlap on one tensor rank": (
        llama,
        {"tensor_overlap": "pipelined"},
        "ConfigError: 1 mistake",
        ['ds_npu.tensor_overlap: found "pipelined"; only with ds_npu.parallel.tensor > 1'],
    ),
    "sequence shards on one tensor rank": (
        llama,
        {"parallel": {"sequence_parallel": True}},
        "ConfigError: 1 mistake",
        ["ds_npu.parallel.sequence_parallel: found true; only with ds_npu.parallel.tensor > 1"],
    ),
    "asked twice": (
        llama,
        TP | {"autotp": 4},
        "ConfigError: 1 mistake",
        ["tensor_parallel.autotp_size: found 4; ", "ds_npu.parallel.tensor"],
    ),
}
"""Of each mistake: the model, the section, how the message begins, and what else is in it."""


def config(section: dict[str, object]) -> dict[str, object]:
    more = {key: value for key, value in section.items() if key != "autotp"}
    made = rule.config(1, torch.float32, {}) | {"ds_npu": more}
    return made | ({"tensor_parallel": {"autotp_size": section["autotp"]}} if "autotp" in section else {})


def one_message_each(titles: list[str]) -> None:
    import deepspeed

    rule.without_extension()
    transformers.logging.set_verbosity_error()
    for title in titles:
        make, section, begin, parts = CASES[title]
        model = make()
        before = {name: (id(weight), weight.shape) for name, weight in model.named_parameters()}
        with pytest.raises(ValueError) as caught:
            deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(section))
        said = f"{type(caught.value).__name__}: {caught.value}"
        assert said.startswith(begin) and all(part in said for part in parts), (title, said)
        assert caught.value.__context__ is None and len(said) < 2200, (title, said)
        # Nothing was split halfway: the model is the user's still.
        assert {name: (id(weight), weight.shape) for name, weight in model.named_parameters()} == before, title


def test_each_mistake_is_one_message_before_training():
    run_on_ranks(2, one_message_each, list(CASES))


def replicas() -> None:
    import deepspeed

    rule.without_extension()
    for make in (own, pipeline):
        model = make()
        section = TP | {"plan": {"**": "replicated"}}
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(section))
        assert engine.topology.size("tp") == 2
        assert all(sharding_of(weight) is None for weight in model.parameters())


def test_replicas_on_purpose():
    run_on_ranks(2, replicas)


@pytest.mark.parametrize("title", ["unknown role", "overlap of nothing", "overlap on one tensor rank", "asked twice"])
def test_the_command_says_it_too(title, tmp_path):
    _, section, _, parts = CASES[title]
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config(section)))
    command = [sys.executable, "-m", "ds_npu.cli.main", "check", str(path), "--world-size", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=60)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert all(part in done.stderr for part in parts), done.stderr
