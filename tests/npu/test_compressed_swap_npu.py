"""``ds_npu.swap.compress`` on simulated NPUs: numbers to the bit, waits of the host, bytes that cross, memory."""

from __future__ import annotations

import gc
import os

import deepspeed
import gradient_rule as rule
import pytest
import shortages
import tensor_parallel_rule as tensor_rule
import tiny_models
import torch
from coded_activations import overflow_bytes
from host_waits import HostWaits
from ranks import run_on_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from ds_npu.memory import swapped_activations
from ds_npu.memory.copy_streams import CopyStreams
from ds_npu.memory.host_storage import HostAllocator, StorageCopy
from ds_npu.ops import exponent_code
from ds_npu.parallel.tensor.shard_access import local_shard

SWAP: dict[str, object] = {"swap": {"activations": True, "depth": 1}}
CODED: dict[str, object] = {"swap": {"activations": True, "depth": 1, "compress": True}}
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
TOKENS = 256


def begin() -> None:
    """With few numbers the tails of the vector cores are as large as what is saved."""
    rule.without_extension()
    swapped_activations.LEAST_BYTES = 2**14
    exponent_code.MOST_SHARE = 2.0


def engine_of(stage: int, section: dict[str, object], family: str = "llama", **more: object):
    sizes = SIZES | {"num_hidden_layers": 3, "max_position_embeddings": TOKENS} | more
    model = tiny_models.tiny(family, torch.float32, **sizes).to(torch.bfloat16)
    config = tensor_rule.config(stage, torch.bfloat16, section)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def batches(count: int, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(11 + rank)
    return [torch.randint(0, 64, (2, TOKENS), generator=generator) for _ in range(count)]


class Crossings(TorchDispatchMode):
    """Keeps the bytes of each copy between the host and the device."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._opname == "copy_" and args[0].device != args[1].device:
            self.sizes.append(args[0].nbytes)
        return func(*args, **(kwargs or {}))


def trained(
    stage: int, section: dict[str, object], family: str, drop: float, counts: bool
) -> tuple[list[torch.Tensor], list[str], list[int]]:
    """Losses and weights of three steps; of the last one what the host waited for, and the bytes of each crossing."""
    layers = 8 if "pipeline" in section else 3
    engine = engine_of(stage, section, family, attention_dropout=drop, num_hidden_layers=layers)
    rank = torch.distributed.get_rank() if "parallel" not in section else 0
    torch.manual_seed(7)
    losses, waits, crossings = [], HostWaits(), Crossings()
    for tokens in batches(3, rank):
        ids = tokens.to(engine.device)
        waits.found.clear()
        crossings.sizes.clear()
        with crossings if counts else waits:
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
        losses.append(loss.detach())
        engine.step()
    weights = map(local_shard, rule.whole_weights(engine.module).values())
    return [*losses, *weights], waits.found, crossings.sizes


def runs(cases: list[tuple[dict[str, object], int, str]]) -> None:
    begin()
    # Half of what is coded does not fit into the codes.
    exponent_code.CODE_RATIO = dict.fromkeys(exponent_code.CODE_RATIO, 0.3)
    for section, stage, family in cases:
        drop = 0.0 if "context" in section.get("parallel", {}) else 0.3
        expected, waits, _ = trained(stage, section | SWAP, family, drop, False)
        found, more, _ = trained(stage, section | CODED, family, drop, False)
        assert len(found) == len(expected) and all(map(torch.equal, found, expected)), (section, stage, family)
        assert more == waits, (section, stage, family)
    assert overflow_bytes(f"npu:{torch.npu.current_device()}") > 0


def test_compressed_runs_are_those_without_to_the_bit_and_the_host_waits_no_more_often():
    sequence = {"parallel": {"tensor": 2, "sequence_parallel": True}}
    cases = [(sequence, 1, "llama"), ({}, 3, "llama"), ({}, 2, "gpt2")]
    run_on_ranks(2, runs, cases, backend="hccl", sets_device=False, deadline_s=600.0)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["context", "expert", "pipeline"])
def test_compressed_runs_on_other_axes_are_those_without_to_the_bit(axis):
    more = {"pipeline": {"schedule": "zb_h1"}} if axis == "pipeline" else {}
    section = {"parallel": {axis: 2}} | more
    cases = [(section, 1, "qwen3_moe" if axis == "expert" else "llama")]
    run_on_ranks(2, runs, cases, backend="hccl", sets_device=False, deadline_s=600.0)


def code_bytes(size: int) -> int:
    """Those that are copied of a storage of ``size`` bytes in bf16, of at most 48 * 32,768 numbers."""
    numel = size // 2
    if numel < 32768:
        return size
    fixed = 512 + (8448 + 256) * (numel // 32768) + numel * 5 // 8
    return 1024 + -(-fixed // 512) * 512 + numel


def bytes_that_cross() -> None:
    """Of each storage its code; nothing is coded where that gains less than a sixteenth."""
    begin()
    *_, plain = trained(1, SWAP, "llama", 0.0, True)
    *_, coded = trained(1, CODED, "llama", 0.0, True)
    assert len(plain) == len(coded) > 20
    assert sorted(coded) == sorted(map(code_bytes, plain))
    exponent_code.MOST_SHARE = 15 / 16
    *_, small = trained(1, CODED, "llama", 0.0, True)
    assert sorted(small) == sorted(plain)
    print(f"bytes that cross: {sum(plain):,}, as codes {sum(coded):,}, {len(plain)} copies")


def test_bytes_that_cross_are_those_of_the_codes():
    run_on_ranks(1, bytes_that_cross, backend="hccl", sets_device=False)


def memory() -> None:
    """Steps again and again, of two engines, take no more host memory, and no more of the device than two codes."""
    begin()
    held: list[list[tuple[int, int]]] = []
    # In the first run attention makes a mask that stays.
    for section in (SWAP, SWAP, CODED, CODED):
        gc.collect()
        before = torch.npu.memory_allocated()
        engine = engine_of(0, section)
        held.append([])
        for tokens in batches(6, 0):
            ids = tokens.to(engine.device)
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
            gc.collect()
            torch.npu.synchronize()
            held[-1].append((torch.npu.memory_allocated() - before, overflow_bytes("npu:0")))
        del engine
    print(held)
    assert len({overflow for each in held[2:] for _, overflow in each}) == 1
    _, plain, *coded = ([allocated for allocated, _ in each[2:]] for each in held)
    # Gate and up.
    largest = exponent_code.CodeLayout(2 * TOKENS * 512, torch.bfloat16).size
    for each in coded:
        assert all(0 <= more - less <= 2 * (largest + 512) for more, less in zip(each, plain, strict=True))
        # A step of two micro-batches.
        assert each[0] == each[2] and each[1] == each[3]


def test_memory_is_used_again():
    run_on_ranks(1, memory, backend="hccl", sets_device=False)


def fails() -> None:
    """Memory of the device is used up anywhere in a step: an error; the next run is right, in the same host memory."""
    # Each tensor is an allocation of its own then.
    os.environ["PYTORCH_NO_NPU_MEMORY_CACHING"] = "1"
    begin()
    ids = batches(1, 0)[0].npu()

    def step() -> tuple[torch.Tensor, int]:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        return loss.detach().cpu(), overflow_bytes("npu:0")

    engine = engine_of(0, CODED)
    expected = step()
    total = shortages.count(shortages.DEVICE, step)
    tried = range(1, total + 1, total // 12)
    for first in tried:
        with shortages.shortage(shortages.DEVICE, first), pytest.raises(RuntimeError, match=r"memory"):
            step()
        torch.npu.synchronize()
        engine = None
        gc.collect()
        engine = engine_of(0, CODED)
        assert step() == expected, first
    print(f"{total} allocations, {len(tried)} failed")


def test_memory_may_be_used_up():
    run_on_ranks(1, fails, backend="hccl", sets_device=False, deadline_s=600.0)


def copies_in_order() -> None:
    """Numbers that were just computed come back, over two swaps whose overflows are in the same memory."""
    begin()
    exponent_code.CODE_RATIO = dict.fromkeys(exponent_code.CODE_RATIO, 0.3)
    swaps = [(CopyStreams("npu", True), HostAllocator("npu", True)) for _ in range(2)]
    numbers = torch.randint(-(2**14), 2**14, (2**16,), dtype=torch.int16)
    step = numbers.npu()
    found, expected = [], []
    for k in range(6):
        streams, places = swaps[k % 2]
        taken = []
        for j in range(2):
            x = torch.zeros_like(step)
            for _ in range(10):
                x = x + step * (k + j)
            expected.append(numbers * (k + j) * 10)
            data = x.view(torch.bfloat16)
            taken.append(StorageCopy(x.view(torch.uint8), places.take(data)))
        streams.wait(streams.copy_out(taken))
        back = [StorageCopy(torch.empty_like(each.data), each.host) for each in taken]
        streams.wait(streams.copy_back(back))
        found += [each.data.view(torch.int16) for each in back]
        for each in taken:
            places.give(each.host)
    assert all(torch.equal(mine.cpu(), right) for mine, right in zip(found, expected, strict=True))


def test_codes_wait_for_what_they_are_of():
    run_on_ranks(1, copies_in_order, backend="hccl", sets_device=False)
