"""Two ranks that save a checkpoint together, one of which is killed before one of its system calls."""

from __future__ import annotations

import json
import os
import signal
import types
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import counted_kills
import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from ds_npu.checkpoint.manifest import MODULE, Manifest, WrittenPart, WrittenRun, manifest_path
from ds_npu.checkpoint.wholeness import checkpoints_in, newest_whole, verify
from ds_npu.checkpoint.written import WrittenCheckpoint
from ds_npu.engine.checkpoints.agreement import StoreAgreement
from ds_npu.engine.checkpoints.checkpoint_files import CheckpointTransaction
from ds_npu.parallel.tensor.sharding import Sharding

RANKS, ROWS, COLUMNS = 2, 300, 100
CALLS = ("write", "fsync", "replace", "rename", "unlink")
DONE = "done"
PATIENCE_S = 1.0
"""How long a rank waits for the other one's files."""
HALVES = Sharding(0, ROWS, (((0, ROWS // 2),), ((ROWS // 2, ROWS),)))


def file_of(rank: int) -> str:
    return f"mp_rank_{rank:02d}_model_states.pt"


def save(folder: Path, tag: str, number: float, behind: bool) -> None:
    """Save this rank's half of a weight; ``behind``: with the agreement of saves behind training."""
    rank, info = dist.get_rank(), types.SimpleNamespace(save_dir=str(folder), tag=tag)
    store = dist.distributed_c10d._get_default_store()
    agreement = StoreAgreement(store, f"{tag} {number}", PATIENCE_S) if behind else None
    transaction = CheckpointTransaction(TorchCheckpointEngine(), True, agreement)
    transaction.zipfile_serialization = True
    transaction.create(info)
    transaction.makedirs(str(folder / tag), exist_ok=True)
    half = torch.full((ROWS // 2, COLUMNS), number)
    transaction.save({MODULE: {"weight": half}, "global_steps": number}, str(folder / tag / file_of(rank)))
    run = WrittenRun(file_of(rank), (MODULE, "weight"), 0, 0, half.numel())
    parts = {"weight": WrittenPart((ROWS // 2, COLUMNS), {"tp": HALVES}, {"tp": rank}, value=run)}

    def text(made: CheckpointTransaction) -> str:
        return Manifest(parts, RANKS, model_file=file_of(rank), files=made.fingerprints, digests=made.digests).sealed()

    transaction.write_text_last(manifest_path(folder / tag, rank), text)
    try:
        transaction.commit(info)
    finally:
        transaction.remove_unfinished()


def kill_before(count: int) -> None:
    """Let this process die before its system call ``count``, from 0 on, of those that change files."""
    calls = [count]

    def counted(call: Callable) -> Callable:
        def before(*args, **kwargs):
            calls[0] -= 1
            if calls[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return before

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


def saved_by_two(folder: Path, tag: str, number: float, behind: bool, killed: tuple[int, int] | None = None) -> bool:
    """Save on two ranks; of ``killed``, a rank and a count, the rank is killed before that system call.

    Returns whether both came to their end.
    """
    store, children = folder.parent / f"{folder.name}.{tag}.{number}.store", []
    for rank in range(RANKS):
        children.append(os.fork())
        if children[-1] == 0:
            _rank(store, (folder, tag, number, behind), rank, killed[1] if killed and killed[0] == rank else None)
    signals = [os.WIFSIGNALED(os.waitpid(child, 0)[1]) for child in children]
    assert not any(each for rank, each in enumerate(signals) if killed is None or rank != killed[0]), signals
    return not any(signals)


def _rank(store: Path, given: tuple, rank: int, count: int | None) -> None:
    """The life of a child, which never returns; it ends with 1 where the save raises what it is to raise."""
    code = 2
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=20)
        )
        if count is not None:
            counted_kills.arm(given[0], count)
        save(*given)
        code = 0
    except (RuntimeError, TimeoutError):
        code = 1
    finally:
        os._exit(code)


def tell(given: str) -> None:
    """Print the ``outcomes`` of what JSON gives, as JSON."""
    folder, victim, behind, counts = json.loads(given)
    print(json.dumps(outcomes(Path(folder), victim, behind, counts)), flush=True)


def outcomes(where: Path, victim: int, behind: bool, counts: list[int]) -> list[str]:
    """What ``latest`` names after a save whose rank ``victim`` was killed before each of the calls ``counts``.

    Whatever is there, the newest whole checkpoint is found and loads, nothing half-written is taken for whole, and a
    new run saves to the same tag. DONE follows where the save ended before that call, and no more counts are tried.
    """
    found = []
    for count in counts:
        folder = where / f"{count}"
        folder.mkdir()
        assert saved_by_two(folder, "before", 1.0, behind)
        is_done = saved_by_two(folder, "after", 2.0, behind, (victim, count))
        named = (folder / "latest").read_text()
        assert loaded(folder / named) == {"before": 1.0, "after": 2.0}[named]
        newest = newest_whole(folder)
        assert newest is not None and loaded(newest) in (1.0, 2.0)
        assert not [each for each in checkpoints_in(folder) if not each.problems and verify(each)]
        assert saved_by_two(folder, "after", 3.0, behind)
        assert loaded(folder / "after") == 3.0 and (folder / "latest").read_text() == "after"
        assert not [each for each in folder.rglob("*") if each.name.endswith((".unfinished", ".saving"))]
        found += [named, *([DONE] if is_done else [])]
        if is_done:
            break
    return found


def loaded(folder: Path) -> float:
    """The number that all elements of the checkpoint's weight are."""
    written = WrittenCheckpoint(folder)
    written.check_files(0, 1)
    weight = written.value("weight")
    written.close()
    assert tuple(weight.shape) == (ROWS, COLUMNS) and weight.unique().numel() == 1
    return float(weight[0, 0])
