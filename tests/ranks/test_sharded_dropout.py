"""Dropout and activation checkpointing in models that are sharded over tensor ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tiny_models
import torch
from ranks import run_on_ranks
from sharded_models import LENGTH, agree, close, everyones, first_fast, pair
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ds_npu.parallel.runtime.placement import sharding_of

pytestmark = pytest.mark.slow

SEQUENCE = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence parallel"])
DROPS = {
    "gpt2": {"attn_pdrop": 0.3, "embd_pdrop": 0.2, "resid_pdrop": 0.1},
    "llama": {"attention_dropout": 0.3},
    "qwen3_moe": {"attention_dropout": 0.3},
}
WAYS = ({"use_reentrant": False}, {"use_reentrant": True})


def step(model: nn.Module, seed: int = 3, length: int = LENGTH) -> dict[str, torch.Tensor]:
    """The loss, every gradient of this rank, and the random number that comes next."""
    torch.manual_seed(seed)
    model.zero_grad()
    tokens = tiny_models.tokens(2, length)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    return {**found, "loss": loss.detach(), "next": torch.rand(3)}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    differ = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert found.keys() == expected.keys() and not differ, differ


def checkpointed(family: str, sequence_parallel: bool) -> None:
    model = pair(family, sequence_parallel, torch.float32, **DROPS[family]).model
    plain = step(model)
    same(step(model), plain)
    assert not torch.equal(step(model, seed=4)["loss"], plain["loss"])
    # The reentrant way loses the gradient of a router's auxiliary loss in one process, too.
    for way in WAYS[:1] if "moe" in family else WAYS:
        model.gradient_checkpointing_enable(way)
        same(step(model), plain)
        model.gradient_checkpointing_disable()
    assert agree(plain["loss"]) and agree(plain["next"])
    for name, weight in model.named_parameters():
        assert sharding_of(weight) is not None or agree(plain[name]), name


@SEQUENCE
@first_fast("family", DROPS)
def test_recomputation_gives_the_same_bits(family, sequence_parallel):
    run_on_ranks(2, checkpointed, family, sequence_parallel)


def two_lengths(family: str) -> None:
    """Two forwards of different lengths, and one backward for both."""
    model = pair(family, True).model

    def together() -> dict[str, torch.Tensor]:
        model.zero_grad()
        batches = [tiny_models.tokens(count, length) for count, length in ((2, 10), (3, 9), (1, 4))]
        sum(model(input_ids=tokens, labels=tokens).loss for tokens in batches).backward()
        return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}

    plain = together()
    for way in WAYS[:1] if family == "mixtral" else WAYS:
        model.gradient_checkpointing_enable(way)
        # The reentrant way adds up gradients in another order.
        for name, gradient in together().items():
            close(gradient, plain[name], name)


@first_fast("family", ["llama", "gpt2", "mixtral", "qwen2_5_vl"])
def test_recomputation_of_an_earlier_forward(family):
    run_on_ranks(2, two_lengths, family)


class Masks(TorchFunctionMode):
    """Notes what each dropout keeps, by drawing its mask over ones."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[torch.Tensor] = []

    def __torch_function__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        if func is not functional.dropout:
            return func(*args, **(kwargs or {}))
        kept = func(torch.ones_like(args[0]), *args[1:], **(kwargs or {}))
        self.drawn.append(kept != 0)
        return args[0] * kept


def independent(mask: torch.Tensor) -> bool:
    """Whether the ranks' masks agree no more than chance would have it (5 sigma)."""
    one, *others = everyones(mask.to(torch.uint8))
    rate = one.double().mean().item()
    chance = rate * rate + (1 - rate) * (1 - rate)
    allowed = 5 * (chance * (1 - chance) / one.numel()) ** 0.5
    return all(abs((one == other).double().mean().item() - chance) < allowed for other in others)


def draws(sequence_parallel: bool) -> None:
    drops = {"attn_pdrop": 0.5, "embd_pdrop": 0.5, "resid_pdrop": 0.5}
    model = pair("gpt2", sequence_parallel, torch.float32, **drops).model
    torch.manual_seed(6)
    with Masks() as masks:
        model(input_ids=tiny_models.tokens(4, 16))
    embedding, *blocks = masks.drawn
    heads, residual = blocks[::3], [*blocks[1::3], *blocks[2::3]]
    assert [mask.dim() for mask in heads] == [4, 4] and [mask.dim() for mask in residual] == [3] * 4
    assert agree(embedding.to(torch.uint8))
    for mask in heads:
        assert independent(mask)
    for mask in residual:
        assert independent(mask) if sequence_parallel else agree(mask.to(torch.uint8))


@SEQUENCE
def test_masks_differ_where_ranks_have_different_work(sequence_parallel):
    run_on_ranks(2, draws, sequence_parallel)


def residual_stream(family: str) -> None:
    """Hidden states outside of regions after steps of training, to the bit."""
    model = pair(family, False, torch.float32, **DROPS[family]).model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[torch.Tensor] = []
    for name, module in model.named_modules():
        if name.rpartition(".")[2].isdecimal() or (name.endswith(("norm", "ln_f")) and ".self_attn." not in name):
            module.register_forward_hook(lambda _, args, out: seen.append(out[0] if isinstance(out, tuple) else out))
    for seed in range(2):
        step(model, seed)
        optimizer.step()
    assert len(seen) > 4 and all(map(agree, seen))


@first_fast("family", DROPS)
def test_tensor_ranks_have_one_residual_stream(family):
    run_on_ranks(2, residual_stream, family)
