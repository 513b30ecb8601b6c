"""Copies in peers' memory that are written while all ranks live: their files against those of a save that blocks."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import background_lives
import layout_lives as lives
import pytest
import torch
import torch.distributed as dist

from ds_npu.checkpoint.wholeness import found_checkpoint, verify
from ds_npu.engine.checkpoints import peer_copies

LIMIT_S = 60.0


def life(folder: str, cases: list[tuple[str, int, dict]]) -> None:
    """A copy with a step behind it holds what a save that blocks holds, and a new engine goes on from it."""
    for index, (family, stage, section) in enumerate(cases):
        where = Path(folder, f"{index}")
        keys = {"checkpoint": {"peer_copies": 4, "peer_folder": str(where / "copies")}}
        engine = lives.engine_of(family, stage, section | keys, torch.float32)
        for step in range(2):
            lives.step_of(engine, step, torch.float32)
        engine.save_checkpoint(str(where / "blocking"))
        expected = lives.step_of(engine, 2, torch.float32)
        copies = engine.peer_copies
        assert copies._is_whole.wait(LIMIT_S)
        dist.barrier()
        assert len(copies._own) == len(copies._held) == 1 and copies._held[0].rank == copies._ring.held
        copies.save_all()
        dist.barrier()
        named = (where / "copies" / "latest").read_text()
        found = found_checkpoint(where / "copies" / named)
        assert found is not None and not found.problems and not verify(found)
        background_lives.same_weights(where / "copies" / named, where / "blocking" / "global_step2")
        other = lives.engine_of(family, stage, section, torch.float32)
        assert other.load_checkpoint(str(where / "copies"))[0] is not None and other.global_steps == 2
        assert lives.step_of(other, 2, torch.float32) == expected
        engine.destroy()
        dist.barrier()


def failing_life(folder: str, is_on_thread: bool) -> None:
    """Rank 1 has no memory for its second copy: no rank waits for that one, and the third is an error on all."""
    keys = {"checkpoint": {"peer_copies": 2, "peer_folder": folder}}
    engine = lives.engine_of("llama", 1, keys, torch.float32)
    lives.step_of(engine, 0, torch.float32)
    owner, name = (peer_copies, "file_bytes") if is_on_thread else (peer_copies.CapturedFiles, "save")
    failing = mock.patch.object(owner, name, side_effect=MemoryError("planted"))
    # A step that raises does not come to the sum of the losses.
    with mock.patch.object(lives.rule, "mean_loss"), failing if dist.get_rank() == 1 else nullcontext():
        raises_at_once = dist.get_rank() == 1 and not is_on_thread
        with pytest.raises(MemoryError, match="planted") if raises_at_once else nullcontext():
            lives.step_of(engine, 1, torch.float32)
        dist.barrier()
        said = r"peer_copies: rank 1 could not make its copy: MemoryError: planted\. No .*What to do: "
        with pytest.raises(RuntimeError, match=said):
            lives.step_of(engine, 2, torch.float32)
    dist.barrier()
    engine.destroy()
    assert (Path(folder) / "latest").read_text().startswith("global_step1_copies_")
