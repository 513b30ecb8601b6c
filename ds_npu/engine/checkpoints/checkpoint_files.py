"""A save gives all files of a DeepSpeed checkpoint their final names, or none; each rank then raises the reason.

DeepSpeed writes each file under its final name and ``latest`` after them; a rank that cannot write raises, and the
others wait for it (DeepSpeed 0.19.8 runtime/engine.py, save_checkpoint). A full disk thereby costs the checkpoint that
had the same name, and ``latest`` itself, and ends in torch's "[enforce fail at inline_container.cc]".
"""

from __future__ import annotations

import fcntl
import os
import re
import zipfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from ds_npu.checkpoint.contents import fingerprint
from ds_npu.checkpoint.digests import DigestedWriter, FileDigests, flush_folder
from ds_npu.checkpoint.files import UNTOUCHED, host_memory, tensor_bytes, why_not_written
from ds_npu.checkpoint.wholeness import UNFINISHED
from ds_npu.engine.checkpoints.agreement import CollectiveAgreement, RankAgreement
from ds_npu.memory.host_snapshot import HostSnapshot

OF_A_CHECKPOINT = re.compile(
    r"(.*mp_rank_\d+_(model|optim)_states\.pt|layer_\d+-.*model_states\.pt|experts_.*_model_states\.pt"
    r"|ds_npu_layout_rank_\d+\.json)(\.unfinished)?"
)
"""Names that ranks' files have in the folder of a checkpoint."""
SAVING = ".saving"
"""The end of the name of a lock in the folder of checkpoints."""
SHOWN = 4


