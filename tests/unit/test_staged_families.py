"""Each decoder of transformers in pipeline stages, run one after the other: what the whole model is, or refused."""

from __future__ import annotations

import decoder_families as families
import pytest
import tiny_models
import torch
from staged_models import chained
from tiny_models import Float64
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as FAMILIES

from ds_npu.features.build import Build
from ds_npu.features.pipeline.stages import cut_into_stages, stages_of
from ds_npu.models.globs import partial_plan_for
from ds_npu.models.plan import PlanError
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import PlannedTopology

STAGES, BLOCKS, EXACT = 3, 6, 1e-10
DIFFERENT = [
    *("gpt_oss", "qwen2_moe", "olmoe", "llama4_text"),  # Experts that tensor ranks do not shard.
    *("qwen3_next", "jamba", "nemotron_h", "lfm2"),  # Blocks of several kinds, some without attention.
    *("olmo2", "gpt_neox", "phi", "persimmon"),  # Blocks of another structure than Llama's.
]
"""Families some of whose modules have no role: their weights are not sharded, and their blocks are known."""
IN_FLOAT32 = {"inkling_text": 1e-5}
"""Its router computes in float32; in backward nothing makes that float64."""


@pytest.fixture(autouse=True)
def more_blocks(monkeypatch):
    monkeypatch.setitem(families.SIZES, "num_hidden_layers", BLOCKS)


def batch() -> dict[str, object]:
    ids = tiny_models.tokens(families.SAMPLES, families.LENGTH)
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def off(plain: nn.Module, parts: list[nn.Module]) -> float:
    """The largest relative error of a gradient of the stages; copies of a tied weight have a part of it each."""
    first = {id(weight): name for name, weight in reversed(list(plain.named_parameters(remove_duplicate=False)))}
    names = {name: first[id(weight)] for name, weight in plain.named_parameters(remove_duplicate=False)}
    found: dict[str, torch.Tensor] = {}
    for part in parts:
        for own, weight in part.named_parameters():
            if weight.grad is not None:
                name = names[own]
                found[name] = found[name] + weight.grad if name in found else weight.grad
    expected = {name: plain.get_parameter(name).grad for name in set(names.values())}
    used = {name: each for name, each in expected.items() if each is not None}
    assert found.keys() == used.keys(), found.keys() ^ used.keys()
    return max(float((found[name] - each).norm() / each.norm().clamp(min=1e-30)) for name, each in used.items())


def outcome(kind: str) -> str:
    """``exact``, ``refused: <why>``, ``alone: <why>`` where the whole model does not run either, or ``WRONG``."""
    plain, parts = families.made(kind), [families.made(kind) for _ in range(STAGES)]
    # Routers of PhiMoE draw noise; the stages run in the order of their blocks.
    torch.manual_seed(3)
    try:
        with Float64():
            expected = plain(**batch()).loss
        expected.backward()
    except Exception as error:
        return f"alone: {error}"
    torch.manual_seed(3)
    try:
        plan = partial_plan_for(parts[0], {})
        stages = stages_of(plan, STAGES)
        for part, own in zip(parts, stages, strict=True):
            cut_into_stages(part, plan, own)
        with Float64():
            loss = chained(parts, stages, **batch()).loss
        loss.backward()
    except (ValueError, TypeError, RuntimeError) as error:
        return f"refused: {error}"
    errors = abs(float(loss / expected) - 1), off(plain, parts)
    return "exact" if max(errors) <= IN_FLOAT32.get(kind, EXACT) else f"WRONG: loss {errors[0]}, gradient {errors[1]}"


@pytest.mark.parametrize("kind", DIFFERENT)
def test_families_that_tensor_ranks_do_not_know(kind):
    assert outcome(kind) == "exact"


@pytest.mark.slow
@pytest.mark.matrix(corners=1, drawn=2)
@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_every_family(kind):
    if not families.is_buildable(kind):
        pytest.skip("no tiny model of it can be made from the sizes that all families share")
    found = outcome(kind)
    is_refused = found.startswith("refused: ") and "stage" in found
    assert found == "exact" or found.startswith("alone: ") or is_refused, found


def test_a_partial_plan_shards_nothing():
    """Where weights are to be sharded, or operators replaced by role, a stage of such a model has no plan."""
    for tensor in (1, 2):
        build = Build(PlannedTopology(Degrees(pp=STAGES, tp=tensor)), families.made("codegen"))
        if tensor == 2:
            with pytest.raises(PlanError, match="in the plan of CodeGenForCausalLM"):
                assert build.block_plan
            continue
        assert build.block_plan.is_partial
        cut_into_stages(build.model, build.block_plan, stages_of(build.block_plan, STAGES)[1])
        build.forget_plan()
        assert len(build.partial_plan.blocks) == BLOCKS // STAGES
        with pytest.raises(PlanError, match="in the plan of CodeGenForCausalLM"):
            assert build.plan
    build = Build(PlannedTopology(Degrees(pp=STAGES)), families.made("llama"))
    assert not build.block_plan.is_partial
