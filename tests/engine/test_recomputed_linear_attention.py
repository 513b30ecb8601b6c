"""Recompute beside gated delta nets, Mamba 2 and short convolutions: what an engine computes is what it does without.

In float32 to the bit, and in float64 to 1e-12 against one process that keeps all.
"""

from __future__ import annotations

from functools import partial
from itertools import product

import gradient_rule as rule
import pytest
import tensor_parallel_rule as dense
import tiny_models
import torch
import torch.distributed as dist
from memory_rule import same
from ranks import run_on_ranks
from torch import nn

LAYERS = {"qwen3_next": "linear_attn", "qwen3_5": "linear_attn", "olmo_hybrid": "linear_attn", "mamba2": "mixer"}
LAYERS |= {"bamba": "mamba", "lfm2": "conv"}
"""The name of a layer of linear attention in a block of each family."""


def variants(family: str) -> dict[str, dict[str, object]]:
    """Sections of ``ds_npu.recompute``: whole blocks, runs of them, and layers of linear attention alone."""
    layers = [f"**.{LAYERS[family]}"]
    sections = {
        "all": {"layers": "all"},
        "uniform": {"layers": 2, "method": "uniform"},
        "kept": {"layers": "all", "keep": ["matmul"]},
        "modules": {"modules": layers},
        "norm": {"norm": True, "modules": layers},
    }
    return {name: {"recompute": each} for name, each in sections.items()}


def model_of(family: str, dtype: torch.dtype, reentrant: bool | None) -> nn.Module:
    """A tiny model; ``reentrant``: how transformers' gradient checkpointing computes its blocks again; None: not."""
    model = tiny_models.tiny(family, torch.float32).to(dtype)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    return model


def to_the_bit(family: str, parallel: dict[str, object], stages: tuple[int, ...]) -> None:
    rule.without_extension()
    for stage in stages:
        make = partial(model_of, family, torch.float32, None)
        same(make, stage, {"parallel": parallel}, variants(family))


def against_one_process(family: str, parallel: dict[str, object], stages: tuple[int, ...]) -> None:
    rule.without_extension()
    tiny_models.compute_again_in_float64(tiny_models.tiny(family))
    dp = dist.get_world_size() // (parallel.get("tensor", 1) * parallel.get("context", 1))
    expected = dense.reference(family, dp, dtype=torch.float64, start=torch.float64)
    cases = [(None, section) for section in variants(family).values()]
    cases += [(False, {}), *([(True, {})] if "context" not in parallel else [])]
    for stage in stages:
        for reentrant, section in cases:
            model, asked = model_of(family, torch.float64, reentrant), {"parallel": parallel} | section
            errors = dense.model_step(model, stage, torch.float64, asked, expected)
            assert max(errors.loss, errors.gradient) <= dense.EXACT, (family, asked, reentrant, stage, errors)


WORLDS: dict[str, dict[str, object]] = {
    "tensor": {"tensor": 2},
    "sequence": {"tensor": 2, "sequence_parallel": True},
    "context": {"context": 2},
    "data": {},
}
CORNERS = [("qwen3_5", "context", (0,)), ("mamba2", "tensor", (1,)), ("olmo_hybrid", "sequence", (3,))]
CASES = [(*each, (0, 1, 3)) for each in product(LAYERS, WORLDS) if each != (tiny_models.FLATTENS, "sequence")]


@pytest.mark.slow
@pytest.mark.matrix(corners=2, drawn=1)
@pytest.mark.parametrize(("family", "world", "stages"), [*CORNERS, *CASES], ids=str)
def test_gradients_are_those_of_one_process(family, world, stages):
    run_on_ranks(2, against_one_process, family, WORLDS[world], stages, deadline_s=600.0)


@pytest.mark.slow
@pytest.mark.matrix(corners=3, drawn=1)
@pytest.mark.parametrize(("family", "world", "stages"), [*CORNERS, *CASES], ids=str)
def test_a_run_is_that_without_to_the_bit(family, world, stages):
    run_on_ranks(2, to_the_bit, family, WORLDS[world], stages, deadline_s=600.0)
