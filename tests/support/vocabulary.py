"""A vocabulary sharded over tensor ranks, against plain PyTorch in one process, which has the whole of it, in float64.

Each function runs on every rank of a world that is one tensor-parallel group. T tokens, V vocabulary, H hidden.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from wire import Wire

from ds_npu.parallel.runtime.placement import sharding_of
from ds_npu.parallel.tensor import cross_entropy
from ds_npu.parallel.tensor.cross_entropy import gather_vocabulary, vocab_parallel_cross_entropy, vocabulary_argmax
from ds_npu.parallel.tensor.embedding import VocabParallelEmbedding
from ds_npu.parallel.tensor.sharding import Sharding, shard_sections
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology

H = 6
EXACT = 1e-12
IGNORED = -100


def tensor_world() -> Topology:
    return Topology(Degrees(tp=dist.get_world_size()))


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal to float64's 1e-12."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    torch.testing.assert_close(found.cpu(), expected, rtol=EXACT, atol=EXACT, equal_nan=True)


def as_near(found: torch.Tensor, torchs: torch.Tensor, exact: torch.Tensor) -> None:
    """At most twice as far from what is exact as torch's own computation in that dtype, over all elements."""
    ours, theirs = ((each.cpu().double() - exact).norm().item() for each in (found, torchs))
    assert ours <= 2 * theirs, (ours, theirs)


def logits_and_targets(words: int, tokens: int, ignored: int = IGNORED) -> tuple[torch.Tensor, torch.Tensor]:
    """Every word is somebody's target where there are as many tokens; some tokens have none."""
    generator = torch.Generator().manual_seed(5)
    logits_TV = 4 * torch.randn(tokens, words, dtype=torch.float64, generator=generator)
    targets_T = torch.randperm(max(tokens, words), generator=generator)[:tokens] % words
    targets_T[::5] = ignored
    return logits_TV, targets_T


def my_part(whole: torch.Tensor, words: int, topology: Topology) -> tuple[torch.Tensor, int]:
    """This rank's columns of logits, and the first of them."""
    columns = Sharding(-1, words, shard_sections(0, [words], topology.size("tp")).ranges)
    rank = topology.rank("tp")
    return columns.take(whole, rank), columns.ranges[rank][0][0]


def embedding_body(words: int, dtype: torch.dtype, padding_idx: int | None, device: str) -> None:
    topology = tensor_world()
    torch.manual_seed(3)
    plain = nn.Embedding(words, H, padding_idx, dtype=dtype)
    torch.manual_seed(3)
    split_up = VocabParallelEmbedding(words, H, topology, padding_idx, dtype=dtype)
    rank = topology.rank("tp")
    sharding = sharding_of(split_up.weight)
    assert torch.equal(split_up.weight, sharding.take(plain.weight.detach(), rank))
    split_up.to(device)
    ids = torch.randint(0, words, (3, 2 * words), generator=torch.Generator().manual_seed(1))
    upstream = torch.randn(3, 2 * words, H, generator=torch.Generator().manual_seed(2)).to(dtype)
    found, expected = split_up(ids.to(device)), plain(ids)
    assert torch.equal(found.cpu(), expected)  # the other ranks' summands are zeros
    found.backward(upstream.to(device))
    plain.double().weight.grad = None
    plain(ids).backward(upstream.double())
    mine = sharding.take(plain.weight.grad, rank)
    if dtype == torch.float64:
        near(split_up.weight.grad, mine)
    else:
        reference = nn.Embedding(words, H, padding_idx, dtype=dtype)
        reference(ids).backward(upstream)
        as_near(split_up.weight.grad, sharding.take(reference.weight.grad, rank), mine)


