"""Embedding, loss and logits of a vocabulary that is sharded over tensor ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from torch import nn
from torch.nn import functional
from vocabulary import (
    H,
    argmax_body,
    bytes_body,
    cross_entropy_body,
    embedding_body,
    gather_body,
    logits_and_targets,
    my_part,
    near,
    tensor_world,
)
from wire import Memory

from ds_npu.parallel.runtime.placement import mark_sharded, sharding_of
from ds_npu.parallel.tensor import cross_entropy
from ds_npu.parallel.tensor.cross_entropy import VocabParallelLoss, vocab_parallel_cross_entropy
from ds_npu.parallel.tensor.embedding import VocabParallelEmbedding
from ds_npu.parallel.tensor.sharding import shard_sections

pytestmark = pytest.mark.slow

WORLDS = (1, 2, 4)


def all_embeddings() -> None:
    for words in (13, 16, dist.get_world_size()):
        for padding_idx in (None, 0, words - 1, -2 % words):
            embedding_body(words, torch.float64, padding_idx, "cpu")
        embedding_body(words, torch.bfloat16, 0, "cpu")


@pytest.mark.parametrize("world", WORLDS)
def test_embedding(world):
    run_on_ranks(world, all_embeddings)


def all_cross_entropies() -> None:
    for words in (13, 16, dist.get_world_size()):
        for tokens in (0, 1, 29):
            for ignored in (-100, 3 % words):
                cross_entropy_body(words, tokens, torch.float64, ignored, "cpu")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        cross_entropy_body(1031, 400, dtype, -100, "cpu")


@pytest.mark.parametrize("world", WORLDS)
def test_cross_entropy(world):
    run_on_ranks(world, all_cross_entropies)


def extremes_body() -> None:
    """Words that cannot be, whole ranks of them, logits out of float32's range for exp, and a nan."""
    topology = tensor_world()
    logits_TV, targets_T = logits_and_targets(13, 20, ignored=7)
    logits_TV[:, :7] = -torch.inf
    logits_TV[1:] *= 1e3
    targets_T[targets_T < 7] = 12
    logits_TV[4, 11] = torch.nan
    leaf_TV = logits_TV.clone().requires_grad_()
    expected_T = functional.cross_entropy(leaf_TV, targets_T, reduction="none")
    expected_T.sum().backward()
    mine_TV, start = my_part(logits_TV, 13, topology)
    loss_T = vocab_parallel_cross_entropy(mine_TV.requires_grad_(), targets_T, start, topology.group("tp"))
    loss_T.sum().backward()
    assert expected_T.isnan().sum() == 1
    near(loss_T.detach(), expected_T.detach())
    near(mine_TV.grad, my_part(leaf_TV.grad, 13, topology)[0])


def test_cross_entropy_of_logits_without_bounds():
    run_on_ranks(2, extremes_body)


def all_gathers() -> None:
    for words in (13, 16):
        gather_body(words, torch.float64, "cpu")
        gather_body(words, torch.bfloat16, "cpu")


@pytest.mark.parametrize("world", WORLDS)
def test_gathered_logits(world):
    run_on_ranks(world, all_gathers)


def all_argmaxes() -> None:
    for words in (13, 16):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            argmax_body(words, dtype, "cpu")


@pytest.mark.parametrize("world", WORLDS)
def test_argmax_of_sharded_logits(world):
    run_on_ranks(world, all_argmaxes)


def test_what_is_sent():
    run_on_ranks(2, bytes_body, 13, 40, "cpu")
    run_on_ranks(4, bytes_body, 16, 7, "cpu")


def memory_body(dtype: torch.dtype) -> None:
    tokens, words, block = 2000, 1500, 1 << 18
    cross_entropy.BLOCK_BYTES["cpu"] = block
    topology = tensor_world()
    mine_TV = torch.randn(tokens, words // 2).to(dtype).requires_grad_()
    targets_T = torch.randint(0, words, (tokens,))
    start = topology.rank("tp") * words // 2
    with Memory() as memory:
        loss_T = vocab_parallel_cross_entropy(mine_TV, targets_T, start, topology.group("tp"))
        assert memory.peak <= block + 64 * tokens
        assert memory.alive == 22 * tokens + loss_T.nbytes
        loss_T.sum().backward()
        assert memory.peak <= mine_TV.nbytes + block + 64 * tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_of_the_loss(dtype):
    run_on_ranks(2, memory_body, dtype)


# ---- the loss as Hugging Face's models call it ----


def plain_loss(logits: torch.Tensor, labels: torch.Tensor, ignored: int, items: Any, shift: bool) -> torch.Tensor:
    if shift:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    reduction = "mean" if items is None else "sum"
    loss = functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=ignored, reduction=reduction
    )
    return loss if items is None else loss / items


