"""Steps in bf16 without ZeRO of a toy model with experts on ranks: gradients, norm, clipping, weights."""

from __future__ import annotations

import deepspeed
import gradient_rule as rule
import tensor_parallel_rule as dense
import torch
import torch.distributed as dist
import toy_experts
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

from ds_npu.parallel.runtime.placement import placement_of
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology
from ds_npu.zero_ext.skipped_steps import reduced_gradients

SINGLE = 2e-6
"""Norms are sums in float32."""


class FusedSGD(FusedAdam):
    """SGD that DeepSpeed takes for one of the fused optimizers, around which it puts another wrapper."""

    def __init__(self, params, lr: float) -> None:
        torch.optim.Optimizer.__init__(self, params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.sub_(group["lr"] * each.grad)


WRAPPERS = {
    (0, torch.optim.SGD): FP16_UnfusedOptimizer,
    (0, FusedSGD): FP16_Optimizer,
    (1, torch.optim.SGD): BF16_Optimizer,
}
"""By the stage of ZeRO, and an optimizer, what DeepSpeed puts around it."""


def started(parallel: dict[str, int], stage: int, kind: type, dtype: torch.dtype = torch.bfloat16):
    shared = parallel.get("tensor", 1) * parallel.get("context", 1)
    sizes = {"tp": parallel.get("tensor", 1), "cp": parallel.get("context", 1), "ep": parallel["expert"]}
    model = toy_experts.Net(Topology(Degrees(dp=dist.get_world_size() // shared, **sizes))).to(dtype)
    config = rule.config(stage, dtype, parallel)
    config["fp16"] = {"enabled": dtype == torch.float16}
    # DeepSpeed's ZeRO 1 in bf16 with gradients in float32 is its BF16_Optimizer.
    config["data_types"] = {"grad_accum_dtype": "fp32"} if stage else {}
    del config["optimizer"]
    engine = deepspeed.initialize(model=model, optimizer=kind(model.parameters(), lr=rule.LR), config=config)[0]
    assert isinstance(engine.optimizer, WRAPPERS.get((stage, kind), FP16_UnfusedOptimizer))
    return engine


def masters(engine) -> dict[str, torch.Tensor]:
    """Of this rank, or its piece of them, by name."""
    return {name: each.detach().clone().double() for name, each in engine.module.named_parameters()}


def backwards(engine) -> None:
    for index, (inputs, labels) in enumerate(rule.my_batches(engine.topology)):
        engine.backward(rule.token_loss(engine(inputs), labels))
        if index < rule.ACCUMULATION - 1:
            engine.step()


def whole_gradients(engine) -> dict[str, torch.Tensor]:
    """Of the loss, as the optimizer has them, put together from all ranks."""
    names = {id(each): name for name, each in engine.module.named_parameters()}
    found = {
        names[id(weight)]: (weight, each.double().view_as(weight))
        for weight, each in reduced_gradients(engine.optimizer)
    }
    return {name: dense.assembled(engine.topology, *found[name]) for name in sorted(found)}


def in_pieces(count: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """One process's gradients, added up in ``dtype`` micro-batch by micro-batch."""
    model = toy_experts.Net(None).to(dtype)
    pieces = rule.samples(count).split(rule.MICRO)
    for tokens in pieces:
        (rule.token_loss(model(tokens[:, :-1]), tokens[:, 1:]) / len(pieces)).backward()
    return {name: each.grad.double() for name, each in model.named_parameters()}


def step(parallel: dict[str, int], stage: int, kind: type) -> None:
    """One clipped step: gradients as near to float64 as twice one process's, the norm theirs, the weights of both."""
    engine, dtype = started(parallel, stage, kind), torch.bfloat16
    count = rule.MICRO * rule.ACCUMULATION * engine.topology.size("dp")
    exact = rule.reference(count, toy_experts.Net(None).to(dtype)).gradients
    backwards(engine)
    found, before = whole_gradients(engine), masters(engine)
    found = {name: each.view_as(exact[name]) for name, each in found.items()}
    error, bound = rule.relative(found, exact), 2 * rule.relative(in_pieces(count, dtype), exact)
    assert error <= bound, (dtype, parallel, stage, kind, error, bound)
    norm = float(torch.cat([each.flatten() for each in found.values()]).norm())
    engine.step()
    told = float(engine.get_global_grad_norm())
    assert abs(told / norm - 1) <= SINGLE, (dtype, parallel, stage, kind, told, norm)
    assert norm > rule.CLIP
    for name, weight in engine.module.named_parameters():
        moved = found[name]
        for axis, sharding in placement_of(weight).sharded.items():
            moved = sharding.take(moved, engine.topology.rank(axis))
        right = before[name] - rule.LR * rule.CLIP / (norm + 1e-6) * moved
        # Masters are float32; what the model has of them is rounded once.
        assert torch.allclose(weight.double(), right, rtol=torch.finfo(dtype).eps, atol=1e-6), (name, parallel)


def all_of(parallel: dict[str, int]) -> None:
    rule.without_extension()
    for stage, kind in WRAPPERS:
        step(parallel, stage, kind)


def resumed(parallel: dict[str, int], folder: str) -> None:
    """A step after a checkpoint is, to the bit, that of the run that wrote it."""
    rule.without_extension()
    for stage, kind in [*WRAPPERS, (0, torch.optim.Adam)]:
        engines = [started(parallel, stage, kind) for _ in range(2)]
        after = []
        for index, engine in enumerate(engines):
            backwards(engine)
            engine.step()
            path = f"{folder}/{stage}{kind.__name__}"
            assert engine.save_checkpoint(path) if index == 0 else engine.load_checkpoint(path)[0]
            backwards(engine)
            engine.step()
            after.append(masters(engine))
            if index == 0:
                # The other one is somewhere else when it loads.
                backwards(engines[1])
                engines[1].step()
        assert all(torch.equal(each, after[1][name]) for name, each in after[0].items()), (parallel, stage, kind)


def fp16_is_refused() -> None:
    import pytest

    rule.without_extension()
    rule.pretend_fp16(True)  # Torch has it on every CPU.
    with pytest.raises(ValueError, match=r"found 2 with FP16_UnfusedOptimizer in fp16"):
        started({"expert": 2}, 0, torch.optim.SGD, torch.float16)
