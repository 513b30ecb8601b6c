"""``ds_npu.optimizer_memory`` on simulated NPUs: numbers, copies beside the step, and bytes of the device."""

from __future__ import annotations

from unittest import mock

import gradient_rule as rule
import kept_state as rig
import pytest
import torch
from kept_state import Case
from ranks import run_on_ranks

from ds_npu.zero_ext.optimizer_state import masters_of

SHARED, SWAPPED = {"share_fp32": True}, {"swap": True}
BOTH = SHARED | SWAPPED
ELEMENTS, BUCKET = 4096, 66_000
"""Of a chunk, and of ZeRO's bucket, into which the largest weight goes."""


def runs(cases: list[Case]) -> None:
    """Those without, to the bit."""
    rule.without_extension()
    for case in cases:
        plain = rig.engine_of(case, {})
        expected = [*rig.train(plain), *rig.weights_of(plain)]
        for section in (SHARED, SWAPPED, BOTH, BOTH | {"resident_gib": 6e-5}):
            engine = rig.engine_of(case, section)
            found = [*rig.train(engine), *rig.weights_of(engine)]
            assert rig.alike(found, expected), (case, section, type(engine.optimizer).__name__)
            places = {
                each.device.type for chunk in chunks_of(engine) for parts in chunk.kept.values() for each in parts
            }
            assert places == (
                {"npu"} if section == SHARED else {"cpu", "npu"} if "resident_gib" in section else {"cpu"}
            )


def chunks_of(engine):
    """Those of the KeptState, whose method wraps the step of DeepSpeed's optimizer."""
    return engine.optimizer.step.wrapper.func.__self__.chunks


def test_runs_are_those_without_to_the_bit():
    run_on_ranks(2, runs, [Case(1), Case(3)], backend="hccl", sets_device=False)


@pytest.mark.slow
def test_runs_of_other_wrappers_are_those_without_to_the_bit():
    cases = [Case(0), Case(0, fused=True), Case(1, "fp32"), Case(2)]
    run_on_ranks(2, runs, cases, backend="hccl", sets_device=False)


def moments() -> None:
    """The loss is the plain run's but for rounding."""
    rule.without_extension()
    plain = rig.train(rig.engine_of(Case(1), {}))
    for moments in ("bf16", "int8"):
        for more in ({}, BOTH):
            found = rig.train(rig.engine_of(Case(1), {"moments": moments} | more))
            losses = zip(found[:-1], plain[:-1], strict=True)
            assert 0 < max((a - b).abs() for a, b in losses) < 0.02, (moments, found, plain)


def test_moments_in_fewer_bits_train():
    run_on_ranks(1, moments, backend="hccl", sets_device=False)


BYTES = {"plain": ({}, 12), "share_fp32": (SHARED, 10), "int8": (SHARED | {"moments": "int8"}, 4), "swap": (SWAPPED, 0)}


def begun(case: Case, section: dict[str, object], elements: int = ELEMENTS):
    """An engine with chunks of so many ``elements`` after some steps, those of its masters, and bytes before it."""
    rig.live_bytes()
    before = torch.npu.memory_allocated()
    with mock.patch.object(rig, "CHUNK", elements):
        engine = rig.engine_of(case, section, rig.Words(), reduce_bucket_size=BUCKET)
    rig.train(engine)
    return engine, sum(master.numel() for master, _ in masters_of(engine.optimizer)), before


def count_bytes(stage: int) -> None:
    """Of the device, between steps: master and moments as the formula says, within 2 %."""
    rule.without_extension()
    begun(Case(stage), {})  # What a first engine leaves for good.
    found = {}
    for name, (section, _) in BYTES.items():
        # The allocator rounds each tensor of a chunk up to 512 bytes.
        engine, elements, before = begun(Case(stage), section, 1 << 16)
        found[name] = torch.npu.memory_allocated() - before
        del engine
    for name, (_, size) in BYTES.items():
        saved = found["plain"] - found[name]
        assert abs(saved - (12 - size) * elements) <= 0.02 * 12 * elements, (name, saved / elements, found)


@pytest.mark.parametrize("stage", [1, 3])
def test_bytes_of_the_device_between_steps(stage):
    run_on_ranks(1, count_bytes, stage, backend="hccl", sets_device=False)


def peak_of_a_step(case: Case, each: int) -> None:
    """So many bytes a weight, of weights and gradients, and a chunk: three slots, its gradient, what Adam makes."""
    rule.without_extension()
    begun(case, {})
    engine, elements, before = begun(case, SWAPPED)
    peak = torch.npu.max_memory_allocated
    step, seen = engine.optimizer.step, []

    def watched(*args: object) -> None:
        torch.npu.reset_peak_memory_stats()
        step(*args)
        seen.append(peak() - before)

    engine.optimizer.step = watched
    rig.train(engine, rig.STEPS, 1)
    buffers = (3 * 12 + 4 + 6 * 4) * ELEMENTS + 2 * BUCKET
    print(f"{case}: {seen[0] / elements:.3f} bytes a weight, {buffers / elements:.3f} of them buffers at most")
    assert 2 * elements < seen[0] <= (each + 0.05) * elements + buffers, (seen[0] / elements, buffers / elements)


@pytest.mark.parametrize(
    ("case", "each"), [(Case(1), 4), (Case(2), 4), (Case(3), 4), (Case(1, "fp32"), 6)], ids=["1", "2", "3", "fp32"]
)
def test_peak_of_a_step_is_weights_gradients_and_chunks(case, each):
    """BF16_Optimizer accumulates gradients in float32."""
    run_on_ranks(1, peak_of_a_step, case, each, backend="hccl", sets_device=False)
