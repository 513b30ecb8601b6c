"""torch.compile of what is divided over tensor or context ranks is refused in one sentence, before anything changes."""

from __future__ import annotations

from collections.abc import Callable

import gradient_rule as rule
import pytest
import tensor_parallel_rule as tensor_rule
import tiny_models
import torch
from ranks import run_on_ranks
from torch import nn

from ds_npu.models import names
from ds_npu.models.globs import plan_for

SETTINGS = {
    "tensor": {"tensor": 2},
    "sequence": {"tensor": 2, "sequence_parallel": True},
    "context": {"context": 2},
}


def whole(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def layer(model: nn.Module) -> nn.Module:
    model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")
    return model


def layer_in_place(model: nn.Module) -> nn.Module:
    model.model.layers[0].mlp.compile(backend="eager")
    return model


def forward_alone(model: nn.Module) -> nn.Module:
    model.forward = torch.compile(model.forward, backend="eager")
    return model


BEFORE: dict[str, Callable[[nn.Module], nn.Module]] = {
    each.__name__: each for each in (whole, in_place, layer, layer_in_place, forward_alone)
}
AFTER: dict[str, Callable[..., object]] = {
    "the engine": lambda engine: engine.compile(backend="eager"),
    "the engine with options": lambda engine: engine.compile(backend="eager", compile_kwargs={"dynamic": False}),
    "the model": lambda engine: engine.module.compile(backend="eager"),
    "a layer": lambda engine: engine.module.model.layers[0].compile(backend="eager"),
    # accelerate's regional compilation does this.
    "a module of a layer": lambda engine: engine.module.model.layers[1].mlp.compile(),
}


def llama() -> nn.Module:
    return tiny_models.tiny("llama", torch.float64)


def initialized(model: nn.Module, parallel: dict[str, object], section: dict[str, object] | None = None):
    import deepspeed

    config = tensor_rule.config(1, torch.float64, {"parallel": parallel} | (section or {}))
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def refused_everywhere() -> None:
    """Before ``initialize`` and after it; the model stays the user's."""
    rule.without_extension()
    for parallel in SETTINGS.values():
        said = rf"^torch\.compile: found on .*, whose .* ds_npu\.parallel\.{next(iter(parallel))} divides over ranks"
        for name, compiled in BEFORE.items():
            model = compiled(llama())
            before = {name: (id(weight), weight.shape) for name, weight in model.named_parameters()}
            with pytest.raises(ValueError, match=said) as caught:
                initialized(model, parallel)
            assert caught.value.__context__ is None and len(str(caught.value)) < 500, name
            assert {name: (id(weight), weight.shape) for name, weight in model.named_parameters()} == before
        engine = initialized(llama(), parallel)
        for name, compiling in AFTER.items():
            with pytest.raises(ValueError, match=said) as caught:
                compiling(engine)
            assert caught.value.__context__ is None, name


def test_what_is_divided_is_not_compiled():
    run_on_ranks(2, refused_everywhere)


SINGLE = 1e-6
"""ZeRO keeps norms in float32."""
FUSED = {"fused_ops": dict.fromkeys(("rms_norm", "swiglu", "rotary", "cross_entropy", "flash_attention"), True)}


def step(engine: nn.Module, called: Callable[..., object]) -> list[float]:
    """Losses and gradient norm of one step."""
    losses = []
    for ids in tiny_models.tokens(2 * rule.ACCUMULATION, 10).chunk(rule.ACCUMULATION):
        with tiny_models.Float64():
            losses.append(called(input_ids=ids, labels=ids).loss)
        engine.backward(losses[-1])
        engine.step()
    return [*map(float, losses), float(engine.get_global_grad_norm())]


def exact_elsewhere() -> None:
    """Where nothing is divided, and where somebody compiles what ds_npu cannot see: as without torch.compile."""
    rule.without_extension()
    for section in ({}, FUSED):
        engine = initialized(llama(), {}, section)
        expected = step(engine, engine)
        found = {}
        for name in ("whole", "layer_in_place"):
            engine = initialized(BEFORE[name](llama()), {}, section)
            found[name] = step(engine, engine)
        engine = initialized(llama(), {}, section)
        engine.compile(backend="eager")
        found["the engine"] = step(engine, engine)
        for name, each in found.items():
            assert each == pytest.approx(expected, rel=SINGLE), (section, name, each, expected)
    for parallel in SETTINGS.values():
        plain, engine = initialized(llama(), parallel), initialized(llama(), parallel)
        expected, found = step(plain, plain), step(engine, torch.compile(engine, backend="eager"))
        assert found == pytest.approx(expected, rel=SINGLE), parallel


@pytest.mark.slow
def test_what_is_not_divided_may_be_compiled():
    run_on_ranks(2, exact_elsewhere)


def test_names_are_those_without_the_wrapper():
    model = layer(llama())
    plain = dict(plan_for(llama(), {}).roles)
    for wrapped in (model, torch.compile(model, backend="eager")):
        roles = plan_for(wrapped, {"model.layers.*.mlp": "mlp"}).roles
        assert {names.plain(name): role for name, role in roles.items()} == plain
