"""Loading, generation, saving and LoRA of families with roles of their own kinds, over two tensor ranks."""

from __future__ import annotations

from pathlib import Path

import family_uses
import pytest
from ranks import run_on_ranks

REFUSED = {("gpt_oss", "lora"), ("llama4_text", "lora")}
"""What is refused by name: adapters of experts."""


def hold(kind: str, folder: str) -> None:
    found = {name: family_uses.outcome(use, kind, Path(folder) / name) for name, use in family_uses.USES.items()}
    expected = {name: "refused" if (kind, name) in REFUSED else "yes" for name in found}
    assert {name: each.partition(":")[0] for name, each in found.items()} == expected, found


@pytest.mark.slow
@pytest.mark.matrix(corners=1, drawn=0)
@pytest.mark.parametrize("kind", ["olmo2", "gpt_neox", "bloom", "gpt_oss", "falcon", "afmoe", "bitnet", "ctrl", "opt"])
def test_a_family_in_use(kind, tmp_path):
    run_on_ranks(2, hold, kind, str(tmp_path), deadline_s=300.0)
