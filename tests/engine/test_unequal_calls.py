"""ZeRO 3 with experts that call an inner module once for each expert with a token: not equally often on each rank."""

from __future__ import annotations

import json
from pathlib import Path

import decoder_families as families
import deepspeed
import family_axes
import gradient_rule as rule
import tiny_models
import torch
import torch.distributed as dist
from deepspeed.utils import set_z3_leaf_modules
from ranks import run_on_ranks


def step(path: str) -> None:
    """A step of two data ranks; all tokens of one are alike, so that its layers call fewer experts."""
    rule.without_extension()
    samples = tiny_models.tokens(2 * family_axes.SAMPLES, family_axes.LENGTH)
    samples[family_axes.SAMPLES :] = 5
    given = [{"input_ids": ids, "labels": ids} for ids in samples.split(family_axes.SAMPLES)]
    plain, calls = families.made("dbrx"), []
    experts = [each for each in plain.modules() if type(each).__name__ == "DbrxExperts"]
    for each in experts:
        each.mlp.register_forward_hook(lambda *_: calls.append(len(expected)))
    expected: list[float] = []
    for batch in given:
        expected.append(families.step(plain, batch))
    assert calls.count(1) < calls.count(0), "the ranks would call experts equally often"
    for weight in plain.parameters():
        weight.grad /= len(given)
    config = rule.config(3, torch.float64, {}, stage3_param_persistence_threshold=0) | {
        "train_micro_batch_size_per_gpu": family_axes.SAMPLES,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
    }
    found = []
    for leaves in ([], [type(experts[0])]):
        model = families.made("dbrx")
        set_z3_leaf_modules(model, leaves, raise_if_not_found=False)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
        rank = dist.get_rank()
        found.append(family_axes.compared(engine, [given[rank]], plain, [expected[rank]]))
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(found))


def test_ranks_that_call_experts_unequally_often_take_a_step(tmp_path):
    """As the model is, and with the experts as a leaf of DeepSpeed's."""
    path = tmp_path / "found.json"
    run_on_ranks(2, step, str(path), deadline_s=120.0)
    assert json.loads(path.read_text()) == ["yes", "yes"]
