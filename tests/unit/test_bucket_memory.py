"""The memory of buckets that are being filled, against the flat buffer in which each weight has its place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ds_npu.zero_ext import bucket_plan
from ds_npu.zero_ext.bucket_memory import BucketedGroup, BucketMemory
from ds_npu.zero_ext.bucket_plan import plan_of

CPU = torch.device("cpu")


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> BucketedGroup:
    """Weights of 12, 40, 5 and 5 elements and 2 of padding, over two ranks, in buckets of some 10 elements."""
    monkeypatch.setattr(bucket_plan, "LEAST", 10)
    monkeypatch.setattr(bucket_plan, "LEAST_OF_A_RANK", 1)
    shapes = [(3, 4), (5, 8), (5,), (5,)]
    weights = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    plan = plan_of([(0, 12), (12, 40), (52, 5), (57, 5)], 64, 2, [10])
    return BucketedGroup(weights, CPU, plan, None, 2, 0, ())


def test_what_is_written_to_homes_and_buckets_is_sent(group, monkeypatch):
    made = []
    full = torch.full
    monkeypatch.setattr(torch, "empty", lambda *size, **how: full(size, torch.nan, **how))
    memory = BucketMemory({0: group}, lambda: torch.float32, lambda: made.append(None))
    whole = torch.cat([torch.arange(1.0, 63.0), torch.zeros(2)])
    for position, weight in enumerate(group.weights):
        start, numel = group.plan.weights[position]
        values = whole[start : start + numel].view(weight.shape)
        home = memory.home(weight, torch.float32)
        assert memory.home(weight, torch.bfloat16) is None
        if position % 2 and home is not None:
            home.copy_(values)
            assert memory.is_home(weight, home) and not memory.is_home(weight, values)
            continue
        for piece in group.plan.pieces(position):
            part = memory.bucket((0, piece.bucket))[piece.start : piece.start + piece.numel]
            part.copy_(values.flatten()[piece.first : piece.first + piece.numel])
    assert len(made) == len(group.plan.spans) == len(list(memory.spans()))
    found = torch.cat([memory.take((0, index)) for index in range(len(group.plan.buckets))])
    assert torch.equal(found, whole)
    assert list(memory.spans()) == []


def test_a_span_is_kept_until_its_last_bucket_is_sent_and_made_anew(group):
    memory = BucketMemory({0: group}, lambda: torch.float32, lambda: None)
    weight = group.weights[1]
    span, _ = group.plan.home(1)
    buckets = [index for index, each in enumerate(group.plan.buckets) if each.span == span]
    assert len(buckets) >= 4
    home = memory.home(weight, torch.float32)
    for index in buckets[:-1]:
        memory.take((0, index))
        assert memory.is_home(weight, home)
    memory.take((0, buckets[-1]))
    assert not memory.is_home(weight, home)
    assert memory.home(weight, torch.float32).data_ptr() != home.data_ptr()


def test_a_home_is_given_once_before_it_is_sent(group):
    """The gradient in it may be set apart while the next one is computed."""
    memory = BucketMemory({0: group}, lambda: torch.float32, lambda: None)
    first, second = group.weights[0], group.weights[1]
    assert memory.home(first, torch.float32) is not None
    assert memory.home(first, torch.float32) is None
    assert memory.home(second, torch.float32) is not None
    for index in range(len(group.plan.buckets)):
        memory.take((0, index))
    assert memory.home(first, torch.float32) is not None
