"""Checkpoints that are either whole or not there, and what it takes to continue from one exactly.

A checkpoint is written to ``step-00000100.partial``. When every rank has written and flushed its part, rank 0 adds a
list of all files with their sizes and checksums (``complete.json``), renames the folder to ``step-00000100``, and only
then points ``latest`` at it. A folder that still has the suffix, lacks the list or has files of other sizes is never
resumed from; one whose bytes have changed is refused when it is loaded.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from rank_group import Ranks, RunError

MANIFEST = "complete.json"
PARTIAL = ".partial"
TAG = re.compile(r"step-(\d{8,})")
PEER_LOST = ("Connection closed by peer", "Connection reset by peer")
HARMLESS_CONFIG_KEYS = {
    "steps_per_print",
    "wall_clock_breakdown",
    "memory_breakdown",
    "dump_state",
    "tensorboard",
    "wandb",
}
HARMLESS_CONFIG_KEYS |= {"csv_monitor", "comet", "flops_profiler", "comms_logger"}


def tag_of(step: int) -> str:
    """The name of the checkpoint made after ``step`` optimizer steps."""
    return f"step-{step:08d}"


# ---- what is on disk ----


def _file_sizes(folder: Path) -> dict[str, int]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST)
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a checkpoint, or None if ``folder`` is not a complete one."""
    if not TAG.fullmatch(folder.name):
        return None
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        # Checkpoints made before there were checksums have the sizes alone.
        entries = {name: {"bytes": it} if isinstance(it, int) else it for name, it in manifest["files"].items()}
        manifest["files"] = entries
        whole = all((folder / name).stat().st_size == entry["bytes"] for name, entry in entries.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return manifest if whole else None


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in ``folder``, oldest first. ``latest`` is not asked: it may be missing or wrong."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if read_manifest(path) is not None]
    return sorted(found, key=lambda path: int(TAG.fullmatch(path.name)[1]))


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two runs' identities, one line each; keys that cannot change a loss are not compared."""
    lines = []
    for name in sorted(saved.keys() | now.keys()):
        before, after = saved.get(name), now.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            keys = sorted(key for key in before.keys() | after.keys() if key not in HARMLESS_CONFIG_KEYS)
            pairs = [(f"{name}.{key}", before.get(key), after.get(key)) for key in keys]
        else:
            pairs = [(name, before, after)]
        lines += [f"{label}: {old!r} then, {new!r} now" for label, old, new in pairs if old != new]
    return lines


def _flush(path: Path) -> None:
    """Make what was written to a file, or the names in a folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_whole(path: Path, text: str) -> None:
    """Write a small file so that its readers see the old text or the new one, never a part."""
    unfinished = path.with_name(path.name + ".new")
    unfinished.write_text(text)
    _flush(unfinished)
    os.replace(unfinished, path)
    _flush(path.parent)


# ---- what a rank remembers ----


def random_states() -> dict[str, Any]:
    """The state of every random generator a model may draw from on this rank."""
    return {
        "python": random.getstate(),
        "numpy": _numpy_state(),
        "torch": torch.get_rng_state(),
        "device": get_accelerator().get_rng_state().cpu(),
    }


def _numpy_state() -> tuple[Any, ...]:
    """numpy's, as numbers: what torch.load reads without running code of the file."""
    name, keys, *rest = np.random.get_state()
    return (name, keys.tolist(), *rest)


def set_random_states(states: Mapping[str, Any]) -> None:
    """Undo everything drawn since ``random_states``."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    get_accelerator().set_rng_state(states["device"])


@dataclass
class Checkpoints:
    """The checkpoints of one run in ``folder``, of which the newest ``keep`` are kept (0: all)."""

    folder: Path
    keep: int
    ranks: Ranks

    def save(self, engine: DeepSpeedEngine, step: int, identity: Mapping[str, Any], state: Mapping[str, Any]) -> Path:
        """Save all ranks' training state after ``step`` steps; ``state`` is what this rank adds to it.

        Raises RunError on all ranks when it cannot be written. Whatever was complete before stays so.
        """
        final, partial = self.folder / tag_of(step), self.folder / (tag_of(step) + PARTIAL)
        # Rank 0 decides alone: on a shared disk other ranks may still see the folder as it was.
        if self.ranks.gather(read_manifest(final) is not None)[0]:
            return final
        self._on_rank(self.ranks.rank == 0, lambda: self._make_room(final, partial))
        # Each rank's own file comes first: it also proves, with a vote, that every rank can write there.
        own = {"random": random_states(), "state": dict(state)}
        self._on_rank(True, lambda: torch.save(own, self._rank_file(partial)))
        try:
            engine.save_checkpoint(str(self.folder), tag=partial.name, save_latest=False)
        except (OSError, RuntimeError) as error:
            self._give_up(error)
        self._on_rank(self.ranks.local_rank == 0, lambda: self._flush_all(partial))
        files = self._described(partial)
        manifest = {"step": step, "identity": dict(identity), "files": files}
        self._on_rank(self.ranks.rank == 0, lambda: self._publish(partial, final, manifest))
        return final

    def load(self, engine: DeepSpeedEngine, checkpoint: Path) -> dict[str, Any]:
        """Bring engine and random generators to where ``checkpoint`` was made; returns this rank's ``state``.

        Raises RunError on all ranks where a file is not what was saved; nothing is loaded then.
        """
        self._verify(checkpoint)
        own, failure = None, None
        try:
            own = _load_numbers(self._rank_file(checkpoint))
        except (OSError, RuntimeError, pickle.UnpicklingError) as error:
            failure = RunError(f"{self._rank_file(checkpoint)} cannot be read: {error}")
        self.ranks.agree(failure)
        loaded, _client_state = engine.load_checkpoint(str(self.folder), tag=checkpoint.name)
        self.ranks.agree(None if loaded else RunError(f"DeepSpeed could not load {checkpoint}"))
        set_random_states(own["random"])
        return own["state"]

    def _verify(self, checkpoint: Path) -> None:
        """Compare the checksums; each rank reads its share of the files."""
        failure = None
        for name, entry in self._share(read_manifest(checkpoint)["files"].items()):
            expected = entry.get("sha256")
            found = _sha256(checkpoint / name) if expected else None
            if found != expected:
                failure = RunError(
                    f"{checkpoint / name} is damaged: its SHA-256 is {found}, {MANIFEST} expects {expected}. Remove "
                    f"{checkpoint} to resume from the checkpoint before it"
                )
                break
        self.ranks.agree(failure)

    def _share(self, things: Iterable[Any]) -> list[Any]:
        return list(things)[self.ranks.rank :: self.ranks.size]

    def _described(self, folder: Path) -> dict[str, dict[str, Any]]:
        """Size and checksum of every file; each rank reads its share of them."""
        sizes = self.ranks.gather(_file_sizes(folder))[0]
        mine: dict[str, str] = {}
        self._on_rank(True, lambda: mine.update({name: _sha256(folder / name) for name in self._share(sizes)}))
        sums = {name: digest for part in self.ranks.gather(mine) for name, digest in part.items()}
        return {name: {"bytes": size, "sha256": sums[name]} for name, size in sizes.items()}

    # ---- the steps of a save ----

    def _rank_file(self, folder: Path) -> Path:
        return folder / f"rank-{self.ranks.rank:05d}.pt"

    def _on_rank(self, mine: bool, action: Callable[[], object]) -> None:
        """Do ``action`` if it is this rank's, then let all ranks know whether it worked everywhere."""
        failure = None
        try:
            if mine:
                action()
        except (OSError, RuntimeError) as error:
            failure = RunError(f"cannot write a checkpoint in {self.folder}: {_why(error, self.folder)}")
        self.ranks.agree(failure)

    def _make_room(self, final: Path, partial: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in (final, partial):
            if leftover.exists():
                shutil.rmtree(leftover)
        # The last one's size is the best guess at this one's. The free space may go before it is written.
        earlier = complete_checkpoints(self.folder)
        needed = _bytes_in(earlier[-1]) if earlier else 0
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise OSError(f"{free / 2**20:.0f} MiB are free, the last checkpoint took {needed / 2**20:.0f} MiB")
        partial.mkdir()

    def _give_up(self, error: Exception) -> NoReturn:
        """End this process: the other ranks wait inside DeepSpeed's save for one that will not come."""
        if any(lost in str(error) for lost in PEER_LOST):
            os._exit(1)  # the rank that was lost has said why
        kept = "checkpoints completed earlier are untouched, --resume continues from them"
        self.ranks.leave(f"cannot write a checkpoint in {self.folder}: {_why(error, self.folder)} ({kept})")

    def _flush_all(self, partial: Path) -> None:
        for name in _file_sizes(partial):
            _flush(partial / name)

    def _publish(self, partial: Path, final: Path, manifest: Mapping[str, Any]) -> None:
        _write_whole(partial / MANIFEST, json.dumps(manifest, indent=1))
        os.rename(partial, final)
        _flush(self.folder)
        _write_whole(self.folder / "latest", final.name)
        self._remove_old()

    def _remove_old(self) -> None:
        kept = complete_checkpoints(self.folder)
        old = kept[: -self.keep] if self.keep else []
        for path in old:
            # Renamed first, so that one half-removed is never taken for a whole one.
            os.rename(path, path.with_name(path.name + PARTIAL))
        for leftover in self.folder.glob(f"step-*{PARTIAL}"):
            shutil.rmtree(leftover)


def _why(error: Exception, folder: Path) -> str:
    """What keeps a checkpoint from being written to ``folder``."""
    said = str(error).strip().split("\n")[0]
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free, partials = shutil.disk_usage(existing).free, folder.glob(f"step-*{PARTIAL}")
    # torch does not say so: "[enforce fail at inline_container.cc:672] . unexpected pos ...".
    full = isinstance(error, OSError) and error.errno == errno.ENOSPC
    if full or ("inline_container" in said and free < 2**20):
        written = sum(map(_bytes_in, partials)) / 2**20
        return (
            f"the disk is full: {free / 2**20:.1f} MiB are free, and more than the {written:.1f} MiB of this "
            "checkpoint that were written are needed; make room, or choose another --save"
        )
    return said


def _bytes_in(folder: Path) -> int:
    return sum(_file_sizes(folder).values())


def _load_numbers(path: Path) -> dict[str, Any]:
    """What a rank has saved; no code of the file is run."""
    # Before checksums, numpy's state was saved as an array.
    keys = np.random.get_state()[1]
    with torch.serialization.safe_globals([keys.__reduce__()[0], np.ndarray, np.dtype, type(keys.dtype)]):
        return torch.load(path, map_location="cpu", weights_only=True)


def choose(folder: Path, required: bool) -> Path | None:
    """The checkpoint to resume from: the newest complete one, or None if there is none and that is allowed."""
    found = complete_checkpoints(folder)
    if not found and required:
        raise RunError(f"--resume: there is no complete checkpoint in {folder} (--resume auto starts anew then)")
    return found[-1] if found else None


def check_identity(checkpoint: Path, identity: Mapping[str, Any], inexact_allowed: bool) -> list[str]:
    """What differs from the run that made ``checkpoint``; RunError if that makes an exact continuation impossible."""
    lines = differences(read_manifest(checkpoint)["identity"], json.loads(json.dumps(identity)))
    fatal = [line for line in lines if line.split(".")[0].split(":")[0] in ("model", "ranks", "data-parallel ranks")]
    if fatal:
        raise RunError(
            f"{checkpoint} cannot be continued with another model or number of ranks:\n  "
            + "\n  ".join(fatal)
            + "\n  (DeepSpeed's ds_to_universal converts a checkpoint to another number of ranks)"
        )
    if lines and not inexact_allowed:
        raise RunError(
            f"{checkpoint} was made with other settings, so the losses would not be the same:\n  "
            + "\n  ".join(lines)
            + "\n  (--inexact continues all the same)"
        )
    return lines
