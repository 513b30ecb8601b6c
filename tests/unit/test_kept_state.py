"""The forms of Adam's state: shared masters exactly, moments on average; a step in chunks is the whole step."""

from __future__ import annotations

import pytest
import torch

from ds_npu.memory import state_chunks
from ds_npu.memory.chunked_step import ChunkedStep
from ds_npu.memory.moment_forms import BF16, BLOCK, INT8, INT8_AT_LEAST_ZERO
from ds_npu.memory.state_chunks import Keeping, StateShard
from ds_npu.memory.weight_residual import master_of, residual_of

EVERY = range(0, 65536, 1024)
"""The first upper halves of slices that together are all float32s."""
LOW = torch.arange(65536, dtype=torch.int64)
FORMS = {"bf16": BF16, "int8": INT8, "int8, at least zero": INT8_AT_LEAST_ZERO}
SIZE, STEPS = 10_000, 200


def hold_exact(upper: int) -> int:
    """All float32s with these upper 16 bits come back; returns how many ties were among them."""
    bits = upper * 65536 + LOW
    bits = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32)
    master = bits.view(torch.float32)
    weight = master.to(torch.bfloat16)
    residual = residual_of(master, weight)
    found = master_of(weight, residual)
    assert residual.remainder.dtype == torch.int16
    assert bool(((found.view(torch.int32) == bits) | (found.isnan() & master.isnan())).all()), hex(upper)
    return residual.ties.numel()


def test_masters_of_every_kind_come_back():
    """Zeros, subnormals, ordinary ones of both signs, the largest, infinities and NaNs; ties of even ones only."""
    for upper in (0, 1, 2, 0x7F, 0x80, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F, 0x7F80, 0x7FC0):
        for sign in (0, 0x8000):
            is_finite = upper < 0x7F80
            assert hold_exact(upper | sign) == (is_finite and upper % 2 == 0), hex(upper | sign)


@pytest.mark.slow
@pytest.mark.matrix(corners=1, drawn=1)
@pytest.mark.parametrize("first", EVERY)
def test_every_float32_comes_back(first):
    for upper in range(first, first + 1024):
        hold_exact(upper)


def test_a_weight_has_more_preimages_than_16_bits_tell_apart():
    """So that a list is needed: an even bf16 is the rounding of 65,537 float32s, an odd one of 65,535."""
    bits = torch.arange(0x3F7F0000, 0x3F830000, dtype=torch.int32)
    rounded = bits.view(torch.float32).to(torch.bfloat16).view(torch.int16).to(torch.int32)
    assert [(rounded == weight).sum().item() for weight in (0x3F80, 0x3F81, 0x3F82)] == [65537, 65535, 65537]


