"""``ds_npu.deterministic`` on simulated NPUs: what CANN and HCCL are told, and which operators go with it."""

from __future__ import annotations

import ctypes

import deepspeed
import gradient_rule as rule
import pytest
import tensor_parallel_rule as tensor_rule
import tiny_models
import torch
from ranks import run_on_ranks

from ds_npu.parallel.tensor.shard_access import local_shard

KEY: dict[str, object] = {"deterministic": True}
CASES = [
    (2, "qwen3_moe", {"parallel": {"expert": 2}}, 2),
    (2, "llama", {"parallel": {"tensor": 2, "sequence_parallel": True}, "chunked_loss": 4}, 3),
    (2, "llama", {"parallel": {"context": 2}, "recompute": {"norm": True}}, 1),
    (2, "gpt2", {"parallel": {"pipeline": 2}, "pipeline": {"schedule": "zb_h1"}}, 1),
]


def told() -> tuple[int, int]:
    """What the process has told (CANN's operators, HCCL's reductions) to be: 1 deterministic."""
    operators, reductions = ctypes.c_int64(), ctypes.c_int32()
    assert ctypes.CDLL("libascendcl.so").aclrtGetSysParamOpt(0, ctypes.byref(operators)) == 0
    assert ctypes.CDLL("libhccl.so").HcclGetConfig(0, ctypes.byref(reductions)) == 0
    return operators.value, reductions.value


def trained(family: str, section: dict[str, object], stage: int) -> list[torch.Tensor]:
    """Losses of two steps in bf16, and the weights after them."""
    model = tiny_models.tiny(family, torch.float32).to(torch.bfloat16)
    config = tensor_rule.config(stage, torch.bfloat16, section)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses = []
    for ids in tensor_rule.batches(2 * rule.MICRO * rule.ACCUMULATION).to(engine.device).split(rule.MICRO):
        loss = engine(input_ids=ids, labels=ids).loss
        losses.append(loss.detach().clone())
        engine.backward(loss)
        engine.step()
    return [*losses, *map(local_shard, rule.whole_weights(engine.module).values())]


def same_numbers(family: str, section: dict[str, object], stage: int) -> None:
    """Simulated kernels are deterministic anyway, so nothing may change."""
    expected = trained(family, section, stage)
    assert told() == (0, 0)
    found = trained(family, section | KEY, stage)
    assert told() == (1, 1)
    assert len(found) == len(expected) > 10
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize(("ranks", "family", "section", "stage"), CASES, ids=str)
def test_cann_and_hccl_are_told(ranks, family, section, stage):
    run_on_ranks(ranks, same_numbers, family, section, stage, backend="hccl")
