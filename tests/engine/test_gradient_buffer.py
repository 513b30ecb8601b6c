"""Weight gradients added to DeepSpeed's buffers: the same training, and no gradient tensor beside the buffer."""

from __future__ import annotations

import dataclasses
from collections import Counter
from types import SimpleNamespace

import deepspeed
import gradient_buffer as rig
import gradient_rule as rule
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from gradient_buffer import Case
from ranks import run_on_ranks
from torch import nn

from ds_npu.parallel.tensor.weight_gradient import gradient_sink
from ds_npu.zero_ext import bucket_plan
from ds_npu.zero_ext.gradient_buffer import install_gradient_buffers

pytestmark = pytest.mark.slow

EXACT = 1e-12
SINGLE = 1e-6
"""A few float32 roundings, of relative size 6e-8; ZeRO keeps float32 masters, whatever the model."""
IMMEDIATE = {"bf16": {"immediate_grad_update": True}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
WIDE_BF16 = Case(1, torch.bfloat16, "fp32")
ROADS = {
    "no ZeRO, float64": Case(0, torch.float64),
    "no ZeRO, float32": Case(0, torch.float32),
    "no ZeRO, bf16": Case(0, torch.bfloat16),
    "ZeRO 1, float64": Case(1, torch.float64),
    "ZeRO 1, float32": Case(1, torch.float32),
    "ZeRO 1, float32, overlapped": Case(1, torch.float32, zero={"overlap_comm": True}),
    "ZeRO 1, float32, offloaded": Case(1, torch.float32, zero=OFFLOAD),
    "ZeRO 1, bf16": Case(1, torch.bfloat16),
    "BF16_Optimizer": WIDE_BF16,
    "BF16_Optimizer, immediate": Case(1, torch.bfloat16, "fp32", more=IMMEDIATE),
    "ZeRO 1, bf16, float32 gradients, offloaded": Case(1, torch.bfloat16, "fp32", zero=OFFLOAD),
    "no ZeRO, autocast": Case(0, torch.float32, autocast=True),
    "ZeRO 1, autocast": Case(1, torch.float32, autocast=True),
}
"""Every place where DeepSpeed accumulates gradients that are whole."""


IN_BUCKETS = {
    "ZeRO 1, float64": Case(1, torch.float64),
    "ZeRO 1, bf16": Case(1, torch.bfloat16),
    "ZeRO 2, float64": Case(2, torch.float64),
    "ZeRO 2, float32": Case(2, torch.float32),
    "ZeRO 2, bf16": Case(2, torch.bfloat16),
    "ZeRO 2, autocast": Case(2, torch.float32, autocast=True),
    "ZeRO 2, small buckets": Case(2, torch.float64, zero={"reduce_bucket_size": 100}),
    **{f"ZeRO 2, {kind}": Case(2, torch.float64, checkpointing=kind) for kind in rig.CHECKPOINTS if kind != "none"},
}
"""Gradients that are sent in buckets from the memory to which they were written, with several data ranks."""


def low_precision(case: Case) -> bool:
    return case.autocast or case.dtype == torch.bfloat16


def hold(case: Case, found: rig.Trained, expected: rig.Trained) -> None:
    """Losses, gradients, norm and clipped updates of all steps, against one process in float64."""
    world = dist.get_world_size()
    if low_precision(case):
        single = rig.plain(case, world, compute=torch.float32 if case.autocast else torch.bfloat16)
        bound = 2 * rule.relative(single.gradients, expected.gradients)
        weights = 2 * rule.relative(single.weights, expected.weights)
        losses = norm = bound
    else:
        bound = EXACT if (case.stage, case.dtype) == (0, torch.float64) else SINGLE
        weights = losses = norm = bound
    assert rule.relative(found.gradients, expected.gradients) <= bound, case
    assert abs(found.norm / expected.norm - 1) <= norm, case
    assert rule.relative(found.weights, expected.weights) <= weights, case
    for mine, true in zip(found.losses, expected.losses, strict=True):
        assert abs(mine / true - 1) <= losses, case


def train_as_one_process(*cases: Case) -> None:
    for case in cases:
        hold(case, rig.train(case, direct=True), rig.plain(case, dist.get_world_size()))


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_training_is_that_of_one_process(world):
    run_on_ranks(world, train_as_one_process, *ROADS.values())


def test_training_in_buckets_is_that_of_one_process():
    run_on_ranks(2, train_as_one_process, *IN_BUCKETS.values())


def come_twice() -> None:
    """Two reentrant recomputations bring two gradients of each weight; with one bucket none is sent between them."""
    bucket_plan.LEAST = 10**6
    for stage in (1, 2):
        train_as_one_process(Case(stage, torch.float64, checkpointing="reentrant", depth=2))


def test_gradients_that_come_twice_in_a_backward():
    run_on_ranks(2, come_twice)


def copies_nothing(*cases: Case) -> None:
    """The products of linears are written to buckets: no other tensor of their size is made, or copied there."""
    for case in cases:
        for index, (ordinary, direct) in enumerate(zip(backwards(case, False), backwards(case, True), strict=True)):
            # Of up, down, and twice of twice, whose products PyTorch adds up.
            assert Counter(ordinary.found)["aten::mm"] == 4, (case, index, ordinary.found)
            spans = {"aten::empty.memory_format", "aten::zeros"}
            assert set(direct.found) <= spans, (case, index, direct.found)
            is_sent = case.stage == 2 or (index + 1) % rule.ACCUMULATION == 0
            fewer = ordinary.calls["aten::copy_"] - direct.calls["aten::copy_"]
            assert fewer >= 4 if is_sent else fewer == 0, (case, index, fewer)
            # Of up, down, twice and the head; twice is used again.
            is_first = case.stage == 2 or index % rule.ACCUMULATION == 0
            found = direct.calls["aten::mm.out"], direct.calls["aten::addmm_"]
            assert found == ((4, 1) if is_first else (0, 5)), (case, index, found)


def test_no_gradient_stands_beside_its_bucket():
    cases = [case for name, case in IN_BUCKETS.items() if not case.autocast and case.checkpointing == "none"]
    run_on_ranks(2, copies_nothing, *cases)


CHECKPOINTED = (Case(0, torch.float64), Case(1, torch.float32), WIDE_BF16, Case(1, torch.float32, autocast=True))


@pytest.mark.parametrize("kind", [kind for kind in rig.CHECKPOINTS if kind != "none"])
def test_with_activation_checkpointing(kind):
    run_on_ranks(2, train_as_one_process, *(dataclasses.replace(case, checkpointing=kind) for case in CHECKPOINTED))


def backwards(case: Case, direct: bool) -> list[rig.Allocations]:
    """What each micro-batch's backward allocated of the size of a linear's weight; no activation has that size."""
    watched: list[rig.Allocations] = []

    def watch(engine) -> rig.Allocations:
        sizes = {weight.numel() for weight in (engine.module.up.weight, engine.module.twice.weight)}
        watched.append(rig.Allocations(sizes))
        return watched[-1]

    rig.train(case, direct, watch)
    return watched


def allocate_nothing(*cases: Case) -> None:
    for case in cases:
        kept = case.accumulated == "fp32" and not case.zero
        # Else DeepSpeed drops the buffer after a step, and the first micro-batch of the next one makes it.
        makes_it = [] if kept else range(0, rig.STEPS * rule.ACCUMULATION, rule.ACCUMULATION)
        for index, pair in enumerate(zip(backwards(case, False), backwards(case, True), strict=True)):
            ordinary, direct = pair
            assert len(ordinary.found) >= 4, (case, index, ordinary.found)  # Of up, down, and twice of twice.
            if index not in makes_it:
                assert direct.calls["aten::addmm_"] == ordinary.calls["aten::addmm_"] + 5, (case, index, direct.calls)
                # An offloaded optimizer's gradients are copied to it in the last backward of a step.
                copies = {"aten::_to_copy"} if case.zero == OFFLOAD else set()
                assert set(direct.found) <= copies, (case, index, direct.found)


def test_no_gradient_stands_beside_its_buffer():
    run_on_ranks(1, allocate_nothing, *ROADS.values())


def rounds_once(case: Case) -> None:
    """The buffer holds the sum over micro-batches of the products of the very operands, to float32."""
    kept: dict[str, list[torch.Tensor]] = {}

    def errors(direct: bool) -> dict[str, float]:
        with rig.engine_of(case) as engine:
            if direct:
                install_gradient_buffers(engine)
            model, expected = engine.module, {"up": 0.0, "down": 0.0}
            for name in expected:
                layer = model.get_submodule(name)
                layer.register_forward_hook(lambda layer, args, out, name=name: kept.update({name: [args[0].detach()]}))
                layer.register_full_backward_hook(lambda layer, dx, dy, name=name: kept[name].append(dy[0]))
            batches = next(rig.steps(rule.MICRO * rule.ACCUMULATION)).split(rule.MICRO)
            for batch in batches:
                with rig.autocast(case.autocast):
                    logits = engine(batch[:, :-1])
                engine.backward(rule.token_loss(logits, batch[:, 1:]))
                for name, (x, dy) in kept.items():
                    low = torch.bfloat16
                    assert dy.dtype == low or case.autocast
                    product = dy.to(low).double().flatten(0, 1).t() @ x.to(low).double().flatten(0, 1)
                    expected[name] = expected[name] + (product.t() if name == "down" else product)
                if engine.is_gradient_accumulation_boundary():
                    found = rig.accumulated(engine)
                engine.step()
        return {name: float((found[f"{name}.weight"] - true).norm() / true.norm()) for name, true in expected.items()}

    for name, error in errors(direct=True).items():
        assert error < SINGLE, (case, name, error)
    for name, error in errors(direct=False).items():
        assert error > 1e-4, (case, name, error)  # Each product is rounded to bf16: 2**-9 at most.


def all_round_once() -> None:
    # DeepSpeed reduces gradients in bf16 for a bf16 model, unless it is told otherwise.
    wide = {"communication_data_type": "fp32"}
    rounds_once(Case(1, torch.bfloat16, "fp32", more=wide))
    rounds_once(Case(1, torch.bfloat16, "fp32", more={**IMMEDIATE, **wide}))
    rounds_once(Case(0, torch.float32, autocast=True))
    rounds_once(Case(1, torch.float32, autocast=True))


def test_products_of_bf16_reach_float32_buffers_unrounded():
    run_on_ranks(1, all_round_once)


def after_an_overflow(case: Case) -> None:
    """A step whose gradients are not finite leaves nothing behind in the buffer."""

    def train(poisoned: bool) -> dict[str, torch.Tensor]:
        with rig.engine_of(case) as engine:
            install_gradient_buffers(engine)
            for scale in [float("inf"), 1.0] if poisoned else [1.0]:
                for batch in next(rig.steps(rule.MICRO * rule.ACCUMULATION)).split(rule.MICRO):
                    engine.backward(rule.token_loss(engine(batch[:, :-1]), batch[:, 1:]) * scale)
                    engine.step()
            return {name: weight.detach().clone() for name, weight in engine.module.named_parameters()}

    clean, poisoned = train(poisoned=False), train(poisoned=True)
    assert all(torch.equal(clean[name], weight) for name, weight in poisoned.items())


def test_an_overflow_leaves_nothing_behind():
    run_on_ranks(1, after_an_overflow, WIDE_BF16)


def says_why(case: Case, expected: list[str]) -> None:
    with rig.engine_of(case) as engine:
        found = install_gradient_buffers(engine)
        assert len(found) == len(expected), found
        for message, part in zip(found, expected, strict=True):
            assert "ds_npu.fused_ops.matmul_accumulate" in message and part in message, message
        # The model is as without the key.
        assert not any(gradient_sink(weight) for weight in engine.module.parameters())
        assert type(engine.module.up) is nn.Linear


@pytest.mark.parametrize("stage", [2, 3])
def test_stages_that_reduce_each_gradient_are_refused(stage):
    run_on_ranks(1, says_why, Case(stage, torch.float32), [f"no effect: ZeRO {stage} copies the gradient of every"])


def names_the_weights_left_out(case: Case) -> None:
    rule.without_extension()
    model = rig.start(case)
    model.twice.weight.register_hook(lambda gradient: gradient * 1)
    optimized = [weight for name, weight in model.named_parameters() if name != "up.weight"]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=optimized, config=case.config())
    up, twice = install_gradient_buffers(engine)
    assert "leaves out up.weight: the optimizer does not have it" in up
    assert "leaves out twice.weight: a hook of its own" in twice
    carry = {name for name, weight in model.named_parameters() if gradient_sink(weight)}
    assert carry == {"down.weight", "embedding.weight"}
    for weight in model.parameters():
        weight.requires_grad_(False)
    assert "Model has no linear layer that is trained" in install_gradient_buffers(engine)[0]
    assert not any(gradient_sink(weight) for weight in model.parameters())


