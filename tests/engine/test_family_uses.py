"""Loading, generation, saving and LoRA of families with roles of their own kinds, over two ranks."""

from __future__ import annotations

from pathlib import Path

import family_uses
import pytest
from ranks import run_on_ranks


def hold(kind: str, folder: str) -> None:
    found = {name: family_uses.outcome(use, kind, Path(folder) / name) for name, use in family_uses.USES.items()}
    assert found == dict.fromkeys(family_uses.USES, "yes")


@pytest.mark.slow
@pytest.mark.matrix(corners=1, drawn=0)
@pytest.mark.parametrize("kind", ["gpt_oss", "gpt_neox", "olmo2"])
def test_a_family_in_use(kind, tmp_path):
    run_on_ranks(2, hold, kind, str(tmp_path), deadline_s=300.0)


def hold_linear_attention(kind: str, folder: str) -> None:
    found = {name: family_uses.outcome(use, kind, Path(folder) / name) for name, use in family_uses.USES.items()}
    refused = found.pop("lora")
    assert found == dict.fromkeys(found, "yes")
    assert refused.startswith("refused") and "have adapters (PEFT)" in refused, refused


@pytest.mark.slow
@pytest.mark.matrix(corners=1, drawn=0)
@pytest.mark.parametrize("kind", ["bamba", "lfm2", "olmo_hybrid", "qwen3_next", "granitemoehybrid"])
def test_linear_attention_in_use(kind, tmp_path):
    run_on_ranks(2, hold_linear_attention, kind, str(tmp_path), deadline_s=300.0)
