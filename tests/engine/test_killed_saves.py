"""A process that is killed at each write, flush and rename of a save: what is whole afterwards, and what is not."""

from __future__ import annotations

import os
import types
from pathlib import Path

import killed_ranks
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from ds_npu.checkpoint.files import CheckpointError
from ds_npu.checkpoint.manifest import MODULE, Manifest, WrittenPart, WrittenRun, manifest_path
from ds_npu.checkpoint.wholeness import checkpoints_in, newest_whole, verify
from ds_npu.checkpoint.written import WrittenCheckpoint
from ds_npu.engine.checkpoints.agreement import StoreAgreement
from ds_npu.engine.checkpoints.checkpoint_files import CheckpointTransaction

MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"


@pytest.fixture
def store():
    """One rank; a killed child has no threads of its own."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()


def save(folder: Path, tag: str, number: float, store) -> None:
    """Save two files and a manifest, as an engine of one rank does."""
    info = types.SimpleNamespace(save_dir=str(folder), tag=tag)
    agreement = StoreAgreement(store, f"{folder} {tag} {number} {os.getpid()}", 10.0)
    transaction = CheckpointTransaction(TorchCheckpointEngine(), True, agreement)
    transaction.zipfile_serialization = True
    transaction.create(info)
    transaction.makedirs(str(folder / tag), exist_ok=True)
    weight = torch.full((300, 100), number)
    transaction.save({MODULE: {"weight": weight}, "global_steps": number}, str(folder / tag / MODEL))
    transaction.save({"state": {0: {"exp_avg": weight + 1}}}, str(folder / tag / OPTIMIZER))
    runs = WrittenRun(MODEL, (MODULE, "weight"), 0, 0, 30000), WrittenRun(OPTIMIZER, ("state", 0), 0, 0, 30000)
    manifest = Manifest({"weight": WrittenPart((300, 100), value=runs[0], state=runs[1])}, 1, model_file=MODEL)

    def text(made: CheckpointTransaction) -> str:
        found = Manifest(manifest.parts, 1, model_file=MODEL, files=made.fingerprints, digests=made.digests)
        return found.sealed()

    transaction.write_text_last(manifest_path(folder / tag, 0), text)
    try:
        transaction.commit(info)
    finally:
        transaction.remove_unfinished()


def killed_at(count: int, action) -> bool:
    """Run ``action`` in a child that is killed before its system call ``count``; whether it came to its end."""
    child = os.fork()
    if child == 0:
        killed_ranks.kill_before(count)
        try:
            action()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return not os.WIFSIGNALED(status)


def loaded(folder: Path) -> float:
    written = WrittenCheckpoint(folder)
    written.check_files(0, 1)
    weight, state = written.value("weight"), written.state("weight")["exp_avg"]
    written.close()
    assert weight.unique().numel() == 1 and state.equal(weight + 1)
    return float(weight[0, 0])


def is_consistent(folder: Path, tag: str, numbers: set[float]) -> bool:
    """The checkpoint is one of both, or refused by name; ``inspect --verify`` agrees. Returns whether it loads."""
    found = next(each for each in checkpoints_in(folder) if each.folder.name == tag)
    is_whole = not found.problems and not verify(found)
    try:
        assert loaded(folder / tag) in numbers
    except CheckpointError as error:
        assert not is_whole and "What to do: load before, the newest whole checkpoint" in str(error), error
        return False
    assert is_whole
    return True


@pytest.mark.slow
def test_killed_at_every_write_flush_and_rename(tmp_path, store):
    count = outcomes = 0
    is_done = False
    while not is_done:
        folder = tmp_path / f"{count}"
        folder.mkdir()
        save(folder, "before", 1.0, store)
        is_done = killed_at(count, lambda folder=folder: save(folder, "after", 2.0, store))
        named = (folder / "latest").read_text()
        assert loaded(folder / named) == {"before": 1.0, "after": 2.0}[named]
        assert newest_whole(folder) in (folder / named, folder / "after") and loaded(newest_whole(folder)) in (1.0, 2.0)
        outcomes |= 1 << ("before", "after").index(named)
        # A new run saves to the same tag, whatever is there.
        save(folder, "after", 3.0, store)
        assert loaded(folder / "after") == 3.0
        assert not [each for each in folder.rglob("*") if each.name.endswith((".unfinished", ".saving"))]
        count += 1
    assert count > 15 and outcomes == 3


@pytest.mark.slow
def test_killed_while_a_tag_is_saved_again(tmp_path, store):
    count, seen, is_done = 0, set(), False
    while not is_done:
        folder = tmp_path / f"{count}"
        folder.mkdir()
        save(folder, "before", 1.0, store)
        save(folder, "same", 2.0, store)
        is_done = killed_at(count, lambda folder=folder: save(folder, "same", 3.0, store))
        seen.add(is_consistent(folder, "same", {2.0, 3.0}))
        assert loaded(folder / "before") == 1.0
        count += 1
    assert seen == {True, False}


def test_two_runs_that_save_one_checkpoint(tmp_path, store):
    info = types.SimpleNamespace(save_dir=str(tmp_path), tag="same")
    first = CheckpointTransaction(TorchCheckpointEngine(), True, StoreAgreement(store, "first", 10.0))
    first.create(info)
    with pytest.raises(RuntimeError, match=r"same was not saved to .*another run is saving this checkpoint"):
        save(tmp_path, "same", 1.0, store)
    first.remove_unfinished()
    save(tmp_path, "same", 1.0, store)
    assert loaded(tmp_path / "same") == 1.0


def test_a_folder_that_is_read_only(tmp_path, store, monkeypatch):
    save(tmp_path, "before", 1.0, store)
    opened = os.open

    def refuses(path, flags, *args, **kwargs):
        if flags & os.O_CREAT:
            raise OSError(30, "Read-only file system", str(path))
        return opened(path, flags, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuses)
        with pytest.raises(RuntimeError, match=r"after was not saved to .*Read-only file system.*What to do:"):
            save(tmp_path, "after", 2.0, store)
    assert newest_whole(tmp_path) == tmp_path / "before" and (tmp_path / "latest").read_text() == "before"
