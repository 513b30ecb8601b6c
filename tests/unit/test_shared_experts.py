"""Which blocks compute shared experts after the routed ones, and of what, as their source says."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

from ds_npu.features.experts.shared_experts import shared_call

FAMILIES = [
    ("deepseek_v2", "DeepseekV2Moe", ("shared_experts", True)),
    ("deepseek_v3", "DeepseekV3MoE", ("shared_experts", True)),
    ("glm4_moe", "Glm4MoeMoE", ("shared_experts", True)),
    ("dots1", "Dots1MoE", ("shared_experts", True)),
    ("nemotron_h", "NemotronHMoE", ("shared_experts", True)),
    ("cohere2_moe", "Cohere2MoeSparseMoeBlock", ("shared_experts", False)),
    ("hy_v3", "HYV3MoE", ("shared_experts", False)),
    ("flint", "FlintSparseMoeBlock", ("shared_expert", False)),
    # Shared experts first, and a gate after; or of another tensor.
    ("qwen2_moe", "Qwen2MoeSparseMoeBlock", None),
    ("qwen3_next", "Qwen3NextSparseMoeBlock", None),
    ("ernie4_5_moe", "Ernie4_5_MoeSparseMoeBlock", None),
    ("aria", "AriaTextMoELayer", None),
    ("inkling", "InklingMoE", None),
    ("qwen3_moe", "Qwen3MoeSparseMoeBlock", None),
]


class Children(nn.Module):
    """The children of a block; its forward is another class's."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Linear(2, 2)
        self.shared_experts, self.shared_expert = (nn.Sequential(nn.Linear(2, 2)) for _ in range(2))
        self.shared_expert_gate = nn.Linear(2, 2)


def found(block: nn.Module) -> tuple[str, bool] | None:
    call = shared_call(block, "experts")
    return call and (call.shared, call.of_block_input)


@pytest.mark.parametrize(("family", "name", "expected"), FAMILIES)
def test_families(family, name, expected):
    kind = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)
    block = type(name, (Children,), {"forward": kind.forward})()
    assert found(block) == expected


class Own(Children):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = x
        x = x.flatten(0, 1)
        if self.training:
            out = self.experts(x)
            x = x + 1
        return out + self.shared_experts(x) + self.shared_experts(kept.detach()) + self.shared_expert(kept)


class Swapped(Children):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared_experts(x) + self.experts(x)


class WithOwnParameter(Children):
    def __init__(self) -> None:
        super().__init__()
        self.shared_experts.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x) + self.shared_experts(x)


def test_own_blocks():
    assert found(Own()) == ("shared_expert", True)
    assert found(Swapped()) is None
    # ZeRO 3 gathers it in hooks of a call that does not come in time.
    assert found(WithOwnParameter()) is None
    nameless = Own()
    nameless.forward = eval("lambda x: x")
    assert found(nameless) is None
