"""Models that compute logits and loss a chunk of tokens at a time, against themselves without, in one process."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import tiny_models
import torch
import transformers
from adapted_models import ATTENTION, adapted
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.trainer_pt_utils import LabelSmoother
from vocabulary import as_near

from ds_npu.config.sections import DsNpuConfig
from ds_npu.features.build import Build
from ds_npu.features.chunked_loss.chunked_model import smoothed
from ds_npu.features.driver import apply_features, values_in
from ds_npu.models.logits import LogitsAccessError
from ds_npu.parallel.tensor.chunked_loss import ChunkedLoss, TargetWords

ONE_RANK = SimpleNamespace(size=lambda *axes: 1, rank=lambda *axes: 0)
"""A topology without process groups."""
EXACT = 1e-12
TOKENS = 4
"""Of a chunk: it divides no number of tokens of these batches."""


def chunked(model: nn.Module, tokens: int = TOKENS) -> nn.Module:
    apply_features(values_in(DsNpuConfig(chunked_loss=tokens)), Build(ONE_RANK, model))
    return model


def batch(**more: object) -> dict[str, object]:
    ids = tiny_models.tokens(3, 13)
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels, **more}


def step(model: nn.Module, given: dict[str, object]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss, and gradients by name."""
    model.zero_grad()
    with tiny_models.Float64():
        loss = model(**given).loss
        (3 * loss).backward()
    return loss.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def same(found: nn.Module, plain: nn.Module, given: dict[str, object]) -> None:
    (loss, gradients), (expected, theirs) = step(found, given), step(plain, given)
    assert gradients.keys() == theirs.keys()
    torch.testing.assert_close(loss, expected, rtol=EXACT, atol=0)
    for name, gradient in theirs.items():
        error = float((gradients[name] - gradient).norm() / gradient.norm())
        assert error <= EXACT, (name, error)


