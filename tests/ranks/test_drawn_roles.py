"""Roles drawn at random for modules of real families: over tensor ranks each is right, or refused before a step."""

from __future__ import annotations

import random

import decoder_families as families
import pytest
from ranks import run_on_ranks

from ds_npu.config.roles import Role
from ds_npu.models import names

pytestmark = pytest.mark.slow

FAMILIES = (
    *("qwen3_next", "llama", "gpt_neox", "deepseek_v3", "falcon_h1"),
    *("qwen3_moe", "phi3", "olmo2", "gpt_oss", "lfm2"),
)
DRAWS = 12
"""Plans of one world, which is as long as a few of its steps."""


def drawn(kind: str, seed: int) -> dict[str, str]:
    """Roles for one to three groups of modules that differ in their indices only."""
    numbers = random.Random(f"{kind} {seed}")
    every = [names.generic(name) for name, _ in families.made(kind).named_modules() if name]
    chosen = numbers.sample(list(dict.fromkeys(every)), numbers.randint(1, 3))
    return {name: numbers.choice(list(Role)).value for name in chosen}


def right_or_refused(kind: str, seeds: range) -> None:
    for seed in seeds:
        globs = drawn(kind, seed)
        found = families.outcome(kind, 2, False, globs)
        assert found == "exact" or found.startswith("refused"), (seed, globs, found)


@pytest.mark.matrix(corners=1, drawn=1)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_drawn_role_is_right_or_refused(kind, seed):
    run_on_ranks(2, right_or_refused, kind, range(DRAWS * seed, DRAWS * (seed + 1)), deadline_s=300.0)