def hugging_face_body() -> None:
    from transformers.loss.loss_utils import ForCausalLMLoss

    topology, words = tensor_world(), 13
    loss_function = VocabParallelLoss(topology, shard_sections(0, [words], topology.size("tp")))
    logits = torch.randn(2, 9, words, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    labels = torch.randint(0, words, (2, 9), generator=torch.Generator().manual_seed(2))
    labels[:, :3] = -100
    for ignored in (-100, 4):
        for items in (None, 7, torch.tensor(11)):
            for given in ({"labels": labels}, {"labels": None, "shift_labels": labels}):
                for nothing in (False, True):
                    one = {name: None if value is None else value.clone() for name, value in given.items()}
                    for value in one.values():
                        if value is not None and (nothing or ignored == 4):
                            value[(value == -100) | nothing] = ignored
                    options = {**one, "vocab_size": words, "num_items_in_batch": items, "ignore_index": ignored}
                    targets = one.get("shift_labels", one["labels"])
                    leaf = logits.clone().requires_grad_()
                    expected = plain_loss(leaf, targets, ignored, items, "shift_labels" not in one)
                    theirs = ForCausalLMLoss(logits=logits, **options)
                    assert torch.allclose(theirs.double(), expected, rtol=1e-6, atol=0, equal_nan=True)
                    mine = my_part(logits, words, topology)[0].requires_grad_()
                    found = loss_function(logits=mine, **options, output_router_logits=None)
                    near(found.detach(), expected.detach())
                    assert bool(found.isnan()) == (nothing and items is None)
                    if not nothing:
                        (2 * expected).backward()
                        (2 * found).backward()
                        near(mine.grad, my_part(leaf.grad, words, topology)[0])


@pytest.mark.parametrize("world", [1, 4])
def test_the_loss_means_what_hugging_faces_means(world):
    run_on_ranks(world, hugging_face_body)


def refusals_body() -> None:
    topology = tensor_world()
    loss_function = VocabParallelLoss(topology, shard_sections(0, [13], 2))
    mine, _ = my_part(torch.randn(1, 4, 13), 13, topology)
    labels = torch.tensor([[0, 1, 12, 13]])
    with pytest.raises(IndexError, match="label 13 is no word of a vocabulary of 13"):
        loss_function(mine, labels, 13)
    with pytest.raises(ValueError, match=r"of 14 were given; this rank's head has the [67] from [07] on of 13"):
        loss_function(mine, labels, 14)
    with pytest.raises(ValueError, match="logits of 13 words"):
        loss_function(torch.randn(1, 4, 13), labels, 13)
    with pytest.raises(ValueError, match="neither labels nor shift_labels"):
        loss_function(mine, None, 13)
    embedding = VocabParallelEmbedding(13, H, topology)
    for wrong in (-1, 13):
        with pytest.raises(IndexError, match=rf"{wrong} .*embedding of 13 words"):
            embedding(torch.tensor([3, wrong, 3]))
    with pytest.raises(ValueError, match=r"1 .*cannot be sharded over 2 tensor ranks"):
        VocabParallelEmbedding(1, H, topology)
    for option in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}):
        with pytest.raises(ValueError, match=rf"13 words with {next(iter(option))} cannot be sharded over 2"):
            VocabParallelEmbedding.adopt(nn.Embedding(13, H, **option), topology)
    otherwise = nn.Embedding(13, H)
    mark_sharded(otherwise.weight, shard_sections(1, [H], 2))
    with pytest.raises(ValueError, match="is to be sharded as"):
        VocabParallelEmbedding.adopt(otherwise, topology)
    assert type(otherwise) is nn.Embedding


def test_what_is_refused():
    run_on_ranks(2, refusals_body)


# ---- embeddings that a model has already ----


