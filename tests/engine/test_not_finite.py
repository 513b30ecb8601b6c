"""``ds_npu.watch.finite``: a run ends in the step that is not finite, and every rank names step, rank and layer."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import gradient_rule
import pytest
import torch
from not_finite_steps import (
    SKIPPING,
    UPDATING,
    Case,
    Exp,
    engine_of,
    stops_after_the_update,
    stops_before_the_update,
    take_step,
)
from ranks import run_on_ranks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ds_npu.features.watch.micro_batch_again import KEPT_BYTES, MicroBatchAgain
from ds_npu.zero_ext.skipped_steps import before_a_skip


class HostReads(TorchDispatchMode):
    """Counts operators for which the host waits for the device."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function._schema.name in ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")
        return function(*args, **(kwargs or {}))


def host_reads(case: Case, finite: bool) -> int:
    engine = engine_of(case, Exp(), finite)
    take_step(engine, case)
    with HostReads() as reads:
        take_step(engine, case)
    return reads.count


def the_host_waits_no_more_often(cases: list[Case]) -> None:
    counts = [(host_reads(case, finite=False), host_reads(case, finite=True)) for case in cases]
    assert all(without == watched for without, watched in counts) and counts[0][0] > 0, counts


@pytest.mark.slow
def test_the_host_waits_no_more_often():
    run_on_ranks(2, the_host_waits_no_more_often, SKIPPING)


@pytest.mark.slow
def test_it_stops_before_the_weights_change_where_deepspeed_would_skip(tmp_path):
    run_on_ranks(2, stops_before_the_update, SKIPPING, f"{tmp_path}/")


@pytest.mark.slow
def test_it_stops_after_the_update_where_deepspeed_does_not_look(tmp_path):
    run_on_ranks(2, stops_after_the_update, UPDATING, f"{tmp_path}/")


def a_pipeline_names_the_stages_loss(stages: list[int]) -> None:
    """Stage 0 has more parameters than the last one, whose gradients come first in backward all the same."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    gradient_rule.without_extension()
    deepspeed.init_distributed()
    for stage in stages:
        torch.manual_seed(0)
        layers = [nn.Linear(4, 4, bias=False), nn.Linear(4, 4), nn.Linear(4, 4), Exp()]
        model = PipelineModule(layers, num_stages=2, loss_fn=lambda y, _: y.square().mean(), partition_method="uniform")
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_optimization": {"stage": stage},
            "ds_npu": {"parallel": {"pipeline": 2}, "watch": {"finite": True}},
        }
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

        def batches(bad: float) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            return iter([(torch.full((2, 4), value), torch.zeros(2)) for value in (0.5, bad)])

        engine.train_batch(batches(0.5))
        with pytest.raises(FloatingPointError) as caught:
            engine.train_batch(batches(1e5))
        said = str(caught.value)
        assert said.startswith("step 2: the loss is not finite\n  rank 1: loss ") and " in micro-batch 1\n" in said
        why = "no module is named: no micro-batch runs again alone in a PipelineModule's schedule"
        assert (why in said) == (stage > 0), said
        assert " in the order of backward that is not finite: 2.bias, on rank 1" in said, said
        assert ("the weights are those of step 1" in said) == (stage > 0), said


@pytest.mark.slow
def test_a_pipeline_names_the_stages_loss():
    run_on_ranks(2, a_pipeline_names_the_stages_loss, [0, 1])


class Scaler:
    """A loss scaler of ZeRO with the state that decides."""

    def __init__(self, scale: float, minimum: float, hysteresis: int, dynamic: bool) -> None:
        self.cur_scale, self.min_scale, self.cur_hysteresis, self.dynamic = scale, minimum, hysteresis, dynamic
        self.delayed_shift = 2


@pytest.mark.parametrize(
    ("scaler", "stops"),
    [
        (Scaler(2.0, 1.0, 1, dynamic=True), False),
        (Scaler(1.0, 1.0, 2, dynamic=True), False),
        (Scaler(1.0, 1.0, 1, dynamic=True), True),
        (Scaler(1.0, 1.0, 1, dynamic=False), False),
    ],
)
def test_fp16_skips_until_its_scale_is_at_the_minimum(scaler, stops):
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    optimizer = object.__new__(DeepSpeedZeroOptimizer)
    optimizer.loss_scaler, optimizer.dtype, optimizer.torch_autocast_gradscaler = scaler, torch.float16, None
    optimizer.check_grad_overflow, done = True, []
    scaler.update_scale = lambda skips: done.append(skips)
    assert before_a_skip(optimizer, lambda: done.append("stop"))
    optimizer._update_scale(False)
    optimizer._update_scale(True)
    assert done == [False, *(["stop"] if stops else []), True]


def test_large_batches_and_those_with_a_graph_are_not_kept():
    again = MicroBatchAgain(SimpleNamespace(device="cpu"), "")
    given = (torch.ones(2), torch.ones(KEPT_BYTES // 4 + 1), torch.ones(2, requires_grad=True))
    assert [again.kept((each,), {}) is not None for each in given] == [True, False, False]
