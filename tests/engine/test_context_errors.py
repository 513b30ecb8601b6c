"""What cannot be sharded over context ranks says so: models before training, batches before they are used."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import tiny_models
import torch
import transformers
from ranks import run_on_ranks
from sequence_sharded_models import LENGTH, algorithm, ends, packed, padded, sequence_sharded, tokens
from torch import nn

from ds_npu.config.context_parallel import ContextParallelSection
from ds_npu.features.build import Build
from ds_npu.features.context_parallel.context_ranks import CONTEXT_PARALLEL
from ds_npu.features.context_parallel.sharded_batch import BatchArguments
from ds_npu.features.context_parallel.sharded_sequences import shard_sequences
from ds_npu.features.driver import apply_features
from ds_npu.models.plan import ModelPlan

SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}
LLAMA = SMALL | {"num_key_value_heads": 1, "head_dim": 16}


def refused(model: nn.Module, said: str) -> None:
    # What is looked at first needs no groups of ranks.
    before = dict(vars(model))
    with pytest.raises(ValueError, match=said):
        shard_sequences(model, ModelPlan("It", {}, (), {}), SimpleNamespace(), algorithm("ring", 2))
    assert vars(model) == before


MODELS = {
    "a loss of sequences": (
        lambda: transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**LLAMA)),
        r"LlamaForSequenceClassification has the loss ForSequenceClassificationLoss.* give it no labels",
    ),
    "recurrent layers": (
        lambda: transformers.MambaForCausalLM(transformers.MambaConfig(**SMALL)),
        r"has layers.0.mixer \(MambaMixer\), which is Mamba, whose states ds_npu does not compute",
    ),
    "an encoder and a decoder": (
        lambda: transformers.BartForConditionalGeneration(
            transformers.BartConfig(d_model=16, encoder_layers=1, decoder_layers=1, vocab_size=32)
        ),
        "has an encoder and a decoder",
    ),
    "two models": (
        lambda: nn.ModuleList(transformers.LlamaModel(transformers.LlamaConfig(**LLAMA)) for _ in range(2)),
        "holds 2 models of transformers; ds_npu.parallel.context shards one",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_cannot_be_spread(name):
    make, said = MODELS[name]
    refused(make(), said)


def test_a_loss_of_the_users_own_is_not_known():
    model = tiny_models.tiny("llama")
    model.loss_function = lambda *args, **kwargs: None
    refused(model, "has the loss <function .*lambda.* give it no labels")


def asked(**given: object) -> BatchArguments:
    return BatchArguments(2, 6, given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"attention_mask": torch.ones(2, 5)}, r"attention_mask: found \[2, 5\]; \[2, 6\] is accepted"),
        ({"attention_mask": torch.ones(2, 6, 6)}, "found 3 dims"),
        ({"attention_mask": {"full_attention": None}}, "found dict"),
        ({"attention_mask": torch.ones(2, 1, 3, 6).bool()}, r"found \[2, 1, 3, 6\]; \[2, N, 6, 6\]"),
        ({"attention_mask": torch.full((2, 1, 6, 6), -0.5)}, "bias of the scores"),
        ({"cu_seq_lens_q": torch.tensor([0, 6])}, "together and without an attention_mask"),
        (
            {name: torch.tensor([0, 6]) for name in ("attention_mask", "cu_seq_lens_q", "cu_seq_lens_k")},
            "together and without an attention_mask",
        ),
        ({name: torch.tensor([0, 6]) for name in ("cu_seq_lens_q", "cu_seq_lens_k")}, "with a batch of 2 x 6 tokens"),
    ],
)
def test_what_is_seen_must_be_said_once(given, said):
    with pytest.raises(ValueError, match=said):
        asked(**given).visibility()


BATCHES = {
    r"LlamaForCausalLM is given pixel_values with a tensor \[1, 3\]": {"pixel_values": torch.ones(1, 3)},
    r"LlamaForCausalLM is given cache with a tensor \[2\]": {"cache": [torch.ones(2)]},
    r"labels: found \[3, 12\] beside 3 sequences of 13 tokens": {"labels": tokens()[:, 1:]},
    r"position_ids: found \[2, 13\] beside 3 sequences of 13": {"position_ids": packed(2)},
    "logits_to_keep: found 1; 0 where": {"logits_to_keep": 1},
    "too short for 2 ranks of ds_npu.parallel.context": {"input_ids": tokens(3, 3)},
    "given neither input_ids nor inputs_embeds": {"input_ids": None},
    "asks for output_attentions": {"output_attentions": True},
    "packed documents come in a batch of 1": ends(),
    r"cu_seq_lens_q \[0, 5, 6, 13\]": ends() | {"input_ids": tokens(1, 12)},
}


def wrong_batches() -> None:
    both = sequence_sharded("llama")
    for said, given in BATCHES.items():
        with pytest.raises(ValueError, match=said):
            both.model(**{"input_ids": tokens(), "labels": tokens() if "input_ids" not in given else None} | given)
    with pytest.raises(RuntimeError, match="computed outside of the forward of the model"):
        both.model.model(input_ids=tokens())
    with pytest.raises(RuntimeError, match="sharded over ranks and cannot be copied"):
        both.model.__deepcopy__({})


@pytest.mark.slow
def test_a_batch_that_cannot_be_divided():
    run_on_ranks(2, wrong_batches)


def wrong_models() -> None:
    """What is seen in a forward only."""

    def own_mask(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args, kwargs | {"attention_mask": torch.zeros(3, 1, 7, 7)}

    both = sequence_sharded("llama")
    handle = both.model.model.layers[0].self_attn.register_forward_pre_hook(own_mask, with_kwargs=True)
    with pytest.raises(ValueError, match=r"a mask \[3, 1, 7, 7\] that LlamaAttention made itself"):
        both.model(input_ids=tokens())
    handle.remove()
    attention = both.model.model.layers[1].self_attn
    attention.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(ValueError, match=r"1 attentions, as layers\.1\.self_attn, did not call transformers' function"):
        both.model(input_ids=tokens())
    del attention.forward
    del both.model._loss_function
    with pytest.raises(ValueError, match="loss_function of LlamaForCausalLM was replaced by <function ForCausalLMLoss"):
        both.model(input_ids=tokens(), labels=tokens())


@pytest.mark.slow
def test_a_model_that_does_what_cannot_be_divided():
    run_on_ranks(2, wrong_models)


class Plain(nn.Module):
    """No model of transformers."""


def test_a_model_of_ones_own_is_told_what_to_do(monkeypatch):
    said = []
    monkeypatch.setattr("ds_npu.features.context_parallel.context_ranks.warn_once", said.append)
    topology = SimpleNamespace(size=lambda axis: 4)
    apply_features([(CONTEXT_PARALLEL, ContextParallelSection())], Build(topology, Plain()))
    assert len(said) == 1 and "context is 4, and Plain holds no model of transformers" in said[0]
    assert "context_attention" in said[0] and "share of the loss" in said[0]
    apply_features([(CONTEXT_PARALLEL, ContextParallelSection())], Build(topology, Plain(), is_pipeline=True))
    assert len(said) == 1


def test_padding_that_has_targets_is_seen():
    """Rows behind a sequence that count are told by a mask, those that do not by documents."""
    given = padded("right")
    for labels, documents in ((given["labels"], True), (given["input_ids"], False)):
        found = BatchArguments(3, LENGTH, given, labels).visibility()
        assert (found.documents is not None) == documents == (found.padding is None)
