"""``pipeline.overlap_experts`` on simulated NPUs, where autograd runs backwards on threads of its own.

``ds_npu sim --chaos SEED -- python -m pytest tests/npu/test_paired_experts_npu.py`` runs the devices' work in the odd
orders that CANN allows.
"""

from __future__ import annotations

import paired_experts
import pytest
import torch
from ranks import run_on_ranks

from ds_npu.parallel.runtime.micro_batch import new_forward
from ds_npu.parallel.runtime.paired_passes import PAIRED_PASS, PairedPass, PairRunner, PassKind, running_pass

RECOMPUTED = {"recompute": {"layers": "all"}}
CASES = [("qwen3_moe", "1f1b", {}), ("deepseek_v3", "1f1b", RECOMPUTED), ("qwen3_moe", "dualpipe_v", RECOMPUTED)]


@pytest.mark.slow
@pytest.mark.matrix(corners=1, drawn=1)
@pytest.mark.parametrize(("family", "schedule", "keys"), CASES, ids=str)
def test_no_bit_changes(family, schedule, keys):
    section = {"parallel": {"pipeline": 2, "expert": 2}, "moe": {}} | keys
    section["pipeline"] = {"schedule": schedule, "overlap_experts": True}
    changes = {"attention_dropout": 0.3} | (paired_experts.MIXED if family == "qwen3_moe" else {})
    run_on_ranks(
        4, paired_experts.hold, family, (1,), section, changes, backend="hccl", sets_device=False, deadline_s=500.0
    )


class Waits(torch.autograd.Function):
    """``x``, whose backward lets the other run."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, turns: PairedPass) -> torch.Tensor:
        ctx.paired_pass = turns
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        ctx.paired_pass.hand_over(PassKind.BACKWARD)
        return gradient * 2, None


def test_autograd_in_a_forward_does_not_wait_for_a_backward_that_waits():
    """Autograd has one thread for a device."""
    pair, found = (PairedPass(), PairedPass()), []
    x = torch.ones(3, device="npu", requires_grad=True)
    out = Waits.apply(Waits.apply(x, pair[1]), pair[1]).sum()

    def forward() -> None:
        with new_forward() as micro_batch:
            PAIRED_PASS.set(micro_batch, pair[0])
            pair[0].hand_over(PassKind.FORWARD)
            running_pass().finish_backward()
            y = torch.full((3,), 2.0, device="npu", requires_grad=True)
            found.extend(torch.autograd.grad(y.square().sum(), y))

    with PairRunner(torch.device("npu")) as runner:
        runner.run(forward, out.backward, pair)
    assert found[0].tolist() == [4.0] * 3
    assert x.grad.tolist() == [4.0] * 3
