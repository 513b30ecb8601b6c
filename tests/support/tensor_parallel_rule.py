"""The gradient rule for Hugging Face models over tensor and context ranks, with the real DeepSpeed engine."""

from __future__ import annotations

import math
from dataclasses import dataclass

import gradient_rule as rule
import tiny_models
import torch
import torch.distributed as dist
from gradient_rule import ACCUMULATION, CLIP, LR, MICRO
from torch import nn

from ds_npu.parallel.runtime.placement import placement_of

EXACT = 1e-12
SINGLE = 1e-6
"""ZeRO keeps its masters, and most of its norms, in float32, whatever the model."""
LENGTH = 10
"""A length that neither 4 ranks nor 3 divide."""


def batches(count: int) -> torch.Tensor:
    return tiny_models.tokens(count, LENGTH)


def loss_of(model: nn.Module, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype != torch.float64:
        return model(input_ids=tokens, labels=tokens).loss
    with tiny_models.Float64():
        return model(input_ids=tokens, labels=tokens).loss


def reference(
    family: str, dp: int, dtype: torch.dtype, start: torch.dtype, device: str = "cpu", **changes: object
) -> rule.Reference:
    """From weights rounded to ``start``, in ``dtype``; micro-batch by micro-batch, as an auxiliary loss is a mean."""
    model = tiny_models.tiny(family, torch.float32, **changes).to(start).to(dtype).to(device)
    total = 0.0
    tokens = batches(MICRO * ACCUMULATION * dp)
    for micro in tokens.split(MICRO):
        loss = loss_of(model, micro.to(device), dtype) / (ACCUMULATION * dp)
        loss.backward()
        total += loss.item()
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    gradients = {name: weight.grad.cpu().double() for name, weight in trained.items()}
    norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()
    scale = (CLIP / (norm + 1e-6)).clamp(max=1)
    weights = {name: w.detach().cpu().double() - LR * scale * gradients[name] for name, w in trained.items()}
    return rule.Reference(total, gradients, norm.item(), weights)


def config(stage: int, dtype: torch.dtype, section: dict[str, object]) -> dict[str, object]:
    usual = rule.config(stage, dtype, {}, stage3_param_persistence_threshold=0)
    return usual | {"ds_npu": rule.ON_NPUS | section}


@dataclass(frozen=True)
class Errors:
    """Relative to the reference."""

    loss: float
    gradient: float
    norm: float
    weight: float

    def __post_init__(self) -> None:
        # ``max`` leaves out what is not a number, wherever it does not come first.
        assert all(map(math.isfinite, (self.loss, self.gradient, self.norm, self.weight))), self


def errors_of(
    expected: rule.Reference,
    loss: float,
    gradients: dict[str, torch.Tensor],
    norm: float,
    weights: dict[str, torch.Tensor],
) -> Errors:
    return Errors(
        abs(loss / expected.loss - 1),
        rule.relative(gradients, expected.gradients),
        abs(norm / expected.norm - 1),
        rule.relative(weights, expected.weights),
    )


def engine_step(
    family: str, stage: int, dtype: torch.dtype, section: dict, expected: rule.Reference, **changes
) -> Errors:
    """One step of this world's engine, of a tiny model, against ``expected``."""
    return model_step(tiny_models.tiny(family, torch.float32, **changes).to(dtype), stage, dtype, section, expected)


def model_step(model: nn.Module, stage: int, dtype: torch.dtype, section: dict, expected: rule.Reference) -> Errors:
    """One step of this world's engine of ``model`` against ``expected``."""
    import deepspeed

    trained = [weight for weight in model.parameters() if weight.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config(stage, dtype, section))
    rule.hold_to_whole_weights(model)
    topology = engine.topology
    dp = topology.size("dp")
    mine = batches(MICRO * ACCUMULATION * dp).view(ACCUMULATION, dp, MICRO, LENGTH)[:, topology.rank("dp")]
    share = 0.0
    for index, micro in enumerate(mine):
        loss = loss_of(engine, micro.to(engine.device), dtype)
        share += loss.item() / ACCUMULATION
        engine.backward(loss)
        if index == ACCUMULATION - 1:
            gradients = rule.reduced_gradients(engine, model)
        engine.step()
    named = dict(model.named_parameters())
    gradients = {name: assembled(topology, named[name], part).cpu() for name, part in gradients.items()}
    weights = {name: weight.double() for name, weight in shared(engine.whole_state_dict()).items()}
    norm = float(engine.get_global_grad_norm())
    # Context ranks that share a Hugging Face model's sequences return the whole loss each.
    loss = rule.mean_loss(share / topology.size("cp"), topology)
    return errors_of(expected, loss, gradients, norm, weights)


def assembled(topology, weight: nn.Parameter, part: torch.Tensor) -> torch.Tensor:
    """The whole gradient from the part of each rank that shards the weight; of one that is whole, this rank's own."""
    for axis, sharding in reversed(placement_of(weight).sharded.items()):
        parts: list = [None] * topology.size(axis)
        # On the host: read from an object, a tensor comes back on the device that it was on.
        dist.all_gather_object(parts, part.cpu(), group=topology.group(axis))
        part = sharding.assemble(parts)
    return part


def shared(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What global rank 0 has, on every rank."""
    box = [weights]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def hold_to_one_process(
    family: str, tensor: int, stages: tuple[int, ...], dtype: torch.dtype, changes: dict[str, object]
) -> None:
    """Hold every stage, with and without sequence parallelism, to one process."""
    rule.without_extension()
    dp = dist.get_world_size() // tensor
    expected = reference(family, dp, dtype=torch.float64, start=dtype, **changes)
    bound = None
    if dtype == torch.bfloat16:
        single = reference(family, dp, dtype=dtype, start=dtype, **changes)
        bound = 2 * rule.relative(single.gradients, expected.gradients)
    for sequence_parallel in (False, True) if tensor > 1 else (False,):
        section = {"parallel": {"tensor": tensor, "sequence_parallel": sequence_parallel}}
        for stage in stages:
            errors = engine_step(family, stage, dtype, section, expected, **changes)
            where = (family, tensor, sequence_parallel, stage, errors, bound)
            if bound is not None:
                assert max(errors.gradient, errors.norm) <= bound and errors.loss <= 4e-3, where
                continue
            assert errors.loss <= EXACT and errors.gradient <= EXACT, where
            loose = EXACT if stage == 0 else SINGLE
            assert errors.norm <= loose and errors.weight <= loose, where
