"""How an engine saves: all files of a checkpoint or none, in the call or behind training."""

from __future__ import annotations

import os
import stat
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ds_npu.engine.checkpoints.allowed_files import AllowedFilesEngine
from ds_npu.engine.checkpoints.background_saves import BackgroundSaves, BackgroundTransaction
from ds_npu.engine.checkpoints.checkpoint_files import CheckpointTransaction
from ds_npu.engine.topology_engine import TopologyEngine
from ds_npu.topology.degrees import NAMES, Axis
from ds_npu.zero_ext.method_wraps import MethodLevel

RECOVERY_SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")
"""Scripts that DeepSpeed adds to its checkpoints; they make one file of weights of them."""
REFUSING_SCRIPT = """#!/usr/bin/env python
raise SystemExit(
    "The weights in this checkpoint are sharded over the ranks of {axes}, which DeepSpeed's script does not put "
    "together. What to do: in a run with the same config, engine.load_checkpoint(folder) and then "
    "engine.save_pretrained(target) or engine.whole_state_dict()."
)
"""


class AtomicCheckpoints(TopologyEngine):
    """How an engine saves checkpoints; all ranks call it, as DeepSpeed wants."""

    background_saves: BackgroundSaves | None = None
    """The saves behind training; None where a save ends before its call does."""

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """DeepSpeed's; raises RuntimeError on every rank where one cannot write, with earlier checkpoints untouched.

        Behind training, the next step, save or load raises it.
        """
        self.finish_saving()
        plain, given = self.checkpoint_engine, (client_state or {}, save_latest, exclude_frozen_parameters)
        if type(plain) is not AllowedFilesEngine:  # another of DeepSpeed's, which writes in its own time
            return bool(super().save_checkpoint(save_dir, tag, *given))
        behind = self.background_saves
        if behind is None:
            transaction = CheckpointTransaction(plain, save_latest)
        else:
            buffers = {each.untyped_storage().data_ptr() for each in self.module.buffers()}
            transaction = BackgroundTransaction(plain, save_latest, behind, buffers)
        self.checkpoint_engine = transaction
        try:
            return bool(super().save_checkpoint(save_dir, tag, given[0], False, exclude_frozen_parameters))
        finally:
            self.checkpoint_engine = plain
            if behind is None:
                transaction.remove_unfinished()

    def save_behind_training(self) -> None:
        """Write checkpoints on a thread from now on."""
        timeout_s = dist.distributed_c10d._get_default_timeout(dist.Backend(dist.get_backend())).total_seconds()
        self.background_saves = BackgroundSaves(get_accelerator().device_name(), timeout_s)
        self.events.before_step(MethodLevel.SNAPSHOT, self.background_saves.before_step)

    def finish_saving(self) -> None:
        """Wait for a save that runs behind training; raises the RuntimeError that it has ended with."""
        if self.background_saves is not None:
            self.background_saves.wait()

    def destroy(self) -> None:
        self.finish_saving()
        super().destroy()

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
