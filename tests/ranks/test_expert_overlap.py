"""What runs while the tokens of a layer of experts travel: that it is exact, and that it does run then."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from unittest import mock

import expert_cases
import pytest
import tiny_models
import torch
import torch.distributed as dist
from expert_cases import ALL_OPTIONS, LAYOUTS, ROUTINGS, LayerCase, Numbers
from ranks import run_on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint
from wire import Messages

from ds_npu.comm.pending import InFlight
from ds_npu.config.sections import DsNpuConfig
from ds_npu.features.build import Build
from ds_npu.features.driver import apply_features, values_in
from ds_npu.parallel.expert import weights as of_experts
from ds_npu.parallel.expert.overlap import compute_experts_in_halves
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology

EP2 = Degrees(dp=2, ep=2)
BLOCK = "model.layers.1.mlp"


def halves_of_every_layer(degrees: Degrees) -> None:
    def in_halves(x, ids, weights, *where):
        return compute_experts_in_halves((x, ids, weights), *where)

    topology = Topology(degrees)
    with mock.patch.object(expert_cases, "compute_experts", in_halves):
        for routing, options, shared in itertools.product(ROUTINGS, ALL_OPTIONS, {False, degrees.tp > 1}):
            case = LayerCase(routing, LAYOUTS["transposed with biases"], options, shared)
            expert_cases.check_layer(topology, case, Numbers())


@pytest.mark.parametrize("degrees", [EP2, pytest.param(Degrees(tp=2, ep=2), marks=pytest.mark.slow)], ids=str)
def test_two_halves_compute_as_the_loop_in_one_process(degrees):
    run_on_ranks(degrees.world_size, halves_of_every_layer, degrees)


def block_of(family: str, degrees: Degrees, **moe: object) -> nn.Module:
    """The last block of a tiny model whose experts are on the ranks of this world."""
    model = tiny_models.tiny(family)
    parallel = {"expert": degrees.ep, "tensor": degrees.tp}
    section = DsNpuConfig.model_validate({"parallel": parallel, "moe": moe})
    apply_features(values_in(section), Build(Topology(degrees), model))
    return model.get_submodule(BLOCK)


def inputs(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    x, dy = torch.randn(2, 2, 5, 32, generator=generator, dtype=torch.float64)
    return x.requires_grad_(), dy


Way = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def under_autocast(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return block.float()(x.float())


WAYS: dict[str, Way] = {
    "plain": lambda block, x: block(x),
    "recomputed": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "recomputed, reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "autocast": under_autocast,
}


def micro_batches(block: nn.Module, way: Way) -> list[torch.Tensor]:
    """Outputs and gradients of two micro-batches in flight, of which the first goes back first; and an evaluation."""
    fed = [inputs(seed) for seed in range(2)]
    outs = [way(block, x) for x, _ in fed]
    found = []
    for out, (x, dy) in zip(outs, fed, strict=True):
        block.zero_grad()
        out.backward(dy.to(out.dtype))
        gradients = {name: each.grad for name, each in block.named_parameters()}
        found += [out.detach(), x.grad, *(each for each in gradients.values() if each is not None)]
    with torch.no_grad():
        found.append(way(block, fed[0][0]))
    with torch.inference_mode():
        found.append(way(block, fed[1][0]))
    return found


def same_bits() -> None:
    for level in ("none", "level0", "level1"):
        plain, overlapped = (block_of("deepseek_v3", EP2, overlap=on, zero_memory=level) for on in (False, True))
        for name, way in WAYS.items():
            pairs = zip(micro_batches(plain, way), micro_batches(overlapped, way), strict=True)
            assert all(torch.equal(one, other) for one, other in pairs), (level, name)


def test_beside_shared_experts_every_bit_is_the_same():
    run_on_ranks(2, same_bits)


AGAIN: list[dict[str, object]] = [
    {"activation_function": True},
    {"modules": ["**.shared_experts"]},
    {"modules": ["**.shared_experts"], "keep": ["matmul"], "norm": True},
    {"modules": ["**.shared_experts.down_proj"]},
    {"modules": ["**.mlp"], "keep": ["matmul"]},
    {"layers": "all"},
]
"""Of ``ds_npu.recompute``: shared experts, and what is around or in them, computed again."""


def gradients(family: str, moe: dict[str, object], recompute: dict[str, object]) -> list[torch.Tensor]:
    """Losses and gradients of two micro-batches in flight, of which the first goes back first."""
    model = tiny_models.tiny(family, torch.float32, num_hidden_layers=3)
    section = DsNpuConfig.model_validate({"parallel": {"expert": 2}, "moe": moe, "recompute": recompute})
    apply_features(values_in(section), Build(Topology(EP2), model))
    with Messages() as messages:
        losses = [model(input_ids=ids, labels=ids).loss for ids in tiny_models.tokens(4, 9).split(2)]
        for loss in losses:
            loss.backward()
    assert messages.begun and not messages.unwaited, (family, moe, recompute)
    return [*(loss.detach() for loss in losses), *(each.grad for each in model.parameters() if each.grad is not None)]


def shared_experts_again() -> None:
    for family in ("deepseek_v3", *tiny_models.SHARED_EXPERTS):
        expected = gradients(family, {}, {})
        for recompute in AGAIN:
            found = gradients(family, {"overlap": True}, recompute)
            assert len(found) == len(expected) > 10
            assert all(map(torch.equal, found, expected)), (family, recompute)


def test_shared_experts_that_are_computed_again_do_not_record_the_routed_ones():
    run_on_ranks(2, shared_experts_again)


Events = list[str]


def recorded(block: nn.Module, way: Way) -> tuple[Events, Events]:
    """What happens in forward and in backward: messages handed over and waited for, and what is computed."""
    events: Events = []
    names = {"up_proj": "shared up", "down_proj": "shared down"}
    post, wait, product = InFlight.post, InFlight.wait, of_experts.grouped_matmul
    for name, said in names.items():
        layer = block.shared_experts.get_submodule(name)
        layer.register_forward_hook(lambda *_, said=said: events.append(said))
        layer.weight.register_post_accumulate_grad_hook(lambda _, said=said: events.append(said))
    for name in ("gate_up_proj", "down_proj"):
        weight = block.experts.get_parameter(name)
        weight.register_post_accumulate_grad_hook(lambda _: events.append("weight gradient"))
    with (
        mock.patch.object(InFlight, "post", lambda self, each: events.append("send") or post(self, each)),
        mock.patch.object(InFlight, "wait", lambda self: events.append("wait") or wait(self)),
        mock.patch.object(of_experts, "grouped_matmul", lambda *a: events.append("experts") or product(*a)),
    ):
        x, dy = inputs(0)
        out = way(block, x)
        forward, events[:] = list(events), []
        out.backward(dy)
    return forward, list(events)


def order_of_events() -> None:
    forward, backward = recorded(block_of("deepseek_v3", EP2, overlap=True), WAYS["plain"])
    receive = ["wait", "wait"]
    assert forward == ["send", "send", "shared up", *receive, "experts", "experts", "send", "shared down", "wait"]
    # The gradients of tokens and of routing weights leave before the gradients of the experts' weights.
    computed = ["experts", "experts", "send", "send", "weight gradient", "weight gradient"]
    assert backward == ["send", "shared down", "wait", *computed, "shared up", *receive]
    forward, backward = recorded(block_of("deepseek_v3", EP2), WAYS["plain"])
    assert forward == ["send", "send", *receive, "experts", "experts", "send", "wait", "shared up", "shared down"]
    assert backward == ["shared down", "shared up", "send", "wait", *computed, *receive]


def test_messages_leave_before_what_is_computed_beside_them():
    run_on_ranks(2, order_of_events)


def order_of_halves() -> None:
    block, events = block_of("qwen3_moe", EP2, overlap=True), []
    post, wait, product = InFlight.post, InFlight.wait, of_experts.grouped_matmul
    known: dict[int, str] = {}

    def said(buffer: InFlight) -> str:
        return known.setdefault(id(buffer), f"{len(known)}")

    with (
        mock.patch.object(InFlight, "post", lambda self, e: events.append(f"send {said(self)}") or post(self, e)),
        mock.patch.object(InFlight, "wait", lambda self: events.append(f"wait {said(self)}") or wait(self)),
        mock.patch.object(of_experts, "grouped_matmul", lambda *a: events.append("experts") or product(*a)),
    ):
        x, dy = inputs(0)
        out = block(x)
        out = out[0] if isinstance(out, tuple) else out
        forward, events[:] = list(events), []
        out.backward(dy)
    # Tokens 0 and routing 1 of the first half, 2 and 3 of the second; sums 4 and 5.
    sent = ["send 0", "send 1", "send 2", "send 3"]
    first = ["wait 1", "wait 0", "experts", "experts", "send 4"]
    assert forward == [*sent, *first, "wait 3", "wait 2", "experts", "experts", "send 5", "wait 4", "wait 5"]
    # The second half's gradients go back first; 6 and 7 are those of routing weights.
    second = ["wait 2", "experts", "experts", "send 5", "send 6"]
    first = ["wait 0", "experts", "experts", "send 4", "send 7"]
    assert events == ["send 2", "send 0", *second, *first, "wait 5", "wait 6", "wait 4", "wait 7"]


def test_one_half_travels_while_the_other_is_computed():
    run_on_ranks(2, order_of_halves)


def other_input() -> None:
    """A block whose shared experts are given a tensor that is not the same, though it is of the same memory."""
    block = block_of("deepseek_v3", EP2, overlap=True)
    shared = block.shared_experts
    call = shared.forward
    said = r"model\.layers\.1\.mlp\.shared_experts was computed while tokens tra"
    with mock.patch.object(shared, "forward", lambda x: call(x.detach())), pytest.raises(RuntimeError, match=said):
        block(inputs(0)[0])
    assert block(inputs(0)[0]).isfinite().all()


def test_a_result_is_taken_for_the_same_tensor_only():
    run_on_ranks(2, other_input)
