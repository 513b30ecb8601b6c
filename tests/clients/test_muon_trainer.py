"""The Hugging Face Trainer with Muon on whole matrices: it trains, and resumes to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "support" / "muon_trainer.py"


@pytest.mark.slow
def test_resumed_to_the_bit(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(SCRIPT)]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    for run in ("first", "resume"):
        subprocess.run([*command, str(tmp_path), run], check=True, env=environment, timeout=300)
    first, resumed = (torch.load(tmp_path / f"{run}.pt") for run in ("first", "resume"))
    assert len(first) > 20 and all(torch.equal(first[name], resumed[name]) for name in first)
