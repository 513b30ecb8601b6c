"""Ends a batch of a pipeline on all of its ranks where one of them has failed, so that the script may go on.

The ranks meet at the end of each batch, on their hosts and over the store of the default process group: no device is
waited for, but for the checksum of the batch (batch_checksum.py), which it computed before the batch ran. In training
all ranks of the world meet, since data ranks that went on would reduce other gradients than this batch's; in evaluation
those that share samples. Two short requests of each rank to the store are all it costs.

A rank that has failed sends zeros to the other stages (parallel/pipeline/executor.py). Collectives inside of a forward
have no such way: tensor and context ranks must all have failed at one line, and a failure of data ranks that share
experts cannot be ended. There the failed rank raises at once, its engine runs no further batch, and the others end as
they do after the death of a rank.
"""

from __future__ import annotations

import itertools
import json
import math
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import NoReturn

from ds_npu.engine.failures.batch_checksum import BatchChecksum
from ds_npu.engine.failures.failed_ranks import ENDED_FIRST, failure_of, is_of_transport
from ds_npu.engine.failures.failure_record import LOOK_EVERY_SECONDS, PATIENCE_SECONDS, FailureRecord
from ds_npu.parallel.pipeline.executor import PipelineError
from ds_npu.parallel.pipeline.schedule import Action, Schedule
from ds_npu.parallel.pipeline.timeline import Costs, timeline
from ds_npu.parallel.tensor.randomness import generator_states, restore_generators
from ds_npu.topology.topology import Topology

PEERS_SECONDS = 10.0
"""How long a rank that has failed waits to hear that its tensor and context ranks have, too."""
LOOK_AFTER_SECONDS = 1.0
"""How long a rank waits at the end of a batch before it asks whether another one has ended."""
PAUSES, SHORTEST_PAUSE_SECONDS = 32, 1e-4
"""Pauses between two looks at the outcome are this part of the time waited, so that they add little to a step."""
NONE = "none"
DIFFERENT = "different batches"
READ_ALIKE = (
    "let every pipeline rank read the same batches in the same order (a loader by engine.topology.rank('dp') of "
    "engine.topology.size('dp')), and skip a batch, such as one that could not be loaded, on all of them or on none"
)
NO_MORE = "no more batches"
LOADING = "loading"
"""The action that failed where a rank could not load its micro-batches."""
SHOWN_LINES = 30
_numbers = itertools.count()
"""Numbers of the engines of this process, which all ranks make in the same order."""


@dataclass(frozen=True)
class BatchFailure:
    """The failure that ended a batch."""

    rank: int
    action: str
    stage: int
    micro_batch: int
    start: float
    """Start of the action if all actions take equally long; a failure that another one causes starts after it."""
    kind: str
    """A text that is equal for errors that several ranks raise alike."""
    summary: str
    where: str
    traceback: str
    batches_differ: bool = False
    """Whether ranks that share this batch were given different ones, which may be why it failed."""

    def told(self) -> str:
        return (
            f"rank {self.rank} failed in {self.action} (stage {self.stage}, micro-batch {self.micro_batch}) by "
            f"{self.summary} (at {self.where})"
        )


class FailedStageError(Exception):
    """The error of another rank, as its traceback."""