@pytest.mark.parametrize("family", [*tiny_models.FAMILIES, *tiny_models.SCALED])
def test_every_family_computes_the_same(family):
    found, plain = chunked(tiny_models.tiny(family)), tiny_models.tiny(family)
    shifted = functional.pad(batch()["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    for given in (batch(), batch(num_items_in_batch=torch.tensor(40)), batch(shift_labels=shifted)):
        same(found, plain, given)
    for model in (found, plain):
        model.eval()
    with torch.no_grad(), tiny_models.Float64():
        ours, theirs = found(**batch()), plain(**batch())
    assert torch.equal(ours.logits, theirs.logits) and torch.equal(ours.loss, theirs.loss)


@pytest.mark.parametrize("count", [None, torch.tensor(40)])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_smoothed_labels(family, count):
    """As the Trainer's own smoother computes them of whole logits."""
    given, smoother = batch() | ({} if count is None else {"num_items_in_batch": count}), LabelSmoother(0.15)
    losses, gradients = [], []
    for model in (chunked(tiny_models.tiny(family)), tiny_models.tiny(family)):
        with tiny_models.Float64(), smoothed(model, 0.15) as is_chunked:
            if is_chunked:
                loss = model(**given).loss
            else:
                labels = given.pop("labels")
                loss = smoother(model(**given), labels, shift_labels=True, num_items_in_batch=count)
            (3 * loss).backward()
        losses.append(loss.detach())
        gradients.append({name: each.grad for name, each in model.named_parameters() if each.grad is not None})
    torch.testing.assert_close(*losses, rtol=EXACT, atol=0)
    found, expected = gradients
    assert found.keys() == expected.keys()
    errors = {name: float((found[name] - each).norm() / each.norm()) for name, each in expected.items()}
    assert all(each <= EXACT for each in errors.values()), errors


def test_adapters_beside_a_frozen_head():
    same(chunked(adapted("llama", ATTENTION)), adapted("llama", ATTENTION), batch())


HEADS = {"llama": ["lm_head.weight"], "gemma2": []}


@pytest.mark.parametrize("family", HEADS)
def test_bfloat16_is_as_near_as_transformers(family):
    exact = tiny_models.tiny(family, torch.bfloat16).double()
    found, plain = chunked(tiny_models.tiny(family, torch.bfloat16)), tiny_models.tiny(family, torch.bfloat16)
    for model in (found, plain):
        (3 * model(**batch()).loss).backward()
    expected = step(exact, batch())[1]
    for name in ("model.embed_tokens.weight", "model.norm.weight", "model.layers.0.mlp.up_proj.weight", *HEADS[family]):
        ours, theirs = (each.get_parameter(name).grad for each in (found, plain))
        assert ours.dtype == torch.bfloat16
        as_near(ours, theirs, expected[name])
    loss = found(**batch()).loss
    assert loss.dtype == torch.float32 and abs(loss - plain(**batch()).loss) < 1e-6


class Live(TorchDispatchMode):
    """The most bytes that tensors with a last dim ``words`` had at once, and the number of tensors [words, hidden]."""

    def __init__(self, words: int, hidden: int) -> None:
        super().__init__()
        self.words, self.hidden = words, hidden
        self.alive = self.peak = self.weights = self.waits = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        self.waits += func is torch.ops.aten._local_scalar_dense.default
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        for leaf in tree_leaves(found):
            if torch.is_tensor(leaf) and (storage := leaf.untyped_storage())._cdata not in given | self._known:
                self.weights += leaf.shape == (self.words, self.hidden)
                if leaf.dim() and leaf.shape[-1] == self.words:
                    self._made(storage)
        return found

    def _made(self, storage: torch.UntypedStorage) -> None:
        self._known.add(storage._cdata)
        self.alive += storage.nbytes()
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size


SIZES = {"vocab_size": 2048, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 128}
COPIES = {("llama", torch.float32): 4, ("llama", torch.bfloat16): 4 + 2, ("gemma2", torch.bfloat16): 4 + 4 * 2}
"""Bytes of a logit of a chunk: in float32, rounded, and what softcapping's backward keeps."""


@pytest.mark.parametrize(("family", "dtype"), COPIES, ids=str)
def test_live_bytes_of_logits(family, dtype):
    ids, size = tiny_models.tokens(2, 128), 32
    peaks = {}
    for tokens in (False, size):
        model = tiny_models.tiny(family, dtype, **SIZES)
        model = chunked(model, tokens) if tokens else model
        with Live(SIZES["vocab_size"], SIZES["hidden_size"]) as live:
            model(input_ids=ids, labels=ids).loss.backward()
        peaks[tokens] = live.peak
    logits = ids.numel() * SIZES["vocab_size"] * COPIES[family, dtype]
    chunks = ids.numel() // size
    print(f"{family}, {dtype}: {peaks[False]:,} bytes whole, {peaks[size]:,} in {chunks} chunks")
    assert peaks[size] <= logits / chunks, (peaks, logits / chunks)
    assert peaks[size] <= 1.2 * peaks[False] / chunks


def test_a_frozen_head_gets_no_gradient():
    model = chunked(tiny_models.tiny("llama", torch.float32, **SIZES))
    model.lm_head.requires_grad_(False)
    with Live(SIZES["vocab_size"], SIZES["hidden_size"]) as live:
        model(**batch()).loss.backward()
    # Of the embedding, which is trained.
    assert live.weights == 1


def test_what_reads_logits_gets_an_error_that_names_the_key():
    model = chunked(tiny_models.tiny("gemma2"))
    out = model(**batch())
    assert out.logits.shape == (3, 13, 64) and out.logits.dtype == torch.float64
    for read in (lambda x: x.argmax(-1), lambda x: x[..., :-1, :], lambda x: x + 1, torch.Tensor.tolist, torch.exp):
        with pytest.raises(LogitsAccessError, match=r"logits of Gemma2ForCausalLM do not exist: ds_npu\.chunked_loss"):
            read(out.logits)
    assert "do not exist" in repr(out.logits)
    loss, logits = model(**batch(), return_dict=False)[:2]
    assert torch.equal(loss, out.loss) and logits.shape == (3, 13, 64)


def test_training_without_labels_is_refused():
    model = chunked(tiny_models.tiny("llama"))
    ids = tiny_models.tokens(1, 9)
    with pytest.raises(ValueError, match=r"ds_npu\.chunked_loss: LlamaForCausalLM is trained without labels"):
        model(input_ids=ids)
    with torch.no_grad():
        assert model(input_ids=ids).logits.shape == (1, 9, 64)
    with pytest.raises(IndexError, match="label 64 is no word of a vocabulary of 64"):
        model(input_ids=ids, labels=ids + 1000 - 936 - ids)


class OwnLoss(transformers.LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, **kwargs):
        return super().forward(input_ids=input_ids, **kwargs)


def test_a_model_that_does_not_call_its_loss_is_refused():
    model = chunked(OwnLoss(tiny_models.config_of("llama")).train())
    ids = tiny_models.tokens(1, 9)
    with pytest.raises(ValueError, match="OwnLoss did not call its loss_function in training on labels"):
        model(input_ids=ids, labels=ids)


def with_own_loss() -> nn.Module:
    model = tiny_models.tiny("llama")
    model.loss_function = lambda logits, **_: logits.sum()
    return model


def with_odd_head() -> nn.Module:
    model = tiny_models.tiny("llama")

    class Odd(nn.Linear):
        pass

    model.lm_head.__class__ = Odd
    return model


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (with_own_loss, "the loss of LlamaForCausalLM is not transformers' ForCausalLMLoss"),
        (with_odd_head, "the head of LlamaForCausalLM is a Odd, not an nn.Linear"),
        (lambda: tiny_models.tiny("llama").model, "LlamaModel has no head"),
        (lambda: adapted("llama", (*ATTENTION, "lm_head")), "lm_head.base_layer of .* has an adapter"),
    ],
)
def test_what_cannot_be_chunked_is_refused(make, said):
    with pytest.raises(ValueError, match=rf"ds_npu\.chunked_loss: .*{said}.*leave ds_npu\.chunked_loss out"):
        chunked(make())


def test_a_weight_of_another_head_is_refused():
    with pytest.raises(ValueError, match="a head of 5 words was given; this rank's has the 7 from 0 on of 7"):
        targets = TargetWords(torch.zeros(2, dtype=torch.int64))
        ChunkedLoss(7, None, ONE_RANK)(torch.ones(2, 3), torch.ones(5, 3), None, targets)
