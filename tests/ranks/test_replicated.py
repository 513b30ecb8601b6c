"""A module that is whole on each tensor rank, beside sequence shards: exact whatever it does, or refused by name."""

from __future__ import annotations

import decoder_families as families
import pytest
from ranks import run_on_ranks
from torch import nn

FAMILIES = {
    "llama": "model.layers.*",
    "gpt2": "transformer.h.*",
    "mixtral": "model.layers.*",
    "deepseek_v2": "model.layers.*",
    "jamba": "model.layers.*",
}
"""Where the blocks of each are."""
ALSO = {"jamba": {"model.layers.*.mamba": "replicated"}}


def parts(kind: str, blocks: str) -> dict[str, nn.Module]:
    """By glob, every module with weights in the blocks of the family, some of which may differ."""
    found: dict[str, nn.Module] = {}
    for block in families.made(kind).get_submodule(blocks.removesuffix(".*")):
        for name, each in block.named_modules():
            if name and list(each.parameters()) and not isinstance(each, nn.ModuleList):
                found[f"{blocks}.{name}"] = each
    return found


def every_part(kind: str, sequence_parallel: bool) -> None:
    exact = set()
    for glob, module in parts(kind, FAMILIES[kind]).items():
        found = families.outcome(kind, 2, sequence_parallel, ALSO.get(kind, {}) | {glob: "replicated"})
        named = glob.rpartition(".")[2] in found or type(module).__name__ in found
        assert found == "exact" or (found.startswith("refused") and named), (glob, found)
        if found == "exact":
            exact.add(glob)
    # What stands in the block itself can always be whole.
    assert {glob for glob in parts(kind, FAMILIES[kind]) if glob.rpartition(".")[0] == FAMILIES[kind]} <= exact


def both(kinds: list[str]) -> None:
    for kind in kinds:
        for sequence_parallel in (True, False):
            every_part(kind, sequence_parallel)


def test_attention_sees_the_whole_sequence():
    run_on_ranks(2, both, ["gpt2"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind != "gpt2"])
def test_every_part_of_a_block(kind):
    run_on_ranks(2, both, [kind])