class BatchFailures:
    """Begins the batches of one engine, and ends those that have failed."""

    def __init__(self, topology: Topology, device_type: str, peers: Sequence[int]) -> None:
        """``peers``: this rank and the others that are given its batches; all of them set a ``checksum``."""
        record = FailureRecord.of_this_world()
        assert record is not None, "a pipeline has two ranks or more"
        self.record, self.topology, self.device_type = record, topology, device_type
        self.peers = peers
        self.number = next(_numbers)
        self.counts: dict[str, int] = {}
        self.broken: str | None = None
        """Why this engine runs no further batch."""

    @contextmanager
    def or_broken(self) -> Iterator[None]:
        """A context whose exceptions leave the ranks out of step, so that this engine runs no further batch."""
        try:
            yield
        except BaseException as error:
            self.broken = f"{type(error).__name__}: {error}"
            raise

    def begin(self, schedule: Schedule, trains: bool) -> BatchInStages:
        """Begin a batch. Raises PipelineError where an earlier one has left the ranks out of step."""
        if self.broken is not None:
            raise PipelineError(
                f"ds_npu.parallel.pipeline: an earlier batch of this engine ended in {self.broken}, and left the ranks "
                "out of step. What to do: end the script, and resume from a checkpoint"
            )
        ranks = list(range(self.record.ranks)) if trains else self.topology.ranks("pp", "cp", "tp")
        name = f"batches of pipeline {self.number}, {'training' if trains else f'evaluation by {ranks[0]}'}"
        self.counts[name] = self.counts.get(name, -1) + 1
        return BatchInStages(self, schedule, ranks, f"{name}: ", self.counts[name])

    def check_peers(self, batch: BatchInStages, mine: BatchFailure) -> None:
        """Raise PipelineError where a rank may wait for this one in a collective of a forward or backward."""
        if self.topology.size("ep", "etp") > 1 and self.topology.size("dp") > 1:
            self._give_up(mine, "data ranks that share experts (ds_npu.parallel.expert) wait for this rank")
        missing = [rank for rank in self.topology.ranks("cp", "tp") if rank != mine.rank]
        ends = time.monotonic() + PEERS_SECONDS
        while missing and time.monotonic() < ends:
            if self.record.store.check([batch.key_of(missing[-1])]):
                theirs = batch.failure_of(missing.pop())
                if (theirs.action, theirs.kind) != (mine.action, mine.kind):
                    self._give_up(mine, f"{theirs.told()}, elsewhere than this rank")
            else:
                time.sleep(0.01)
        if missing:
            self._give_up(mine, f"the tensor or context rank {missing[-1]} has not failed, and waits for this rank")

    def give_up_waiting(self, why: str) -> NoReturn:
        """Raise PipelineError at the end of a batch to which not all ranks come; no further batch runs."""
        with self.or_broken():
            raise PipelineError(
                f"ds_npu.parallel.pipeline: this rank waited at the end of a batch for ranks that did not come: {why}. "
                "What to do: find the first error in the logs of the other ranks, and resume from a checkpoint"
            )

    def _give_up(self, mine: BatchFailure, why: str) -> None:
        raise PipelineError(
            f"ds_npu.parallel.pipeline: {mine.told()}, and the batch cannot be ended on all ranks: {why}. What to do: "
            "end the script on this error; batches that fail on some of the ranks cannot be skipped here"
        )


