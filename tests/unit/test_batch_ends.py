"""The end of a pipeline's batch, at which ranks wait for each other: one that has ended keeps none waiting."""

from __future__ import annotations

import threading
import types
from datetime import timedelta

import pytest
import torch.distributed as dist

from ds_npu.engine.failures import batch_failures
from ds_npu.engine.failures.batch_failures import BatchFailures, BatchInStages
from ds_npu.engine.failures.failed_ranks import is_of_transport
from ds_npu.engine.failures.failure_record import FailureRecord
from ds_npu.parallel.pipeline.executor import PipelineError


def batch_of(store: dist.Store, rank: int) -> BatchInStages:
    """The first batch of one of two ranks."""
    failures = object.__new__(BatchFailures)
    failures.record, failures.device_type, failures.broken = FailureRecord(store, rank, 2), "cpu", None
    failures.topology, failures.peers = types.SimpleNamespace(size=lambda *axes: 2), [rank]
    return BatchInStages(failures, None, [0, 1], "batches: ", 0)


@pytest.fixture
def store(monkeypatch) -> dist.Store:
    monkeypatch.setattr(batch_failures, "LOOK_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(batch_failures, "PATIENCE_SECONDS", 0.1)
    found = dist.HashStore()
    found.set_timeout(timedelta(seconds=60))
    return found


def test_ranks_meet(store):
    batches = [batch_of(store, rank) for rank in range(2)]
    other = threading.Thread(target=batches[1].end)
    threading.Timer(0.3, other.start).start()
    batches[0].end()
    other.join(10.0)
    assert not other.is_alive()


@pytest.mark.parametrize("key", ["left", "first", "gone"])
def test_a_rank_that_has_ended_keeps_none_waiting(key, store):
    batch = batch_of(store, 0)
    batch._failures.record.store.set(key, "1")
    with pytest.raises(PipelineError, match="did not come: another rank has ended its process") as caught:
        batch.end()
    assert is_of_transport(caught.value) and "another rank has ended" in batch._failures.broken


def test_the_timeout_of_the_process_group(store):
    store.set_timeout(timedelta(seconds=0.3))
    with pytest.raises(PipelineError, match="did not come: Wait timeout, 0 s"):
        batch_of(store, 0).end()
