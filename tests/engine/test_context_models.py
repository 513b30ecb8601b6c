"""The gradient rule for Hugging Face models whose sequences are sharded: DeepSpeed's engine against one process.

The corners have every algorithm and every stage of ZeRO, tensor ranks and data ranks.
"""

from __future__ import annotations

import gradient_rule as rule
import pytest
import tensor_parallel_rule as tensor_rule
import torch
import torch.distributed as dist
from ranks import run_on_ranks

EXACT = 1e-12
SINGLE = 1e-6
"""ZeRO keeps its masters, and most of its norms, in float32, whatever the model."""
STAGES = (0, 1, 2, 3)
SECTIONS = {
    "ulysses": {"algorithm": "ulysses"},
    "ring": {"algorithm": "ring"},
    "allgather": {"algorithm": "allgather"},
    "hybrid": {"algorithm": "hybrid", "ulysses": 2},
    "double ring": {"algorithm": "ring", "window": 2},
}
CONTEXT = {"hybrid": 4, "double ring": 4}
"""Context ranks, where 2 do not show what an algorithm is."""


def steps(family: str, tensor: int, stages: tuple[int, ...], section: dict[str, object], sequence: bool) -> None:
    """Hold every stage to one process."""
    rule.without_extension()
    context = section["context"]
    dp = dist.get_world_size() // tensor // context
    expected = tensor_rule.reference(family, dp, dtype=torch.float64, start=torch.float64)
    parallel = {"tensor": tensor, "context": context, "sequence_parallel": sequence}
    algorithm = {key: value for key, value in section.items() if key != "context"}
    for stage in stages:
        asked = {"parallel": parallel, "context_parallel": algorithm}
        errors = tensor_rule.engine_step(family, stage, torch.float64, asked, expected)
        where = (family, parallel, algorithm, stage, errors)
        assert errors.loss <= EXACT and errors.gradient <= EXACT, where
        loose = EXACT if stage == 0 else SINGLE
        assert errors.norm <= loose and errors.weight <= loose, where


def hold(family: str, name: str, tensor: int, stages: tuple[int, ...] = STAGES, dp: int = 1) -> None:
    context = CONTEXT.get(name, 2)
    section = SECTIONS[name] | {"context": context}
    world = context * tensor * dp
    run_on_ranks(world, steps, family, tensor, stages, section, tensor > 1, deadline_s=600.0)


def test_two_context_ranks():
    hold("llama", "ring", 1, (1, 3))


CASES = [(family, name, tensor, STAGES) for family in ("llama", "qwen3") for name in SECTIONS for tensor in (1, 2)]
CORNERS = [
    ("llama", "ulysses", 1, (0, 3)),
    ("qwen3", "allgather", 2, (0, 3)),
    ("llama", "ring", 2, (1, 2)),
    ("qwen3", "hybrid", 1, (1, 3)),
    ("llama", "double ring", 1, (0,)),
]


@pytest.mark.slow
@pytest.mark.matrix(corners=len(CORNERS))
@pytest.mark.parametrize(("family", "name", "tensor", "stages"), [*CORNERS, *CASES], ids=str)
def test_every_algorithm_and_stage(family, name, tensor, stages):
    hold(family, name, tensor, stages)


@pytest.mark.slow
def test_data_ranks_beside_context_ranks():
    hold("llama", "ring", 1, (0, 1, 3), dp=2)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v3", "mistral", "gpt2", "gemma", "mixtral"])
def test_other_families(family):
    hold(family, "ulysses" if family == "deepseek_v3" else "ring", 1, (2, 3))
