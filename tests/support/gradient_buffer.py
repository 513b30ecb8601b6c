"""A model whose linear layers are used in every way, trained by a DeepSpeed engine and by plain float64 PyTorch.

Shape letters: B batch, S sequence, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import gradient_rule as rule
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from ds_npu.zero_ext.gradient_buffer import install_gradient_buffers

V, H, INNER = rule.V, rule.H, 24
STEPS = 2
CHECKPOINTS: dict[str, Callable[..., torch.Tensor] | None] = {
    "none": None,
    "not reentrant": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "DeepSpeed's": lambda block, x: deepspeed.checkpointing.checkpoint(block, x),
}


class Model(nn.Module):
    """Linears with and without bias, one used twice, one frozen, one transposed, and a head tied to the embedding."""

    def __init__(self, checkpointing: str = "none", depth: int = 1) -> None:
        torch.manual_seed(3)
        super().__init__()
        self.embedding = nn.Embedding(V, H)
        self.up, self.twice, self.down = nn.Linear(H, INNER, bias=False), nn.Linear(INNER, INNER), Conv1D(H, INNER)
        nn.init.normal_(self.down.weight, std=0.2)
        self.frozen = nn.Linear(H, H).requires_grad_(False)
        self.norm = nn.LayerNorm(H)
        self.head = nn.Linear(H, V, bias=False)
        self.head.weight = self.embedding.weight
        self.checkpointing, self.depth = checkpointing, depth

    def block(self, x_BSH: torch.Tensor) -> torch.Tensor:
        inner = self.up(x_BSH)
        return x_BSH + self.frozen(self.down(torch.tanh(self.twice(torch.tanh(self.twice(inner))))))

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        x_BSH = self.embedding(tokens_BS)
        recompute = CHECKPOINTS[self.checkpointing]
        for _ in range(self.depth):
            x_BSH = self.block(x_BSH) if recompute is None else recompute(self.block, x_BSH)
        return self.head(self.norm(x_BSH))


@dataclass(frozen=True)
class Case:
    """How an engine accumulates gradients."""

    stage: int
    dtype: torch.dtype
    accumulated: str | None = None
    """grad_accum_dtype."""
    zero: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    checkpointing: str = "none"
    autocast: bool = False
    depth: int = 1
    """How often the block is used: a reentrant recomputation brings the gradients of each use by themselves."""

    def config(self) -> dict[str, Any]:
        config = rule.config(self.stage, self.dtype, {}, **self.zero)
        config["fp16"] = {"enabled": self.dtype == torch.float16, "loss_scale": 64}
        for key, value in self.more.items():
            config[key] = {**config[key], **value} if isinstance(value, dict) else value
        if self.accumulated:
            config["data_types"] = {"grad_accum_dtype": self.accumulated}
        return config


@dataclass(frozen=True)
class Trained:
    """Of the last of STEPS steps."""

    gradients: dict[str, torch.Tensor]
    norm: float
    weights: dict[str, torch.Tensor]
    losses: list[float]


class Allocations(TorchDispatchMode):
    """Which operators were called while it was on, and which of them allocated one of ``sizes`` elements."""

    def __init__(self, sizes: set[int]) -> None:
        super().__init__()
        self.sizes = sizes
        self.found: list[str] = []
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage(each) for each in tree_leaves((args, kwargs)) if torch.is_tensor(each)}
        out = func(*args, **(kwargs or {}))
        self.calls[func.name()] += 1
        for each in tree_leaves(out):
            if torch.is_tensor(each) and _storage(each) not in given:
                elements = each.untyped_storage().nbytes() // each.element_size()
                self.found += [func.name()] if elements in self.sizes else []
        return out


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def start(case: Case) -> Model:
    return Model(case.checkpointing, case.depth).to(torch.float64).to(case.dtype)


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def steps(count: int) -> Iterator[torch.Tensor]:
    """Another batch of ``count`` samples for each step."""
    tokens = rule.samples(count)
    return (tokens.roll(step, dims=1) for step in range(STEPS))


def plain(case: Case, world: int, compute: torch.dtype = torch.float64) -> Trained:
    """One process doing the whole batch in plain PyTorch; ``case`` says where it starts, and whether autocast is on."""
    model = start(Case(case.stage, case.dtype, depth=case.depth)).to(torch.float64).to(compute)
    weights, losses = trainable(model), []
    for tokens in steps(rule.MICRO * rule.ACCUMULATION * world):
        with autocast(case.autocast and compute != torch.float64):
            logits = model(tokens[:, :-1])
        loss = rule.token_loss(logits, tokens[:, 1:])
        found = torch.autograd.grad(loss, list(weights.values()))
        gradients = {name: gradient.double() for name, gradient in zip(weights, found, strict=True)}
        norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()
        losses.append(loss.item())
        with torch.no_grad():
            for name, weight in weights.items():
                weight -= rule.LR * (rule.CLIP / (norm + 1e-6)).clamp(max=1) * gradients[name]
    return Trained(gradients, norm.item(), {name: weight.detach().double() for name, weight in weights.items()}, losses)


def autocast(on: bool, device: str = "cpu") -> Any:
    return torch.autocast(device, torch.bfloat16) if on else nullcontext()


@contextmanager
def engine_of(case: Case) -> Iterator[Any]:
    rule.without_extension()
    model = start(case)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=case.config())
    yield engine
    engine.destroy()


def train(case: Case, direct: bool, watch: Callable[[Any], Any] = lambda engine: nullcontext()) -> Trained:
    """STEPS steps of a DeepSpeed engine; ``watch(engine)`` is around every backward."""
    with engine_of(case) as engine:
        if direct:
            assert install_gradient_buffers(engine) == []
        losses: list[float] = []
        dp, rank = engine.topology.size("dp"), engine.topology.rank("dp")
        for tokens in steps(rule.MICRO * rule.ACCUMULATION * dp):
            batches = tokens.to(engine.device).view(rule.ACCUMULATION, dp, rule.MICRO, rule.S + 1)[:, rank]
            total = 0.0
            for batch in batches:
                with autocast(case.autocast, engine.device.type):
                    logits = engine(batch[:, :-1])
                loss = rule.token_loss(logits, batch[:, 1:])
                total += loss.item() / rule.ACCUMULATION
                with watch(engine):
                    engine.backward(loss)
                if engine.is_gradient_accumulation_boundary():
                    gradients = accumulated(engine)
                engine.step()
            losses.append(mean_loss(total, engine))
        weights = {name: weight.detach().cpu().double() for name, weight in trainable(engine.module).items()}
        return Trained(gradients, float(engine.get_global_grad_norm()), weights, losses)


def mean_loss(share: float, engine: Any) -> float:
    """Averaged over data-parallel ranks."""
    shares = [0.0] * engine.topology.size("dp")
    dist.all_gather_object(shares, share, group=engine.topology.group("dp"))
    return sum(shares) / len(shares)


def accumulated(engine: Any) -> dict[str, torch.Tensor]:
    """Every gradient as the optimizer will see it, whole, on the CPU."""
    return {name: gradient.cpu().double() for name, gradient in _accumulated(engine).items()}


def _accumulated(engine: Any) -> dict[str, torch.Tensor]:
    optimizer, weights = engine.optimizer, trainable(engine.module)
    if type(optimizer).__name__ == "BF16_Optimizer":
        (kept,) = optimizer.fp32_groups_gradients
        return {name: part.view(w.shape) for (name, w), part in zip(weights.items(), kept, strict=True)}
    if engine.zero_optimization_stage() == 0:
        scale = float(vars(optimizer).get("cur_scale", 1))
        return {name: weight.grad.detach() / scale for name, weight in weights.items()}
    if optimizer.cpu_offload:
        parts = [group.grad for group in optimizer.single_partition_of_fp32_groups]
    else:
        parts = [part.flatten() for part in optimizer.averaged_gradients[0]]
    flat = rule.in_order_of_weights(rule.gathered(torch.cat(parts), engine.topology.group("dp")), optimizer, 0)
    offset, found = 0, {}
    for name, weight in weights.items():
        part = flat[offset : offset + weight.numel()]
        found[name] = part.view(weight.shape) / float(optimizer.loss_scale)
        offset += weight.numel()
    return found
