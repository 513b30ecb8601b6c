"""The gradient rule for Hugging Face models whose experts are on the expert view, with the real DeepSpeed engine."""

from __future__ import annotations

import gradient_rule as rule
import tensor_parallel_rule as dense
import torch
import torch.distributed as dist
import toy_experts
from torch import nn

from ds_npu.parallel.expert.weights import GroupedProduct
from ds_npu.parallel.placement import placement_of


def whole_gradient(engine, weight: nn.Parameter, part: torch.Tensor) -> torch.Tensor:
    """The whole gradient from the part of each rank that shards the weight; of one that is whole, this rank's own."""
    for axis, sharding in reversed(placement_of(weight).sharded.items()):
        parts: list = [None] * engine.topology.size(axis)
        dist.all_gather_object(parts, part, group=engine.topology.group(axis))
        part = sharding.assemble(parts)
    return part


def engine_step(family: str, stage: int, dtype: torch.dtype, section: dict, expected: rule.Reference, **changes):
    """One step of this world's engine against ``expected``."""
    import deepspeed
    import tiny_models

    model = tiny_models.tiny(family, torch.float32, **changes).to(dtype)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    config = dense.config(stage, dtype, section)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
    topology = engine.topology
    dp = topology.size("dp")
    whole = dense.batches(rule.MICRO * rule.ACCUMULATION * dp)
    mine = whole.view(rule.ACCUMULATION, dp, rule.MICRO, -1)[:, topology.rank("dp")]
    share = 0.0
    for index, micro in enumerate(mine):
        loss = dense.loss_of(engine, micro.to(engine.device), dtype)
        share += loss.item() / rule.ACCUMULATION
        engine.backward(loss)
        if index == rule.ACCUMULATION - 1:
            gradients = toy_experts.reduced_gradients(engine, model)
        engine.step()
    named = dict(model.named_parameters())
    gradients = {name: whole_gradient(engine, named[name], part).cpu() for name, part in gradients.items()}
    weights = {name: weight.double() for name, weight in dense.shared(engine.whole_state_dict()).items()}
    norm = float(engine.get_global_grad_norm())
    loss = rule.mean_loss(share / topology.size("cp"), topology)
    return dense.Errors(
        abs(loss / expected.loss - 1),
        rule.relative(gradients, expected.gradients),
        abs(norm / expected.norm - 1),
        rule.relative(weights, expected.weights),
    )


def hold_to_one_process(
    family: str, parallel: dict, moe: dict, stages: tuple[int, ...], more: dict, **changes: object
) -> None:
    """Hold every stage of ZeRO to one process; ``more`` of the section."""
    rule.without_extension()
    dp = dist.get_world_size() // (parallel.get("tensor", 1) * parallel.get("context", 1))
    dtype = torch.float64
    expected = dense.reference(family, dp, dtype=dtype, start=dtype, **changes)
    for stage in stages:
        errors = engine_step(family, stage, dtype, {"parallel": parallel, "moe": moe} | more, expected, **changes)
        where = (family, parallel, moe, more, stage, errors)
        assert errors.loss <= dense.EXACT and errors.gradient <= dense.EXACT, where
        loose = dense.EXACT if stage == 0 else dense.SINGLE
        assert errors.norm <= loose and errors.weight <= loose, where


def sinks_take_products(family: str, moe: dict) -> None:
    """Weight gradients of experts, added where the optimizer accumulates, are those of one process."""
    taken: list[str] = []
    original = GroupedProduct.add_to

    def add_to(product: GroupedProduct, buffer: torch.Tensor) -> bool:
        taken.append(str(buffer.dtype))
        return original(product, buffer)

    GroupedProduct.add_to = add_to  # type: ignore[method-assign]
    more = {"fused_ops": {"matmul_accumulate": True}}
    hold_to_one_process(family, {"expert": 2}, moe, (0, 1), more)
    # From the second micro-batch of a step on: the first one's gradients become the buffers.
    layers = {"mixtral": 2, "qwen3_moe": 1}[family]
    assert taken == ["torch.float64"] * (2 * layers * (rule.ACCUMULATION - 1) * 2), len(taken)
