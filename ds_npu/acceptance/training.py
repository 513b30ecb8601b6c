"""Twenty steps with DeepSpeed's engine on NPUs, against one process on the CPU in float64."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from ds_npu.acceptance import one_process
from ds_npu.acceptance.case import Check, Measured
from ds_npu.acceptance.one_process import Curve
from ds_npu.acceptance.rank import Assignment, run_cases
from ds_npu.acceptance.training_cases import TrainingCase, training_cases
from ds_npu.config.parallel import ParallelSection, fit

UNITS = {"float32": 2.0**-13, "bfloat16": 2.0**-8}
FALL = 0.05
"""Least fall of the reference's loss, as a share: a model that does not learn would hide a wrong gradient."""


def run_training(case: TrainingCase, job: Assignment) -> Measured:
    """Train for the steps of the recipe; the first rank compares."""
    # A PipelineModule needs process groups before there is an engine.
    deepspeed.init_distributed()
    curves = one_process.kept_curves(case.recipe, Path(job.folder)) if dist.get_rank() == 0 else None
    found = _pipeline_curve(case) if case.recipe.model == "layers" else _decoder_curve(case)
    if curves is None:
        return Measured()
    exact, own = curves
    checks = [
        *curve_checks("loss", found.losses, exact.losses, own.losses, UNITS[case.recipe.dtype]),
        *curve_checks("gradient norm", found.norms, exact.norms, own.norms, UNITS[case.recipe.dtype]),
    ]
    unlearned = exact.losses[-1] > (1 - FALL) * exact.losses[0]
    series = {"loss": found.losses, "expected loss": exact.losses}
    series |= {"gradient norm": found.norms, "expected gradient norm": exact.norms}
    return Measured(checks, "the reference itself does not learn" if unlearned else "", series=series)


def curve_checks(
    what: str, found: Sequence[float], exact: Sequence[float], own: Sequence[float], unit: float
) -> Iterator[Check]:
    if len(found) != len(exact):
        raise ValueError(f"{len(found)} steps, and {len(exact)} are right")
    allowed = max(unit, 2 * max(abs(x / true - 1) for x, true in zip(own, exact, strict=True)))
    for step, (x, true) in enumerate(zip(found, exact, strict=True), start=1):
        yield Check(f"{what} of step {step}", abs(x / true - 1), allowed)


def data_ranks(case: TrainingCase) -> int:
    """How many ranks share the global batch of a case."""
    return fit(ParallelSection.model_validate((case.section or {}).get("parallel", {})), case.ranks)[0].dp


def ds_config(case: TrainingCase) -> dict[str, object]:
    """The config of a case; each data rank has up to two micro-batches."""
    sequences = case.recipe.sizes.sequences // data_ranks(case)
    accumulation = min(case.micro_batches, sequences)
    rate = one_process.LEARNING_RATES[case.recipe.optimizer]
    adam = {"betas": one_process.BETAS, "eps": one_process.EPS, "weight_decay": one_process.DECAY}
    config: dict[str, object] = {
        "train_micro_batch_size_per_gpu": sequences // accumulation,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": one_process.CLIP,
        "steps_per_print": 10**9,
        "optimizer": {
            "type": case.recipe.optimizer,
            "params": {"lr": rate, **(adam if case.recipe.optimizer == "AdamW" else {})},
        },
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": case.stage},
        "bf16": {"enabled": case.recipe.dtype == "bfloat16"},
    }
    return config if case.section is None else config | {"ds_npu": case.section}


def _decoder_curve(case: TrainingCase) -> Curve:
    engine = _engine(one_process.model_of(case.recipe).to(one_process.dtype_of(case.recipe)), ds_config(case))
    sharing = data_ranks(case)
    data_rank = dist.get_rank(group=engine.data_parallel_group)
    losses, norms = [], []
    for step in range(case.recipe.steps):
        mine = one_process.batch(case.recipe.sizes, step).chunk(sharing)[data_rank].to(engine.device)
        total = torch.zeros((), device=engine.device)
        for tokens in mine.chunk(engine.gradient_accumulation_steps()):
            loss = one_process.decoder_loss(engine, tokens)
            engine.backward(loss)
            engine.step()
            total += loss.detach().float() / engine.gradient_accumulation_steps()
        # Ranks that share a batch have the same loss, so that the mean over all ranks is that over data ranks.
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
        norms.append(float(engine.get_global_grad_norm()))
    engine.destroy()
    return Curve(losses, norms)


def _pipeline_curve(case: TrainingCase) -> Curve:
    layers = one_process.model_of(case.recipe)
    module = deepspeed.PipelineModule(
        list(layers.children()), num_stages=2, loss_fn=one_process.token_loss, partition_method="uniform"
    )
    engine = _engine(module.to(one_process.dtype_of(case.recipe)), ds_config(case))
    sharing = data_ranks(case)
    data_rank = engine.grid.get_data_parallel_rank()
    losses, norms = [], []
    for step in range(case.recipe.steps):
        mine = one_process.batch(case.recipe.sizes, step).chunk(sharing)[data_rank]
        pieces = mine.chunk(engine.gradient_accumulation_steps())
        losses.append(float(engine.train_batch(iter([(piece[:, :-1], piece[:, 1:]) for piece in pieces]))))
        norms.append(float(engine.get_global_grad_norm()))
    engine.destroy()
    return Curve(losses, norms)


def _engine(model: nn.Module, config: dict[str, object]) -> Any:
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    return engine


if __name__ == "__main__":
    sys.exit(run_cases(training_cases, run_training, distributed=True))
