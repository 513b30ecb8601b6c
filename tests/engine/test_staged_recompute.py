"""``pipeline.recompute``: engines whose schedules run forwards again, to the bit as without, and as one process."""

from __future__ import annotations

import pipeline_rule as rule
import pytest
import torch
from gradient_rule import reduced_gradients
from ranks import run_on_ranks

from ds_npu.parallel.pipeline.schedules import SCHEDULES

DROPPED = {"attention_dropout": 0.3}
ROUTED = {"moe": {"aux_loss": {"coefficient": 0.3}, "z_loss": 0.1}}


def section(schedule: str, placed: str | None, pipeline: int = 2, **more: object) -> dict:
    keys = {"schedule": schedule} | ({} if placed is None else {"recompute": placed})
    keys |= {"virtual_stages": 2} if SCHEDULES[schedule].chunks is None else {}
    return {"parallel": {"pipeline": pipeline, **more.pop("parallel", {})}, "pipeline": keys} | more


def step(family: str, zero: int, changes: dict, asked: dict) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of one step, and its gradients on this rank; random numbers begin alike."""
    # The mode that makes all of transformers' computations float64 does not reach into a backward.
    dtype = torch.float32 if "recompute" in asked else torch.float64
    engine = rule.engine_of(rule.model_of(family, dtype, **changes), zero, dtype, asked)
    torch.manual_seed(11)
    losses = []
    for index, each in enumerate(rule.batches(engine.topology.size("dp"))):
        loss = rule.loss_of(engine, each[engine.topology.rank("dp")], dtype)
        losses.append(loss.item())
        engine.backward(loss)
        if index == rule.ACCUMULATION - 1:
            gradients = {name: each.clone() for name, each in reduced_gradients(engine, engine.module).items()}
        engine.step()
    return losses, gradients


def compare(*cases: tuple[str, str, int, dict, dict]) -> None:
    """To the bit, with dropout: random numbers of a forward are drawn again."""
    for schedule, family, zero, changes, more in cases:
        losses, gradients = step(family, zero, changes, section(schedule, None, **more))
        for placed in ("inline", "bubble"):
            found_losses, found = step(family, zero, changes, section(schedule, placed, **more))
            where = (schedule, family, zero, placed)
            assert found_losses == losses, where
            assert found.keys() == gradients.keys(), where
            assert all(torch.equal(found[name], each) for name, each in gradients.items()), where


def test_it_is_bitwise_what_it_is_without():
    experts = {"output_router_logits": False} | DROPPED
    run_on_ranks(2, compare, ("1f1b", "llama", 0, DROPPED, {}), ("zb_v", "llama", 1, DROPPED, {}), deadline_s=600.0)
    run_on_ranks(2, compare, ("zb_h1", "qwen3_moe", 2, experts, ROUTED), deadline_s=600.0)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_bitwise(schedule):
    cases = [(schedule, "llama", 1, DROPPED, {}), (schedule, "gpt2", 0, {"attn_pdrop": 0.2, "resid_pdrop": 0.2}, {})]
    run_on_ranks(2, compare, *cases, deadline_s=600.0)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{"norm": True, "activation_function": True}, {"attention_core": True}], ids=str)
def test_with_parts_of_layers_recomputed(keys):
    run_on_ranks(2, compare, ("1f1b", "llama", 1, DROPPED, {"recompute": keys}), deadline_s=600.0)


def sums_of_products(*schedules: str) -> None:
    """In bf16, where a product that is added to a sum is rounded once, and one by itself twice."""
    for schedule in schedules:
        found = []
        for recompute in ({}, {"recompute": {"norm": True, "activation_function": True}}):
            asked = section(schedule, None, fused_ops={"matmul_accumulate": True}) | recompute
            engine = rule.engine_of(rule.model_of("llama", torch.bfloat16), 1, torch.bfloat16, asked)
            engine.backward(engine(**rule.batches(1)[0][0]).loss)
            found.append({name: weight.grad.clone() for name, weight in engine.module.named_parameters()})
        plain, again = found
        assert all(torch.equal(again[name], each) for name, each in plain.items()), schedule


def test_weight_gradients_of_recomputed_mlps_are_added_up_alike():
    run_on_ranks(2, sums_of_products, "1f1b", "zb_h1")


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zb_v"])
def test_two_stages_are_one_process(schedule):
    run_on_ranks(2, rule.hold_all, "llama", (0, 1, 2), [section(schedule, "bubble")], {}, deadline_s=600.0)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_four_stages_are_one_process(schedule):
    run_on_ranks(4, rule.hold_all, "llama", (0, 2), [section(schedule, "bubble", 4)], {}, deadline_s=900.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel", [{}, {"tensor": 2, "sequence_parallel": True}, {"context": 2}], ids=["data", "sequences", "context"]
)
def test_with_other_axes(parallel):
    asked = section("zb_h1", "bubble", parallel=parallel)
    if "context" in parallel:
        asked["context_parallel"] = {"algorithm": "ring"}
    run_on_ranks(4, rule.hold_all, "llama", (0, 1), [asked], {}, deadline_s=900.0)


@pytest.mark.slow
def test_with_expert_ranks_and_losses_of_routers():
    asked = section("1f1b", "bubble", parallel={"expert": 2}) | ROUTED
    run_on_ranks(4, rule.hold_all, "qwen3_moe", (0, 2), [asked], {"output_router_logits": False}, deadline_s=900.0)


def refused() -> None:
    model = rule.model_of("llama", torch.float32)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    engine = rule.engine_of(model, 1, torch.float32, section("1f1b", "inline"))
    with pytest.raises(ValueError, match=r"pipeline\.recompute, and gradient checkpointing of LlamaModel is on"):
        rule.loss_of(engine, rule.batches(1)[0][0], torch.float32)
    for layers in ({"layers": "all"}, {"modules": ["model.layers.*"]}):
        asked = section("1f1b", "inline", recompute=layers)
        with pytest.raises(
            ValueError, match=r"nothing beside ds_npu\.pipeline\.recompute: layers would be computed tw"
        ):
            rule.engine_of(rule.model_of("llama", torch.float32), 1, torch.float32, asked)


def test_layers_that_would_be_computed_three_times():
    run_on_ranks(2, refused)
