"""Twenty steps of Muon on the ranks of a world, with the real engine, against one process (``muon_reference``)."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import gradient_rule as rule
import muon_reference
import tensor_parallel_rule as tensor_rule
import tiny_models
import torch
import torch.distributed as dist
from muon_reference import OPTIMIZER, WholeMuon
from tensor_parallel_rule import EXACT, SINGLE
from torch import nn

from ds_npu.zero_ext import matrix_optimizer

STEPS = 20
Weights = dict[str, torch.Tensor]


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
    keys: dict[str, object] = field(default_factory=dict)
    """Other keys of DeepSpeed's config."""


def tokens(dp: int, steps: int = STEPS) -> torch.Tensor:
    """[steps, accumulated, data ranks, samples of a micro-batch, tokens]"""
    count = steps * rule.ACCUMULATION * dp * rule.MICRO
    return tensor_rule.batches(count).view(steps, rule.ACCUMULATION, dp, rule.MICRO, -1)


def iterate_in_float64() -> None:
    """Where weights are float32, the iteration's dtype is float64 on both sides."""
    matrix_optimizer.ITERATION_DTYPES = dict.fromkeys(matrix_optimizer.ITERATION_DTYPES, torch.float64)


def expected(
    case: MuonCase, batches: torch.Tensor, narrow: bool = False
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The weights of one process behind the steps of ``batches``, and the norm of each step.

    In float64; ``narrow``: a model in the case's dtype, whose gradients float32 masters take, as ZeRO does it.
    """
    model = tiny_models.tiny(case.family, torch.float32).to(case.dtype).to(case.dtype if narrow else torch.float64)
    wide = copy.deepcopy(model).float() if narrow else model
    scale = muon_reference.moonlight if case.section.get("muon", {}).get("scale") == "rms" else muon_reference.aspect
    muon, norms = WholeMuon(wide, case.heads, scale, eps=case.params.get("eps", OPTIMIZER["params"]["eps"])), []
    for batch in batches:
        micros = batch.flatten(0, 1)
        for micro in micros:
            loss = tensor_rule.loss_of(model, micro, case.dtype if narrow else torch.float64) / len(micros)
            loss.backward()
        if narrow:
            for weight, master in zip(model.parameters(), wide.parameters(), strict=True):
                master.grad, weight.grad = weight.grad.float(), None
        norms.append(muon.step(rule.CLIP))
        if narrow:
            model.load_state_dict(wide.state_dict())
    return {name: each.detach().double() for name, each in model.named_parameters()}, norms


def engine_of(case: MuonCase, model: nn.Module, **keys: object):
    import deepspeed

    config = tensor_rule.config(case.stage, case.dtype, case.section) | case.keys | keys
    config["zero_optimization"] |= case.zero
    if "optimizer" not in keys:
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


def weights_of(engine) -> dict[str, torch.Tensor]:
    return {name: each.double() for name, each in tensor_rule.shared(engine.whole_state_dict()).items()}


def errors(case: MuonCase) -> tuple[float, float]:
    """The relative errors of weights behind all steps, and the largest of the norms of their gradients."""
    engine = engine_of(case, tiny_models.tiny(case.family, torch.float32).to(case.dtype))
    batches = tokens(engine.topology.size("dp"))
    norms = train(engine, case, batches)
    want, want_norms = expected(case, batches)
    norm_error = max(abs(found / each - 1) for found, each in zip(norms, want_norms, strict=True))
    return rule.relative(weights_of(engine), want), norm_error


def hold(cases: list[MuonCase]) -> None:
    """Hold weights and norms to one process."""
    rule.without_extension()
    iterate_in_float64()
    for case in cases:
        error, norm = errors(case)
        # Norms are of gradients at weights that are as far off as those of float32.
        bounds = (EXACT, EXACT) if case.stage == 0 else (SINGLE, 2 * SINGLE)
        assert error <= bounds[0] and norm <= bounds[1], (case, error, norm)


def hold_as_shipped(cases: list[MuonCase]) -> None:
    """In bf16 and with the iteration's own dtypes, within twice one process' error."""
    rule.without_extension()
    for case in cases:
        batches = tokens(dist.get_world_size() // case.section["parallel"].get("tensor", 1))
        exact, _ = expected(case, batches)
        single, _ = expected(case, batches, narrow=True)
        error, bound = errors(case)[0], 2 * rule.relative(single, exact)
        assert error <= bound, (case, error, bound)
