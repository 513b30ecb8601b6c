"""What the fused operators do to each family: how often a forward calls them, and the step they are held against."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import tiny_models
import torch
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl

from ds_npu.ops.operator import Operator

ONE_RANK = SimpleNamespace(size=lambda *axes: 1)
"""A topology without process groups."""

KEYS = ("flash_attention", "rms_norm", "swiglu", "rotary", "cross_entropy")
CALLED = {"flash_attention": "attention_forward"}
"""The operator that a forward calls, where it does not have the key's name."""
LAYERS = 2

# Two layers, each with two norms, an attention with queries and keys, and an MLP; a final norm.
LLAMA = {"flash_attention": 2, "rms_norm": 5, "swiglu": 2, "rotary": 4, "cross_entropy": 1}
CALLS: dict[str, dict[str, int]] = {
    "llama": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA | {"rms_norm": 9},
    "mistral": LLAMA,
    "gemma": LLAMA | {"swiglu": 0},  # its gate is a GELU
    "gpt2": {"flash_attention": 2, "rms_norm": 0, "swiglu": 0, "rotary": 0, "cross_entropy": 1},
    "phi3": LLAMA,
    "mixtral": LLAMA,  # the experts of a layer at once
    "qwen3_moe": LLAMA | {"rms_norm": 9},
    "deepseek_v3": LLAMA | {"rms_norm": 9, "swiglu": 3},  # an MLP, experts and shared experts
    # In older releases its function has other arguments, and is kept.
    "qwen2_5_vl": LLAMA | {"rotary": 4 * hasattr(modeling_qwen2_5_vl, "apply_rotary_pos_emb")},
}
"""By family and key, in one forward."""


def tiny(family: str, **changes: object):
    """The model; its experts are computed at once, in products that know float64."""
    changes = {"experts_implementation": "batched_mm"} | changes
    return tiny_models.tiny(family, **({} if family == "gpt2" else changes))


def step(model) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients."""
    ids = tiny_models.tokens(3, 10)
    labels = ids.clone()
    labels[0, :3] = -100
    with tiny_models.Float64():
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
    return loss.item(), {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@contextmanager
def counted():
    """Counts the calls of each operator."""
    calls: Counter[str] = Counter()
    original = Operator.__call__

    def call(self, *args, **kwargs):
        calls[self.name] += 1
        return original(self, *args, **kwargs)

    with mock.patch.object(Operator, "__call__", call):
        yield calls


def expected_calls(family: str, wanted) -> dict[str, int]:
    found = {CALLED.get(key, key): CALLS[family][key] for key in wanted if CALLS[family][key]}
    return found | ({"attention_backward": LAYERS} if "flash_attention" in wanted else {})


def worst(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest relative error of a gradient."""
    assert set(found) == set(expected)
    return max(float((found[name] - true).norm() / true.norm().clamp(min=1e-30)) for name, true in expected.items())
