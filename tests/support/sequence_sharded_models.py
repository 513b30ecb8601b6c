"""Tiny models whose sequences are sharded over context ranks, without an engine, and the same in one process.

Context ranks' gradients are added up, as the engine does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import tiny_models
import torch
import torch.distributed as dist
from sharded_models import Pair
from torch import nn

from ds_npu.config.context_algorithm import ContextAlgorithm, algorithm_of
from ds_npu.features.context_parallel.sharded_sequences import shard_sequences
from ds_npu.features.tensor_parallel.sharded_model import shard_model
from ds_npu.models.globs import plan_for
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology

LENGTH = 13
"""No number of ranks divides it, nor twice as many."""
ALGORITHMS = ("ulysses", "ring", "allgather", "hybrid", "double ring")


def algorithm(name: str, context: int) -> ContextAlgorithm:
    """By the names of ``ALGORITHMS``."""
    if name == "double ring":
        return algorithm_of("ring", context, window=2)
    return algorithm_of(name, context, ulysses=2 if name == "hybrid" else None)


@dataclass(frozen=True)
class SequenceSharded(Pair):
    """A model that is sharded, and the plain one that it was."""

    def gradients(self) -> dict[str, torch.Tensor]:
        found = {}
        for weight in self.model.parameters():
            if weight.requires_grad:
                # A rank may have had nothing to do with a weight.
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, gradient in super().gradients().items():
            found[name] = gradient.clone()
            dist.all_reduce(found[name], group=self.topology.group("cp"))
        return found

    def same_gradients(self) -> None:
        for weight in self.plain.parameters():
            if weight.requires_grad and weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        super().same_gradients()


def sequence_sharded(
    family: str,
    chosen: str | Callable[[int, int], ContextAlgorithm] = "ring",
    tensor: int = 1,
    sequence_parallel: bool = False,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
    device: str = "cpu",
    **changes: object,
) -> SequenceSharded:
    """Over all ranks of this world, ``tensor`` of which share weights; the plain model's attention is transformers'."""
    context = dist.get_world_size() // tensor
    topology = Topology(Degrees(cp=context, tp=tensor))
    # A row of padding sees nothing: "eager" would give it a mean.
    options = {"attn_implementation": "sdpa"} | changes
    model, plain = (tiny_models.tiny(family, **options).to(device) for _ in range(2))
    if wrap is not None:
        model, plain = wrap(model), wrap(plain)
    plan = plan_for(model, {} if wrap is None else dict.fromkeys(("prompt", "head"), "replicated"))
    if tensor > 1:
        shard_model(model, plan, topology, sequence_parallel)
    shard_sequences(model, plan, topology, algorithm(chosen, context) if isinstance(chosen, str) else chosen)
    return SequenceSharded(model, plain, topology)


def tokens(samples: int = 3, length: int = LENGTH) -> torch.Tensor:
    return tiny_models.tokens(samples, length)


def padding(kind: str, samples: int = 3, length: int = LENGTH) -> torch.Tensor:
    """An attention mask [B, S]: left, right, both, holes, or none."""
    seen = torch.ones(samples, length, dtype=torch.int64)
    for sample, missing in enumerate((0, 3, 8)):
        if kind in ("left", "both"):
            seen[sample, :missing] = 0
        if kind in ("right", "both") and missing:
            seen[sample, -(missing // 2) :] = 0
    if kind == "holes":
        seen[0, 4:6], seen[1, 0], seen[2, -2:] = 0, 0, 0
    return seen


def padded(kind: str) -> dict[str, torch.Tensor]:
    ids, seen = tokens(), padding(kind)
    return {"input_ids": ids, "attention_mask": seen, "labels": ids.masked_fill(seen == 0, -100)}


def packed(samples: int) -> torch.Tensor:
    """Position ids of documents, uneven ones and some of one token."""
    rows = [[*range(5), 0, *range(7)], [*range(2), *range(9), *range(2)]]
    return torch.tensor(rows[:samples])


def ends() -> dict[str, torch.Tensor | int]:
    """As transformers' DataCollatorWithFlattening gives them, for the first row of ``packed``."""
    cumulative = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
    return {"cu_seq_lens_q": cumulative, "cu_seq_lens_k": cumulative, "max_length_q": 7, "max_length_k": 7}


def step(model: nn.Module, **given: object) -> torch.Tensor:
    """The loss, with gradients."""
    model.zero_grad()
    with tiny_models.Float64():
        loss = model(**given).loss
        loss.backward()
    return loss.detach()
