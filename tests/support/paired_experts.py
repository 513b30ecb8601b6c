"""Forwards and backwards that run together in pipelines of experts: against the same schedule one after the other."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import gradient_rule as gradients_of
import pipeline_rule as rule
import pytest
import torch
import torch.distributed as dist
from torch import nn

from ds_npu.features.pipeline import layout
from ds_npu.parallel.expert import dispatch
from ds_npu.parallel.pipeline.schedule import Schedule
from ds_npu.parallel.runtime import paired_passes

MIXED = {"output_router_logits": False}


def one_by_one(make):
    """The same rows, in which nothing runs together."""
    return lambda *sizes: Schedule(make(*sizes).rows)


@contextmanager
def watched(log: list[tuple[str, tuple[int, ...]]], covered: list[str]) -> Iterator[None]:
    """Write down the all-to-alls of experts in the order in which they begin: on which thread, with rows of what shape.

    ``covered``: an item for each time that one of two lets the other run while messages of its own travel.
    """
    sent: dict[str, int] = {}
    hand_over = paired_passes._Pair.hand_over

    def logged(send):
        def begun(x, *args):
            name = threading.current_thread().name
            sent[name] = sent.get(name, 0) + 1
            log.append((name if name.startswith("ds_npu") else "", tuple(x.shape[1:])))
            return send(x, *args)

        return begun

    def handed(pair, part):
        name = threading.current_thread().name
        if part.other in pair._running and sent.get(name):
            covered.append(part.value)
        sent[name] = 0
        hand_over(pair, part)

    with ExitStack() as stack:
        for name in ("exchange_rows", "all_gather", "reduce_scatter"):
            stack.enter_context(mock.patch.object(dispatch, name, logged(getattr(dispatch, name))))
        stack.enter_context(mock.patch.object(paired_passes._Pair, "hand_over", handed))
        yield


def without_choice(model: nn.Module) -> nn.Module:
    """``model``, all of whose tokens choose the same experts, so that others have none."""
    for name, weight in model.named_parameters():
        if name.endswith("gate.weight"):
            nn.init.zeros_(weight)
    return model


def one_step(family: str, stage: int, section: dict, changes: dict, is_even: bool, is_paired: bool):
    """The engine, loss and gradients of one step, the order of its messages, and what was covered."""
    dtype = dtype_of(section)
    log: list[tuple[str, tuple[int, ...]]] = []
    covered: list[str] = []
    with ExitStack() as stack:
        if not is_paired:
            plain = {name: one_by_one(make) for name, make in layout.PAIRED.items()}
            stack.enter_context(mock.patch.dict(layout.PAIRED, plain))
        model = rule.model_of(family, dtype, **changes)
        engine = rule.engine_of(model if is_even else without_choice(model), stage, dtype, section)
        torch.manual_seed(17)
        stack.enter_context(watched(log, covered))
        loss, gradients = rule.step_of(engine, dtype)
    return engine, loss, gradients, log, covered


def dtype_of(section: dict) -> torch.dtype:
    if dist.get_backend() == "hccl":
        return torch.bfloat16
    # The mode that makes all of transformers' computations float64 does not reach into a backward.
    return torch.float32 if "recompute" in section else torch.float64


def hold(family: str, stages: tuple[int, ...], section: dict, changes: dict, is_even: bool = True) -> None:
    """To the bit as one after the other; in float64 and without dropout to 1e-12 as one process.

    On NPUs in bf16, and where blocks are recomputed in float32.
    """
    for stage in stages:
        where = (family, stage, section, changes)
        engine, loss, gradients, log, covered = one_step(family, stage, section, changes, is_even, True)
        alone, alone_loss, alone_gradients, _, none = one_step(family, stage, section, changes, is_even, False)
        assert loss == alone_loss and not none, where
        assert gradients.keys() == alone_gradients.keys()
        assert all(torch.equal(each, alone_gradients[name]) for name, each in gradients.items()), where
        assert engine.get_global_grad_norm() == alone.get_global_grad_norm(), where
        every: list = [None] * engine.topology.size("ep")
        dist.all_gather_object(every, log, group=engine.topology.group("ep"))
        assert all(each == log for each in every), where
        # A rank whose first stage is one dense block has nothing to hide in it.
        everywhere: list = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, covered)
        assert {"forward", "backward"} == set(itertools.chain(*everywhere)), (where, everywhere)
        if dtype_of(section) == torch.float64 and not any("dropout" in name for name in changes):
            model = rule.model_of(family, torch.float64, **changes)
            model = model if is_even else without_choice(model)
            losses = section["moe"] if "z_loss" in section["moe"] else None
            expected = rule.reference(model, engine.topology.size("dp"), torch.float64, losses)
            assert abs(loss / expected.loss - 1) <= rule.EXACT, where
            assert gradients_of.relative(gradients, expected.gradients) <= rule.EXACT, where


def dying(victim: int, hand_overs: int) -> None:
    """One rank dies between two turns, while messages travel; all others end with an error, and so do their threads."""
    hand_over, count = paired_passes._Pair.hand_over, itertools.count(1)

    def die(pair, part):
        if dist.get_rank() == victim and next(count) == hand_overs:
            os._exit(0)
        hand_over(pair, part)

    section = {"parallel": {"pipeline": 2, "expert": 2}, "pipeline": {"overlap_experts": True}}
    engine = rule.engine_of(rule.model_of("qwen3_moe", torch.float64, **MIXED), 1, torch.float64, section)
    began = time.monotonic()
    with mock.patch.object(paired_passes._Pair, "hand_over", die), pytest.raises(RuntimeError) as caught:
        rule.step_of(engine, torch.float64)
    assert not isinstance(caught.value, paired_passes.AbandonedError), caught.value
    assert not [each for each in threading.enumerate() if each.name.startswith("ds_npu backward")]
    assert time.monotonic() - began < 60
    # There is nobody left to meet at the harness's barrier.
    os._exit(0)
