"""``ds_npu.swap`` in DeepSpeed's engine: losses and weights of a run with it are those without, to the bit."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from adapted_models import ATTENTION, MLP, adapted
from coded_activations import code_everything, overflow_bytes
from gradient_rule import without_extension
from memory_rule import DROPS, WORLDS, same
from ranks import run_on_ranks

from ds_npu.memory import swapped_activations

SWAP: dict[str, object] = {"swap": {"activations": True}}
VARIANTS: dict[str, dict[str, object]] = {
    "blocks": SWAP,
    "modules": {"swap": {"activations": ["**.mlp", "**.*attn*"]}},
    "inputs": SWAP | {"recompute": {"layers": "all"}},
    "runs": SWAP | {"recompute": {"layers": 2, "method": "uniform"}},
    "outputs": SWAP | {"recompute": {"norm": True, "activation_function": True}},
    "compressed": {"swap": {"activations": True, "compress": True}},
    "chunked": SWAP | {"chunked_loss": 4, "recompute": {"norm": True}},
}
STAGES = (0, 1, 2, 3)
CORNERS = [
    ("sequence parallel", "gpt2", (0, 3)),
    ("context 2", "llama", (1, 3)),
    ("expert 2", "qwen3_moe", (2, 3)),
]
CASES = [(world, family, STAGES) for world in WORLDS for family in ("llama", "gpt2", "qwen3_moe")]


def begin() -> None:
    """Swap and code everything; half of what is coded does not fit into the codes."""
    without_extension()
    swapped_activations.LEAST_BYTES = 1
    code_everything(pytest.MonkeyPatch(), 1 / 4)


def each_stage(family: str, parallel: dict[str, object], stages: tuple[int, ...]) -> None:
    begin()
    changes = DROPS.get(family, {}) | {"num_hidden_layers": 3}
    # Another sum of the loss than a whole one.
    variants = {name: each for name, each in VARIANTS.items() if name != "chunked"}
    for stage in stages:
        section = {"parallel": parallel}
        same(lambda: tiny_models.tiny(family, torch.float32, **changes), stage, section, variants)
        chunked = section | {"chunked_loss": 4}
        same(
            lambda: tiny_models.tiny(family, torch.float32, **changes), stage, chunked, {"chunked": VARIANTS["chunked"]}
        )
    assert overflow_bytes() > 0


def in_stages(schedules: tuple[str, ...]) -> None:
    """Pipelines, some of which leave weight gradients for later; ZeRO 3 does not go with them."""
    begin()
    variants = {name: each for name, each in VARIANTS.items() if name != "chunked"}
    for schedule in schedules:
        for stage in (0, 1):
            section = {"parallel": {"pipeline": 2}, "pipeline": {"schedule": schedule}}
            same(lambda: tiny_models.tiny("llama", torch.float32, num_hidden_layers=6), stage, section, variants)


def with_adapters() -> None:
    begin()
    for stage in (0, 3):
        same(lambda: adapted("llama", ATTENTION + MLP, lora_dropout=0.2).float(), stage, {}, {"blocks": SWAP})


@pytest.mark.slow
@pytest.mark.matrix(corners=len(CORNERS), drawn=1)
@pytest.mark.parametrize(("world", "family", "stages"), [*CORNERS, *CASES], ids=str)
def test_a_swapped_run_is_that_without_to_the_bit(world, family, stages):
    ranks, parallel = WORLDS[world]
    if "expert" in parallel and family != "qwen3_moe":
        pytest.skip("without experts")
    run_on_ranks(ranks, each_stage, family, parallel, stages, deadline_s=900.0)


@pytest.mark.slow
@pytest.mark.parametrize("schedules", [("1f1b", "zb_h1"), ("zb_v", "dualpipe_v")], ids=str)
def test_swapped_in_pipeline_stages(schedules):
    run_on_ranks(2, in_stages, schedules, deadline_s=900.0)


@pytest.mark.slow
def test_swapped_adapters_beside_frozen_weights():
    """ZeRO-3 keeps no frozen weight gathered."""
    run_on_ranks(2, with_adapters)
