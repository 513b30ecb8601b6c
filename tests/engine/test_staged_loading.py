"""Models of which each pipeline rank reads its own stages, and what is written of them."""

from __future__ import annotations

from pathlib import Path

import pipeline_rule as rule
import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from transformers import AutoModelForCausalLM

import ds_npu
from ds_npu.parallel.pipeline.pass_through import absent_weights, stages_in

CASES = [
    ("llama", 2, {"pipeline": 2}, "1f1b"),
    ("gpt2", 2, {"pipeline": 2}, "zb_v"),
    ("gpt2", 4, {"pipeline": 4}, "zb_h1"),
    ("qwen3_moe", 4, {"pipeline": 2, "expert": 2}, "zb_v"),
    ("llama", 4, {"pipeline": 2, "tensor": 2}, "zb_v"),
]


def load_and_save(folder: Path, parallel: dict, schedule: str, family: str) -> None:
    """A rank reads what it holds; a step of it and of the model that was cut in memory are the same; saved as plain."""
    section = {"parallel": parallel, "pipeline": {"schedule": schedule}}
    config = rule.dense.config(1, torch.float32, section)
    config |= {"train_micro_batch_size_per_gpu": rule.SAMPLES, "gradient_accumulation_steps": rule.ACCUMULATION}
    model = ds_npu.from_pretrained(AutoModelForCausalLM, folder / "plain", config).train()
    plain = AutoModelForCausalLM.from_pretrained(folder / "plain").train()
    assert stages_in(model) and absent_weights(model)
    mine, whole = (sum(each.numel() for each in made.parameters()) for made in (model, plain))
    assert mine < 0.75 * whole, (mine, whole)
    engine = rule.engine_of(model, 1, torch.float32, section)
    engine.save_pretrained(folder / "ours")
    dist.barrier()
    again, info = AutoModelForCausalLM.from_pretrained(folder / "ours", output_loading_info=True)
    assert not any(info.values()), info
    expected = plain.state_dict()
    assert all(torch.equal(each, expected[name]) for name, each in again.state_dict().items())
    cut = rule.engine_of(plain, 1, torch.float32, section)
    losses = [rule.step_of(each, torch.float32)[0] for each in (engine, cut)]
    assert losses[0] == losses[1]
    found, wanted = (rule.dense.shared(each.whole_state_dict()) for each in (engine, cut))
    assert all(torch.equal(each, wanted[name]) for name, each in found.items()), family


@pytest.mark.slow
@pytest.mark.matrix(corners=1, drawn=1)
@pytest.mark.parametrize(("family", "ranks", "parallel", "schedule"), CASES)
def test_each_rank_reads_its_own_stages(family, ranks, parallel, schedule, tmp_path):
    changes = {"output_router_logits": False} if family == "qwen3_moe" else {}
    rule.model_of(family, torch.float32, **changes).save_pretrained(tmp_path / "plain")
    run_on_ranks(ranks, load_and_save, tmp_path, parallel, schedule, family, deadline_s=300.0)