class BatchInStages:
    """One batch, from its begin to its end on this rank."""

    def __init__(
        self, failures: BatchFailures, schedule: Schedule, ranks: Sequence[int], name: str, number: int
    ) -> None:
        self._failures, self._schedule, self._ranks = failures, schedule, ranks
        self._name, self._number = name, number
        self._loaders = 2 * len(ranks) // failures.topology.size("pp")
        """The number of ranks in first and last stages."""
        self._store = failures.record.store
        self._rank = failures.record.rank
        self._random = generator_states(failures.device_type)
        self._error: Exception | None = None
        self.checksum: BatchChecksum | None = None
        """The checksum of the batch that this rank was given; ``end`` compares it with those of its peers."""

    @property
    def has_failed(self) -> bool:
        """Whether a failure of this rank was noted."""
        return self._error is not None

    def note(self, action: Action, error: Exception) -> None:
        """Note that ``action`` of this rank has failed by ``error``; raises where not all ranks can end the batch."""
        start = timeline(self._schedule, Costs()).start[action]
        self._note((f"{action}", action.stage, action.micro_batch, start), error)

    def note_loading(self, stage: int, micro_batch: int, error: Exception) -> None:
        """Note that ``micro_batch`` could not be loaded for ``stage``, before any action."""
        self._note((LOADING, stage, micro_batch, -1.0), error)

    def _note(self, position: tuple[str, int, int, float], error: Exception) -> None:
        if is_of_transport(error):
            raise error
        self._error = error
        found = failure_of(error, error.__traceback__)
        lines = "".join(traceback.format_exception(error)).splitlines()[-SHOWN_LINES:]
        mine = BatchFailure(self._rank, *position, found.kind, found.summary, found.where, "\n".join(lines))
        self._store.set(self.key_of(self._rank), json.dumps(asdict(mine)))
        self._failures.check_peers(self, mine)

    def end(self) -> None:
        """Meet the other ranks; where one has failed or was given another batch, raise PipelineError on all.

        The random generators are then set back to before the batch. Raises StopIteration on all ranks where all that
        load data have met its end.
        """
        # One number, from the lowest bits up: the ranks that have come, those that have failed, the sum of shares.
        ranks = len(self._ranks)
        width = len(self._ranks).bit_length()
        mine = 1 + (self.has_failed << width) + (self._share(62 - 3 * width) << 2 * width)
        come = self._store.add(self._key(self._number), mine)
        if come % (1 << width) == ranks:
            self._forget(self._number - 1)
            failed = (come >> width) % (1 << width) > 0
            differ = come >> 2 * width != 0
            outcome = self._first(differ) if failed else DIFFERENT if differ else NONE
            self._store.set(self._outcome(self._number), outcome)
        outcome = self._met()
        if outcome == NONE:
            return
        restore_generators(self._failures.device_type, self._random)
        if outcome == NO_MORE:
            raise self._error or StopIteration
        if outcome == DIFFERENT:
            raise PipelineError(
                "ds_npu.parallel.pipeline: this batch ended on all ranks, since pipeline ranks (or the context or "
                "tensor ranks that share their samples) were given different batches. Its gradients are dropped. What "
                f"to do: {READ_ALIKE}"
            )
        failure = BatchFailure(**json.loads(outcome))
        cause = (
            self._error
            if failure.rank == self._rank
            else FailedStageError(f"on rank {failure.rank}:\n{failure.traceback}")
        )
        different = (
            f". Pipeline ranks were given different batches, too: {READ_ALIKE}" if failure.batches_differ else ""
        )
        raise PipelineError(
            f"ds_npu.parallel.pipeline: this batch ended on all ranks, since {failure.told()}. Its gradients are "
            "dropped. What to do: mend what failed; a script may also skip the batch, and go on with the next one on "
            f"all ranks{different}"
        ) from cause

    def _met(self) -> str:
        """Wait for the outcome; raise PipelineError where a rank that has ended cannot come, or at the timeout.

        The store's own wait would block it for this process's other threads, and would not end with a dead rank.
        """
        key = self._outcome(self._number)
        begun = time.monotonic()
        ended = math.inf
        timeout_s = self._failures.record.timeout_s
        while not self._store.check([key]):
            now = time.monotonic()
            if now - begun > timeout_s:
                self._failures.give_up_waiting(f"Wait timeout, {timeout_s:.0f} s")
            if now - begun > LOOK_AFTER_SECONDS and ended == math.inf and self._failures.record.knows_an_end():
                ended = now
            if now - ended > PATIENCE_SECONDS:
                self._failures.give_up_waiting(ENDED_FIRST)
            time.sleep(min(max(now - begun, SHORTEST_PAUSE_SECONDS * PAUSES) / PAUSES, LOOK_EVERY_SECONDS))
        return self._store.get(key).decode()

    def _share(self, bits: int) -> int:
        """This rank's share of a sum over its peers that is 0 where they have one checksum of ``bits``.

        Two checksums that differ never give 0; three or more do with a chance of about 2**-bits. The sum over all
        ranks, with the two counts in the bits below it, has at most 62 bits and a sign.
        """
        if self.checksum is None:
            return 0
        peers = self._failures.peers
        # Data ranks may have the same batches: without a salt their shares could cancel each other.
        own = self.checksum.read(bits, salt=peers[0])
        return own * (len(peers) - 1) if self._rank == peers[0] else -own

    def key_of(self, rank: int) -> str:
        """The store's key of the failure of ``rank`` in this batch."""
        return f"{self._key(self._number)} failure of rank {rank}"

    def failure_of(self, rank: int) -> BatchFailure:
        return BatchFailure(**json.loads(self._store.get(self.key_of(rank))))

    def _first(self, differ: bool) -> str:
        """The failure that no other one has caused; NO_MORE where every rank that loads has met the end of its data."""
        failures = [self.failure_of(rank) for rank in self._ranks if self._store.check([self.key_of(rank)])]
        if sum(each.action == LOADING and each.kind.startswith("StopIteration") for each in failures) == self._loaders:
            return NO_MORE
        first = min(failures, key=lambda each: (each.start, each.rank))
        # A rank that could not load its batch has no checksum.
        differ = differ and all(each.action != LOADING for each in failures)
        return json.dumps(asdict(first) | {"batches_differ": differ})

    def _forget(self, number: int) -> None:
        """Delete the count and the outcome of an earlier batch, which all ranks have read."""
        if number >= 0:
            self._store.delete_key(self._key(number))
            self._store.delete_key(self._outcome(number))

    def _key(self, number: int) -> str:
        return f"{self._name}{number}"

    def _outcome(self, number: int) -> str:
        return f"outcome of {self._key(number)}"
