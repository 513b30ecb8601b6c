"""Each decoder of transformers, over tensor ranks, with sequence shards, and over context ranks: exact, or refused.

The corners are families that differ, and those that were wrong once.
"""

from __future__ import annotations

import decoder_families as families
import pytest
from ranks import run_on_ranks
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

SETTINGS = {"tensor": (2, False), "sequence": (2, True), "context": (1, False)}
"""Tensor ranks, and whether activations are sharded between their regions."""
EXACT, STATE = "exact", "layers with a state"
CASES: list[tuple[str, str, dict[str, str], str]] = [
    # Nobody needs a tensor plan to shard a sequence.
    ("olmo2", "context", {}, EXACT),
    ("phi", "context", {}, EXACT),
    ("gpt_neox", "context", {}, EXACT),
    ("opt", "context", {}, EXACT),
    ("stablelm", "context", {}, EXACT),
    ("starcoder2", "context", {}, EXACT),
    ("nemotron", "context", {}, EXACT),
    # Makes a mask of a window of 0, which no layer uses.
    ("qwen2_moe", "context", {}, EXACT),
    # The reason comes first, not a list of roles.
    ("mamba", "context", {}, "refused: ds_npu.parallel.context: MambaForCausalLM has layers.0.mixer (MambaMixer)"),
    ("jamba", "context", {}, "refused: ds_npu.parallel.context: JambaForCausalLM has layers.0.mamba (JambaMamba"),
    ("rwkv", "context", {}, f"refused: ds_npu.parallel.context: RwkvForCausalLM has {STATE}"),
    ("llama4_text", "context", {}, EXACT),
    ("longcat_flash", "context", {}, EXACT),
    ("minimax", "context", {}, "refused: ds_npu.parallel.context: MiniMaxForCausalLM has linear_attention"),
    ("bloom", "context", {}, "refused: ds_npu.parallel.context: BloomForCausalLM computes its"),
    ("doge", "context", {}, "refused: ds_npu.parallel.context: DogeForCausalLM has no stack of blocks"),
    # Hidden states without a sequence dim, and biases for all heads.
    ("opt", "tensor", {}, EXACT),
    ("opt", "sequence", {}, "refused: ds_npu.parallel.sequence_parallel: found hidden states"),
    ("hy_v3", "sequence", {}, "refused: ds_npu.parallel.sequence_parallel: found hidden states"),
    ("bloom", "tensor", {}, EXACT),
    ("bloom", "sequence", {}, EXACT),
    ("mpt", "tensor", {}, EXACT),
    # Mamba 2 with one group, beside attention, and short convolutions.
    ("falcon_h1", "sequence", {}, EXACT),
    ("lfm2", "sequence", {}, EXACT),
    # Blocks are given inputs of each token beside hidden states.
    ("gemma4_text", "sequence", {}, EXACT),
    # Attention that is given three hidden states.
    ("ctrl", "tensor", {}, EXACT),
    ("ctrl", "sequence", {}, EXACT),
]


def hold(cases: list[tuple[str, str, dict[str, str], str]]) -> None:
    wrong = []
    for kind, setting, globs, expected in cases:
        found = families.outcome(kind, *SETTINGS[setting], globs)
        if not found.startswith(expected):
            wrong.append((kind, setting, found))
    assert not wrong, wrong


def test_families_that_differ():
    run_on_ranks(2, hold, CASES)


def every_setting(kind: str) -> None:
    found = {name: families.outcome(kind, *setting) for name, setting in SETTINGS.items()}
    bad = {name: each for name, each in found.items() if not each.startswith((EXACT, "refused", "one process"))}
    assert not bad, (kind, bad)


@pytest.mark.slow
@pytest.mark.matrix(drawn=2)
@pytest.mark.parametrize("kind", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_every_family_is_exact_or_refused(kind):
    if not families.is_buildable(kind):
        pytest.skip("no tiny model of it can be made from the sizes that all families share")
    run_on_ranks(2, every_setting, kind, deadline_s=600.0)
