"""Of how many tokens logits are computed at a time: bytes and seconds of each choice, and the plan that takes one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_npu.config.rules import broken_rules
from ds_npu.config.sections import DsNpuConfig
from ds_npu.planner.chunk_choice import LEAST_TOKENS, PASSES, ChunkedHead
from ds_npu.planner.memory_plan import Moment, Option, PlannedLayer, best_plan
from ds_npu.planner.memory_plan_table import LOSS, StagePlan, plan_lines, section_of
from ds_npu.topology.machine import A2

HEAD = ChunkedHead(tokens=3000, hidden=4096, words=128_000, itemsize=2, wide=4)


def test_sizes_go_from_the_least_to_all_tokens():
    assert HEAD.chunk_sizes() == (256, 512, 1024, 2048, 4096)
    assert replace(HEAD, tokens=LEAST_TOKENS).chunk_sizes() == replace(HEAD, tokens=1).chunk_sizes() == (LEAST_TOKENS,)


def test_bytes_are_those_of_the_logits_of_a_chunk():
    # bf16: one copy in float32, one in bf16; of softcapped logits two of each.
    for copies in (1, 2):
        options = replace(HEAD, copies=copies).options(A2)
        of_logits = [each.kept_bytes - 2 * 4096 * 2 * min(int(each.parts[0]), 3000) for each in options]
        assert of_logits == [6 * copies * 128_000 * each for each in (256, 512, 1024, 2048, 3000)]


def test_small_chunks_read_the_weight_more_often():
    machine = replace(A2, matmul=1e30, kernel=0.0, memory=((1, 1e12),))
    weight, chunk = 4096 * 128_000, 256 * (4096 + 128_000) * 2
    one = 3 * chunk + weight * (2 + 2 + 8) + PASSES * 2 * 256 * 128_000 * 4
    assert replace(HEAD, tokens=512).seconds(256, machine) == pytest.approx(2 * one / 1e12)
    frozen = replace(HEAD, tokens=256, trains_weight=False).seconds(256, machine)
    assert frozen == pytest.approx((one - chunk - 8 * weight) / 1e12)
    options = HEAD.options(A2)
    assert options[-1].seconds == 0.0 < options[-2].seconds < options[0].seconds
    # What is left over is a chunk of its own.
    split = replace(HEAD, tokens=2048).seconds(2048, A2) + replace(HEAD, tokens=952).seconds(952, A2)
    assert HEAD.seconds(2048, A2) == pytest.approx(split)


def test_a_plan_takes_the_largest_chunk_that_fits():
    block = PlannedLayer("model.layers.0", (Option(("block",), 10, 5.0), Option((), 1000, 0.0)))
    layers = (block, PlannedLayer(LOSS, HEAD.options(A2)))
    least = HEAD.options(A2)[0].kept_bytes
    moments = (Moment(LOSS, least + 10, (1, 1)), Moment("the forward behind it", 10, (1, 0)))
    taken = []
    for more in (0, 256, 1000, 3000):
        plan = best_plan(layers, moments, least + 1010 + more * HEAD.bytes_of_token)
        taken.append(section_of([StagePlan(0, layers, moments, {"model.layers.0": {}}, plan)]))
    assert taken == [{"chunked_loss": each} for each in (256, 512, 1024, 4096)]
    tight = best_plan(layers, moments, least + 10)
    stage = StagePlan(0, layers, moments, {"model.layers.0": {}}, tight)
    assert section_of([stage]) == {"recompute": {"modules": ["model.layers.0"]}, "chunked_loss": 256}
    assert any(LOSS in line and "in chunks of 256 tokens" in line for line in plan_lines([stage], 1.0, 0, "A2"))


def test_a_planned_number_needs_a_plan():
    def problems(**section: object) -> list[str]:
        return [each.path for each in broken_rules(DsNpuConfig.model_validate(section), frozenset())]

    assert problems(chunked_loss="planned") == ["ds_npu.chunked_loss"]
    assert problems(chunked_loss="planned", recompute={"budget_gib": 1}) == []
    assert problems(chunked_loss=True) == problems(chunked_loss=300) == []
