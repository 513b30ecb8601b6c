"""The gradient rule for gated delta nets and Mamba 2 over context and tensor ranks: the engine against one process.

transformers computes their recurrences in a way of its own, which is the reference, in float64.
"""

from __future__ import annotations

import pytest
import tensor_parallel_rule as rule
import tiny_models
import torch
import torch.distributed as dist
from gradient_rule import without_extension
from ranks import run_on_ranks

ALGORITHMS = {
    "ulysses": {"algorithm": "ulysses"},
    "ring": {"algorithm": "ring"},
    "allgather": {"algorithm": "allgather"},
    "hybrid": {"algorithm": "hybrid", "ulysses": 2},
    "double ring": {"algorithm": "ring", "window": 2},
    "chosen": {},
}
SIZES = {"hybrid": 4, "double ring": 4}
"""Context ranks, where 2 do not show what an algorithm is."""
EVERY = (0, 1, 2, 3)
STAGES = dict.fromkeys(("qwen3_next", "qwen3_5", "mamba2", "bamba", "olmo_hybrid", "lfm2"), EVERY)


def steps(family: str, parallel: dict[str, object], algorithm: dict[str, object], stages: tuple[int, ...]) -> None:
    """Hold every stage to one process."""
    without_extension()
    dp = dist.get_world_size() // (parallel.get("tensor", 1) * parallel.get("context", 1))
    expected = rule.reference(family, dp, dtype=torch.float64, start=torch.float64)
    asked = {"parallel": parallel, "context_parallel": algorithm}
    for stage in stages:
        errors = rule.engine_step(family, stage, torch.float64, asked, expected)
        where = (family, asked, stage, errors)
        assert errors.loss <= rule.EXACT and errors.gradient <= rule.EXACT, where
        loose = rule.EXACT if stage == 0 else rule.SINGLE
        assert errors.norm <= loose and errors.weight <= loose, where


CONTEXT_CORNERS = [
    ("qwen3_next", "ulysses", (0, 3)),
    ("lfm2", "chosen", (1, 3)),
    ("bamba", "ring", (0, 3)),
]
CONTEXT_CASES = [(family, name, stages) for family, stages in STAGES.items() for name in ALGORITHMS]


@pytest.mark.slow
@pytest.mark.matrix(corners=len(CONTEXT_CORNERS), drawn=1)
@pytest.mark.parametrize(("family", "name", "stages"), [*CONTEXT_CORNERS, *CONTEXT_CASES], ids=str)
def test_one_division_of_the_sequence_serves_both_kinds_of_attention(family, name, stages):
    context = SIZES.get(name, 2)
    run_on_ranks(context, steps, family, {"context": context}, ALGORITHMS[name], stages, deadline_s=600.0)


SEQUENCES = {"tensor": 2, "sequence_parallel": True}
TENSOR_CORNERS = [
    ("lfm2", {"tensor": 2}, (0, 3)),
    ("bamba", SEQUENCES, (1, 3)),
    ("qwen3_5", SEQUENCES | {"context": 2}, (1,)),
]
TENSOR_CASES = [
    (family, parallel, STAGES[family])
    for family in STAGES
    for parallel in ({"tensor": 2}, SEQUENCES, {"tensor": 2, "context": 2}, SEQUENCES | {"context": 2})
    if family != tiny_models.FLATTENS or "sequence_parallel" not in parallel
]


@pytest.mark.slow
@pytest.mark.matrix(corners=len(TENSOR_CORNERS), drawn=1)
@pytest.mark.parametrize(("family", "parallel", "stages"), [*TENSOR_CORNERS, *TENSOR_CASES], ids=str)
def test_tensor_ranks_have_heads_of_linear_attention(family, parallel, stages):
    world = parallel["tensor"] * parallel.get("context", 1)
    run_on_ranks(world, steps, family, parallel, {}, stages, deadline_s=600.0)


def shards() -> None:
    """Each rank holds half of every weight that is of heads, and computes with half of the heads."""
    from ds_npu.features.tensor_parallel.sharded_model import shard_model
    from ds_npu.models.globs import plan_for
    from ds_npu.topology.degrees import Degrees
    from ds_npu.topology.topology import Topology

    for family, name, whole in (
        ("mamba2", "backbone.layers.0.mixer", {"in_proj.weight", "conv1d.weight", "conv1d.bias", "norm.weight"}),
        ("qwen3_5", "model.layers.0.linear_attn", {"in_proj_qkv.weight", "conv1d.weight"}),
        ("bamba", "model.layers.0.mamba", {"in_proj.weight", "norm.weight"}),
    ):
        before, model = tiny_models.tiny(family), tiny_models.tiny(family)
        shard_model(model, plan_for(model, {}), Topology(Degrees(tp=2)))
        layer, original = model.get_submodule(name), before.get_submodule(name)
        sizes = {each: weight.numel() for each, weight in original.named_parameters()}
        found = {each for each, weight in layer.named_parameters() if 2 * weight.numel() == sizes[each]}
        assert found >= whole | {"A_log", "dt_bias", "out_proj.weight"}, (family, found)
        assert 2 * layer.num_v_heads == original.num_v_heads if family == "qwen3_5" else 2 * layer.num_heads == 8


def test_weights_of_heads_are_sharded():
    run_on_ranks(2, shards)


def too_many() -> None:
    from ds_npu.features.tensor_parallel.sharded_model import shard_model
    from ds_npu.models.globs import plan_for
    from ds_npu.topology.degrees import Degrees
    from ds_npu.topology.topology import Topology

    model = tiny_models.tiny("qwen3_5", linear_num_key_heads=1)
    with pytest.raises(
        ValueError, match=r"layers.0.linear_attn \(Qwen3_5GatedDeltaNet\): each rank needs a head of keys"
    ):
        shard_model(model, plan_for(model, {}), Topology(Degrees(tp=2)))


def test_fewer_heads_than_ranks_are_refused_by_name():
    run_on_ranks(2, too_many)