@pytest.mark.parametrize("road", ["BF16_Optimizer", "ZeRO 1, bf16, float32 gradients, offloaded"])
def test_weights_that_keep_ordinary_gradients_are_named(road):
    run_on_ranks(1, names_the_weights_left_out, ROADS[road])


@pytest.mark.parametrize(
    ("optimizer", "deepcompile", "part"),
    [
        (object(), True, "DeepCompile"),
        (ZeROOptimizer(), False, "it is not known where ZeROOptimizer accumulates gradients"),
    ],
)
def test_engines_that_are_not_known_are_refused(optimizer, deepcompile, part):
    engine = SimpleNamespace(module=nn.Linear(2, 2), optimizer=optimizer, is_deepcompile_enabled=lambda: deepcompile)
    (message,) = install_gradient_buffers(engine)
    assert message.startswith("ds_npu.fused_ops.matmul_accumulate has no effect: ") and part in message
    assert type(engine.module) is nn.Linear and gradient_sink(engine.module.weight) is None


def the_key_installs_them(case: Case) -> None:
    rule.without_extension()
    for asked in (True, False):
        model = rig.start(case)
        config = case.config()
        config["ds_npu"]["fused_ops"] = {"matmul_accumulate": asked}
        deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        carry = {name for name, weight in model.named_parameters() if gradient_sink(weight)}
        expected = {"up.weight", "twice.weight", "down.weight", "embedding.weight"}
        assert carry == (expected if asked else set()), (case, asked, carry)


def test_the_key_installs_them():
    run_on_ranks(1, the_key_installs_them, WIDE_BF16)
