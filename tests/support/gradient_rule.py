"""The gradient rule: what an engine computes on many ranks, against one process doing the whole batch in plain PyTorch.

The model has no attention, so that context peers may hold different tokens of the same samples. Shape letters: B
batch, S sequence, V vocabulary, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from ds_npu.zero_ext.bucketed_zero import BUCKETED

V, H, S = 13, 8, 8
MICRO, ACCUMULATION = 2, 2
REPLICAS = {"**": "replicated"}
"""Tensor ranks that split nothing, on purpose."""
LR, CLIP = 0.5, 0.1
"""The clip bites: the norm of these gradients is well above it."""


@dataclass(frozen=True)
class Reference:
    """One step of one process."""

    loss: float
    gradients: dict[str, torch.Tensor]
    norm: float
    weights: dict[str, torch.Tensor]
    """After clipping and one step of SGD."""


def layers() -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Embedding(V, H), nn.Linear(H, H), nn.LayerNorm(H), nn.Linear(H, V)]


def token_loss(logits_BSV: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
    """A context peer's share of the mean over all tokens: the shares add up to it."""
    wide = logits_BSV.to(torch.promote_types(logits_BSV.dtype, torch.float32))
    share = functional.cross_entropy(wide.flatten(0, 1), labels_BS.flatten(), reduction="sum")
    return share / (labels_BS.shape[0] * S)


def samples(count: int) -> torch.Tensor:
    return torch.randint(0, V, (count, S + 1), generator=torch.Generator().manual_seed(11))


def reference(count: int, model: nn.Module, compute: torch.dtype = torch.float64) -> Reference:
    """The step on ``count`` samples at once, from the weights of ``model``, which is cast to ``compute``."""
    whole = model.to(torch.float64).to(compute)
    tokens = samples(count)
    loss = token_loss(whole(tokens[:, :-1]), tokens[:, 1:])
    loss.backward()
    gradients = {name: weight.grad.double() for name, weight in whole.named_parameters()}
    norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()
    scale = (CLIP / (norm + 1e-6)).clamp(max=1)
    weights = {name: (w.detach().double() - LR * scale * gradients[name]) for name, w in whole.named_parameters()}
    return Reference(loss.item(), gradients, norm.item(), weights)


ON_NPUS = {"fused_ops": {"matmul_accumulate": True}}
"""What is on by default on NPUs, and off on the CPU, where float64 tells whether it is exact."""


def config(stage: int, dtype: torch.dtype, parallel: dict[str, int], **zero: object) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, **zero},
        "bf16": {"enabled": dtype == torch.bfloat16},
        "ds_npu": {"parallel": parallel, "plan": REPLICAS if parallel.get("tensor", 1) > 1 else {}},
    }


def without_extension() -> None:
    """DeepSpeed's shared-memory collectives take a minute to compile and leave files in /dev/shm."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def pretend_fp16(is_supported: bool) -> None:
    """On this rank DeepSpeed's accelerator says so from now on; by itself it tells by the kind of CPU."""
    from deepspeed.accelerator import get_accelerator

    vars(get_accelerator())["is_fp16_supported"] = lambda: is_supported


def my_batches(topology) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's micro-batches: its samples of the whole batch, its tokens of each sample."""
    dp, cp = topology.size("dp"), topology.size("cp")
    tokens = samples(MICRO * ACCUMULATION * dp)
    mine = slice(topology.rank("cp") * S // cp, (topology.rank("cp") + 1) * S // cp)
    batches = tokens.view(ACCUMULATION, dp, MICRO, S + 1)[:, topology.rank("dp")]
    return [(batch[:, :-1][:, mine], batch[:, 1:][:, mine]) for batch in batches]


def reduced_gradients(engine, model: nn.Module) -> dict[str, torch.Tensor]:
    """Every gradient of this rank as the optimizer will see it, of its whole shard, on the host.

    DeepSpeed's safe_get_full_grad rounds to float32, so its partitions are put together here.
    """
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    stage, optimizer, found = engine.zero_optimization_stage(), engine.optimizer, {}
    if stage == 0:
        graded = {name: weight.grad for name, weight in trained.items() if weight.grad is not None}
        return {name: gradient.detach().clone().cpu().double() for name, gradient in graded.items()}
    names = {id(weight): name for name, weight in trained.items()}
    for index, weights in enumerate(optimizer.fp16_groups if stage == 3 else optimizer.bit16_groups):
        parts = [part.flatten() for part in optimizer.averaged_gradients[index]]
        if stage == 3:
            for weight, part in zip(weights, parts, strict=True):
                flat = gathered(part, weight.ds_process_group)
                found[names[id(weight)]] = flat[: weight.ds_numel].view(weight.ds_shape).cpu().double()
            continue
        flat = gathered(torch.cat(parts), optimizer.real_dp_process_group[index])
        flat, offset = in_order_of_weights(flat, optimizer, index), 0
        for weight in weights:
            found[names[id(weight)]] = flat[offset : offset + weight.numel()].view(weight.shape).cpu().double()
            offset += weight.numel()
    return found


def in_order_of_weights(flat: torch.Tensor, optimizer, index: int) -> torch.Tensor:
    """All partitions of a group, one after the other, in the order of its weights.

    A partition is one n-th of them, or its rank's n-th of each bucket, one bucket after the other.
    """
    bucketed = BUCKETED.get(optimizer)
    if bucketed is None:
        return flat
    size = dist.get_world_size(optimizer.real_dp_process_group[index])
    shards = [each.numel() for each in bucketed.own_slices(index)]
    return torch.cat([each.flatten() for each in flat.view(size, -1).split(shards, dim=1)])


def gathered(part: torch.Tensor, group) -> torch.Tensor:
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts)


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    weights = dict(model.named_parameters())
    with deepspeed.zero.GatheredParameters(list(weights.values())):
        return {name: weight.detach().clone().double() for name, weight in weights.items()}


def hold_to_whole_weights(model: nn.Module) -> None:
    """Fail a backward in which the gradient of a weight comes when ZeRO-3 has released the weight.

    Where other code holds the gradient, autograd copies it into the shape that the weight has then.
    """

    def check(weight: nn.Parameter) -> None:
        assert weight.shape == getattr(weight, "ds_shape", weight.shape), "it is released"

    for weight in model.parameters():
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(check)


def relative(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The norm of all differences over the norm of all that is expected."""
    difference = sum((found[name] - value).square().sum() for name, value in expected.items())
    return float((difference / sum(value.square().sum() for value in expected.values())).sqrt())


def mean_loss(share: float, topology) -> float:
    """Shares added over context peers, averaged over data-parallel ranks."""
    # As objects: HCCL adds no float64.
    shares = [0.0] * topology.size("dp", "cp")
    dist.all_gather_object(shares, share, group=topology.group("dp", "cp"))
    return sum(shares) / topology.size("dp")
