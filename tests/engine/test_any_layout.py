"""Checkpoints of DeepSpeed that go on at other layouts, against one process that is not interrupted."""

from __future__ import annotations

import layout_lives as lives
import pytest
import torch
from ranks import run_on_ranks


def over(**parallel: int) -> dict:
    ring = {"context_parallel": {"algorithm": "ring"}} if "context" in parallel else {}
    return {"parallel": parallel} | ring


V_SHAPE = over(pipeline=2) | {"pipeline": {"schedule": "zb_v"}}
CHAINS = {
    "llama": [
        [(1, {}), (2, over(tensor=2)), (0, over(tensor=4)), (3, over(context=2)), (1, over(pipeline=2))],
        [(3, {}), (3, over(tensor=2)), (0, over(pipeline=4)), (2, V_SHAPE), (0, {}), (3, over(tensor=2, context=2))],
    ],
    "mixtral": [
        [(1, over(expert=2)), (2, over(expert=4)), (0, over(expert_tensor=2)), (3, over(expert=2, tensor=2))],
        [(3, over(expert=4)), (1, over(pipeline=2, expert=2)), (0, {}), (0, over(expert=2, expert_tensor=2))],
    ],
    "gpt2": [[(1, over(pipeline=2)), (3, over(tensor=2)), (0, over(pipeline=2)), (2, {})]],
    "deepseek_v3": [[(0, over(expert=2)), (3, over(tensor=2)), (2, over(expert=4)), (1, {})]],
}
"""By family, stages of ZeRO and sections that follow each other."""
AT_HALF_THE_RANKS = [(1, over(tensor=2)), (3, {})]


@pytest.mark.slow
@pytest.mark.matrix(corners=2, drawn=1)
@pytest.mark.parametrize(
    ("family", "chain"), [(family, index) for index in (0, 1) for family in CHAINS if index < len(CHAINS[family])]
)
def test_runs_go_on_at_other_layouts(family, chain, tmp_path):
    layouts = CHAINS[family][chain]
    expected = lives.expected_of(family, len(layouts) + len(AT_HALF_THE_RANKS))
    run_on_ranks(4, lives.go_on, family, layouts, 0, str(tmp_path), expected, deadline_s=400.0)
    run_on_ranks(2, lives.go_on, family, AT_HALF_THE_RANKS, len(layouts), str(tmp_path), expected, deadline_s=400.0)


@pytest.mark.slow
def test_adapters_go_on_at_other_layouts(tmp_path):
    lora = {"r": 2, "target_modules": ["q_proj", "down_proj"]}
    chain = [(2, {}), (3, {}), (0, over(tensor=2)), (3, over(tensor=2)), (1, over(pipeline=2)), (2, over(tensor=2))]
    expected = lives.expected_of("llama", len(chain), lora)
    run_on_ranks(2, lives.go_on, "llama", chain, 0, str(tmp_path), expected, lora)


@pytest.mark.slow
def test_moved_experts_go_on_at_other_layouts(tmp_path):
    chain = [(0, over(expert=2)), (2, over(expert=4)), (3, over(expert=2)), (1, over(expert=2, expert_tensor=2))]
    run_on_ranks(4, lives.moved_experts, "qwen3_moe", chain, str(tmp_path), lives.expected_of("qwen3_moe", len(chain)))


@pytest.mark.slow
def test_offloaded_optimizers_go_on_at_other_layouts(tmp_path):
    offloaded = {"zero": {"offload_optimizer": {"device": "cpu"}}}
    chain = [(2, offloaded), (3, {}), (3, offloaded), (1, over(tensor=2) | offloaded), (0, {})]
    run_on_ranks(2, lives.go_on, "llama", chain, 0, str(tmp_path), lives.expected_of("llama", len(chain)))


@pytest.mark.slow
def test_other_orders_of_weights(tmp_path):
    """What DeepSpeed itself tells of a weight's float32 values is another weight's with ``round_robin_gradients``."""
    around = {"zero": {"round_robin_gradients": True}}
    chain = [(1, around), (2, {}), (2, around), (2, over(tensor=2) | around), (0, {}), (1, around), (0, {})]
    run_on_ranks(4, lives.go_on, "llama", chain, 0, str(tmp_path), lives.expected_of("llama", len(chain)))


@pytest.mark.slow
def test_masters_and_moments_stay_bit_for_bit(tmp_path):
    layouts = [(1, {}), (0, {}), (2, over(tensor=2)), (0, over(tensor=2)), (3, {}), (3, over(tensor=2)), (1, {})]
    run_on_ranks(2, lives.in_16_bits, torch.bfloat16, layouts, str(tmp_path))


@pytest.mark.slow
def test_masters_in_another_dtype(tmp_path):
    run_on_ranks(2, lives.masters_in_16_bits, str(tmp_path))


KEPT = {"optimizer_memory": {"share_fp32": True, "swap": True}}


@pytest.mark.slow
def test_kept_states_stay_bit_for_bit(tmp_path):
    layouts = [(1, {}), (2, over(tensor=2) | KEPT), (3, KEPT), (0, over(tensor=2) | KEPT), (1, KEPT), (1, {})]
    run_on_ranks(2, lives.in_16_bits, torch.bfloat16, layouts, str(tmp_path))


def test_parts_of_a_checkpoint(tmp_path):
    run_on_ranks(2, lives.parts_of_a_load, str(tmp_path))


@pytest.mark.slow
def test_ranks_that_share_samples_draw_the_same(tmp_path):
    run_on_ranks(2, lives.random_states, str(tmp_path))
