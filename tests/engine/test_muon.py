"""Muon over every axis and stage of ZeRO against one process: whole matrices, each orthogonalised once."""

from __future__ import annotations

import muon_lives as lives
import muon_rule
import pytest
import torch
from muon_rule import MuonCase
from ranks import run_on_ranks

STAGES = (0, 1, 2, 3)
ADAM = {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}}
HEADS = {"params": {"per_head_muon": True}, "heads": {f"{each}_proj.weight": 8 for each in "qkv"}}

SMALL = {"zero": {"reduce_bucket_size": 2500, "allgather_bucket_size": 2500}}
"""Buckets of one or two matrices, of which each data rank has a part."""


WIDE_EPS = {"eps": 1e-6}
"""Keys without a rotary embedding have a bias whose gradient is 0: Adam would make steps of its rounding errors. (One
process whose weights differ in their last bits is 8.7e-12 off behind 20 steps with an eps of 1e-10.)"""


def over(**axes: object) -> dict[str, object]:
    return {"parallel": axes}


def staged(family: str, section: dict[str, object], stages=STAGES, **more) -> list[MuonCase]:
    return [MuonCase(family, stage, section, **more) for stage in stages]


OF_TWO = [
    staged("llama", over(tensor=2)),
    staged("qwen2", over(tensor=2, sequence_parallel=True), **HEADS),
    staged("qwen3_moe", over(expert=2)),
    staged("llama", over(), **SMALL),
    staged("llama", over(context=2), **SMALL),
    staged("llama", over(pipeline=2), (0, 1, 2)),
    staged("qwen3_moe", over(expert_tensor=2)),
    staged("qwen3_moe", over(tensor=2)),
    staged("llama", over(), **HEADS, **SMALL),
    staged("llama", over(tensor=2) | {"muon": {"scale": "rms"}}),
    staged("gpt2", over(tensor=2), (0, 1), params=WIDE_EPS),
    staged("phi3", over(tensor=2), (0, 3)),
    staged("gemma", over(tensor=2), (1, 2)),
    staged("deepseek_v3", over(expert=2), (0, 2)),
    staged("mixtral", over(expert=2), (1, 3)),
    staged("gpt_oss", over(expert=2), (0, 1)),
    staged("llama4_text", over(expert=2), (1,)),
]
OF_FOUR = [
    staged("llama", over(tensor=2), **SMALL),
    staged("qwen3_moe", over(expert=2, expert_tensor=2)),
    staged("llama", over(tensor=2, pipeline=2), (0, 1, 2)),
    staged("llama", over(tensor=2, context=2)),
    staged("llama", over(tensor=4), **HEADS),
    staged("deepseek_v3", over(expert=2, tensor=2)),
    staged("llama", over(context=2, pipeline=2), (0, 1), **SMALL),
    staged("llama", over(pipeline=2), (0, 1), **SMALL),
    staged("llama", over(), **SMALL),
]


@pytest.mark.slow
@pytest.mark.matrix(corners=3, drawn=2)
@pytest.mark.parametrize("cases", OF_TWO, ids=lambda cases: f"{cases[0].family} {cases[0].section}")
def test_two_ranks_as_one_process(cases):
    run_on_ranks(2, muon_rule.hold, cases, deadline_s=600.0)


@pytest.mark.slow
@pytest.mark.matrix(corners=2, drawn=1)
@pytest.mark.parametrize("cases", OF_FOUR, ids=lambda cases: f"{cases[0].family} {cases[0].section}")
def test_four_ranks_as_one_process(cases):
    run_on_ranks(4, muon_rule.hold, cases, deadline_s=600.0)


@pytest.mark.slow
@pytest.mark.parametrize("cases", [staged("llama", over(tensor=3), (0, 1)), staged("gemma", over(tensor=3), (0, 3))])
def test_ranks_that_divide_nothing(cases):
    run_on_ranks(3, muon_rule.hold, [*cases, *staged("llama", over(), (0, 1, 3))], deadline_s=600.0)


@pytest.mark.slow
@pytest.mark.parametrize("section", [over(tensor=2), over()], ids=str)
def test_bf16_as_shipped(section):
    wide = {"data_types": {"grad_accum_dtype": "fp32"}}
    others = [
        MuonCase("llama", 1, section, torch.bfloat16, {"ns_method": "standard"}),
        MuonCase("llama", 1, section, torch.bfloat16, keys=wide),
    ]
    run_on_ranks(2, muon_rule.hold_as_shipped, [*staged("llama", section, dtype=torch.bfloat16), *others])