def adoption_body() -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    topology = tensor_world()
    ids = torch.randint(0, 13, (4, 9), generator=torch.Generator().manual_seed(1))
    for plain in (nn.Embedding(13, H, 5), Gemma3TextScaledWordEmbedding(13, H, 5, embed_scale=2.5)):
        plain.double()
        model = nn.ModuleDict({"embedding": copy.deepcopy(plain)})
        adopted, weight = model["embedding"], model["embedding"].weight
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        assert VocabParallelEmbedding.adopt(adopted, topology) is adopted
        assert VocabParallelEmbedding.adopt(adopted, topology) is adopted
        assert model["embedding"].weight is weight
        assert isinstance(adopted, type(plain))
        assert list(model.state_dict()) == ["embedding.weight"]
        sharding = sharding_of(weight)
        assert weight.untyped_storage().nbytes() == sharding.length(topology.rank("tp")) * H * 8
        for _ in range(2):
            expected = plain(ids)
            near(adopted(ids).detach(), expected.detach())
            expected.square().sum().backward()
            adopted(ids).square().sum().backward()
            near(weight.grad, sharding.take(plain.weight.grad, topology.rank("tp")))
            optimizer.step()
            torch.optim.SGD(plain.parameters(), lr=0.5).step()
            plain.zero_grad()
            optimizer.zero_grad()


@pytest.mark.parametrize("world", [1, 4])
def test_an_embedding_is_adopted_in_place(world):
    run_on_ranks(world, adoption_body)


def gathered_late_body() -> None:
    """As under ZeRO-3: the weight has its rows in forward only, given by hooks."""
    topology = tensor_world()
    plain = nn.Embedding(13, H, dtype=torch.float64)
    adopted = VocabParallelEmbedding.adopt(copy.deepcopy(plain), topology)
    kept = adopted.weight.data

    def gather(module: nn.Module, _: Any) -> None:
        module.weight.data = kept

    def release(module: nn.Module, *_: Any) -> None:
        module.weight.data = kept.new_empty(0)

    adopted.register_forward_pre_hook(gather)
    adopted.register_forward_hook(release)
    release(adopted)
    ids = torch.arange(13).repeat(2)
    found = adopted(ids)
    near(found.detach(), plain(ids).detach())
    gather(adopted, None)
    found.sum().backward()
    assert adopted.weight.grad.shape == kept.shape
    assert "rows" in repr(adopted)


def test_the_weight_may_come_and_go():
    run_on_ranks(2, gathered_late_body)


def llama_body(tied: bool) -> None:
    """A whole model: one process's loss and gradients, with only the vocabulary split."""
    from transformers import LlamaConfig, LlamaForCausalLM

    topology = tensor_world()
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=13,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=tied,
    )
    plain = LlamaForCausalLM(config).double()
    model = copy.deepcopy(plain)
    sharding = shard_sections(0, [13], topology.size("tp"))
    rank = topology.rank("tp")
    head, embedding = model.lm_head, model.get_input_embeddings()
    assert (head.weight is embedding.weight) == tied
    head.weight.data = sharding.take(head.weight.data, rank)
    mark_sharded(head.weight, sharding)
    VocabParallelEmbedding.adopt(embedding, topology)
    assert (head.weight is embedding.weight) == tied

    def summed(gradient: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(gradient, group=topology.group("tp"))
        return gradient

    head.register_forward_pre_hook(lambda _, args: args[0].register_hook(summed) and None)
    model.loss_function = VocabParallelLoss(topology, sharding)
    ids = torch.randint(0, 13, (2, 9), generator=torch.Generator().manual_seed(2))
    labels = ids.masked_fill(torch.arange(9) < 2, -100)
    out = model(input_ids=ids, labels=labels, num_items_in_batch=14)
    out.loss.backward()
    logits = plain(input_ids=ids).logits
    expected = plain_loss(logits, labels, -100, 14, shift=True)
    expected.backward()
    near(out.loss.detach(), expected.detach())
    assert out.logits.shape == (2, 9, sharding.length(rank))
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        part = sharding_of(mine)
        assert (part is not None) == (name in ("model.embed_tokens.weight", "lm_head.weight"))
        near(mine.grad, theirs.grad if part is None else part.take(theirs.grad, rank))


@pytest.mark.parametrize(("world", "tied"), [(1, True), (2, False), (4, True)])
def test_a_llama_with_a_split_vocabulary(world, tied):
    run_on_ranks(world, llama_body, tied)
