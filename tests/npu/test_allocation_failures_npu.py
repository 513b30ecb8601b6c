"""Memory is used up at any allocation of a step: an error, and weights and optimizer state as before, or refused."""

from __future__ import annotations

import gc
import os
import re
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

import gradient_rule as rule
import kept_state as rig
import pytest
import torch
from ranks import run_on_ranks
from shortages import ALL_KEYS, DEVICE, HOST, SEGMENT, Run, count, counts, engine_of, shortage

from ds_npu.memory import swapped_activations

SHARED = {"share_fp32": True, "swap": True}
CASES: dict[str, tuple[int, dict[str, object], dict[str, object]]] = {
    "ZeRO 1, all": (1, ALL_KEYS, SHARED),
    "ZeRO 3, all": (3, ALL_KEYS, SHARED),
    "ZeRO 2, int8": (2, {}, {"moments": "int8"}),
    "without ZeRO, layers": (0, {"recompute": {"layers": 2, "method": "uniform"}}, SHARED | {"resident_gib": 6e-5}),
}
"""By name: the stage, the section without optimizer_memory, and that."""
SAMPLE, SAMPLE_OF_A_PHASE = 9, 3


def begin() -> None:
    # Each tensor is an allocation of its own then; the allocator looks once.
    os.environ["PYTORCH_NO_NPU_MEMORY_CACHING"] = "1"
    rule.without_extension()
    swapped_activations.LEAST_BYTES = 1


def places(counted: Sequence[int], sample: int) -> list[int]:
    """Allocations, numbered from 1, of phases that have ``counted`` ones: all, or ends and middles of each."""
    ends = list(accumulate(counted))
    if sample == 0:
        return list(range(1, ends[-1] + 1))
    return sorted(
        {
            end - total + 1 + (total - 1) * k // (sample - 1)
            for end, total in zip(ends, counted, strict=True)
            for k in range(sample)
        }
    )


def fails(case: str, folder: str, sample: int) -> None:
    """Let each allocation fail, and hold what is left to what was before, and what goes on to a run without."""
    begin()

    def resumed() -> Run:
        run = Run(engine_of(*CASES[case]))
        run.engine.load_checkpoint(folder)
        return run

    run = Run(engine_of(*CASES[case]))
    for seed in (1, 2):
        run.step(seed)
    run.engine.save_checkpoint(folder)
    before, expected = run.held(), [run.step(3), *run.held()]
    run = resumed()
    counted = counts(DEVICE, run.phases(3))
    seen: Counter[str] = Counter()
    for first in places(counted, sample):
        # A later step allocates less, and after a backward that has not ended ZeRO 2 and 3 reduce nothing any more.
        run.engine.destroy()  # else DeepSpeed's hooks keep it, and its bucket of gradients
        del run
        gc.collect()
        run = resumed()
        try:
            with shortage(DEVICE, first) as made:
                run.step(3)
        except RuntimeError as error:
            assert re.search(r"apply for memory|out of memory", str(error)), error
        else:
            # What swap copies depends on how long copies took: a step may allocate less than the one that was counted.
            assert made[0] < first and first > 0.9 * sum(counted), (case, first, made, counted)
            assert rig.alike([run.loss, *run.held()], expected), (case, first)
            continue
        torch.npu.synchronize()
        seen[run.phase] += 1
        refused = check_whole_or_refused(run, before)
        seen["refused"] += refused
        if refused:
            run.engine.load_checkpoint(folder)
            assert rig.alike(run.held(), before), (case, first)
    assert seen["forward"] and seen["backward"] and seen["step"] and seen["refused"], seen
    print(f"{case}: {counted} allocations, failed in {dict(seen)}")
    again = resumed()
    assert rig.alike([again.step(3), *again.held()], expected), case


def check_whole_or_refused(run: Run, before: list[torch.Tensor]) -> bool:
    try:
        assert rig.alike(run.held(), before), run.phase
    except RuntimeError as error:
        assert "load the last checkpoint" in str(error) and run.phase == "step", error
        with pytest.raises(
            RuntimeError, match=r"step: ds_npu\.optimizer_memory was changing weights and optimizer state"
        ):
            run.engine.optimizer.step()
        return True
    return False


@pytest.mark.slow
@pytest.mark.matrix(corners=2, drawn=0)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("sample", [SAMPLE_OF_A_PHASE, 0], ids=["sample", "all"])
def test_each_allocation_of_a_step_may_fail(case, sample, tmp_path):
    run_on_ranks(1, fails, case, str(tmp_path), sample, backend="hccl", sets_device=False, deadline_s=3600.0)


def host_fails() -> None:
    """Pinned memory, in making an engine and in its first step: torch_npu says nothing where there is none."""
    begin()
    case = CASES["ZeRO 1, all"]
    total = count(HOST, lambda: Run(engine_of(*case)).step(1))
    assert total > 3
    for first in range(1, total + 1):
        torch.npu.host_empty_cache()
        with (
            pytest.raises(MemoryError, match=r"out of memory of the host: [\d,]+ bytes could not be pinned"),
            shortage(HOST, first),
        ):
            Run(engine_of(*case)).step(1)
        gc.collect()
        torch.npu.synchronize()


def test_pinned_memory_may_be_used_up():
    run_on_ranks(1, host_fails, backend="hccl", sets_device=False, deadline_s=600.0)


def saving_fails(folder: str) -> None:
    """A checkpoint that cannot be saved, or loaded, for want of memory leaves the last one; a later one is whole."""
    begin()
    run = Run(engine_of(*CASES["ZeRO 2, int8"]))
    run.step(1)
    run.engine.save_checkpoint(folder, "first")
    before = run.held()
    for first in places([count(DEVICE, lambda: run.engine.save_checkpoint(folder, "counted"))], SAMPLE):
        with shortage(DEVICE, first), pytest.raises(RuntimeError, match="apply for memory"):
            run.engine.save_checkpoint(folder, "second")
        assert rig.alike(run.held(), before), first
    refused = 0
    for first in places([count(DEVICE, lambda: run.engine.load_checkpoint(folder, "first"))], SAMPLE):
        with shortage(DEVICE, first), pytest.raises(RuntimeError, match="apply for memory"):
            run.engine.load_checkpoint(folder, "first")
        try:
            assert rig.alike(run.held(), before), first
        except RuntimeError as error:
            assert "load the last checkpoint" in str(error), error
            refused += 1
        run.engine.load_checkpoint(folder, "first")
    assert refused
    assert rig.alike(run.held(), before)
    run.engine.save_checkpoint(folder, "second")
    again = Run(engine_of(*CASES["ZeRO 2, int8"]))
    again.engine.load_checkpoint(folder, "second")
    assert rig.alike(again.held(), before)


def test_saving_and_loading_may_fail(tmp_path):
    run_on_ranks(1, saving_fails, str(tmp_path), backend="hccl", sets_device=False, deadline_s=600.0)


def runs_out() -> None:
    """With torch_npu's cache, as in any run: its own error, which says how much it wanted."""
    rule.without_extension()
    swapped_activations.LEAST_BYTES = 1
    run = Run(engine_of(1, ALL_KEYS, SHARED))
    run.step(1)
    before = run.held()
    torch.npu.empty_cache()
    with shortage(SEGMENT, 1), pytest.raises(torch.OutOfMemoryError, match=r"NPU out of memory\. Tried to allocate"):
        run.step(2, rows=4000)
    torch.npu.synchronize()
    assert rig.alike(run.held(), before)


def test_the_error_is_torchs():
    run_on_ranks(1, runs_out, backend="hccl", sets_device=False)
