"""``ds_npu.swap.compress``: to the bit what was, how many bytes, what stays as it is, and what is refused."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import tiny_models
import torch
from coded_activations import code_everything, overflow_bytes
from memory_rule import DROPS
from memory_steps import same, step, three_backwards
from torch import nn

from ds_npu import capability
from ds_npu.capability import Unavailable
from ds_npu.config.sections import DsNpuConfig
from ds_npu.config.swap import SwapSection
from ds_npu.features.build import Build
from ds_npu.features.driver import apply_features, values_in
from ds_npu.features.swap.swapped_modules import SWAP
from ds_npu.memory import host_storage, swapped_activations
from ds_npu.memory.host_storage import HostAllocator
from ds_npu.ops import exponent_code

ONE_RANK = SimpleNamespace(size=lambda *axes: 1, rank=lambda *axes: 0)
"""A topology without process groups."""
ROOM = 1 / 2
SHAPE = 4, 16
"""Rows and tokens: storages of a multiple of 64 numbers."""


@pytest.fixture(autouse=True)
def swaps_and_codes_everything(monkeypatch):
    monkeypatch.setattr(swapped_activations, "LEAST_BYTES", 1)
    code_everything(monkeypatch, ROOM)
    host_storage.overflow_pool.cache_clear()


@pytest.fixture
def places(monkeypatch) -> list[tuple[torch.dtype, int, int, bool]]:
    """Of each storage that is copied out its dtype, its bytes, those that are copied, and whether it is coded."""
    found = []
    take = HostAllocator.take

    def taken(self, tensor):
        place = take(self, tensor)
        found.append((tensor.dtype, tensor.untyped_storage().nbytes(), place.size, place.code is not None))
        return place

    monkeypatch.setattr(HostAllocator, "take", taken)
    return found


def swapping(model: nn.Module, compress: bool = True, **section: object) -> nn.Module:
    section |= {"swap": {"activations": True, "compress": compress}}
    apply_features(values_in(DsNpuConfig.model_validate(section)), Build(ONE_RANK, model))
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", [*DROPS, "qwen3_moe"])
def test_gradients_to_the_bit(family, dtype, places):
    def model() -> nn.Module:
        return tiny_models.tiny(family, torch.float32, num_hidden_layers=3, **DROPS.get(family, {})).to(dtype)

    expected = step(model(), *SHAPE)
    for recompute in ({}, {"norm": True, "activation_function": True}, {"layers": "all"}):
        places.clear()
        assert same(step(swapping(model(), recompute=recompute), *SHAPE), expected), recompute
        coded = [each for each in places if each[3]]
        assert coded and any(each[0] == dtype for each in coded)
    assert overflow_bytes() > 0


def test_float64_and_odd_sizes_are_copied_as_ever(places):
    def model() -> nn.Module:
        return tiny_models.tiny("llama", torch.float64)

    expected = step(model(), *SHAPE)
    assert same(step(swapping(model()), *SHAPE), expected)
    assert places and not any(coded and dtype == torch.float64 for dtype, _, _, coded in places)
    places.clear()
    step(swapping(tiny_models.tiny("llama", torch.float32)), rows=1, length=7)
    assert any(size % 256 for _, size, _, _ in places)
    assert all(coded == (size % 256 == 0) for dtype, size, _, coded in places if dtype == torch.float32)
    assert all(size == copied for _, size, copied, coded in places if not coded)


def test_bytes_that_are_copied(places):
    """Half a byte for each exponent byte, the other bytes, and 1 KiB of counts; rounded up to 64 bytes."""
    step(swapping(tiny_models.tiny("llama", torch.bfloat16, num_hidden_layers=3)), *SHAPE)
    for dtype, size, copied, coded in places:
        numel = size // dtype.itemsize
        assert copied == (1024 + -(-numel // 128) * 64 + numel * (dtype.itemsize - 1) if coded else size)


def test_two_micro_batches_and_a_graph_that_is_kept():
    models = tiny_models.tiny("llama", torch.float32), swapping(tiny_models.tiny("llama", torch.float32))
    assert same(*(three_backwards(each, (2, 32), (1, 64)) for each in models))


def test_host_memory_is_used_again_also_by_the_next_model(monkeypatch):
    """Overflows have one pool in the process: torch_npu frees them at once, whatever still runs, or never."""
    made, begin = [], HostAllocator.__init__
    monkeypatch.setattr(HostAllocator, "__init__", lambda self, *args: (made.append(self), begin(self, *args))[1])
    sizes = set()
    for _ in range(2):
        model = swapping(tiny_models.tiny("llama", torch.float32, num_hidden_layers=3))
        for _ in range(3):
            step(model, *SHAPE)
            gc.collect()
            sizes.add((made[-1].pool.size, overflow_bytes()))
    assert len(made) == 2 and len(sizes) == 1 and min(sizes.pop()) > 0


def test_memory_of_the_host_that_is_used_up_gives_the_buffer_back(monkeypatch):
    places = HostAllocator("cpu", True)

    def fails(nbytes: int, device: torch.device) -> torch.Tensor:
        raise MemoryError(f"out of memory of the host: {nbytes}")

    monkeypatch.setattr(exponent_code, "overflow_memory", fails)
    with pytest.raises(MemoryError, match="out of memory of the host"):
        places.take(torch.zeros(640))
    assert sum(map(len, places.pool._free.values())) == 1


def test_a_torch_npu_without_the_operators_is_refused(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "npu")
    monkeypatch.setattr(capability, "torch_npu_state", lambda: SimpleNamespace(usable=True))
    said = Unavailable("torch_npu 2.1 has no npu_hans_encode", "install the newest torch_npu for this torch")
    monkeypatch.setattr(exponent_code, "why_no_codes", lambda: said)
    section = SwapSection(activations=True, compress=True)
    assert SWAP.unmet(section) == [f"compress: {said}"]
    assert SWAP.unmet(SwapSection(activations=True)) == []
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert SWAP.unmet(section) == []


def test_operators_that_do_not_give_back_what_was_are_refused(monkeypatch):
    monkeypatch.setattr(exponent_code, "why_wrong_codes", lambda device: "torch.float16 does not come back as it was")
    build = Build(ONE_RANK, tiny_models.tiny("llama", torch.float32), device_type="npu")
    section = DsNpuConfig.model_validate({"swap": {"activations": True, "compress": True}})
    said = r"swap\.compress: found true, .* do not work here: torch\.float16 does not come back .* leave it out"
    with pytest.raises(ValueError, match=said):
        apply_features(values_in(section), build)