def test_a_quick_one():
    run_on_ranks(2, muon_rule.hold, staged("llama", over(tensor=2), (0, 2)))


@pytest.mark.slow
def test_resumed_to_the_bit(tmp_path):
    cases = [
        *staged("llama", over(tensor=2)),
        MuonCase("qwen3_moe", 1, over(expert=2)),
        *staged("llama", over(), **SMALL),
    ]
    narrow = staged("llama", over(tensor=2), dtype=torch.bfloat16)
    run_on_ranks(2, lives.resume_to_the_bit, [*cases, *narrow], str(tmp_path), deadline_s=400.0)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [(0, 0, 0, 0), (1, 0, 2, 3), (3, 1, 1, 0)], ids=str)
def test_resumed_at_other_layouts(stages, tmp_path):
    sections = (over(), over(tensor=2), over(), over(tensor=2))
    chain = [MuonCase("llama", stage, section, **SMALL) for stage, section in zip(stages, sections, strict=True)]
    run_on_ranks(2, lives.go_on_elsewhere, chain, str(tmp_path))


@pytest.mark.slow
def test_checkpoints_of_deepspeeds_muon(tmp_path):
    # Partitions of this family begin within a matrix.
    cases = staged("gemma", over(), dtype=torch.float32, **SMALL)
    run_on_ranks(2, lives.go_on_from_deepspeed, cases, str(tmp_path))


@pytest.mark.slow
def test_skipped_steps_leave_momenta():
    bf16 = {"bf16": {"enabled": True, "check_grad_overflow": True}}
    cases = [(case, bf16) for case in staged("llama", over(), dtype=torch.bfloat16, **SMALL)]
    cases += [(case, bf16) for case in staged("llama", over(tensor=2), dtype=torch.bfloat16)]
    run_on_ranks(2, lives.skip_steps, cases)


@pytest.mark.slow
def test_bytes_and_iterations_are_counted():
    # 2 layers of q, k, v, o of 32 x 32 and three of 48 x 32; float64 both ways.
    numel, wide = 2 * (4 * 32 * 32 + 3 * 48 * 32), 8
    cases = [
        (MuonCase("llama", 0, over(tensor=2)), 2 * wide * numel // 2),
        (MuonCase("llama", 0, over()), wide * numel),
    ]
    run_on_ranks(2, lives.sent, cases)


@pytest.mark.slow
def test_holdings_are_those_that_plans_expect():
    cases = [*staged("gemma", over(tensor=2)), *staged("qwen3_moe", over(expert=2)), *staged("gpt2", over(), **SMALL)]
    run_on_ranks(2, lives.hold_what_is_expected, [*cases, *staged("llama", over(pipeline=2), (0, 1))])
    run_on_ranks(3, lives.hold_what_is_expected, staged("qwen2", over(tensor=3), (0, 1)))


@pytest.mark.slow
def test_frozen_weights():
    run_on_ranks(2, lives.frozen, staged("llama", over(tensor=2)))


@pytest.mark.slow
def test_an_optimizer_of_the_clients_own():
    cases = [*staged("llama", over(tensor=2)), *staged("qwen3_moe", over(expert=2), (0, 1))]
    run_on_ranks(2, lives.own_optimizer, cases)


def test_refusals():
    offload = {"offload_optimizer": {"device": "cpu"}}
    cases = [
        (MuonCase("llama", 2, over(tensor=2), zero=offload), {}, "zero_optimization.offload_optimizer.device: found"),
        (MuonCase("llama", 1, over(tensor=2), zero={"elastic_checkpoint": True}), {}, "DeepSpeedZeroOptimizer keeps"),
        (MuonCase("llama", 1, {"muon": {"scale": "rms"}}), {"optimizer": ADAM}, "^ds_npu.muon: found"),
        (MuonCase("gpt2", 1, over(tensor=2), params={"per_head_muon": True}), {}, "no attention projection could be"),
        (
            MuonCase("llama", 1, over(tensor=2), torch.float64, {}),
            {"ds_npu": {"parallel": {"tensor": 2}, "optimizer_memory": {"swap": True}}},
            "optimizer_memory",
        ),
    ]
    run_on_ranks(2, lives.refusals, cases)
