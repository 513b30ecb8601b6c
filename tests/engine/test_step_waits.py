"""The optimizer steps of ZeRO 1 and 2, for which the host waits once, against DeepSpeed's own, to the bit."""

from __future__ import annotations

from typing import Any

import gradient_rule
import torch
import torch.distributed as dist
from not_finite_steps import BF16, UNREAD, Case, Model, Root, take_step
from ranks import run_on_ranks
from torch.utils._python_dispatch import TorchDispatchMode

CASES = [
    *(Case(config, stage, clipping) for config in ({}, BF16, UNREAD) for stage in (1, 2) for clipping in (0.01, 1e9)),
    Case({}, 1, clipping=0.0),
]
FINITE, NOT_FINITE = None, 0.0
"""Inputs of a step's last micro-batch on rank 1: as all others, or with an infinite gradient."""
STEPS = (FINITE, NOT_FINITE, FINITE)


class HostReads(TorchDispatchMode):
    """Counts the numbers that the host reads of tensors."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function._schema.name == "aten::_local_scalar_dense"
        return function(*args, **(kwargs or {}))


def engine_of(case: Case, **section: Any) -> Any:
    import deepspeed

    gradient_rule.without_extension()
    torch.manual_seed(0)
    model = Model(Root())
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": case.clipping,
        # Adam reads its counts of steps, which are on the host.
        "optimizer": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": case.stage},
        **case.config,
        **section,
    }
    groups = [list(model.first.parameters()), list(model.last.parameters())]
    groups = [{"params": each, "lr": lr} for each, lr in zip(groups, (1e-2, 1e-3), strict=True)]
    return deepspeed.initialize(model=model, model_parameters=groups, config=config)[0]


def trained(case: Case, **section: Any) -> tuple[list[Any], list[int]]:
    """After each step weights, masters, the norm, and whether it was skipped; and the numbers that the step read."""
    engine, found, reads = engine_of(case, **section), [], []
    for bad in STEPS:
        with HostReads() as read:
            take_step(engine, case, bad)
        reads.append(read.count)
        optimizer = engine.optimizer
        state = [*engine.module.parameters(), *optimizer.single_partition_of_fp32_groups]
        norm = torch.as_tensor(engine.get_global_grad_norm()).float()
        found.append(([each.detach().clone() for each in state], norm, engine.skipped_steps, optimizer.overflow))
    return found, reads


def compare() -> None:
    for case in CASES:
        plain, reads_of_plain = trained(case)
        section, reads = trained(case, ds_npu={})
        for (states, norm, *skips), (other_states, other_norm, *other_skips) in zip(plain, section, strict=True):
            assert skips == other_skips, case
            assert torch.equal(norm.nan_to_num(-1), other_norm.nan_to_num(-1)), (case, norm, other_norm)
            assert len(states) == len(other_states)
            for state, other in zip(states, other_states, strict=True):
                assert torch.equal(state.nan_to_num(), other.nan_to_num()), case
        looks = case.config is not UNREAD
        assert [skipped for _, _, skipped, _ in section] == ([0, 1, 1] if looks else [0, 0, 0]), case
        assert reads == [int(looks)] * len(STEPS), (case, reads)
        # DeepSpeed asks for the norm, in bf16 before that for gradients, and for the norm again in each clipped group.
        of_plain = looks + (case.config is BF16) + 2 * (case.clipping > 0)
        assert reads_of_plain[0] == of_plain, (case, reads_of_plain)
        assert dist.get_world_size() == 2


def test_a_step_reads_one_number_and_is_deepspeeds_to_the_bit():
    run_on_ranks(2, compare)