class CheckpointTransaction(TorchCheckpointEngine):  # type: ignore[misc]
    """Writes the files of one checkpoint under other names, and renames them when every rank has written its own.

    It takes the place of ``plain`` while one checkpoint is saved. A failure is kept until ``commit``, which raises
    RuntimeError on all ranks alike; every file that was there before is then as it was.
    """

    snapshot: HostSnapshot | None = None
    """The snapshot that tensors are copied to before they are written; None where they are written as they are."""

    def __init__(self, plain: TorchCheckpointEngine, save_latest: bool, agreement: RankAgreement | None = None) -> None:
        self.name = plain.name
        self.zipfile_serialization = plain.zipfile_serialization
        self.save_latest = save_latest
        self._agreement = agreement or CollectiveAgreement()
        self.unfinished: list[Path] = []
        self.fingerprints: dict[str, str] = {}
        self.digests: dict[str, FileDigests] = {}
        self._last: list[tuple[Path, Callable[[CheckpointTransaction], str]]] = []
        self._lock: FolderLock | None = None
        self.failure: str | None = None
        self.error: Exception | None = None

    def create(self, info: Any) -> None:
        if dist.get_rank() == 0:
            path = Path(info.save_dir, f".{str(info.tag).replace('/', '_')}{SAVING}")
            self.attempt(path, lambda: self._lock_folder(path))

    def _lock_folder(self, path: Path) -> None:
        self._lock = FolderLock(path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        upstream: Any = super()
        self.attempt(Path(path), lambda: upstream.makedirs(path, exist_ok=exist_ok))

    def save(self, state_dict: Any, path: str) -> None:
        def write(unfinished: Path) -> None:
            with DigestedWriter(unfinished, host_memory(state_dict)) as writer:
                file: Any = writer
                torch.save(state_dict, file, _use_new_zipfile_serialization=self.zipfile_serialization)
            self.digests[Path(path).name] = writer.digests()
            if zipfile.is_zipfile(unfinished):
                self.fingerprints[Path(path).name] = fingerprint(unfinished)

        self._write(Path(path), write, tensor_bytes(state_dict))

    def write_text_last(self, path: Path, text_of: Callable[[CheckpointTransaction], str]) -> None:
        """Write ``text_of(self)`` when all other files are written."""
        self._last.append((path, text_of))

    def commit(self, info: Any) -> bool:
        folder = Path(info.save_dir)
        for path, text_of in self._last:
            text = text_of(self)
            self._write(path, partial(_write_text, text), len(text))
        if self.save_latest and dist.get_rank() == 0:
            self._write(folder / "latest", partial(_write_text, str(info.tag)), 0)
        self._agree(info)
        latest = [each for each in self.unfinished if each.name == f"latest{UNFINISHED}"]
        for each in (file for file in self.unfinished if file not in latest):
            self.attempt(each, lambda each=each: each.replace(each.with_suffix("")))  # type: ignore[misc]
        self.attempt(folder, lambda: flush_folder(folder / str(info.tag)))
        self._agree(info)
        for each in latest:
            self.attempt(each, lambda each=each: each.replace(each.with_suffix("")))  # type: ignore[misc]
        self.attempt(folder, lambda: flush_folder(folder))
        self._agree(info)
        self._remove_older(folder / str(info.tag))
        return True

    def attempt(self, path: Path, action: Callable[[], object], needed: int = 0) -> None:
        """Do ``action``, which writes ``path``, unless something has failed already; keep the reason if it fails.

        The partial file is kept until all ranks know: another rank may still look whether the disk is full.
        """
        if self.failure is not None:
            return
        try:
            action()
        except (OSError, RuntimeError) as error:
            self.error = error
            self.failure = f"{path.name.removesuffix(UNFINISHED)}: {why_not_written(error, path, needed)}"

    def remove_unfinished(self) -> None:
        """Remove what was written and got no name; a disk that has become read-only keeps it."""
        for each in self.unfinished:
            with suppress(OSError):
                each.unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _remove_older(self, folder: Path) -> None:
        """Remove files that an earlier checkpoint of the same name had of other ranks, or at another layout.

        All files of the new one have their final names by now. Files that cannot
        be removed are left: no load of the new one reads them.
        """
        names = self._agreement.gather([each.name.removesuffix(UNFINISHED) for each in self.unfinished])
        new = {name for each in names for name in each}
        with suppress(OSError):
            for path in folder.iterdir():
                if OF_A_CHECKPOINT.fullmatch(path.name) and path.name not in new:
                    path.unlink(missing_ok=True)

    def _write(self, path: Path, write: Callable[[Path], object], needed: int) -> None:
        unfinished = path.with_name(path.name + UNFINISHED)
        self.unfinished.append(unfinished)
        self.attempt(unfinished, lambda: write(unfinished), needed)

    def _agree(self, info: Any) -> None:
        """Raise RuntimeError on every rank if one of them has failed; nothing of this checkpoint is left then."""
        failures: list[str | None] = self._agreement.gather(self.failure)
        found = [f"rank {rank}: {failure}" for rank, failure in enumerate(failures) if failure is not None]
        if not found:
            return
        self.remove_unfinished()
        self._agreement.barrier()
        if dist.get_rank() == 0:
            with suppress(OSError):  # it may hold an earlier checkpoint of the same name
                Path(info.save_dir, str(info.tag)).rmdir()
        more = f"; and {len(found) - SHOWN} more ranks" if len(found) > SHOWN else ""
        raise RuntimeError(
            f"the checkpoint {info.tag} was not saved to {info.save_dir}: {'; '.join(found[:SHOWN])}{more}. "
            + UNTOUCHED
        ) from self.error


def _write_text(text: str, path: Path) -> None:
    with DigestedWriter(path) as writer:
        writer.write(text.encode())


class FolderLock:
    """A lock that a run holds while it saves a checkpoint: another run that saves the same one gets an OSError.

    The system releases it when the process dies.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._descriptor)
            raise OSError(f"another run is saving this checkpoint ({path.name} is locked)") from error
        except OSError:  # a disk without locks
            pass

    def release(self) -> None:
        """Remove the lock."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
        os.close(self._descriptor)
