"""Ranks that share a batch and were given different ones, as where a script skips a batch on one rank alone."""

from __future__ import annotations

import gradient_rule
import pytest
import torch
import torch.distributed as dist
from caught_failures import Run, failing, fails_on, hold
from ranks import run_on_ranks
from test_module_failures import as_before, engine_of

from ds_npu.engine.failures import batch_checksum
from ds_npu.engine.failures.batch_checksum import BatchChecksum
from ds_npu.parallel.pipeline.executor import PipelineError

SAID = r"since pipeline ranks .* were given different batches\. .*skip a batch, .*, on all of them or on none"


def section(schedule: str, **parallel: int) -> dict:
    return {"parallel": {"pipeline": 2, **parallel}, "pipeline": {"schedule": schedule}}


def one_is_ahead(run: Run) -> None:
    """Each rank in turn has skipped a batch, in training and in evaluation."""
    if run.engine.micro_steps == 0:
        return  # The first batch is compared before it runs.
    for rank in range(dist.get_world_size()):
        given = run.batches[dist.get_rank() == rank]
        failing(run, given, SAID)
        run.engine.eval()
        with torch.no_grad():
            failing(run, given, SAID)
        run.engine.train()
        # A failure is said first, and what may have caused it behind it.
        with fails_on(0, run.engine, 0, ValueError("given up")):
            failing(run, given, r"rank 0 failed .* given up .* Pipeline ranks were given different batches, too")


def ahead() -> None:
    hold(section("1f1b"), 1, bad=one_is_ahead)


def one_tensor_rank_is_ahead(run: Run) -> None:
    if run.engine.micro_steps > 0:
        failing(run, run.batches[dist.get_rank() == 3], SAID)


def beside_other_axes() -> None:
    hold(section("zb_v", tensor=2), 0, bad=one_tensor_rank_is_ahead)
    run = Run(section("1f1b"), 0, torch.float64)
    run.forward(run.batches[0])
    for ranks in ((1,), (1, 2)):
        failing(run, run.batches[dist.get_rank() in ranks], SAID)
    # Data ranks read other batches.
    run.forward(run.batches[run.engine.topology.rank("dp")])


def of_a_module() -> None:
    engine, batches = engine_of("1f1b", 0)
    for rank in (0, 2):
        ahead = batches[1:] + batches[:1]
        with pytest.raises(PipelineError, match=SAID):
            engine.train_batch(iter(ahead if dist.get_rank() == rank else batches))
        as_before(engine)
    loss = float(engine.train_batch(iter(batches)))
    expected = gradient_rule.reference(
        len(batches) * gradient_rule.MICRO, torch.nn.Sequential(*gradient_rule.layers())
    ).loss
    assert abs(loss / expected - 1) <= 1e-6


def test_a_batch_that_one_rank_has_skipped():
    run_on_ranks(2, ahead)


@pytest.mark.slow
def test_other_axes():
    run_on_ranks(4, beside_other_axes)


def test_a_module():
    run_on_ranks(3, of_a_module)


def checksum(*tensors: torch.Tensor) -> int:
    return BatchChecksum({"input_ids": tensors[0], "others": list(tensors[1:])}).read(56)


def test_checksums(monkeypatch):
    words = torch.randint(0, 50_000, (4, 33), generator=torch.Generator().manual_seed(1))
    mask, pixels = torch.ones(4, 33, dtype=torch.bool), torch.rand(2, 3)
    same = checksum(words, mask, pixels)
    assert same == checksum(words.clone().t().contiguous().t(), mask, pixels + 1)
    seen = {same, checksum(words.flip(0), mask, pixels), checksum(words[:, :32], mask, pixels)}
    for place in range(words.numel()):
        other = words.clone()
        other.view(-1)[place] += 1
        seen.add(checksum(other, mask, pixels))
    assert len(seen) == 3 + words.numel()
    assert checksum(words, ~mask, pixels) not in seen
    # Without integers the bits of the last tensor count.
    assert len({checksum(pixels.to(dtype) + step) for step in (0, 1) for dtype in (torch.float64, torch.bfloat16)}) == 4
    assert checksum(pixels.to(torch.complex64)) != checksum(pixels.to(torch.complex64) * 1j)
    assert BatchChecksum(["no tensor"]).read(8) == BatchChecksum(("another",)).read(8)
    checksum(torch.zeros(0, dtype=torch.int64))
    # Ranks may have seen batches of other sizes.
    assert torch.equal(batch_checksum._weights(64)[:16], batch_checksum._weights(16))
    monkeypatch.setattr(batch_checksum, "MOST", 10)
    assert checksum(words, mask) != checksum(words + 1, mask)
