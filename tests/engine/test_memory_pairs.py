"""Every two keys that save memory beside each other, and on every axis: the training is that of the first one alone."""

from __future__ import annotations

import itertools
from unittest import mock

import deepspeed
import gradient_rule as rule
import kept_state as rig
import pytest
import tiny_models
import torch
from adapted_models import ATTENTION, MLP, adapted
from kept_state import Case
from memory_rule import WORLDS
from ranks import run_on_ranks

from ds_npu.memory import state_chunks, swapped_activations

pytestmark = pytest.mark.slow

EXACT: dict[str, dict[str, object]] = {
    "recompute layers": {"recompute": {"layers": "all"}},
    "recompute outputs": {"recompute": {"norm": True, "activation_function": True, "attention_core": True}},
    "recompute keep": {"recompute": {"layers": 2, "method": "uniform", "keep": ["matmul"]}},
    "swap": {"swap": {"activations": True}},
    "optimizer": {"optimizer_memory": {"share_fp32": True, "swap": True}},
    "report": {"memory_report": True},
}
"""Keys that change no bit."""
OTHERS: dict[str, dict[str, object]] = {
    "chunked loss": {"chunked_loss": 4},
    "int8": {"optimizer_memory": {"moments": "int8"}},
    "bf16 moments": {"optimizer_memory": {"moments": "bf16", "swap": True}},
}
"""Keys that round otherwise: beside each of the others they change what they change alone."""


def pairs() -> list[tuple[str, str]]:
    """A key that may change bits or none, and one that changes none, of different sections."""
    found = [*itertools.permutations(EXACT, 2), *itertools.product(OTHERS, EXACT)]
    keys = EXACT | OTHERS
    return [
        (one, other) for one, other in found if (one in OTHERS or one < other) and not keys[one].keys() & keys[other]
    ]


WORLDS_OF_PAIRS = WORLDS | {"pipeline 2": (2, {"pipeline": 2})}


def is_refused(case: Case, key: str) -> bool:
    """Whether the config is refused; what is said there is tested with the config."""
    axes = dict(case.parallel)
    return (key == "chunked loss" and "pipeline" in axes) or (
        key == "int8" and bool({"tensor", "pipeline"} & set(axes))
    )


def all_pairs(world: str, stage: int) -> None:
    rule.without_extension()
    swapped_activations.LEAST_BYTES = 1
    parallel = WORLDS_OF_PAIRS[world][1]
    case = Case(stage, parallel=tuple(parallel.items()), family="qwen3_moe" if "expert" in parallel else "llama")
    alone: dict[str, list[torch.Tensor]] = {}
    for one, other in pairs():
        if is_refused(case, one):
            continue
        if one not in alone:
            alone[one] = run(case, (EXACT | OTHERS)[one])
        assert rig.alike(run(case, (EXACT | OTHERS)[one] | EXACT[other]), alone[one]), (world, stage, one, other)
    if stage == 3:
        adapters(case)


def run(case: Case, section: dict[str, object], model: torch.nn.Module | None = None) -> list[torch.Tensor]:
    """Losses, the last norm and the weights of three steps."""
    if model is None:
        drops = {} if "context" in dict(case.parallel) or case.family != "llama" else {"attention_dropout": 0.2}
        model = tiny_models.tiny(case.family, torch.float32, num_hidden_layers=4, **drops).to(torch.bfloat16)
    config = case.config({})
    config["ds_npu"] |= section
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    with mock.patch.object(state_chunks, "CHUNK", rig.CHUNK):
        engine = deepspeed.initialize(model=model, model_parameters=weights, config=config)[0]
    torch.manual_seed(5)
    return [*rig.train(engine), *rig.weights_of(engine)]


def adapters(case: Case) -> None:
    """LoRA: frozen weights are not left gathered by ZeRO 3, and train as without."""
    if case.parallel:
        return
    models = [adapted("llama", ATTENTION + MLP).to(torch.bfloat16) for _ in range(1 + len(EXACT))]
    expected = run(case, {}, models[0])
    for (name, section), model in zip(EXACT.items(), models[1:], strict=True):
        assert rig.alike(run(case, section, model), expected), name
        kept = [each for each, weight in model.named_parameters() if weight.ds_status.name != "NOT_AVAILABLE"]
        assert not kept, (name, kept)


CORNERS = [("data 2", 3), ("pipeline 2", 1)]
CASES = [(world, stage) for world in WORLDS_OF_PAIRS for stage in range(4) if (world, stage) != ("pipeline 2", 3)]


@pytest.mark.matrix(corners=2, drawn=1)
@pytest.mark.parametrize(("world", "stage"), [*CORNERS, *(each for each in CASES if each not in CORNERS)])
def test_each_two_keys_beside_each_other(world, stage):
    run_on_ranks(WORLDS_OF_PAIRS[world][0], all_pairs, world, stage, deadline_s=1800.0)
