"""Copies of each rank's files of a checkpoint in its own and in a peer's memory (``ds_npu.checkpoint.peer_copies``).

Every few optimizer steps a rank takes a snapshot of what it would save; a thread makes files of it and sends them to
the rank that holds them. When a rank is gone, or this process ends by an error or a SIGTERM, each rank that is left
writes its own files and those that it holds. No collective and no store is needed for that: both may hang or be gone.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from ds_npu.capability.named_classes import AllowedClass
from ds_npu.checkpoint.rank_files import RankFiles, file_bytes, name_latest
from ds_npu.engine.checkpoints.checkpoint_files import CheckpointTransaction
from ds_npu.engine.checkpoints.peer_ring import PeerRing, RingMessage
from ds_npu.engine.failures.failure_record import FailureRecord
from ds_npu.engine.failures.termination import TERMINATION
from ds_npu.log import logger
from ds_npu.memory.host_snapshot import HostSnapshot

KEY = "ds_npu.checkpoint.peer_copies"
FILE, COMPLETE, TOKEN, WHOLE, FAILED = "file", "complete", "token", "whole", "failed"
"""Kinds of messages: one file; the end of a rank's files; a token that each rank passes on; news that all ranks have
the copy; news that a rank could not make its own."""
GONE_RANK = (
    "%s: rank %s is gone. The other ranks write the copies in their memory, at most %s steps old, to %s. A new start "
    "loads them; where a rank and the rank that held its copy are both gone, it loads what latest named before"
)
COPIED = "%s: the files of all ranks are in %s. What to do: start again with load_checkpoint(%r)"
NOT_COPIED = (
    "%s: the copies in the memory of this rank were not written to %s: %s. What to do: load an earlier checkpoint"
)
COULD_NOT = (
    "{}: rank {} could not make its copy: {}. No further copies are made. What to do: load the last checkpoint in a "
    "new start; where host memory is short, give a node fewer ranks, or leave the key out (ds_npu check --model prints "
    "the bytes that it takes)"
)
MOST_TEXT = 2000
"""Characters of an error that other ranks are told."""
GENERATIONS = 2
"""How many copies are kept: the newest, and an older one that is whole on all ranks."""


class CapturedFiles(CheckpointTransaction):
    """A transaction that keeps a snapshot of each file in memory, and writes none."""

    def __init__(self, plain: TorchCheckpointEngine, snapshot: HostSnapshot) -> None:
        super().__init__(plain, save_latest=False)
        self.snapshot: HostSnapshot = snapshot
        self.contents: list[tuple[Path, Any]] = []

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass

    def attempt(self, path: Path, action: Callable[[], object], needed: int = 0) -> None:
        """Do nothing: scripts that DeepSpeed adds to a checkpoint are not copied."""

    def save(self, state_dict: Any, path: str) -> None:
        self.contents.append((Path(path), self.snapshot.of(state_dict)))

    def move_to(self, files: RankFiles) -> None:
        """Move what was captured to ``files``, as bytes, the manifest last."""
        while self.contents:
            path, content = self.contents.pop(0)
            name = path.name
            files.files[name], self.digests[name], self.fingerprints[name] = file_bytes(content)
        for path, text_of in self._last:
            files.files[path.name] = text_of(self).encode()


class PeerCopies:
    """The copies of one engine's files. All ranks make it at the same time.

    At most one copy is being sent. A token that goes around the ring shows that all ranks have it: each passes the
    token on once it has its own files and those that it holds. A second round tells all ranks so.
    """

    def __init__(self, folder: Path, steps: int, device_type: str, classes: Sequence[AllowedClass]) -> None:
        """``steps``: the most optimizer steps that are repeated, 2 or more; ``classes``: those that files may hold."""
        self._folder, self._interval = folder, steps // 2
        self._snapshot = HostSnapshot(device_type)
        self._classes = classes
        self._lock, self._saving = threading.Lock(), threading.Lock()
        self._own: list[RankFiles] = []
        self._held: list[RankFiles] = []
        """All files of this rank, and of the rank whose holder it is, of one or two copies; the older copy is first."""
        self._arriving: RankFiles | None = None
        self._token, self._begun = "", ""
        """The tags of a token that waits here, and of the last one that rank 0 has made."""
        self._is_whole, self._is_over = threading.Event(), threading.Event()
        self._is_whole.set()
        self._failure = ""
        """Why no copy is made any more."""
        self._thread: threading.Thread | None = None
        self._ranks = dist.get_world_size()
        self._is_closed = False
        self._ring = PeerRing(self._receive, self._end_with)
        atexit.register(self._end)
        TERMINATION.add(self.save_all)

    def __str__(self) -> str:
        return (
            f"checkpoints are copied every {self._interval} steps to host memory, rank {self._ring.rank}'s to that of "
            f"rank {self._ring.holder}, too; when ranks die, {self._folder} gets them"
        )

    def before_step(self) -> None:
        """Let the device finish the snapshot before the optimizer step."""
        self._snapshot.hold_back()

    def after_step(self, engine: Any) -> None:
        """Take a copy where it is time for one, after a wait until the one before is whole on all ranks.

        Raises RuntimeError on all ranks where one of them could not make its copy.
        """
        step = engine.global_steps
        if step == 0 or step % self._interval:
            return
        while not (self._is_whole.wait(0.1) or self._is_over.is_set()):
            pass
        if self._failure:
            raise RuntimeError(self._failure)
        if self._is_over.is_set():
            return
        if self._thread is not None:
            self._thread.join()
        self._is_whole.clear()
        files = RankFiles(f"global_step{step}_copies_{self._ring.run}", step, self._ring.rank)
        captured = CapturedFiles(engine.checkpoint_engine, self._snapshot)
        try:
            engine.put_own_files(captured, str(self._folder), files.tag)
        except BaseException as error:
            self._fail(error)
            raise
        self._snapshot.finish()
        self._thread = threading.Thread(
            target=self._copy, args=(captured, files), name="ds_npu peer copies", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End in order, so that no rank takes this one for gone.

        Where another one is gone, the copies are written first.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._is_over.is_set():
            self.save_all()
        self._is_over.set()
        self._ring.leave()
        TERMINATION.remove(self.save_all)
        atexit.unregister(self._end)

    def save_all(self) -> None:
        """Write all files that this rank has, once; the older copy, which may alone be whole on all ranks, first."""
        self._is_over.set()
        with self._saving:
            with self._lock:
                found = [*self._own, *self._held]
                self._own = []
                self._held = []
            found.sort(key=lambda each: each.step)
            try:
                for each in found:
                    each.write(self._folder)
                steps = {each.tag: each.step for each in found}
                latest = name_latest(self._folder, steps, self._ranks, self._classes) if found else None
            except OSError as error:
                logger().error(NOT_COPIED, KEY, self._folder, error)
                return
            if latest is not None:
                logger().error(COPIED, KEY, self._folder / latest, str(self._folder))

    def _fail(self, error: BaseException) -> None:
        """Tell all ranks that this one could not make its copy, for which they would wait for ever."""
        self._hear_of_failure(self._ring.rank, f"{type(error).__name__}: {error}"[:MOST_TEXT])

    def _hear_of_failure(self, rank: int, text: str) -> None:
        self._failure = COULD_NOT.format(KEY, rank, text)
        self._is_over.set()
        if self._ring.holder != rank:
            self._ring.send(RingMessage(FAILED, {"rank": rank, "text": text}))

    def _copy(self, captured: CapturedFiles, files: RankFiles) -> None:
        try:
            self._snapshot.wait()
            captured.move_to(files)
            self._snapshot.release()
        except Exception as error:
            self._fail(error)
            return
        fields = {"tag": files.tag, "step": files.step, "rank": files.rank}
        for name, data in files.files.items():
            self._ring.send(RingMessage(FILE, {**fields, "name": name}, data))
        self._ring.send(RingMessage(COMPLETE, fields))
        with self._lock:
            self._own = [*self._own, files][-GENERATIONS:]
        self._pass_on()

    def _receive(self, message: RingMessage) -> None:
        """Handle a message of the rank whose holder this is."""
        if message.kind == FAILED:
            self._hear_of_failure(message.fields["rank"], message.fields["text"])
            return
        tag = message.fields["tag"]
        if message.kind == TOKEN:
            with self._lock:
                self._token = tag
            self._pass_on()
        elif message.kind == WHOLE:
            self._know_whole(tag)
        elif message.kind == FILE:
            if self._arriving is None or self._arriving.tag != tag:
                self._arriving = RankFiles(tag, message.fields["step"], message.fields["rank"])
            self._arriving.files[message.fields["name"]] = message.data
        elif self._arriving is not None:
            with self._lock:
                self._held = [*self._held, self._arriving][-GENERATIONS:]
            self._arriving = None
            self._pass_on()

    def _pass_on(self) -> None:
        """Send the token on if this rank has all files of the copy.

        Rank 0 makes the token; once it returns there, all ranks have their files.
        """
        with self._lock:
            tag = self._own[-1].tag if self._own else ""
            has_all = bool(tag) and bool(self._held) and self._held[-1].tag == tag
            returned = self._ring.rank == 0 and self._token != "" and self._token == self._begun
            is_first = self._ring.rank == 0 and has_all and self._begun != tag
            passes = is_first or (self._ring.rank > 0 and has_all and self._token == tag)
            if is_first:
                self._begun = tag
            if passes or returned:
                self._token = ""
        if passes:
            self._ring.send(RingMessage(TOKEN, {"tag": tag}))
        if returned:
            self._know_whole(self._begun)

    def _know_whole(self, tag: str) -> None:
        """Drop the copies before ``tag``, which all ranks have, and tell the next rank so."""
        with self._lock:
            self._own = self._own[-1:]
            index = next((index for index, each in enumerate(self._held) if each.tag == tag), 0)
            self._held = self._held[index:]
        if self._ring.holder != 0:
            self._ring.send(RingMessage(WHOLE, {"tag": tag}))
        self._is_whole.set()

    def _end_with(self, rank: int) -> None:
        if self._is_closed:
            return
        if not self._is_over.is_set() and rank == self._ring.held:
            logger().error(GONE_RANK, KEY, rank, 2 * self._interval, self._folder)
        self.save_all()
        record = FailureRecord.of_this_world()
        if record is not None:
            record.tell_of_an_end()

    def _end(self) -> None:
        """Close at the end of the process; after an error that nobody has caught, write the copies first."""
        if getattr(sys, "last_value", None) is not None and not isinstance(sys.last_value, KeyboardInterrupt):
            self.save_all()
        self.close()
