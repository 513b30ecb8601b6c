"""A disk that takes no more: one error on every rank that says so, and what was saved before is whole."""

from __future__ import annotations

import resource
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest
import tensor_parallel_rule
import tiny_models
import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from ranks import run_on_ranks

from ds_npu.engine.checkpoints.checkpoint_files import UNFINISHED, CheckpointTransaction

SIZE = 7 * 2**20
FULL = r"the disk /\S*/disk is full: [\d,]{7,} bytes are needed, [\d,]+ are free.*What to do: make room there"


@pytest.fixture
def disk(tmp_path):
    """A folder on a disk of its own of ``SIZE`` bytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def engine_of(stage: int, tensor: int, section: dict | None = None):
    import deepspeed
    import gradient_rule as rule

    rule.without_extension()
    model = tiny_models.tiny("llama", torch.float32, hidden_size=128, intermediate_size=256)
    config = tensor_parallel_rule.config(stage, torch.float32, {"parallel": {"tensor": tensor}, **(section or {})})
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train(engine) -> list[float]:
    losses = []
    for ids in tiny_models.tokens(4 * tensor_parallel_rule.ACCUMULATION, 9).split(2):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def unchanged(folder: Path):
    """The block leaves ``folder`` as it was; ranks wait for each other, since they write together."""
    dist.barrier()
    before = contents(folder)
    dist.barrier()
    yield
    dist.barrier()
    assert contents(folder) == before
    dist.barrier()


def fill_up(filler: Path) -> None:
    """Let rank 0 write ``filler``, which leaves 200,000 bytes of the disk."""
    if dist.get_rank() == 0:
        try:
            filler.write_bytes(bytes(SIZE))
        except OSError:
            filler.write_bytes(bytes(filler.stat().st_size - 200_000))


def fills_up(folder: Path, tensor: int, stages: tuple[int, ...]) -> None:
    for stage in stages:
        engine = engine_of(stage, tensor)
        train(engine)
        saved = folder / f"{stage}"
        engine.save_checkpoint(saved, tag="first", client_state={"seen": 7})
        filler = saved / "filler"
        fill_up(filler)
        after = train(engine)
        with unchanged(folder):
            for tag in ("first", "second"):
                with pytest.raises(RuntimeError, match=f"{tag} was not saved to .*/{stage}: rank .*{FULL}") as caught:
                    engine.save_checkpoint(saved, tag=tag)
                said = [None] * dist.get_world_size()
                dist.all_gather_object(said, str(caught.value))
                assert len(set(said)) == 1 and "\n" not in said[0]
            with pytest.raises((RuntimeError, OSError), match=FULL):
                engine.save_pretrained(saved / "model")
            # DeepSpeed's own road, of a model that is not split, concerns rank 0 alone, and needs a key under ZeRO-3.
            if tensor > 1 or (dist.get_rank() == 0 and stage < 3):
                with pytest.raises((RuntimeError, OSError), match=FULL):
                    engine.save_16bit_model(saved / "16bit")
        assert (saved / "latest").read_text() == "first"
        other = engine_of(stage, tensor)
        path, client_state = other.load_checkpoint(saved)
        assert path is not None and client_state["seen"] == 7 and train(other) == after
        dist.barrier()
        if dist.get_rank() == 0:
            filler.unlink()
        dist.barrier()
        # The engine that could not save trains on, and saves where there is room.
        engine.save_checkpoint(folder / f"{stage}", tag="third")
        assert (saved / "latest").read_text() == "third"
        dist.barrier()
        if dist.get_rank() == 0:
            subprocess.run(["rm", "-r", str(saved)], check=True)
        dist.barrier()


@pytest.mark.parametrize(("tensor", "stages"), [(2, (1,)), pytest.param(1, (0, 2, 3), marks=pytest.mark.slow)])
def test_nothing_is_lost_and_every_rank_says_why(tensor, stages, disk):
    run_on_ranks(2, fills_up, disk, tensor, stages)


def test_files_that_fill_a_disk_together(disk):
    """Each has room by itself: no rank removes what it has written before the others have looked at the disk."""
    ranks = [CheckpointTransaction(TorchCheckpointEngine(), save_latest=False) for _ in range(2)]
    needed = 2 * SIZE // 3

    def write(rank: int) -> None:
        path = disk / f"{rank}{UNFINISHED}"
        path.write_bytes(bytes(SIZE // 2))
        if rank == 0:
            ranks[1].attempt(disk / f"1{UNFINISHED}", lambda: write(1), needed)
        raise RuntimeError("basic_ios::clear: iostream error")  # As torch.save says it.

    ranks[0].attempt(disk / f"0{UNFINISHED}", lambda: write(0), needed)
    for rank, each in enumerate(ranks):
        found = f"{rank}: the disk {disk} is full: {needed:,} bytes are needed, {SIZE // 2:,} are free"
        assert each.failure == found


def is_read_only(folder: Path) -> None:
    """A disk that has become read-only: saves that block and saves behind training, of ZeRO 1 and of tensor ranks."""
    for stage, tensor, behind in ((1, 1, False), (0, 2, True)):
        saved = folder / f"{stage}"
        engine = engine_of(stage, tensor, {"checkpoint": {"asynchronous": behind}})
        engine.save_checkpoint(saved, tag="first")
        engine.finish_saving()
        with unchanged(folder):
            if dist.get_rank() == 0:
                subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
            dist.barrier()
            try:
                said = r"second was not saved to .*rank .*: .*Read-only file system.*What to do:"
                with pytest.raises(RuntimeError, match=said):
                    engine.save_checkpoint(saved, tag="second")
                    engine.finish_saving()
            finally:
                dist.barrier()
                if dist.get_rank() == 0:
                    subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
                dist.barrier()
        engine.save_checkpoint(saved, tag="second")
        engine.finish_saving()
        dist.barrier()
        assert (saved / "latest").read_text() == "second"
        dist.barrier()
        if dist.get_rank() == 0:
            subprocess.run(["rm", "-r", str(saved)], check=True)
        dist.barrier()


def test_a_disk_that_is_read_only(disk):
    run_on_ranks(2, is_read_only, disk)


def fills_up_behind(folder: Path) -> None:
    """Both ranks fill the disk behind training: the next step says so on both, and what was there is whole."""
    engine = engine_of(1, 1, {"checkpoint": {"asynchronous": True}})
    train(engine)
    engine.save_checkpoint(folder, tag="first")
    engine.finish_saving()
    fill_up(folder / "filler")
    with unchanged(folder):
        engine.save_checkpoint(folder, tag="second")
        with pytest.raises(RuntimeError, match=f"behind training.*second was not saved to .*: rank .*{FULL}"):
            engine.finish_saving()
    assert (folder / "latest").read_text() == "first"
    path, _ = engine.load_checkpoint(folder)
    assert path is not None


def test_a_disk_that_is_full_behind_training(disk):
    run_on_ranks(2, fills_up_behind, disk)


def refuses(folder: Path) -> None:
    """One rank alone cannot write: a limit on the size of its files."""
    engine = engine_of(1, 1)
    engine.save_checkpoint(folder, tag="first")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with unchanged(folder):
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, limits[1]))
        try:
            with pytest.raises(RuntimeError, match=r"was not saved .*: rank 1: zero_pp_rank_1_mp_rank_00_optim_states"):
                engine.save_checkpoint(folder, tag="first")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_one_rank_that_cannot_write_stops_no_other(tmp_path):
    run_on_ranks(2, refuses, tmp_path)
