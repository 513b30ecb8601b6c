"""Every two keys that save memory beside each other, on every axis: the training is that without, to the bit.

A run has several keys at once, and each two of all keys meet in some run. A loss of chunks and moments in fewer bits
round otherwise: beside them the others change nothing of what these change alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
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

from ds_npu.config.rules import broken_rules
from ds_npu.config.sections import DsNpuConfig
from ds_npu.memory import state_chunks, swapped_activations

Keys = dict[str, object]
RECOMPUTE: list[Keys] = [
    {"layers": "all"},
    {"layers": 2, "method": "uniform", "keep": ["matmul"]},
    {"norm": True},
    {"activation_function": True},
    {
        **{"layers": 1, "method": "block", "keep": ["matmul", "attention"]},
        **{"norm": True, "activation_function": True, "attention_core": True},
    },
]
OPTIMIZER: list[Keys] = [
    {"share_fp32": True},
    {"swap": True},
    {"share_fp32": True, "swap": True, "resident_gib": 6e-5},
    {"moments": "bf16", "share_fp32": True, "swap": True, "resident_gib": 6e-5},
    {"moments": "int8", "share_fp32": True, "swap": True, "resident_gib": 6e-5},
]
WORLDS_OF_PAIRS = WORLDS | {
    "pipeline 2": (2, {"pipeline": 2}),
    "pipeline 2 x tensor 2": (4, {"pipeline": 2, "tensor": 2}),
}
REFUSED = {"tensor 2", "sequence parallel", "tensor 2 x context 2", "pipeline 2", "pipeline 2 x tensor 2"}
"""Worlds without moments in int8."""


def sections(world: str) -> Iterator[Keys]:
    """Of all runs in this world."""
    own = [each for each in OPTIMIZER if each.get("moments") != "int8" or world not in REFUSED]
    for (i, recompute), (j, optimizer) in itertools.product(enumerate(RECOMPUTE), enumerate(own)):
        section: Keys = {"recompute": recompute, "optimizer_memory": optimizer}
        section |= {"swap": {"activations": True}} if (i + j) % 2 else {}
        section |= {"chunked_loss": 4} if (i + 2 * j) % 5 < 2 else {}
        yield section | ({"memory_report": True} if (i + 3 * j) % 5 < 2 else {})


def switches(section: Keys) -> set[str]:
    """What ``section`` switches on."""
    nested = (
        (f"{key}.{name}", each) for key, own in section.items() if isinstance(own, dict) for name, each in own.items()
    )
    flat = ((key, each) for key, each in section.items() if not isinstance(each, dict))
    return {f"{path} {value}" if path.endswith("moments") else path for path, value in (*nested, *flat)}


@pytest.mark.parametrize("world", WORLDS_OF_PAIRS)
def test_each_two_keys_meet(world):
    found = list(map(switches, sections(world)))
    every = sorted(set.union(*found))
    bits = {"optimizer_memory.moments bf16", "optimizer_memory.moments int8"}
    assert len(every) == 14 - (world in REFUSED) and bits.intersection(every)
    for pair in itertools.combinations(every, 2):
        assert set(pair) == bits or any(each.issuperset(pair) for each in found), pair


@pytest.mark.parametrize("world", WORLDS_OF_PAIRS)
def test_what_is_refused(world):
    for keys in (*sections(world), {"optimizer_memory": OPTIMIZER[-1]}):
        config = DsNpuConfig.model_validate(keys | {"parallel": WORLDS_OF_PAIRS[world][1]})
        is_refused = world in REFUSED and "optimizer_memory.moments int8" in switches(keys)
        paths = [problem.path for problem in broken_rules(config, frozenset())]
        assert paths == (["ds_npu.optimizer_memory.moments"] if is_refused else []), keys


def rounding(section: Keys) -> Keys:
    """The part of ``section`` that changes bits."""
    memory = section["optimizer_memory"]
    assert isinstance(memory, dict)
    own = {key: section[key] for key in ("chunked_loss",) if key in section}
    return own | ({"optimizer_memory": {"moments": memory["moments"]}} if "moments" in memory else {})


def all_pairs(world: str, stage: int) -> None:
    rule.without_extension()
    swapped_activations.LEAST_BYTES = 1
    parallel = WORLDS_OF_PAIRS[world][1]
    case = Case(stage, parallel=tuple(parallel.items()), family="qwen3_moe" if "expert" in parallel else "llama")
    expected: dict[str, list[torch.Tensor]] = {}
    for section in sections(world):
        plain = rounding(section)
        if str(plain) not in expected:
            expected[str(plain)] = run(case, plain)
        assert rig.alike(run(case, section), expected[str(plain)]), (world, stage, section)
    if stage == 3 and "expert" not in parallel:
        adapters(case, world)


def run(case: Case, section: Keys, model: torch.nn.Module | None = None) -> list[torch.Tensor]:
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


def adapters(case: Case, world: str) -> None:
    """LoRA: frozen weights are not left gathered by ZeRO 3, and train as without."""
    expected = run(case, {}, adapted("llama", ATTENTION + MLP).to(torch.bfloat16))
    for place, recompute in enumerate(RECOMPUTE):
        more = {"optimizer_memory": OPTIMIZER[place % 3], "swap": {"activations": place % 2 == 0}}
        model = adapted("llama", ATTENTION + MLP).to(torch.bfloat16)
        assert rig.alike(run(case, {"recompute": recompute} | more, model), expected), (world, recompute)
        kept = [each for each, weight in model.named_parameters() if weight.ds_status.name != "NOT_AVAILABLE"]
        assert not kept, (recompute, kept)


CORNERS = [("data 2", 3), ("pipeline 2", 1)]
CASES = [
    (world, stage)
    for world, (_, parallel) in WORLDS_OF_PAIRS.items()
    for stage in range(4)
    # Refused.
    if stage < 3 or "pipeline" not in parallel
]


@pytest.mark.slow
@pytest.mark.matrix(corners=2, drawn=1)
@pytest.mark.parametrize(("world", "stage"), [*CORNERS, *(each for each in CASES if each not in CORNERS)])
def test_each_two_keys_beside_each_other(world, stage):
    run_on_ranks(WORLDS_OF_PAIRS[world][0], all_pairs, world, stage, deadline_s=1800.0)
