"""DeepSpeed's checkpoint files get their names together or not at all, and every rank says why not.

DeepSpeed writes each file under its final name and ``latest`` after them; a rank that cannot write raises, and the
others wait for it (DeepSpeed 0.19.8 runtime/engine.py, save_checkpoint). A full disk thereby costs the checkpoint that
had the same name, and ``latest`` itself, and ends in torch's "[enforce fail at inline_container.cc]".
"""

from __future__ import annotations

import os
import re
import stat
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
from ds_npu.checkpoint.digests import DigestedWriter, FileDigests
from ds_npu.checkpoint.files import UNTOUCHED, tensor_bytes, why_not_written
from ds_npu.checkpoint.wholeness import UNFINISHED
from ds_npu.engine.checkpoints.allowed_files import AllowedFilesEngine
from ds_npu.engine.topology_engine import TopologyEngine
from ds_npu.topology.degrees import NAMES, Axis

RECOVERY_SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")
"""Scripts that DeepSpeed adds to its checkpoints; they make one file of weights of them."""
REFUSING_SCRIPT = """#!/usr/bin/env python
raise SystemExit(
    "The weights in this checkpoint are sharded over the ranks of {axes}, which DeepSpeed's script does not put "
    "together. What to do: in a run with the same config, engine.load_checkpoint(folder) and then "
    "engine.save_pretrained(target) or engine.whole_state_dict()."
)
"""
OF_A_CHECKPOINT = re.compile(
    r"(.*mp_rank_\d+_(model|optim)_states\.pt|layer_\d+-.*model_states\.pt|experts_.*_model_states\.pt"
    r"|ds_npu_layout_rank_\d+\.json)(\.unfinished)?"
)
"""Names that ranks' files have in the folder of a checkpoint."""
SHOWN = 4


class CheckpointTransaction(TorchCheckpointEngine):  # type: ignore[misc]
    """Writes the files of one checkpoint under other names, and renames them when every rank has written its own.

    It takes the place of ``plain`` while one checkpoint is saved. A failure is kept until ``commit``, which raises
    RuntimeError on all ranks alike; every file that was there before is then as it was.
    """

    def __init__(self, plain: TorchCheckpointEngine, save_latest: bool) -> None:
        self.__dict__.update(vars(plain))
        self.save_latest = save_latest
        self.unfinished: list[Path] = []
        self.fingerprints: dict[str, str] = {}
        self.digests: dict[str, FileDigests] = {}
        self._last: list[tuple[Path, Callable[[CheckpointTransaction], str]]] = []
        self.failure: str | None = None
        self.error: Exception | None = None

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        upstream: Any = super()
        self.attempt(Path(path), lambda: upstream.makedirs(path, exist_ok=exist_ok))

    def save(self, state_dict: Any, path: str) -> None:
        def write(unfinished: Path) -> None:
            with DigestedWriter(unfinished) as writer:
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
            self._write(folder / "latest", lambda unfinished: unfinished.write_text(str(info.tag)), 0)
        self._agree(info)
        latest = [each for each in self.unfinished if each.name == f"latest{UNFINISHED}"]
        for each in (file for file in self.unfinished if file not in latest):
            self.attempt(each, lambda each=each: each.replace(each.with_suffix("")))  # type: ignore[misc]
        self._agree(info)
        for each in latest:
            self.attempt(each, lambda each=each: each.replace(each.with_suffix("")))  # type: ignore[misc]
        self._agree(info)
        self._remove_older(folder / str(info.tag))
        return True

    def attempt(self, path: Path, action: Callable[[], object], needed: int = 0) -> None:
        """Do ``action``, which writes ``path``, unless something has failed already; keep the reason if it fails.

        The partial file is kept until all ranks know: another rank may ask for the reason, too.
        """
        if self.failure is not None:
            return
        try:
            action()
        except (OSError, RuntimeError) as error:
            self.error = error
            self.failure = f"{path.name.removesuffix(UNFINISHED)}: {why_not_written(error, path, needed)}"

    def remove_unfinished(self) -> None:
        """Remove what was written and got no name."""
        for each in self.unfinished:
            each.unlink(missing_ok=True)

    def _remove_older(self, folder: Path) -> None:
        """Remove files of an earlier checkpoint of the same name, which other ranks or another layout had.

        All of the new one have their names by now. Files that cannot be removed
        are left: no load of the new one reads them.
        """
        names: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(names, [each.name.removesuffix(UNFINISHED) for each in self.unfinished])
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
        failures: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(failures, self.failure)
        found = [f"rank {rank}: {failure}" for rank, failure in enumerate(failures) if failure is not None]
        if not found:
            return
        self.remove_unfinished()
        dist.barrier()
        if dist.get_rank() == 0:
            with suppress(OSError):  # it may hold an earlier checkpoint of the same name
                Path(info.save_dir, str(info.tag)).rmdir()
        more = f"; and {len(found) - SHOWN} more ranks" if len(found) > SHOWN else ""
        raise RuntimeError(
            f"the checkpoint {info.tag} was not saved to {info.save_dir}: {'; '.join(found[:SHOWN])}{more}. "
            + UNTOUCHED
        ) from self.error


class AtomicCheckpoints(TopologyEngine):
    """How an engine saves checkpoints; all ranks call it, as DeepSpeed wants."""

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """DeepSpeed's; raises RuntimeError on every rank where one cannot write, with earlier checkpoints untouched."""
        plain, given = self.checkpoint_engine, (client_state or {}, save_latest, exclude_frozen_parameters)
        if type(plain) is not AllowedFilesEngine:  # another of DeepSpeed's, which writes in its own time
            return bool(super().save_checkpoint(save_dir, tag, *given))
        self.checkpoint_engine = transaction = CheckpointTransaction(plain, save_latest)
        try:
            return bool(super().save_checkpoint(save_dir, tag, given[0], False, exclude_frozen_parameters))
        finally:
            self.checkpoint_engine = plain
            transaction.remove_unfinished()

    def _copy_recovery_script(self, save_path: str) -> None:
        copy = partial(self._refuse_recovery if self.is_sharded else super()._copy_recovery_script, save_path)
        if isinstance(self.checkpoint_engine, CheckpointTransaction):
            self.checkpoint_engine.attempt(Path(save_path), copy)
        else:
            copy()

    def _refuse_recovery(self, folder: str) -> None:
        """Put scripts in DeepSpeed's place, which would put shards together in a wrong way."""
        axes: tuple[Axis, ...] = ("tp", "pp", "ep", "etp")
        found = [f"{NAMES[axis]} {self.topology.size(axis)}" for axis in axes if self.topology.size(axis) > 1]
        for name in RECOVERY_SCRIPTS:
            script = Path(folder, name)
            script.write_text(REFUSING_SCRIPT.format(axes=f"ds_npu.parallel: {', '.join(found)}"))
            script.chmod(script.stat().st_mode | stat.S_IEXEC)


def _write_text(text: str, path: Path) -> None:
    path.write_text(text)