def moments(count: int) -> torch.Tensor:
    draws = torch.Generator().manual_seed(3)
    return torch.randn(count, generator=draws) * torch.exp(torch.randn(count, generator=draws))


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("count", [1, BLOCK - 1, 3 * BLOCK, 1001])
def test_what_was_kept_is_kept_again_as_it_is(name, count):
    """So that a checkpoint in float32 brings the same state back, whatever the seed; zeros stay zeros."""
    form, values = FORMS[name], moments(count)
    values = values.square() if form is INT8_AT_LEAST_ZERO else values
    values[::5] = 0
    once = form.pack(values, 1)
    again = form.pack(form.unpack(once), 77)
    assert all(torch.equal(*pair) for pair in zip(once, again, strict=True))
    found = form.unpack(once)
    assert found.shape == values.shape and found.dtype == torch.float32
    assert torch.equal(found == 0, values == 0) or form is INT8
    assert sum(part.nbytes for part in once) <= (2 if form is BF16 else 1) * count + 4 * (count // BLOCK + 1)


@pytest.mark.parametrize("name", FORMS)
def test_roundings_are_right_on_average(name):
    """Over 2,000 seeds the mean is within 5 standard errors; a single one is off by no more than a level."""
    form, values = FORMS[name], moments(BLOCK).abs()
    found = torch.stack([form.unpack(form.pack(values, seed * 0x9E3779B1)) for seed in range(2000)]).double()
    error = (found.mean(0) - values).abs()
    # What is below the smallest level above zero is raised to it.
    chosen = values > values.max() * 1e-6
    assert (error <= 5 * found.std(0) / 2000**0.5 + 1e-7 * values)[chosen].all()
    level = 2**-7 if form is BF16 else 0.5
    assert ((found - values).abs() <= level * values)[:, values > values.max() * 1e-3].all()


def test_replicas_are_rounded_alike_wherever_they_stand():
    values = moments(1000)
    part = BF16.pack(values[300:600].clone(), 5)
    assert torch.equal(part[0], BF16.pack(values, 5)[0][300:600])


def trained(keeping: Keeping | None, on_host: bool = False, decay: float = 0.1) -> tuple[torch.Tensor, torch.Tensor]:
    """Masters and bf16 weights after 200 steps of AdamW: as DeepSpeed does them, or (``keeping``) in chunks.

    The gradients, of a quadratic with noise, have scales from 1e-3 to 1e3, and become 10 times smaller halfway.
    """
    draws = torch.Generator().manual_seed(5)
    weight = (torch.randn(SIZE, generator=draws) * 0.5).to(torch.bfloat16)
    # Float32 masters of a run that has begun, so that all bits count; some are ties.
    master = weight.float() * (1 + 2**-10 * torch.rand(SIZE, generator=draws))
    master[::97] = (weight[::97].view(torch.int16).to(torch.int32) * 65536 + 32768).view(torch.float32)
    weight = master.to(torch.bfloat16)
    target = torch.randn(SIZE, generator=draws)
    scale = 10 ** (6 * torch.rand(SIZE, generator=draws).view(-1, 500).sort(0).values.view(-1) - 3)
    parameter = master.clone().requires_grad_()
    adam = torch.optim.AdamW([parameter], lr=1e-2, weight_decay=decay)
    shard = None
    if keeping is not None:
        shard = StateShard(parameter, [weight], keeping, 0)
        for chunk in shard.chunks:
            chunk.on_host = on_host
        shard.take({})
        adam.step = ChunkedStep(adam, [shard])
    for step in range(STEPS):
        noise = torch.randn(SIZE, generator=draws)
        gradient = scale * (weight.float() - target + noise) * (0.1 if step >= STEPS // 2 else 1)
        parameter.grad = gradient
        adam.step()
        if shard is None:
            weight.copy_(parameter.data)
        else:
            assert parameter.data_ptr() == weight.data_ptr()
            shard.close()
    return (parameter.detach() if shard is None else shard.whole()[0]), weight


EXACT = {
    "shared": (Keeping(True, "fp32"), False),
    "swapped": (Keeping(False, "fp32"), True),
    "shared and swapped": (Keeping(True, "fp32"), True),
}


@pytest.mark.parametrize("name", EXACT)
def test_shared_and_swapped_steps_are_the_plain_ones_to_the_bit(name, monkeypatch):
    monkeypatch.setattr(state_chunks, "CHUNK", 4096)
    found, expected = trained(*EXACT[name]), trained(None)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


BOUNDS = {"bf16": 0.01, "int8": 0.1}
"""Of docs/memory.md: of the distance that the weights went in 200 steps."""


@pytest.mark.parametrize("name", BOUNDS)
def test_after_200_steps_weights_are_within_the_stated_bound(name, monkeypatch):
    monkeypatch.setattr(state_chunks, "CHUNK", 4096)
    (found, _), (expected, _) = trained(Keeping(False, name)), trained(None)
    start = trained_from()
    difference, way = (found - expected).norm(), (expected - start).norm()
    assert 0 < difference <= BOUNDS[name] * way


def trained_from() -> torch.Tensor:
    """The weights before the first step of ``trained``."""
    return (torch.randn(SIZE, generator=torch.Generator().manual_seed(5)) * 0.5).to(torch.bfloat16).float()


def test_a_master_that_is_not_read_is_a_placeholder():
    parameter = torch.randn(7).to(torch.bfloat16).float().requires_grad_()
    shard = StateShard(parameter, [parameter.detach().to(torch.bfloat16)], Keeping(True, "fp32"), 0)
    shard.take({})
    assert parameter.shape == (7,) and parameter.dtype == torch.float32 and parameter.isnan().all()
    assert parameter.untyped_storage().nbytes() == 4
    with pytest.raises(RuntimeError, match="single memory location"):
        parameter.data.copy_(torch.ones(7))


def test_weights_that_are_not_contiguous_are_refused():
    weight = torch.ones(4, 6, dtype=torch.bfloat16).t()
    with pytest.raises(ValueError, match=r"\(1, 6\)\)\]; contiguous ones work"):
        StateShard(weight.float(), [weight], Keeping(True, "fp32"), 0)


def test_a_gradient_in_pieces_is_the_gradient():
    """Of whatever sizes, scaled by the placeholder's factor; what pieces lack is zero; a piece is dropped when used."""
    weight = torch.zeros(100, dtype=torch.bfloat16)
    shard = StateShard(weight.float().requires_grad_(), [weight], Keeping(False, "fp32"), 0)
    shard.chunks = [
        state_chunks.StateChunk(weight[start : start + 32], start, shard.chunks[0].keeping)
        for start in range(0, 100, 32)
    ]
    whole = torch.randn(96).to(torch.bfloat16)
    shard.use_pieces([each.view(-1, 1) for each in whole.split([5, 40, 51])])
    shard.master.grad = shard.factor()
    shard.master.grad[:1].mul_(0.3)
    found = torch.cat([shard.gradient(chunk) for chunk in shard.chunks])
    assert torch.equal(found[:96], whole.float() * 0.3) and not found[96:].any()
