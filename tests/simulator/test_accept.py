"""``ds_npu accept`` on simulated NPUs: all of it right, and what it says of a kernel and a collective that are not."""

from __future__ import annotations

import json
import re

import pytest
import simulated

DEADLINE_S = 600.0


def accept(folder, *options, sim=()):
    """Exit code and screen of a run, and its file."""
    file = folder / "out.json"
    done = simulated.sim(
        "--devices", "2", *sim, "--", "ds_npu", "accept", "--out", str(file), *options, timeout=DEADLINE_S
    )
    return done, json.loads(file.read_text())


@pytest.mark.slow
def test_all_of_it_passes(tmp_path):
    done, found = accept(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert found["simulated"] is True and "SIMULATED" in done.stdout
    results = {entry["result"] for entry in found["cases"]}
    assert results == {"passed"}
    for group in ("operators", "collectives", "training"):
        assert [entry for entry in found["cases"] if entry["group"] == group], group
    lines = re.findall(r"^\[ *\d+/\d+\] passed ", done.stdout, re.MULTILINE)
    assert len(lines) == len(found["cases"])
    assert done.stdout.splitlines()[-1].endswith("say nothing about a real one.")
    curves = [entry for entry in found["cases"] if entry["group"] == "training"]
    assert all(len(entry["loss"]) == len(entry["expected loss"]) == 20 for entry in curves)


@pytest.mark.slow
def test_a_collective_that_kills_a_rank_is_named_and_the_rest_is_run(tmp_path):
    done, found = accept(tmp_path, "--only", "collectives", sim=("--fault", "aclnnAllGatherMatmul:1@1=exit"))
    assert done.returncode == 1, done.stderr
    bad = [entry for entry in found["cases"] if entry["result"] != "passed"]
    assert [(entry["result"], entry["case"].partition(",")[0]) for entry in bad] == [
        ("crashed", "product fused with an all-gather")
    ] * 2
    assert found["cases"][-1]["result"] == "passed"
    assert all(entry["said"].startswith("rank 1 ended ") and entry["output"] for entry in bad)
    assert "collectives: 2 of 54 did not pass" in done.stdout and "What to do" in done.stdout
