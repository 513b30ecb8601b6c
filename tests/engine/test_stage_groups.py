"""Pipeline stages whose optimizers have other groups of parameters: without experts, and with frozen weights alone."""

from __future__ import annotations

from pathlib import Path

import pipeline_rule as rule
import pytest
import torch
from ranks import run_on_ranks

from ds_npu.parallel.tensor.shard_access import local_shard

DENSE_FIRST = {"parallel": {"pipeline": 2, "expert": 2}, "pipeline": {"split": [1, 3]}}
"""The first block of tiny DeepSeek-V3 is dense."""
V_SHAPE = DENSE_FIRST | {"pipeline": {"schedule": "zb_v", "split": [1, 1, 1, 1]}}
TWO = {"parallel": {"pipeline": 2}}
QUEUED = TWO | {"pipeline": {"schedule": "zb_h1"}}
FIRST, LAST = (
    {"r": 2, "target_modules": ["q_proj", "down_proj"], "layers_to_transform": each} for each in ([0, 1], [2, 3])
)
OFFLOADED = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


def resumes(family: str, changes: dict, stage: int, section: dict, folder: Path) -> None:
    """A second step gives the same weights, to the bit, with a checkpoint between."""
    found = []
    for resumed in (False, True):
        engine = rule.engine_of(rule.model_of(family, torch.float64, **changes), stage, torch.float64, section)
        if resumed:
            engine.load_checkpoint(folder)
        else:
            rule.step_of(engine, torch.float64)
            engine.save_checkpoint(folder)
        rule.step_of(engine, torch.float64)
        found.append({name: local_shard(weight).clone() for name, weight in engine.module.named_parameters()})
    assert all(torch.equal(weight, found[1][name]) for name, weight in found[0].items()), (family, stage, section)


def without_experts(sections: list[dict], folder: Path) -> None:
    for section in sections:
        rule.hold_all("deepseek_v3", (0, 1, 2), [section], {})
    for stage in (0, 1):
        resumes("deepseek_v3", {}, stage, DENSE_FIRST, folder / f"{stage}")


def norm_of_offloaded() -> None:
    model = rule.model_of("deepseek_v3", torch.float32)
    expected = rule.reference(rule.model_of("deepseek_v3", torch.float32).double(), 2, torch.float64)
    more = {"zero_optimization": OFFLOADED, "zero_force_ds_cpu_optimizer": False}
    engine = rule.engine_of(model, 2, torch.float32, DENSE_FIRST, **more)
    for step in rule.batches(2):
        engine.backward(engine(**step[engine.topology.rank("dp")]).loss)
        engine.step()
    assert abs(float(engine.get_global_grad_norm()) / expected.norm - 1) <= rule.SINGLE


def refused_in_16_bits() -> None:
    more = {"data_types": {"grad_accum_dtype": "fp32"}}
    with pytest.raises(ValueError, match="BF16_Optimizer has 1, 2 parameter groups in the stages"):
        rule.engine_of(rule.model_of("deepseek_v3", torch.bfloat16), 1, torch.bfloat16, DENSE_FIRST, **more)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has no module of experts that ds_npu knows"):
        rule.engine_of(rule.model_of("llama", torch.float32), 1, torch.float32, DENSE_FIRST)


def with_experts_in_some(folder: Path) -> None:
    without_experts([DENSE_FIRST], folder)
    norm_of_offloaded()
    refused_in_16_bits()


def with_nothing_trained(folder: Path) -> None:
    for adapters, section, rank in ((LAST, TWO, 0), (FIRST, QUEUED, 1)):
        rule.hold_all("llama", (0,), [section], {"adapters": adapters})
        for stage in (1, 2):
            with pytest.raises(ValueError, match=f"nothing is trained in the stages of pipeline ranks {rank}, and"):
                rule.engine_of(rule.model_of("llama", torch.float32, adapters), stage, torch.float32, section)
    resumes("llama", {"adapters": LAST}, 0, TWO, folder)


def profiled() -> None:
    with pytest.raises(ValueError, match=r"flops_profiler\.enabled: found true in pipeline stages"):
        model, profiler = rule.model_of("llama", torch.float32), {"enabled": True}
        rule.engine_of(model, 0, torch.float32, TWO, flops_profiler=profiler)


def with_two_ranks(folder: Path) -> None:
    with_nothing_trained(folder)
    profiled()


def test_a_stage_that_trains_nothing_and_what_is_refused(tmp_path):
    run_on_ranks(2, with_two_ranks, tmp_path)


def test_a_stage_without_experts(tmp_path):
    run_on_ranks(4, with_experts_in_some, tmp_path)


KEYS = [
    {"aux_loss": {"coefficient": 0.3}, "z_loss": 0.1},
    {"overlap": True},
    {"bias_update_rate": 0.01},
]


@pytest.mark.slow
def test_a_stage_without_experts_and_other_keys(tmp_path):
    run_on_ranks(4, without_experts, [V_SHAPE, *(DENSE_FIRST | {"moe": keys} for keys in KEYS)], tmp_path)
