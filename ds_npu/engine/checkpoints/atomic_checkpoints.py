"""How an engine saves: all files of a checkpoint or none, in the call or behind training."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ds_npu.engine.checkpoints.allowed_files import AllowedFilesEngine
from ds_npu.engine.checkpoints.background_saves import BackgroundSaves, BackgroundTransaction
from ds_npu.engine.checkpoints.checkpoint_files import CheckpointTransaction
from ds_npu.engine.checkpoints.peer_copies import KEY, PeerCopies
from ds_npu.engine.topology_engine import TopologyEngine
from ds_npu.topology.degrees import NAMES, Axis
from ds_npu.zero_ext.bucketed_zero import BUCKETED
from ds_npu.zero_ext.method_wraps import MethodLevel

RECOVERY_SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")
"""Scripts that DeepSpeed adds to its checkpoints; they make one file of weights of them."""
OWN_SCRIPT = """#!/usr/bin/env python
# Makes float32 weights of this checkpoint, whose weights are sharded over the ranks of {axes}: in place of
# DeepSpeed's script, which does not put them together. ds_npu has to be installed; ranks and NPUs are not needed.
import argparse
import sys

from ds_npu.cli.main import main

parser = argparse.ArgumentParser()
parser.add_argument("checkpoint_dir", help="the folder of checkpoints, or one of them")
parser.add_argument("output_dir", help="the folder to write model.safetensors to")
parser.add_argument("-t", "--tag", help="the checkpoint; else the newest whole one")
given, _ = parser.parse_known_args()
folder = given.checkpoint_dir + ("/" + given.tag if given.tag else "")
sys.exit(main(["convert", folder, "--to", "fp32", "--out", given.output_dir]))
"""


class AtomicCheckpoints(TopologyEngine):
    """How an engine saves checkpoints; all ranks call it, as DeepSpeed wants."""

    background_saves: BackgroundSaves | None = None
    """The saves behind training; None where a save ends before its call does."""
    peer_copies: PeerCopies | None = None

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """As DeepSpeed's; raises RuntimeError on all ranks where one cannot write, with earlier checkpoints untouched.

        The error of a save behind training is raised by the next step, save or load.
        """
        self.finish_saving()
        plain = self.checkpoint_engine
        given = (client_state or {}, save_latest, exclude_frozen_parameters)
        if type(plain) is not AllowedFilesEngine:  # another of DeepSpeed's, which writes in its own time
            return bool(super().save_checkpoint(save_dir, tag, *given))
        behind = self.background_saves
        if behind is None:
            transaction = CheckpointTransaction(plain, save_latest)
        else:
            buffers = {each.untyped_storage().data_ptr() for each in self.module.buffers()}
            transaction = BackgroundTransaction(plain, save_latest, behind, buffers)
        try:
            with self._saving_by(transaction):
                return bool(super().save_checkpoint(save_dir, tag, given[0], False, exclude_frozen_parameters))
        finally:
            if behind is None:
                transaction.remove_unfinished()
            else:
                behind.forget_unbegun()

    def put_own_files(self, transaction: CheckpointTransaction, save_dir: str, tag: str) -> None:
        """Let ``transaction`` save this rank's files of a checkpoint, without communication between ranks."""
        with self._saving_by(transaction):
            if self._optimizer_has_ckpt_event_prologue():
                self.optimizer.checkpoint_event_prologue()
            self._save_checkpoint(save_dir, tag, {})
            if self.save_zero_checkpoint:
                self._save_zero_checkpoint(save_dir, tag)
            if self._optimizer_has_ckpt_event_epilogue():
                self.optimizer.checkpoint_event_epilogue()

    @contextmanager
    def _saving_by(self, transaction: CheckpointTransaction) -> Iterator[None]:
        """Within the block DeepSpeed saves by ``transaction``.

        State that is moved to the host goes to the transaction's snapshot.
        """
        plain = self.checkpoint_engine
        self.checkpoint_engine = transaction
        bucketed = None if self.optimizer is None else BUCKETED.get(self.optimizer)
        if bucketed is not None:
            bucketed.state.snapshot = transaction.snapshot
        try:
            yield
        finally:
            self.checkpoint_engine = plain
            if bucketed is not None:
                bucketed.state.snapshot = None

    def zero_nvme_offload_optimizer(self) -> bool:
        """False, so that DeepSpeed's saves and loads copy no swapped files: the rank's own file has their content.

        Nothing else asks it. See ``ds_npu.zero_ext.swapped_states``.
        """
        return False

    def copy_to_peers(self, folder: Path, steps: int) -> str:
        """Keep copies of this rank's files in memory, and in a peer's, from now on; says so in a line.

        ``steps``: the most optimizer steps that are repeated when ranks die. Raises ValueError in a world of one rank,
        and with the optimizer on NVMe. Every rank calls it.
        """
        if dist.get_world_size() == 1 or super().zero_nvme_offload_optimizer():
            why = "a world of one rank" if dist.get_world_size() == 1 else "zero_optimization.offload_optimizer on NVMe"
            raise ValueError(f"{KEY}: found {steps} beside {why}, of which no copy is made. Leave it out")
        device_type = get_accelerator().device_name()
        self.peer_copies = copies = PeerCopies(folder, steps, device_type, self.allowed_classes)
        self.events.before_step(MethodLevel.SNAPSHOT, copies.before_step)
        self.events.after_step(MethodLevel.SNAPSHOT, partial(copies.after_step, self))
        return str(copies)

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
        if self.peer_copies is not None:
            self.peer_copies.close()
        super().destroy()

    def _copy_recovery_script(self, save_path: str) -> None:
        copy = partial(self._write_own_scripts if self.is_sharded else super()._copy_recovery_script, save_path)
        if isinstance(self.checkpoint_engine, CheckpointTransaction):
            self.checkpoint_engine.attempt(Path(save_path), copy)
        else:
            copy()

    def _write_own_scripts(self, folder: str) -> None:
        """Write scripts in place of DeepSpeed's, which would join shards wrongly."""
        axes: tuple[Axis, ...] = ("tp", "pp", "ep", "etp")
        found = [f"{NAMES[axis]} {self.topology.size(axis)}" for axis in axes if self.topology.size(axis) > 1]
        for name in RECOVERY_SCRIPTS:
            script = Path(folder, name)
            script.write_text(OWN_SCRIPT.format(axes=f"ds_npu.parallel: {', '.join(found)}"))
            script.chmod(script.stat().st_mode | stat.S_IEXEC)
