"""Copies in peers' memory that are written while all ranks live: their files against those of a save that blocks."""

from __future__ import annotations

from pathlib import Path

import background_lives
import layout_lives as lives
import torch
import torch.distributed as dist

from ds_npu.checkpoint.wholeness import found_checkpoint, verify

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
