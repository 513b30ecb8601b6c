"""Twenty steps of Muon on the ranks of a world, with the real engine, against one process (``muon_reference``)."""

from __future__ import annotations

from dataclasses import dataclass, field

import gradient_rule as rule
import muon_reference
import tensor_parallel_rule as tensor_rule
import tiny_models
import torch
import torch.distributed as dist
from muon_reference import OPTIMIZER, WholeMuon
from torch import nn

from ds_npu.zero_ext import matrix_optimizer

STEPS = 20


@dataclass(frozen=True)
class MuonCase:
    """One run: ``section`` is that of ds_npu, ``params`` are of the optimizer, ``heads`` as in the reference."""

    family: str
    stage: int
    section: dict[str, object]
    dtype: torch.dtype = torch.float64
    params: dict[str, object] = field(default_factory=dict)
    heads: dict[str, int] = field(default_factory=dict)
    zero: dict[str, object] = field(default_factory=dict)


def tokens(dp: int, steps: int = STEPS) -> torch.Tensor:
    """[steps, accumulated, data ranks, samples of a micro-batch, tokens]"""
    count = steps * rule.ACCUMULATION * dp * rule.MICRO
    return tensor_rule.batches(count).view(steps, rule.ACCUMULATION, dp, rule.MICRO, -1)


def iterate_in_float64() -> None:
    """Where weights are float32, the iteration's dtype is float64 on both sides."""
    matrix_optimizer.ITERATION_DTYPES = dict.fromkeys(matrix_optimizer.ITERATION_DTYPES, torch.float64)


def expected(case: MuonCase, dp: int, steps: int = STEPS) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The weights of one process behind its steps in float64, and the norm of each."""
    model = tiny_models.tiny(case.family, torch.float32).to(case.dtype).to(torch.float64)
    scale = muon_reference.moonlight if case.section.get("muon", {}).get("scale") == "rms" else muon_reference.aspect
    muon, norms = WholeMuon(model, case.heads, scale), []
    for batch in tokens(dp, steps):
        for micro in batch.flatten(0, 1):
            loss = tensor_rule.loss_of(model, micro, torch.float64) / (rule.ACCUMULATION * dp)
            loss.backward()
        norms.append(muon.step(rule.CLIP))
    return {name: each.detach() for name, each in model.named_parameters()}, norms


def engine_of(case: MuonCase, model: nn.Module):
    import deepspeed

    config = tensor_rule.config(case.stage, case.dtype, case.section)
    config["zero_optimization"] |= case.zero
    config["optimizer"] = {**OPTIMIZER, "params": {**OPTIMIZER["params"], **case.params}}
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=trained, config=config)[0]


def train(engine, case: MuonCase, batches: torch.Tensor) -> list[float]:
    """Step through ``batches`` as ``tokens`` gives them; returns the norm of each step's gradients."""
    topology, norms = engine.topology, []
    for batch in batches[:, :, topology.rank("dp")]:
        for micro in batch:
            engine.backward(tensor_rule.loss_of(engine, micro.to(engine.device), case.dtype))
            engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    return norms


def hold(case: MuonCase, bounds: tuple[float, float] | None = None) -> tuple[float, float]:
    """Hold norms and weights behind all steps to one process; returns their relative errors."""
    rule.without_extension()
    if case.dtype != torch.bfloat16:
        iterate_in_float64()
    engine = engine_of(case, tiny_models.tiny(case.family, torch.float32).to(case.dtype))
    dp = engine.topology.size("dp")
    norms = train(engine, case, tokens(dp))
    weights = {name: each.double() for name, each in tensor_rule.shared(engine.whole_state_dict()).items()}
    want, want_norms = expected(case, dp)
    error = rule.relative(weights, want)
    norm_error = max(abs(found / each - 1) for found, each in zip(norms, want_norms, strict=True))
    if bounds is not None:
        assert error <= bounds[0] and norm_error <= bounds[1], (case, error, norm_error)
    return error, norm_error


def print_errors(cases: list[MuonCase]) -> None:
    for case in cases:
        found = hold(case)
        if dist.get_rank() == 0:
            print(case.family, case.stage, case.section, case.dtype, case.params, found, flush=True)
