"""Several micro-batches in flight: forwards and backwards in any order, on two threads, with recomputed layers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import checkpointing_model as own
import deepspeed
import gradient_rule as rule
import pytest
import tiny_models
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import run_on_ranks
from sequence_sharded_models import SequenceSharded, sequence_sharded
from sharded_models import Pair, close, pair
from torch import nn
from torch.autograd.graph import _engine_run_backward

from ds_npu.features.fused_ops.fused_model import fuse
from ds_npu.features.tensor_parallel.sharded_model import shard_model
from ds_npu.models.globs import plan_for
from ds_npu.parallel.runtime.micro_batch import running
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology

ORDERS = ((0, 1, 1, 0), (0, 1, 2, 0, 2, 1), (0, 1, 0, 1))
"""Of micro-batch numbers: its first stands for the forward of each, its second for the backward."""
LENGTHS = (9, 10, 13, 8)
"""Of micro-batches: shards of 9 and 10 tokens are of one size on two tensor ranks."""
WAYS = (None, {"use_reentrant": True}, {"use_reentrant": False})
FUSED = ("rms_norm", "swiglu", "rotary", "cross_entropy")
DROPS = {
    "gpt2": {"attn_pdrop": 0.3, "embd_pdrop": 0.2, "resid_pdrop": 0.1},
    "llama": {"attention_dropout": 0.3},
}

Batches = list[torch.Tensor]


def batches(lengths: Sequence[int] = LENGTHS) -> Batches:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, 60, (1 + place % 3, length), generator=generator) for place, length in enumerate(lengths)]


def backward(loss: torch.Tensor) -> None:
    """As ``loss.backward()``, which the mode would be told of and so be left by what is computed again."""
    with tiny_models.Float64():
        _engine_run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, True)


def forward(model: nn.Module, ids: torch.Tensor, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    with tiny_models.Float64():
        return model(input_ids=ids, labels=ids).loss


def run(model: nn.Module, order: Sequence[int], each: Batches, on_thread: bool = True) -> torch.Tensor:
    """The losses of the micro-batches of ``order``; gradients are added up."""
    model.zero_grad()
    losses: dict[int, torch.Tensor] = {}
    begun = set()
    with ThreadPoolExecutor(1) as other:
        for number in order:
            if number not in begun:
                begun.add(number)
                losses[number] = forward(model, each[number], number)
            elif on_thread:
                other.submit(backward, losses[number]).result()
            else:
                backward(losses[number])
    return torch.stack([losses[number].detach() for number in sorted(losses)])


def one_by_one(order: Sequence[int]) -> list[int]:
    return [number for number in sorted(set(order)) for _ in range(2)]


def set_checkpoints(model: nn.Module, way: dict[str, bool] | None) -> None:
    if way is None:
        model.gradient_checkpointing_disable()
    else:
        model.gradient_checkpointing_enable(way)


class Expected:
    """What one process computes, micro-batch by micro-batch."""

    def __init__(self, both: Pair) -> None:
        self.both = both
        self._known: dict[object, tuple[torch.Tensor, dict[str, torch.Tensor]]] = {}

    def check(self, order: Sequence[int], each: Batches, on_thread: bool = True) -> None:
        both, losses = self.both, self._compute(order, each)
        close(run(both.model, order, each, on_thread), losses, str(order))
        both.same_gradients()

    def _compute(self, order: Sequence[int], each: Batches) -> torch.Tensor:
        """The losses; the plain model has the gradients."""
        plain = self.both.plain
        batch = (*one_by_one(order), *(ids.shape for ids in each))
        if batch not in self._known:
            losses = run(plain, one_by_one(order), each)
            self._known[batch] = losses, {name: weight.grad for name, weight in plain.named_parameters()}
        losses, gradients = self._known[batch]
        for name, weight in plain.named_parameters():
            weight.grad = gradients[name]
        return losses


def every_order(
    both: Pair, ways: Sequence[dict[str, bool] | None] = WAYS, orders: Sequence[Sequence[int]] = ORDERS
) -> None:
    """``orders``, and others that hypothesis draws, the same on every rank."""
    expected = Expected(both)
    for way in ways:
        set_checkpoints(both.model, way)
        for order in orders:
            expected.check(order, batches())

    numbers = st.integers(2, 4).flatmap(lambda count: st.permutations([*range(count)] * 2))
    lengths = st.lists(st.integers(8, 13), min_size=4, max_size=4)

    @settings(
        max_examples=2 * len(orders),
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(numbers, lengths, st.sampled_from(ways), st.booleans())
    def drawn(order: list[int], sizes: list[int], way: dict[str, bool] | None, on_thread: bool) -> None:
        set_checkpoints(both.model, way)
        expected.check(order, batches(sizes), on_thread)

    drawn()


def few() -> None:
    for both in (pair("llama", True), sequence_sharded("llama", "ulysses")):
        every_order(both, orders=ORDERS[1:2])


def over_tensor_ranks(families: Sequence[str]) -> None:
    for family in families:
        for sequence_parallel in (True, False):
            # The reentrant way loses the gradient of a router's auxiliary loss in one process, too.
            every_order(pair(family, sequence_parallel), WAYS[::2] if family == "mixtral" else WAYS)


def with_fused_operators() -> None:
    for both in (pair("llama", True), sequence_sharded("llama", "ulysses")):
        fuse(both.model, plan_for(both.plain, {}), FUSED)
        every_order(both)


def over_context_ranks(algorithms: Sequence[str], tensor: int = 1) -> None:
    for algorithm in algorithms:
        every_order(sequence_sharded("llama", algorithm, tensor, sequence_parallel=tensor > 1))


CASES = {
    "tensor": (2, over_tensor_ranks, ["llama"]),
    "context": (2, over_context_ranks, ["ulysses", "ring", "allgather"]),
    "tensor and context": (4, over_context_ranks, ["ulysses", "ring"], 2),
    "fused": (2, with_fused_operators),
    "tensor, others": (2, over_tensor_ranks, ["gpt2", "mixtral", "qwen2_5_vl"]),
    "context, in two ways": (4, over_context_ranks, ["hybrid", "double ring"]),
}


def test_an_order_computes_what_one_process_does():
    run_on_ranks(2, few)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_any_order_computes_what_one_process_does(case):
    run_on_ranks(*CASES[case])


def drops(both: Pair) -> None:
    """In any order the model drops what it drops where each forward is followed by its backward."""
    for way in WAYS:
        set_checkpoints(both.model, way)
        for order in ORDERS:
            found = []
            for each in (one_by_one(order), order):
                losses = run(both.model, each, batches())
                found.append({"": losses, **{name: weight.grad for name, weight in both.model.named_parameters()}})
            for name, expected in found[0].items():
                close(found[1][name], expected, f"{name} {way} {order}")


def dropped_over_tensor_ranks() -> None:
    for family, rates in DROPS.items():
        for sequence_parallel in (True, False):
            drops(pair(family, sequence_parallel, **rates))


def dropped_over_context_ranks() -> None:
    for algorithm in ("ulysses", "ring", "allgather"):
        drops(sequence_sharded("gpt2", algorithm, **DROPS["gpt2"]))


@pytest.mark.parametrize("body", [dropped_over_tensor_ranks, dropped_over_context_ranks])
@pytest.mark.slow
def test_dropout_is_that_of_the_forward(body):
    run_on_ranks(2, body)


def whole_modules_that_drop() -> None:
    """A module that every tensor rank computes alike draws its numbers from outside of the region, again too."""
    model, topology = tiny_models.tiny("gpt2", **DROPS["gpt2"]), Topology(Degrees(tp=2))
    plan = plan_for(model, dict.fromkeys(("transformer.h.*.attn", "transformer.h.*.attn.**"), "replicated"))
    shard_model(model, plan, topology, sequence_parallel=True)
    both = Pair(model, model, topology)
    drops(both)
    found = []
    for way in WAYS:
        set_checkpoints(both.model, way)
        run(both.model, (0, 0), batches())
        found.append({name: weight.grad.clone() for name, weight in both.model.named_parameters()})
    for name, expected in found[0].items():
        close(found[1][name], expected, name)
        close(found[2][name], expected, name)


def test_whole_modules_drop_as_in_the_forward():
    run_on_ranks(2, whole_modules_that_drop)


def own_pair() -> Pair:
    topology, model = Topology(Degrees(tp=2)), own.Own()
    shard_model(model, plan_for(model, own.GLOBS), topology, sequence_parallel=True)
    return Pair(model, own.Own(), topology)


def own_checkpoints() -> None:
    both = own_pair()
    for way in own.OWN_WAYS.values():
        both.model.way = way
        for order in ORDERS:
            Expected(both).check(order, batches())
    # What the checkpoint holds tells nothing of its forward: the shards tell the length where it can be only one.
    for recompute in (own.REENTRANT, own.OTHER):
        both.model.way = own.in_turn
        for block in both.model.blocks:
            block.recompute = recompute
        Expected(both).check((0, 1, 2, 0, 2, 1), batches((9, 4, 13)))
        with pytest.raises(ValueError, match="outside of the forward that it is of, and forwards of 9 and 10 tokens"):
            run(both.model, (0, 1, 0, 1), batches((9, 10)))


def test_checkpoints_of_a_model_of_ones_own():
    run_on_ranks(2, own_checkpoints)


def within_each_other() -> None:
    """A backward while another forward runs, and forwards on parts of one storage."""
    both = pair("llama", True)
    nine, ten = batches((9, 10))
    for way in WAYS:
        run(both.plain, (0, 0, 1, 1), [nine, ten])
        set_checkpoints(both.model, way)
        both.model.zero_grad()
        pending = [forward(both.model, nine, 0)]
        both.model.model.layers[1].mlp.register_forward_pre_hook(
            lambda *_, pending=pending: backward(pending.pop()) if pending else None
        )
        second = forward(both.model, ten, 1)
        backward(second)
        both.same_gradients()

        losses = []
        for model in (both.plain, both.model):
            model.zero_grad()
            (ids,) = batches((19,))
            hidden = model.get_input_embeddings()(ids).detach().requires_grad_()
            parts = [each.split((9, 10), 1) for each in (hidden, ids)]
            with tiny_models.Float64():
                parts = [model(inputs_embeds=part, labels=labels) for part, labels in zip(*parts, strict=True)]
            losses.append([part.loss for part in parts])
            for loss in losses[-1]:
                backward(loss)
            losses[-1].append(hidden.grad)
        for found, expected in zip(*losses, strict=True):
            close(found, expected)


def nothing_is_kept() -> None:
    """A MicroBatch ends with the graph of its forward, and without a graph with its forward."""
    for both in (pair("llama", True), sequence_sharded("llama", "ulysses")):
        known: list[weakref.ref] = []
        for layer in both.model.model.layers:
            layer.self_attn.register_forward_hook(
                lambda *_, known=known: known.append(weakref.ref(running())) if running() else None
            )
        for way in WAYS:
            set_checkpoints(both.model, way)
            gc.disable()
            loss = forward(both.model, batches()[0], 0)
            # The masks of context parallelism know all that is computed again.
            assert {each() for each in known} != {None} or both.topology.size("cp") > 1
            del loss
            assert {each() for each in known} == {None}, way
            run(both.model, (0, 1, 1, 0), batches())
            with torch.no_grad():
                forward(both.model, batches()[0], 0)
            assert {each() for each in known} == {None}, way
            gc.enable()
            known.clear()


@pytest.mark.parametrize("body", [within_each_other, nothing_is_kept])
def test_each_forward_has_its_own(body):
    run_on_ranks(2, body)


def through_an_engine() -> None:
    """ZeRO 0 accumulates gradients of micro-batches whose backwards come in another order."""
    rule.without_extension()
    sharded = {"parallel": {"tensor": 2, "sequence_parallel": True}, "plan": own.GLOBS}
    for make, section in ((own.Own, sharded), (partial(tiny_models.tiny, "llama"), {"parallel": {"context": 2}})):
        model, plain = make(), make()
        config = rule.config(0, torch.float64, {}) | {"gradient_accumulation_steps": 3, "ds_npu": section}
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        both = (SequenceSharded if make is not own.Own else Pair)(model, plain, engine.topology)
        for way in ("none", "reentrant", "other") if make is own.Own else ("none",):
            plain.zero_grad()
            for number, ids in enumerate(batches()[:3]):
                (forward(plain, ids, number) / 3).backward()
            model.zero_grad()
            if make is own.Own:
                model.way = own.OWN_WAYS[way]
            losses = [forward(engine, ids, number) for number, ids in enumerate(batches()[:3])]
            with ThreadPoolExecutor(1) as other:
                for number in (0, 2, 1):
                    other.submit(engine.backward, losses[number]).result()
            both.same_gradients()


def test_through_an_engine():
    run_on_ranks(2, through_an_engine)
