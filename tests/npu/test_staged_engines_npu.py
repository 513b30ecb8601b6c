"""Models in pipeline stages over simulated NPUs: one step of DeepSpeed's engine over HCCL, against one process.

``ds_npu sim --chaos SEED -- python -m pytest tests/npu/test_staged_engines_npu.py`` runs the devices' work in the odd
orders that CANN allows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import gradient_rule
import pipeline_rule as rule
import pytest
import tensor_parallel_rule as dense
import torch
import torch.distributed as dist
from ranks import run_on_ranks

BF16, F64 = torch.bfloat16, torch.float64
BLOCKS = {"num_hidden_layers": 8}
"""A block for each of two stages of 4 ranks."""


def steps(
    schedules: Sequence[str], stages: Sequence[int], parallel: dict[str, int], more: dict[str, bool], family: str
) -> None:
    """bf16 within twice the error of one process, from the same weights and batches."""
    changes = more if family == "gpt2" else BLOCKS | more
    dp = dist.get_world_size() // math.prod(parallel.get(axis, 1) for axis in ("pipeline", "tensor", "context"))
    expected = rule.reference(rule.model_of(family, BF16, **changes).double(), dp, F64)
    found = {}
    # The engines first: nothing here sets the device.
    for schedule, stage in itertools.product(schedules, stages):
        section = {"parallel": parallel, "pipeline": {"schedule": schedule}}
        section["pipeline"] |= {"virtual_stages": 2} if schedule == "interleaved" else {}
        section |= {"context_parallel": {"algorithm": "ring"}} if "context" in parallel else {}
        engine = rule.engine_of(rule.model_of(family, BF16, **changes), stage, BF16, section)
        found[schedule, stage] = rule.errors_of_step(engine, BF16, expected)
    single = rule.reference(rule.taking_batches_to("npu", rule.model_of(family, BF16, **changes)), dp, BF16)
    bound = 2 * gradient_rule.relative(single.gradients, expected.gradients)
    for where, errors in found.items():
        assert max(errors.gradient, errors.norm) <= bound and errors.loss <= 4e-3, (where, errors, bound)
        # The weights were rounded to bf16 after the step; a step that was not made is off by more.
        assert errors.weight <= 2**-8, (where, errors)


CASES = [
    (2, "zb_h1", (0, 1, 2), {"pipeline": 2}),
    (2, "zb_v", (1, 2), {"pipeline": 2}),
    (4, "zb_v", (0, 1, 2), {"pipeline": 2, "tensor": 2}),
    (4, "1f1b", (0, 1, 2), {"pipeline": 2}),
    (2, "1f1b", (0, 1, 2), {"pipeline": 2}),
    *((4, schedule, (0, 1, 2), {"pipeline": 4}) for schedule in ("1f1b", "zb_h1", "zb_v")),
    *((4, schedule, (0, 1, 2), {"pipeline": 2, "tensor": 2}) for schedule in ("1f1b", "zb_h1")),
]
"""Ranks, schedule, stages of ZeRO, axes."""


@pytest.mark.slow
@pytest.mark.matrix(corners=3, drawn=1)
@pytest.mark.parametrize(("ranks", "schedule", "stages", "parallel"), CASES)
def test_a_step(ranks, schedule, stages, parallel):
    asked = ([schedule], stages, parallel, {}, "llama")
    run_on_ranks(ranks, steps, *asked, backend="hccl", sets_device=False, deadline_s=400.0)


EIGHT = [
    ("qwen3_moe", "zb_h1", (1,), {"pipeline": 2, "tensor": 2, "expert": 2}),
    ("llama", "1f1b", (0, 2), {"pipeline": 2, "tensor": 2, "context": 2}),
    ("qwen3_moe", "interleaved", (0, 2), {"pipeline": 2, "context": 2, "expert": 2}),
    ("gpt2", "zb_v", (1,), {"pipeline": 2, "tensor": 2}),
]


@pytest.mark.slow
@pytest.mark.matrix(corners=0, drawn=1)
@pytest.mark.parametrize(("family", "schedule", "stages", "parallel"), EIGHT)
def test_a_step_of_eight_ranks(family, schedule, stages, parallel):
    more = {"output_router_logits": False} if family == "qwen3_moe" else {}
    asked = ([schedule], stages, parallel, more, family)
    run_on_ranks(8, steps, *asked, backend="hccl", sets_device=False, deadline_s=900.0)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "schedule"), [(4, "zb_h1"), (2, "1f1b")])
def test_tied_weights(ranks, schedule):
    """Embedding and head have a copy each, on the first and the last rank; the script has them on the host."""
    tied = {"tie_word_embeddings": True}
    asked = ([schedule], (0, 1, 2), {"pipeline": ranks}, tied, "llama")
    run_on_ranks(ranks, steps, *asked, backend="hccl", sets_device=False)


def loss_scale(stage: int) -> None:
    """An overflow in one stage skips the step on all of them, and halves the scale of the loss."""
    gradient_rule.without_extension()
    keys = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}, "gradient_accumulation_steps": 1}
    section = {"parallel": {"pipeline": 2}, "pipeline": {"schedule": "zb_h1"}}
    batch = rule.batches(1)[0][0]
    plain = rule.model_of("llama", torch.float16).double()
    plain(**batch).loss.backward()
    engine = rule.engine_of(rule.model_of("llama", torch.float16), stage, torch.float16, section, **keys)
    here = {name: each.to(engine.device) for name, each in batch.items()}

    def weights() -> dict[str, torch.Tensor]:
        return dense.shared({name: each.cpu() for name, each in engine.whole_state_dict().items()})

    start = weights()
    engine.backward(engine(**here).loss)
    gradients = gradient_rule.reduced_gradients(engine, engine.module)
    found = {name: each / 256 for name, each in rule.over_stages(gradients, engine.topology).items()}
    expected = {name: each.grad for name, each in plain.named_parameters()}
    assert gradient_rule.relative(found, expected) <= 5e-3
    engine.step()
    stepped = weights()
    assert (engine.skipped_steps, engine.optimizer.cur_scale) == (0, 256)
    assert any(not torch.equal(each, start[name]) for name, each in stepped.items())
    if engine.topology.rank("pp") == 0:
        next(iter(engine.module.parameters())).register_hook(lambda gradient: gradient * float("inf"))
    engine.backward(engine(**here).loss)
    engine.step()
    assert (engine.skipped_steps, engine.optimizer.cur_scale) == (1, 128)
    assert all(torch.equal(each, stepped[name]) for name, each in weights().items())


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_the_loss_scale_is_that_of_all_stages(stage):
    run_on_ranks(2, loss_scale, stage, backend="hccl", sets_device=False)
