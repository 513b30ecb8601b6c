"""Every two keys beside each other, over families with shared experts, with dense first layers and without gates.

The keys of each run are drawn by the commit's hash until every two of them have met. Keys that save memory change
nothing: losses and weights are, to the bit, those of a run with only the keys that round otherwise. Those runs begin
with the loss of a run without any key, as bfloat16 rounds it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection
from unittest import mock

import decoder_families
import deepspeed
import gradient_rule as rule
import kept_state as rig
import matrix
import pytest
import tiny_models
import torch
from kept_state import Case
from memory_rule import WORLDS
from ranks import run_on_ranks

from ds_npu.config.rules import broken_rules
from ds_npu.config.sections import DsNpuConfig
from ds_npu.memory import state_chunks, swapped_activations

Keys = dict[str, object]
EXACT: dict[str, tuple[str, object]] = {
    "layers": ("recompute", {"layers": 1, "method": "block"}),
    "modules": ("recompute", {"modules": []}),
    "keep": ("recompute", {"keep": ["matmul", "attention"]}),
    "norm": ("recompute", {"norm": True}),
    "activation_function": ("recompute", {"activation_function": True}),
    "attention_core": ("recompute", {"attention_core": True}),
    "swap": ("swap", {"activations": True}),
    "share_fp32": ("optimizer_memory", {"share_fp32": True}),
    "state on the host": ("optimizer_memory", {"swap": True, "resident_gib": 6e-5}),
    "memory_report": ("memory_report", True),
    "overlap": ("moe", {"overlap": True}),
}
"""Switches, by name, whose runs are the same to the bit: the key of the section, and what it holds."""
ROUNDING: dict[str, tuple[str, object]] = {
    "chunked_loss": ("chunked_loss", 4),
    "moments": ("optimizer_memory", {"moments": "bf16"}),
    "fused": ("fused_ops", dict.fromkeys(("rms_norm", "swiglu", "rotary", "cross_entropy"), True)),
    "zero_memory": ("moe", {"zero_memory": "level0"}),
    "grouped_matmul": ("moe", {"grouped_matmul": True}),
    "tensor_overlap": ("tensor_overlap", "pipelined"),
}
MODULES = {
    "gpt2": "transformer.h.2.mlp",
    "gpt_neox": "gpt_neox.layers.0.mlp",
    "qwen2_moe": "**.layers.0.**.shared_expert",
}
"""What of a family is computed again as a module; of all others shared experts of a layer."""
SHARED = ("deepseek_v3", *tiny_models.SHARED_EXPERTS)
"""Families with shared experts that run while tokens travel, and with a dense first layer."""
MOST = 8
"""Switches of one run: where all are on, one hides what another does."""
CLOSE = 0.02
"""Relative, of a first loss in bfloat16."""


def switches(family: str, world: str) -> list[str]:
    """The switches that there is something for."""
    has_experts, parallel = family in (*SHARED, "qwen2_moe"), WORLDS[world][1]
    absent = {
        "overlap": family not in SHARED or "expert" not in parallel,
        "zero_memory": not has_experts,
        "grouped_matmul": not has_experts,
        "tensor_overlap": "sequence_parallel" not in parallel,
    }
    return [each for each in (*EXACT, *ROUNDING) if not absent.get(each)]


def section_of(chosen: Collection[str], family: str) -> Keys:
    """The section, without ``parallel``, that switches on what is ``chosen``."""
    found: Keys = {}
    for name in chosen:
        key, value = (EXACT | ROUNDING)[name]
        if name == "modules":
            value = {"modules": [MODULES.get(family, "**.layers.2.mlp.shared_experts")]}
        found[key] = {**found.get(key, {}), **value} if isinstance(value, dict) else value
    return found


def is_allowed(section: Keys, world: str) -> bool:
    config = DsNpuConfig.model_validate(section | {"parallel": WORLDS[world][1]})
    return not list(broken_rules(config, frozenset()))


def drawn(family: str, world: str, seed: str) -> list[tuple[str, ...]]:
    """Sets of switches in which every two meet that may stand beside each other."""
    names, chance = switches(family, world), random.Random(f"{seed} {family} {world}")
    # What results of modules are kept is said beside modules only.
    wanted = {
        frozenset(pair)
        for pair in itertools.combinations(names, 2)
        if is_allowed(section_of({*pair, *(["layers"] if "keep" in pair else [])}, family), world)
    }
    found = []
    while wanted:
        tries = []
        for _ in range(30):
            pair = chance.choice(sorted(map(sorted, wanted)))
            more = chance.sample(names, MOST - 2)
            chosen = {*pair, *more, *(["layers"] if "keep" in (*pair, *more) else [])}
            tries += [chosen] if is_allowed(section_of(chosen, family), world) else []
        best = max(tries, key=lambda each: (sum(pair <= each for pair in wanted), sorted(each)))
        wanted -= {pair for pair in wanted if pair <= best}
        found.append(tuple(each for each in names if each in best))
    return found


def run(case: Case, section: Keys) -> list[torch.Tensor]:
    """Losses, the last norm and the weights of three steps in bf16."""
    if case.family in tiny_models.ALL:
        model = tiny_models.tiny(case.family, torch.float32, num_hidden_layers=3).to(torch.bfloat16)
    else:
        model = decoder_families.made(case.family).to(torch.bfloat16)
    config = case.config({})
    config["ds_npu"] |= section
    with mock.patch.object(state_chunks, "CHUNK", rig.CHUNK):
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    torch.manual_seed(5)
    return [*rig.train(engine), *rig.weights_of(engine)]


def all_pairs(family: str, world: str, stage: int, seed: str) -> None:
    rule.without_extension()
    swapped_activations.LEAST_BYTES = 1
    case = Case(stage, parallel=tuple(WORLDS[world][1].items()), family=family)
    plain = run(case, {})
    expected = {(): plain}
    for chosen in drawn(family, world, seed):
        rounding = tuple(each for each in chosen if each in ROUNDING)
        if rounding not in expected:
            expected[rounding] = run(case, section_of(rounding, family))
            first, without = float(expected[rounding][0]), float(plain[0])
            assert abs(first - without) <= CLOSE * abs(without), (family, world, stage, rounding, first, without)
        found = run(case, section_of(chosen, family))
        assert rig.alike(found, expected[rounding]), (family, world, stage, section_of(chosen, family))


CORNERS = [("deepseek_v3", "expert 2", 1), ("gpt2", "data 2", 2)]
CASES = [
    *CORNERS,
    *((family, "expert 2", stage) for family in tiny_models.SHARED_EXPERTS for stage in (0, 2, 3)),
    *(("deepseek_v3", world, stage) for world in ("data 2", "tensor 2", "expert 2") for stage in (0, 2, 3)),
    *(("gpt2", world, stage) for world in ("tensor 2", "sequence parallel", "context 2") for stage in (1, 3)),
    *((family, "data 2", stage) for family in ("gpt_neox", "qwen2_moe") for stage in (1, 3)),
]


@pytest.mark.parametrize(("family", "world", "stage"), CASES)
def test_every_two_switches_meet(family, world, stage):
    found = [set(each) for each in drawn(family, world, matrix.seed())]
    names = switches(family, world)
    apart = [pair for pair in itertools.combinations(names, 2) if not any(each.issuperset(pair) for each in found)]
    assert len(names) >= 10 and not [pair for pair in apart if is_allowed(section_of(pair, family), world)], apart


@pytest.mark.slow
@pytest.mark.matrix(corners=2, drawn=1)
@pytest.mark.parametrize(("family", "world", "stage"), CASES)
def test_every_two_keys_of_a_family(family, world, stage):
    run_on_ranks(WORLDS[world][0], all_pairs, family, world, stage, matrix.seed(), deadline_s=900.0)
