"""The ways in which scripts accumulate gradients over batches, with an engine of a model in pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gradient_rule
import pipeline_rule as rule
import pytest
import torch
import torch.distributed as dist

CLIPPED = {"gradient_clipping": 1e9, "gradient_accumulation_steps": 1}
"""Norms are computed, and nothing is clipped."""


class Script:
    """A user's script: ``engine`` and the batches of this data rank."""

    def __init__(self, engine: Any, dtype: torch.dtype) -> None:
        self.engine, self.dtype = engine, dtype
        rank, dp = engine.topology.rank("dp"), engine.topology.size("dp")
        self.batches = [{name: x.to(engine.device) for name, x in step[rank].items()} for step in rule.batches(dp)]

    def forward(self, step: int) -> torch.Tensor:
        return rule.loss_of(self.engine, self.batches[step], self.dtype)

    def both(self, step: int) -> None:
        self.engine.backward(self.forward(step))


def all_inside(script: Script) -> None:
    """Of two forwards inside, one is not wanted."""
    with script.engine.no_sync():
        script.both(0)
        script.forward(1)
    script.both(1)


def backward_inside(script: Script) -> None:
    loss = script.forward(0)
    with script.engine.no_sync():
        script.engine.backward(loss)
    script.both(1)


def forward_inside(script: Script) -> None:
    with script.engine.no_sync():
        script.both(0)
        loss = script.forward(1)
    script.engine.backward(loss)


def evaluated_inside(script: Script) -> None:
    with script.engine.no_sync():
        loss = script.forward(0)
        script.engine.eval()
        with torch.no_grad():
            script.forward(1)
        script.engine.train()
        script.engine.backward(loss)
    script.both(1)


def boundaries(script: Script) -> None:
    script.engine.set_gradient_accumulation_boundary(False)
    script.both(0)
    with pytest.raises(RuntimeError, match=r"no gradients are pending"):
        script.engine.backward(torch.ones((), requires_grad=True))
    script.engine.set_gradient_accumulation_boundary(True)
    script.both(1)


def coalesced(script: Script) -> None:
    with script.engine.coalesce_grad_reduction():
        script.both(0)
        script.both(1)
        script.forward(0)


NO_SYNC = (all_inside, backward_inside, forward_inside, evaluated_inside)
Way = Callable[[Script], None]


def ways_of(stage: int, dtype: torch.dtype) -> Sequence[Way]:
    """Those that DeepSpeed accepts; BF16_Optimizer, of ZeRO 1 here, does not coalesce."""
    return (*(NO_SYNC if stage < 2 else ()), boundaries, *((coalesced,) if stage and dtype != torch.bfloat16 else ()))


def expected_of(family: str, dtype: torch.dtype, dp: int) -> dict[str, torch.Tensor]:
    """Gradients of the sum of the batches' losses, averaged over ``dp``, by one process."""
    model = rule.model_of(family, dtype).double()
    for batch in (each for step in rule.batches(dp) for each in step):
        (rule.loss_of(model, batch, torch.float64) / dp).backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


def hold(family: str, section: dict[str, Any], stage: int, dtype: torch.dtype, bound: float) -> None:
    """Hold each way to one process in float64: all gradients, and their norm in the step."""
    more = {"data_types": {"grad_accum_dtype": "fp32"}} if stage and dtype == torch.bfloat16 else {}
    engine = rule.engine_of(rule.model_of(family, dtype), stage, dtype, section, **CLIPPED, **more)
    expected = expected_of(family, dtype, engine.topology.size("dp"))
    norm = float(torch.cat([each.flatten() for each in expected.values()]).norm())
    start = {name: weight.detach().clone() for name, weight in engine.module.named_parameters()}
    for way in ways_of(stage, dtype):
        engine.set_gradient_accumulation_boundary(True)
        way(Script(engine, dtype))
        where = (family, section, stage, dtype, way.__name__)
        if type(engine.optimizer).__name__ != "BF16_Optimizer":
            found = rule.over_stages(gradient_rule.reduced_gradients(engine, engine.module), engine.topology)
            error = gradient_rule.relative(found, expected)
            assert error <= bound, (where, error)
        # Its learning rate is 0: every way begins with the same weights.
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.0
        engine.step()
        found_norm = float(engine.get_global_grad_norm())
        loose = max(bound, rule.SINGLE) if stage else bound
        assert abs(found_norm / norm - 1) <= loose, (where, found_norm, norm)
    for name, weight in engine.module.named_parameters():
        assert torch.equal(weight, start[name]), name


def refused(section: dict[str, Any]) -> None:
    """A step without a reduction, and what DeepSpeed refuses in any engine."""
    engine = rule.engine_of(rule.model_of("gpt2", torch.float32), 1, torch.float32, section, **CLIPPED)
    script = Script(engine, torch.float32)
    with engine.no_sync():
        script.both(0)
        with pytest.raises(AssertionError, match=r"illegal to call Engine\.step"):
            engine.step()
        with pytest.raises(RuntimeError, match=r"engine\.train_batch inside of engine\.no_sync"):
            engine.train_batch(iter([script.batches[0]]))
    with pytest.raises(RuntimeError, match=r"engine\.step: the gradients of the last .* were not reduced"):
        engine.step()
    engine = rule.engine_of(rule.model_of("gpt2", torch.float32), 2, torch.float32, section, **CLIPPED)
    with pytest.raises(AssertionError, match="no_sync context manager is incompatible"), engine.no_sync():
        pass
    dist.barrier()
