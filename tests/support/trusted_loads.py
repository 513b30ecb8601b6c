"""Checkpoints with damage, with objects of other classes, and with code: each load of them, at both layouts."""

from __future__ import annotations

from pathlib import Path

import layout_lives as lives
import pytest
import torch
import torch.distributed as dist
from checkpoint_loads import states_in

from ds_npu.checkpoint.digests import CHUNK_BYTES
from ds_npu.checkpoint.files import CheckpointError
from ds_npu.cli.main import main
from ds_npu.parallel.tensor.shard_access import allow_shard_access

RAN: list[int] = []
OTHER = {"parallel": {"tensor": 2}}
LAYOUTS: tuple[tuple[int, dict], ...] = ((1, {}), (2, OTHER), (3, {}))
"""The first one writes."""


class Attack:
    """Runs code where it is unpickled."""

    def __reduce__(self):
        return RAN.append, (1,)


class Progress:
    """An object of a user's client_state."""

    def __init__(self, seen: int) -> None:
        self.seen = seen


def engine_of(stage: int, section: dict, **checkpoint: object):
    return lives.engine_of("llama", stage, section | ({"checkpoint": checkpoint} if checkpoint else {}), torch.float32)


def refused(engine, folder: Path, message: str, **given: object) -> str:
    """The load is refused by the same error on all ranks, and the engine's weights are as before."""
    before = states_in(engine, with_masters=True)
    with pytest.raises(CheckpointError, match=message) as caught:
        engine.load_checkpoint(str(folder), **given)
    every: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(every, str(caught.value))
    assert len(set(every)) == 1 and "What to do:" in every[0], every
    after = states_in(engine, with_masters=True)
    with allow_shard_access():
        assert all(map(torch.equal, after, before))
    return every[0]


def on_first_rank(action) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def flip(path: Path, at: int) -> None:
    """Change one bit of the byte ``at`` of a file, whose end is -1."""
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(bytes(data))


def says(folder: Path, *arguments: str) -> int:
    return main(["inspect", str(folder), *arguments])


def life(folder: str) -> None:
    """All of it with one writer, whose engine saves again and again."""
    where = Path(folder)
    engine = engine_of(*LAYOUTS[0])
    lives.step_of(engine, 0, torch.float32)
    engine.save_checkpoint(folder, tag="first", client_state={"seen": 7, "when": {1.5, None}})
    lives.step_of(engine, 1, torch.float32)
    readers = [engine_of(*layout) for layout in LAYOUTS]
    engine.save_checkpoint(folder, tag="attacked", client_state={"mine": Attack()})
    engine.save_checkpoint(folder, tag="strange", client_state={"mine": Progress(3), "other": Attack})
    for reader in readers:
        refused(reader, where, r"model_states\.pt has an object of .*RAN|append|getattr", tag="attacked")
        names = r"has an object of trusted_loads\.Attack, trusted_loads\.Progress, which is not loaded.*allowed_classes"
        refused(reader, where, names, tag="strange")
        assert reader.load_checkpoint(folder, tag="first")[1]["seen"] == 7
    on_first_rank(lambda: [says(where, *given) for given in ((), ("--verify",))])
    on_first_rank(lambda: [says(where / "attacked", *given) for given in ((), ("--verify",))])
    assert RAN == []
    allowed = engine_of(*LAYOUTS[0], allowed_classes=["trusted_loads.Progress", "trusted_loads.Attack"])
    assert allowed.load_checkpoint(folder, tag="strange")[1]["mine"].seen == 3
    with pytest.raises(ValueError, match=r"allowed_classes: trusted_loads\.Nobody is no class"):
        engine_of(*LAYOUTS[0], allowed_classes=["trusted_loads.Nobody"])
    damaged(engine, readers, where)


def damaged(engine, readers: list, where: Path) -> None:
    engine.save_checkpoint(str(where), tag="last")
    of_states = where / "last" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    of_model = where / "last" / "mp_rank_00_model_states.pt"
    whole = r"What to do: copy it again; or load strange, the newest whole checkpoint in "
    spots = [
        (
            of_states,
            of_states.stat().st_size // 2,
            rf"_optim_states\.pt: bytes 0 to .*damaged.*In them .*self_attn.q_proj.weight .*exp_avg.*{whole}",
        ),
        (of_states, of_states.stat().st_size - 300, "optim_states.pt"),
        (of_model, 40, r"mp_rank_00_model_states\.pt"),
        (where / "last" / "ds_npu_layout_rank_00001.json", 700, "ds_npu_layout_rank_00001.json is damaged"),
    ]
    assert of_states.stat().st_size < CHUNK_BYTES
    for path, at, message in spots:
        on_first_rank(lambda path=path, at=at: flip(path, at))
        for reader in readers:
            refused(reader, where, message)
        on_first_rank(lambda: check_report(where / "last"))
        on_first_rank(lambda path=path, at=at: flip(path, at))
    for reader in readers:
        assert reader.load_checkpoint(str(where))[0] is not None
    assert says(where / "last", "--verify") == 0


def check_report(folder: Path) -> None:
    assert says(folder, "--verify") == 1
