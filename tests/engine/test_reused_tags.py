"""A checkpoint's tag is saved to again, by a run of another layout: what is loaded is what was saved last."""

from __future__ import annotations

import pytest
import reused_tags as lives
from ranks import run_on_ranks


@pytest.mark.slow
def test_known_and_unknown_layouts(tmp_path):
    run_on_ranks(2, lives.known_and_unknown_layouts, str(tmp_path), deadline_s=400.0)


@pytest.mark.slow
def test_files_of_deepspeed_alone(tmp_path):
    run_on_ranks(2, lives.by_deepspeed_alone, str(tmp_path))


@pytest.mark.slow
def test_fewer_ranks(tmp_path):
    run_on_ranks(4, lives.by_more_ranks, str(tmp_path))
    run_on_ranks(2, lives.by_fewer_ranks, str(tmp_path))
