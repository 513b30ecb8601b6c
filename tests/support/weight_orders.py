"""Models of somebody's own whose weights hold their parts in one of many orders, and roles that can be said of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

HIDDEN, HEADS, HEAD_DIM, COLUMNS = 16, 4, 4, 12
GLOBS = {"embed": "embedding", "layers.*": "block", "layers.*.norm": "norm", "head": "head"}


class Fused(nn.Module):
    """One linear for queries, keys and values, in an ``order``."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order, self.head_dim, self.num_heads = order, HEAD_DIM, HEADS
        self.qkv = nn.Linear(HIDDEN, 3 * HEADS * HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, HIDDEN)

    def forward(self, x):
        y = self.qkv(x)
        if self.order == "by head":
            q, k, v = y.unflatten(-1, (-1, 3, HEAD_DIM)).unbind(-2)
        elif self.order == "by number":
            q, k, v = y.unflatten(-1, (-1, HEAD_DIM, 3)).unbind(-1)
        else:
            parts = dict(zip(self.order, y.chunk(3, -1), strict=True))
            q, k, v = (parts[each].unflatten(-1, (-1, HEAD_DIM)) for each in "qkv")
        return self.out(attended(q, k, v))


class Grouped(nn.Module):
    """Two heads of keys and values for four of queries, ``together`` or by turns."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order, self.head_dim = order, HEAD_DIM
        self.q = nn.Linear(HIDDEN, HEADS * HEAD_DIM)
        self.k, self.v = (nn.Linear(HIDDEN, HEADS // 2 * HEAD_DIM) for _ in range(2))
        self.out = nn.Linear(HEADS * HEAD_DIM, HIDDEN)

    def forward(self, x):
        q, k, v = (each(x).unflatten(-1, (-1, HEAD_DIM)) for each in (self.q, self.k, self.v))
        times = q.shape[-2] // k.shape[-2]
        if self.order == "together":
            k, v = (each.repeat_interleave(times, -2) for each in (k, v))
        else:
            k, v = (each.repeat(1, 1, times, 1) for each in (k, v))
        return self.out(attended(q, k, v))


def attended(q, k, v):
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


class Gated(nn.Module):
    """Gate and up in one linear, in an ``order``."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order
        self.wide, self.narrow = nn.Linear(HIDDEN, 2 * COLUMNS), nn.Linear(COLUMNS, HIDDEN)

    def forward(self, x):
        y = self.wide(x)
        gate, up = (y[..., ::2], y[..., 1::2]) if self.order == "by turns" else y.chunk(2, -1)
        if self.order == "ups first":
            gate, up = up, gate
        return self.narrow(functional.silu(gate) * up)


class Plain(nn.Module):
    """A plain MLP, or one whose columns know of each other."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order
        self.wide, self.narrow = nn.Linear(HIDDEN, COLUMNS), nn.Linear(COLUMNS, HIDDEN)

    def forward(self, x):
        y = self.wide(x)
        return self.narrow(y.softmax(-1) if self.order == "mixed" else functional.gelu(y))


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(HIDDEN), inner

    def forward(self, x):
        return x + self.inner(self.norm(x))


class Net(nn.Module):
    def __init__(self, kind: type, order: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, HIDDEN)
        self.layers = nn.ModuleList(Block(kind(order)) for _ in range(2))
        self.head = nn.Linear(HIDDEN, 11)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


ORDERS = {
    Fused: ("qkv", "kqv", "vkq", "by head", "by number"),
    Grouped: ("together", "by turns"),
    Gated: ("gates first", "ups first", "by turns"),
    Plain: ("plain", "mixed"),
}
HEADS_OF = ("query", "key", "value", "column")
ROLES = {
    Fused: {"qkv": ("query_key_value", "column", "query"), "out": ("attention_output", "row")},
    Grouped: {"q": HEADS_OF, "k": HEADS_OF, "v": HEADS_OF, "out": ("attention_output", "row")},
    Gated: {"wide": ("gate_up", "up", "gate", "column"), "narrow": ("down", "row")},
    Plain: {"wide": ("gate_up", "up", "gate", "column"), "narrow": ("down", "row")},
}
AROUND = {Fused: ("attention",), Grouped: ("attention",), Gated: ("mlp",), Plain: ("mlp",)}


def cases(count: int, seed: int) -> Iterator[tuple[type, str, dict[str, str]]]:
    """A sample of all orders with all roles, as far as roles go: a module's kind, its order, and globs."""
    every = []
    for kind, orders in ORDERS.items():
        for order, around, *roles in itertools.product(orders, (*AROUND[kind], None), *ROLES[kind].values()):
            inner = {f"layers.*.inner.{name}": role for name, role in zip(ROLES[kind], roles, strict=True)}
            every.append((kind, order, GLOBS | ({"layers.*.inner": around} if around else {}) | inner))
    yield from random.Random(seed).sample(every, min(count, len(every)))


def made(kind: type, order: str) -> Net:
    torch.manual_seed(3)
    return Net(kind, order).double()
