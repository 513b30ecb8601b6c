"""ds_npu changes in torch, DeepSpeed, accelerate and transformers what its patch table says, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys

import patched_names
import pytest

from ds_npu.engine.patches import PATCHES


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory):
    """A function from the way ("", "ds_npu" or "planted") to the names and descriptions of a new process."""
    folder = tmp_path_factory.mktemp("names")
    taken = {}

    def take(way):
        if way not in taken:
            command = [sys.executable, patched_names.__file__, str(folder / f"{way}.json"), *([way] if way else [])]
            environ = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
            search = {"PYTHONPATH": f"{patched_names.ROOT}"}
            done = subprocess.run(
                command,
                env={**patched_names.os.environ, **environ, **search},
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            taken[way] = json.loads((folder / f"{way}.json").read_text())
        return taken[way]

    return take


def changed(before, after):
    """The names that are other code, or code where there was none."""
    modules = {name.rpartition(".")[0] for name in before}
    return {
        name
        for name in before.keys() | after.keys()
        if before.get(name) != after.get(name) and name.rpartition(".")[0] in modules
    }


def unexplained(before, after):
    """Changed names that are neither a target of the table nor a ``from ... import`` copy of one."""
    targets = {patch.target for patch in PATCHES}
    originals = {before[target] for target in targets if target in before}
    return {name for name in changed(before, after) if name not in targets and before.get(name) not in originals}


@pytest.mark.slow
def test_the_snapshot_sees_a_lot(snapshot):
    names = snapshot("")
    assert len(names) > 20_000
    assert {
        "torch.nn.modules.linear.Linear.forward",
        "torch.nn.functional.gelu",
        "deepspeed.initialize",
    } <= names.keys()
    assert {"torch.Tensor.backward", "deepspeed.runtime.engine.DeepSpeedEngine.step"} <= names.keys()


def test_the_snapshot_names_no_addresses(snapshot):
    """They differ from process to process, and would drown what is compared below."""
    first = dict(snapshot(""))
    assert not any(" 0x" in said for said in first.values())


def test_exactly_the_table_is_changed(snapshot):
    before, after = snapshot(""), snapshot("ds_npu")
    assert unexplained(before, after) == set()
    # ms-swift has an environment of its own: tests/clients/test_ms_swift.py.
    here = {patch.target for patch in PATCHES if patch.module.partition(".")[0] != "swift"}
    assert here <= changed(before, after)


@pytest.mark.slow
def test_a_planted_patch_would_be_seen(snapshot):
    assert unexplained(snapshot(""), snapshot("planted")) == {
        "torch.nn.modules.linear.Linear.forward",
        "torch.nn.functional.gelu",
        "deepspeed.runtime.pipe.engine.PipelineEngine.planted",
    }


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.target)
def test_every_card_is_filled_in(patch):
    assert all(text.strip() for text in (patch.what, patch.why, patch.upstream, patch.until))
    assert not patch.what.endswith(".")
