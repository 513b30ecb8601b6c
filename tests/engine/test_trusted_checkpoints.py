"""Nothing in the folder of a checkpoint is run, and damage in it is refused by name, at any layout."""

from __future__ import annotations

import pytest
import trusted_loads
from ranks import run_on_ranks


@pytest.mark.slow
def test_code_other_classes_and_damage(tmp_path):
    run_on_ranks(2, trusted_loads.life, str(tmp_path), deadline_s=400.0)
