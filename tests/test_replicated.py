"""A module that is whole on each tensor rank, beside sequence shards: exact whatever it does, or refused by name."""

from __future__ import annotations

import decoder_families as families
import pytest
import torch.distributed as dist
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


def parts(kind: str, blocks: str) -> list[str]:
    """By glob, every module in a block of the family, blocks that differ included."""
    model = families.made(kind)
    found: dict[str, None] = {}
    for block in model.get_submodule(blocks.removesuffix(".*")):
        held = ((name, each) for name, each in block.named_modules() if name and list(each.parameters()))
        found.update(dict.fromkeys(f"{blocks}.{name}" for name, each in held if not isinstance(each, nn.ModuleList)))
    return list(found)


def every_part(kind: str, sequence_parallel: bool) -> None:
    exact = []
    for glob in parts(kind, FAMILIES[kind]):
        found = families.outcome(kind, 2, sequence_parallel, ALSO.get(kind, {}) | {glob: "replicated"})
        assert found == "exact" or found.startswith("refused"), (glob, found)
        if found == "exact":
            exact.append(glob.removeprefix(f"{FAMILIES[kind]}."))
        else:
            assert glob.removesuffix(".*") and glob.rpartition(".")[2] in found, (glob, found)
        if dist.get_rank() == 0:
            print(kind, sequence_parallel, glob, found[:150], flush=True)
    # What stands in the block itself can always be whole.
    assert {name for name in parts_of_block(kind) if name not in exact} == set()


def parts_of_block(kind: str) -> set[str]:
    named = (glob.removeprefix(f"{FAMILIES[kind]}.") for glob in parts(kind, FAMILIES[kind]))
    return {name for name in named if "." not in name}


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
