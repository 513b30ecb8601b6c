"""A vocabulary sharded over simulated NPUs, and random numbers of tensor-parallel regions on them."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ranks import run_on_ranks
from region_dropout import alignment_body, checkpoint_body, regions_body
from torch import nn
from vocabulary import bytes_body, cross_entropy_body, embedding_body, gather_body, tensor_world

from ds_npu.parallel.runtime.placement import sharding_of
from ds_npu.parallel.tensor import cross_entropy
from ds_npu.parallel.tensor.cross_entropy import VocabParallelLoss, vocab_parallel_cross_entropy
from ds_npu.parallel.tensor.embedding import VocabParallelEmbedding
from ds_npu.parallel.tensor.randomness import RegionRandomness
from ds_npu.parallel.tensor.sharding import shard_sections

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def all_of_it_body() -> None:
    for words, dtype in itertools.product((13, 16), DTYPES):
        embedding_body(words, dtype, None, "npu")
        embedding_body(words, dtype, 7, "npu")
        gather_body(words, dtype, "npu")
        cross_entropy_body(words, 400, dtype, -100, "npu")
        cross_entropy_body(words, 29, dtype, 3, "npu")
    cross_entropy_body(1031, 50, torch.bfloat16, -100, "npu")
    bytes_body(13, 40, "npu")


@pytest.mark.parametrize("world", [2, 3])
def test_embedding_loss_and_logits(world):
    run_on_ranks(world, all_of_it_body, backend="hccl")


def moved_body() -> None:
    """DeepSpeed moves models to the device after they were split."""
    embedding = VocabParallelEmbedding.adopt(nn.Embedding(13, 4), tensor_world())
    before = embedding.weight
    embedding.to("npu").bfloat16()
    assert embedding.weight is before
    assert sharding_of(embedding.weight) == shard_sections(0, [13], 2)


def test_a_split_weight_stays_split_on_its_way_to_the_npu():
    run_on_ranks(2, moved_body, backend="hccl")


def memory_body(dtype: torch.dtype) -> None:
    tokens, words, block = 1000, 3000, 1 << 18
    cross_entropy.BLOCK_BYTES["npu"] = block
    group = tensor_world().group("tp")
    logits_TV = torch.randn(tokens, words // 2).to(dtype).npu().requires_grad_()
    targets_T = torch.randint(0, words, (tokens,)).npu()
    start = dist.get_rank() * words // 2
    vocab_parallel_cross_entropy(logits_TV, targets_T, start, group).sum().backward()  # HCCL has its buffers now
    torch.npu.synchronize()
    logits_TV.grad = None
    torch.npu.reset_peak_memory_stats()
    begun = torch.npu.memory_allocated()
    loss = vocab_parallel_cross_entropy(logits_TV, targets_T, start, group).sum()
    # torch_npu casts a block of bf16 before it subtracts from it.
    blocks = (1 if dtype == torch.float32 else 2) * block
    small = 80 * tokens + 16 * 512  # each tensor is rounded up to 512 bytes
    assert torch.npu.max_memory_allocated() - begun <= blocks + small
    assert torch.npu.memory_allocated() - begun <= 22 * tokens + 10 * 512
    loss.backward()
    assert torch.npu.max_memory_allocated() - begun <= logits_TV.nbytes + blocks + small


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_of_the_loss(dtype):
    run_on_ranks(2, memory_body, dtype, backend="hccl")


# ---- random numbers ----


@pytest.mark.parametrize("world", [2, 4])
def test_regions(world):
    run_on_ranks(world, regions_body, "npu", backend="hccl")


def test_recomputation_repeats():
    run_on_ranks(2, checkpoint_body, "npu", backend="hccl")


def test_alignment():
    run_on_ranks(4, alignment_body, "npu", backend="hccl")


# ---- the host does not wait ----


def no_wait_body() -> None:
    topology = tensor_world()
    numbers = RegionRandomness(topology, "npu")
    embedding = VocabParallelEmbedding(13, 8, topology).to("npu")
    loss_function = VocabParallelLoss(topology, shard_sections(0, [13], 2))
    ids = torch.randint(0, 13, (4, 9)).npu()

    def step() -> None:
        with numbers.region():
            rows = nn.functional.dropout(embedding(ids), 0.5)
        logits = rows @ embedding.weight.t()
        loss_function(logits, ids, 13).backward()

    step()  # communicators are made
    torch.npu.synchronize()
    # In virtual time a sum takes longer than its dispatch.
    busy = torch.ones(1 << 23).npu()
    torch.npu.synchronize()
    for _ in range(200):
        busy = busy + busy
    queued = torch.npu.current_stream().record_event()
    step()
    assert not queued.query()
    torch.npu.synchronize()


def test_the_host_waits_for_nothing():
    run_on_ranks(2, no_wait_body, backend="hccl")


def outside_body(word: int) -> None:
    embedding = VocabParallelEmbedding.adopt(nn.Embedding(13, 4), tensor_world()).npu()
    embedding(torch.tensor([1, 12]).npu())
    torch.npu.synchronize()
    embedding(torch.tensor([1, word]).npu())
    torch.npu.synchronize()


@pytest.mark.parametrize("word", [-1, 13])
def test_a_word_outside_of_the_vocabulary_stops_the_device_as_torchs_embedding_does(word):
    with pytest.raises(mp.ProcessRaisedException, match=r"error code(:| is) 5070(15|18)"):
        run_on_ranks(2, outside_body, word, backend="hccl")
