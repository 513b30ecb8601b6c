"""Weight gradients that are queued are those that are taken now, to the bit, wherever DeepSpeed accumulates them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import adapted_models
import deepspeed
import gradient_buffer as rig
import gradient_rule as rule
import pytest
import tensor_parallel_rule
import tiny_models
import torch
import torch.distributed as dist
from gradient_buffer import Case
from ranks import run_on_ranks
from torch import nn

from ds_npu.parallel.tensor.shard_access import local_shard
from ds_npu.parallel.tensor.weight_gradient import gradient_sink
from ds_npu.zero_ext.gradient_buffer import install_gradient_buffers
from ds_npu.zero_ext.held_reduction import HeldReduction

MICRO_BATCHES = 3
"""In each of rule.ACCUMULATION accumulation steps."""
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
ROADS = {
    "no ZeRO, float64": Case(0, torch.float64),
    "no ZeRO, bf16": Case(0, torch.bfloat16),
    "no ZeRO, autocast": Case(0, torch.float32, autocast=True),
    "ZeRO 1, float32": Case(1, torch.float32),
    "ZeRO 1, float32, overlapped": Case(1, torch.float32, zero={"overlap_comm": True}),
    "ZeRO 1, bf16, float32 gradients, offloaded": Case(1, torch.bfloat16, "fp32", zero=OFFLOAD),
    "ZeRO 1, autocast": Case(1, torch.float32, autocast=True),
    "BF16_Optimizer": Case(1, torch.bfloat16, "fp32"),
    "BF16_Optimizer, immediate": Case(1, torch.bfloat16, "fp32", more={"bf16": {"immediate_grad_update": True}}),
    "ZeRO 2, float32": Case(2, torch.float32),
    "ZeRO 2, float64": Case(2, torch.float64),
    "ZeRO 2, bf16": Case(2, torch.bfloat16),
    "ZeRO 2, bf16, float32 gradients": Case(2, torch.bfloat16, "fp32"),
    "ZeRO 2, float32, overlapped, not contiguous": Case(
        2, torch.float32, zero={"overlap_comm": True, "contiguous_gradients": False}
    ),
    "checkpointed": Case(1, torch.float32, checkpointing="not reentrant"),
    "checkpointed, reentrant": Case(2, torch.float32, checkpointing="reentrant"),
}
"""Every place where DeepSpeed accumulates gradients that are not reduced yet."""

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Run:
    """How one of the runs that are compared treats weight gradients."""

    queue: bool = False
    late: bool = False
    """They are computed after all backwards of an accumulation step, and not directly after each."""
    direct: bool = False
    """fused_ops.matmul_accumulate."""
    sinks: bool = False
    """Weights have sinks, although nothing is queued."""


def losses(case: Case, engine: Any, model: nn.Module) -> Iterator[list[Callable[[], torch.Tensor]]]:
    """For each accumulation step of rig.STEPS steps what computes the losses of its micro-batches."""
    dp, rank = engine.topology.size("dp"), engine.topology.rank("dp")
    count = rule.MICRO * MICRO_BATCHES * rule.ACCUMULATION

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        with rig.autocast(case.autocast):
            logits = model(batch[:, :-1])
        return rule.token_loss(logits, batch[:, 1:]) / (MICRO_BATCHES * rule.ACCUMULATION)

    for words in rig.steps(count * dp):
        mine = words.view(rule.ACCUMULATION, MICRO_BATCHES, dp, rule.MICRO, rule.S + 1)[:, :, rank]
        for step in mine:
            yield [lambda batch=batch: loss_of(batch) for batch in step]


def train(engine: Any, run: Run, steps: Iterator[list[Callable[[], torch.Tensor]]]) -> set[str]:
    """Train ``engine``; returns the weights whose gradients were queued."""
    held, queued = HeldReduction(engine, run.queue), set()
    for step in steps:
        with held:
            late = []
            for loss in step:
                late.append(held.backward(loss()))
                queued |= {*late[-1].names}
                if not run.late:
                    late.pop().compute()
            for each in late:
                each.compute()
        engine.step()
    return queued


def trained(case: Case, run: Run) -> Weights:
    with rig.engine_of(case) as engine:
        if run.direct:
            install_gradient_buffers(engine)
        if run.sinks:
            HeldReduction(engine, queue_weight_gradients=True)
        queued = train(engine, run, losses(case, engine, engine.module))
        assert queued == ({"embedding.weight", "up.weight", "twice.weight", "down.weight"} if run.queue else set())
        return kept(engine)


def kept(engine: Any) -> Weights:
    found = {name: local_shard(weight).clone() for name, weight in engine.module.named_parameters()}
    return found | {"norm": torch.tensor(float(engine.get_global_grad_norm() or 0))}


def assert_same(found: Weights, expected: Weights, where: object) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), (where, name, (found[name] - weight).abs().max())


def queued_is_now(*cases: Case) -> None:
    for case in cases:
        # For a weight that is used twice autocast makes one cast, to which it adds both gradients in bf16.
        now = trained(case, Run(sinks=case.autocast))
        for late in (False, True):
            assert_same(trained(case, Run(queue=True, late=late)), now, (case, late))
        if case.stage < 2:
            direct = trained(case, Run(direct=True))
            assert_same(trained(case, Run(queue=True, late=True, direct=True)), direct, (case, "direct"))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 1])
def test_queued_is_now(world):
    run_on_ranks(world, queued_is_now, *ROADS.values())


def held_is_usual(*cases: Case) -> None:
    """Without a queue, and where DeepSpeed adds up whole gradients anyway, holding them back changes nothing."""
    for case in cases:
        with rig.engine_of(case) as engine:
            for step in losses(case, engine, engine):
                for index, loss in enumerate(step):
                    last = index == MICRO_BATCHES - 1 and (engine.micro_steps + 1) % rule.ACCUMULATION == 0
                    engine.set_gradient_accumulation_boundary(last)
                    engine.backward(loss(), scale_wrt_gas=False)
                engine.step()
            usual = kept(engine)
        assert_same(trained(case, Run()), usual, case)


@pytest.mark.slow
def test_held_is_usual():
    run_on_ranks(2, held_is_usual, *(ROADS[name] for name in ("ZeRO 1, float32", "BF16_Optimizer")))


def inside_no_sync(*cases: Case) -> None:
    """What is held inside of ``no_sync`` is reduced with what is held behind it."""
    for case in cases:
        runs = []
        for is_inside in (False, True):
            with rig.engine_of(case) as engine:
                held, (first, second, *_) = HeldReduction(engine), next(losses(case, engine, engine.module))
                engine.set_gradient_accumulation_boundary(True)
                if is_inside:
                    with engine.no_sync(), held:
                        held.backward(first()).compute()
                    with held:
                        held.backward(second()).compute()
                else:
                    with held:
                        held.backward(first()).compute()
                        held.backward(second()).compute()
                engine.step()
                runs.append(kept(engine))
        assert_same(runs[1], runs[0], case)


def test_inside_no_sync():
    run_on_ranks(
        2, inside_no_sync, *(ROADS[name] for name in ("no ZeRO, float64", "ZeRO 1, float32", "BF16_Optimizer"))
    )


# Tensor ranks and adapters.


@contextmanager
def hugging_face(model: nn.Module, stage: int, section: dict[str, Any]) -> Iterator[Any]:
    rule.without_extension()
    config = tensor_parallel_rule.config(stage, torch.float64, section)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=weights, config=config)
    yield engine
    engine.destroy()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "qwen2": lambda: tiny_models.tiny("qwen2", torch.float64),
    "gpt2, tied": lambda: tiny_models.tiny("gpt2", torch.float64),
    "gemma, tied and scaled": lambda: tiny_models.tiny("gemma", torch.float64),
    "mixtral": lambda: tiny_models.tiny("mixtral", torch.float64),
    "LoRA": lambda: adapted_models.adapted("qwen2", [*adapted_models.ATTENTION, *adapted_models.MLP]),
}
QUEUED = {
    "qwen2": ("embed_tokens", "q_proj", "o_proj", "gate_proj", "down_proj", "lm_head"),
    "gpt2, tied": ("wte", "c_attn", "c_proj", "c_fc"),
    "gemma, tied and scaled": ("embed_tokens", "k_proj", "down_proj"),
    "mixtral": ("embed_tokens", "v_proj", "lm_head"),
    "LoRA": ("lora_B.default",),
}
"""Parts of the names of weights that must be queued."""
SECTIONS = (
    {},
    {"parallel": {"tensor": 2}},
    {"parallel": {"tensor": 2, "sequence_parallel": True}},
    {"parallel": {"tensor": 2, "sequence_parallel": True}, "tensor_overlap": "pipelined"},
)


def hugging_face_queued_is_now(name: str, stage: int) -> None:
    for section in SECTIONS:
        runs = []
        for run in (Run(), Run(queue=True, late=True)):
            with hugging_face(MODELS[name](), stage, section) as engine:
                dp, rank = engine.topology.size("dp"), engine.topology.rank("dp")
                batches = tensor_parallel_rule.batches(2 * rule.ACCUMULATION * rule.MICRO * dp)
                mine = batches.view(rule.ACCUMULATION, 2, dp, rule.MICRO, -1)[:, :, rank]
                steps = ([lambda batch=batch, engine=engine: loss_of(engine, batch) for batch in step] for step in mine)
                queued = train(engine, run, steps)
                runs.append(kept(engine))
        for part in QUEUED[name]:
            assert any(part in each for each in queued), (name, section, part, queued)
        assert_same(runs[1], runs[0], (name, section))


def loss_of(engine: Any, batch: torch.Tensor) -> torch.Tensor:
    return tensor_parallel_rule.loss_of(engine.module, batch, torch.float64) / (2 * rule.ACCUMULATION)


@pytest.mark.slow
@pytest.mark.matrix(corners=3, drawn=1)
@pytest.mark.parametrize("stage", [1, 0, 2])
@pytest.mark.parametrize("name", MODELS)
def test_queued_is_now_on_tensor_ranks(name, stage):
    run_on_ranks(2, hugging_face_queued_is_now, name, stage)


# What is refused.


def a_queue_that_is_not_empty() -> None:
    with rig.engine_of(Case(1, torch.float32)) as engine:
        held = HeldReduction(engine, queue_weight_gradients=True)
        before = {name: weight.detach().clone() for name, weight in engine.module.named_parameters()}
        loss = next(losses(Case(1, torch.float32), engine, engine.module))[0]
        names = "down.weight, embedding.weight, twice.weight, up.weight"
        with pytest.raises(RuntimeError, match=f"of 4 weights are still queued: {names}. What to do"), held:
            held.backward(loss()).compute()
            held.backward(loss())
        with pytest.raises(ZeroDivisionError), held:
            held.backward(loss())
            raise ZeroDivisionError
        with held, pytest.raises(RuntimeError, match="held back already"), held:
            pass
        with held, pytest.raises(AssertionError, match="no_sync"):
            engine.step()
        assert_same({name: w.detach() for name, w in engine.module.named_parameters()}, before, "nothing was reduced")


def refused(stage: int, part: str) -> None:
    for queue in (False, True):
        with rig.engine_of(Case(stage, torch.float32)) as engine:
            with pytest.raises(ValueError, match=part):
                HeldReduction(engine, queue_weight_gradients=queue)
            assert not any(gradient_sink(weight) for weight in engine.module.parameters())
            assert type(engine.module.up) is nn.Linear


def a_hook_has_the_gradient_now() -> None:
    with rig.engine_of(Case(0, torch.float64)) as engine:
        seen = []
        engine.module.up.weight.register_hook(lambda gradient: seen.append(gradient) or 2 * gradient)
        held = HeldReduction(engine, queue_weight_gradients=True)
        with held:
            later = held.backward(next(losses(Case(0, torch.float64), engine, engine.module))[0]())
            assert len(seen) == 1 and torch.equal(engine.module.up.weight.grad, 2 * seen[0])
            assert "up.weight" not in later.names and engine.module.down.weight.grad is None
            later.compute()
            assert engine.module.down.weight.grad is not None
            later.compute()


def all_refusals() -> None:
    a_queue_that_is_not_empty()
    refused(3, "ZeRO 3 reduces the gradient of each weight")
    a_hook_has_the_gradient_now()
    dist.barrier()


def test_what_is_refused():
    run_on_ranks(1, all_refusals)
