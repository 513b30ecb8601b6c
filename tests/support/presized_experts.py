"""Experts in rooms of known sizes: layers by themselves, and forwards that run again where something does not fit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import contextmanager
from unittest import mock

import expert_rule
import tensor_parallel_rule as dense
import tiny_models
import torch
from expert_cases import LAYOUTS, ROUTINGS, ExpertOptions, LayerCase, Numbers, check_layer

from ds_npu.features.experts.presized import PresizedForward
from ds_npu.parallel.expert.dispatch import Plan
from ds_npu.parallel.expert.presized import BufferSizes, PresizedPlan, need
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology


def with_room(margin: float, more: int):
    """Makes plans with room for ``margin`` times what they need, and ``more``."""

    def presize(plans: Sequence[Plan]) -> list[Plan]:
        needs = [need(plan).wait().cpu() for plan in plans]
        return [
            PresizedPlan(plan, BufferSizes((each * margin).ceil().long() + more))
            for plan, each in zip(plans, needs, strict=True)
        ]

    return presize


def check_world(degrees: Degrees, dtype: torch.dtype = torch.float64, device: str = "cpu") -> None:
    """Every routing, layout and level in rooms that just fit, and larger ones, is the loop over experts."""
    topology = Topology(degrees)
    rooms = [(1.0, 0), (1.5, 0), (1.0, 3)]
    options = [
        ExpertOptions("alltoall", level, presize=with_room(*room))
        for level, room in itertools.product(("none", "level0", "level1"), rooms)
    ]
    for each in itertools.product(ROUTINGS, LAYOUTS.values(), options, {False, degrees.tp > 1}):
        check_layer(topology, LayerCase(*each), Numbers(dtype, device))


TIGHT, WIDE = 1.0, 6.0
EXACT, IN_ROOMS, TOO_SMALL = (False, True), (True, True), (True, False)
"""Whether a forward has rooms, and whether all rows fitted."""
RUNS = {TIGHT: [EXACT, TOO_SMALL, EXACT], WIDE: [EXACT, IN_ROOMS]}
"""Of two micro-batches."""


@contextmanager
def counted_runs(checkpoints: bool = False):
    """A list of the runs of every forward within the block; with ``checkpoints`` each block is computed again."""
    runs, run, made = [], PresizedForward._run, tiny_models.tiny

    def counted(forward, rooms, *args, **kwargs):
        out = run(forward, rooms, *args, **kwargs)
        runs.append((bool(rooms), out[1]))
        return out

    def tiny(*args, **kwargs):
        model = made(*args, **kwargs)
        if checkpoints:
            model.gradient_checkpointing_enable()
        return model.train()

    with mock.patch.object(PresizedForward, "_run", counted), mock.patch.object(tiny_models, "tiny", tiny):
        yield runs


def hold_to_one_process(hold, family: str, parallel: dict, moe: dict, stages: tuple[int, ...]) -> None:
    """``hold`` each stage to one process, with rooms in which everything fits, and with too small ones."""
    for margin in (TIGHT, WIDE):
        with counted_runs() as runs:
            hold(family, parallel, moe | {"row_margin": margin}, stages)
        assert runs == RUNS[margin] * len(stages), (margin, runs)


def plain_rule(family: str, parallel: dict, moe: dict, stages: tuple[int, ...]) -> None:
    """The gradient rule of experts."""
    more = {"context_parallel": {"algorithm": "ring"}} if "context" in parallel else {}
    expert_rule.hold_to_one_process(family, parallel, moe, stages, more)


def checkpointed(family: str, parallel: dict, stages: tuple[int, ...]) -> None:
    """Blocks that are computed again in backward, in float32: Float64 does not reach there."""
    expected = dense.reference(family, 2 // parallel.get("tensor", 1), dtype=torch.float64, start=torch.float32)
    for margin, stage in itertools.product((TIGHT, WIDE), stages):
        section = {"parallel": parallel, "moe": {"row_margin": margin}}
        with counted_runs(checkpoints=True) as runs:
            errors = dense.engine_step(family, stage, torch.float32, section, expected)
        assert runs == RUNS[margin], runs
        assert max(errors.loss, errors.gradient, errors.norm) <= 1e-5, (margin, stage, errors)