def cross_entropy_body(words: int, tokens: int, dtype: torch.dtype, ignored: int, device: str) -> None:
    """With blocks of two or three rows, so that there are several of them and the last is shorter."""
    cross_entropy.BLOCK_BYTES[device] = 2 * words * 8
    topology = tensor_world()
    exact_TV, targets_T = logits_and_targets(words, tokens, ignored)
    given_TV = (exact_TV + 30 if dtype == torch.float32 else exact_TV).to(dtype)
    upstream_T = torch.randn(tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(8))

    def torchs(logits_TV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = logits_TV.clone().requires_grad_()
        wide = leaf.to(torch.promote_types(leaf.dtype, torch.float32))
        loss_T = functional.cross_entropy(wide, targets_T, reduction="none", ignore_index=ignored)
        loss_T.backward(upstream_T.to(loss_T.dtype))
        return loss_T.detach(), leaf.grad

    mine_TV, start = my_part(given_TV, words, topology)
    mine_TV = mine_TV.to(device).requires_grad_()
    loss_T = vocab_parallel_cross_entropy(mine_TV, targets_T.to(device), start, topology.group("tp"), ignored)
    loss_T.backward(upstream_T.to(loss_T.dtype).to(device))
    expected_T, gradient_TV = torchs(given_TV.double())
    assert mine_TV.grad.dtype == dtype
    assert loss_T.dtype == torch.promote_types(dtype, torch.float32)
    assert not loss_T.detach().cpu()[targets_T == ignored].any()
    if dtype == torch.float64:
        near(loss_T.detach(), expected_T)
        near(mine_TV.grad, my_part(gradient_TV, words, topology)[0])
    else:
        loss, gradient = torchs(given_TV)
        as_near(loss_T.detach(), loss, expected_T)
        mine = [my_part(each, words, topology)[0] for each in (gradient, gradient_TV)]
        as_near(mine_TV.grad, *mine)


def gather_body(words: int, dtype: torch.dtype, device: str) -> None:
    topology = tensor_world()
    whole = torch.randn(2, 3, words, generator=torch.Generator().manual_seed(4)).to(dtype)
    mine = my_part(whole, words, topology)[0].to(device).requires_grad_()
    with Wire() as wire:
        found = gather_vocabulary(mine, shard_sections(0, [words], topology.size("tp")), topology.group("tp"))
        assert torch.equal(found.cpu(), whole)
        arrived = len(wire.sent)
        found.backward((whole * 2).to(device))
    assert arrived == len(wire.sent) <= 1
    assert torch.equal(mine.grad.cpu(), my_part(whole * 2, words, topology)[0])


def argmax_body(words: int, dtype: torch.dtype, device: str) -> None:
    """The first of the largest, of which there are several."""
    topology = tensor_world()
    whole = torch.randint(-2, 3, (2, 3, words), generator=torch.Generator().manual_seed(4)).to(dtype)
    mine = my_part(whole, words, topology)[0].to(device)
    found = vocabulary_argmax(mine, shard_sections(0, [words], topology.size("tp")), topology.group("tp"))
    number = torch.arange(words).expand_as(whole)
    assert torch.equal(found.cpu(), number.masked_fill(whole < whole.amax(-1, keepdim=True), words).amin(-1))


def bytes_body(words: int, tokens: int, device: str) -> None:
    """Each message is the algorithm's, and no more are sent."""
    topology = tensor_world()
    embedding = VocabParallelEmbedding(words, H, topology).to(device)
    logits_TV, targets_T = logits_and_targets(words, tokens)
    mine_TV = my_part(logits_TV.float(), words, topology)[0].to(device).requires_grad_()
    start = embedding.first_row
    with Wire() as wire:
        rows = embedding(targets_T.clamp(min=0).to(device))
        assert wire.sent == [("allreduce_", tokens * H * 4)]
        rows.sum().backward()
        assert len(wire.sent) == 1
        loss_T = vocab_parallel_cross_entropy(mine_TV, targets_T.to(device), start, topology.group("tp"))
        assert wire.sent[1:] == [("allreduce_", tokens * 4), ("allreduce_", 2 * tokens * 4)]
        loss_T.sum().backward()
        assert len(wire.sent) == 3
