"""Batches of every form through models whose sequences are sharded: loss, gradients and logits of one process.

No engine here; in float64, against transformers' own attention.
"""

from __future__ import annotations

import gradient_rule as rule
import pytest
import tiny_models
import torch
import torch.distributed as dist
import transformers
from ranks import run_on_ranks
from sequence_sharded_models import (
    ALGORITHMS,
    LENGTH,
    SequenceSharded,
    algorithm,
    ends,
    packed,
    padded,
    padding,
    sequence_sharded,
    step,
    tokens,
)
from sharded_models import EXACT, agree, close, first_fast
from torch.nn import functional

from ds_npu.features.context_parallel.sharded_sequences import algorithm_choice_of, shard_sequences
from ds_npu.models.globs import plan_for
from ds_npu.parallel.context.load_balance import shard_evenly
from ds_npu.parallel.tensor.shard_access import ShardAccessError, allow_shard_access
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology

pytestmark = pytest.mark.slow


def four_dims(dtype: torch.dtype) -> torch.Tensor:
    seen = (torch.rand(3, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.6).tril()
    seen |= torch.eye(LENGTH, dtype=torch.bool)
    return seen if dtype == torch.bool else torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, -torch.inf)


def ignored() -> dict[str, torch.Tensor]:
    """Most of one sample, and the ends of others, do not count."""
    labels = tokens().clone()
    labels[0, :10], labels[1, -4:], labels[2, 5] = -100, -100, -100
    return {"input_ids": tokens(), "labels": labels}


def own_count() -> dict[str, object]:
    return {"input_ids": tokens(), "labels": tokens(), "num_items_in_batch": torch.tensor(71)}


def right_with_labels() -> dict[str, torch.Tensor]:
    """Padding whose rows count, as scripts have it that forget to mask their labels."""
    return {"input_ids": tokens(), "labels": tokens(), "attention_mask": padding("right")}


CASES = {
    "plain": lambda: {"input_ids": tokens(), "labels": tokens()},
    "ignored": ignored,
    "own count": own_count,
    "all seen": lambda: padded("none"),
    **{f"padding {kind}": lambda kind=kind: padded(kind) for kind in ("left", "right", "both", "holes")},
    "labels in padding": right_with_labels,
    "packed": lambda: {"input_ids": tokens(2), "labels": tokens(2), "position_ids": packed(2)},
    "packed alike": lambda: {"input_ids": tokens(2), "labels": tokens(2), "position_ids": packed(1)},
    "cu_seq_lens": lambda: {"input_ids": tokens(1), "labels": tokens(1), "position_ids": packed(1), **ends()},
    "shift_labels": lambda: {"input_ids": tokens(), "labels": tokens(), "shift_labels": tokens().roll(3, 1)},
    "4d bool": lambda: {"input_ids": tokens(), "labels": tokens(), "attention_mask": four_dims(torch.bool)},
    "4d float": lambda: {"input_ids": tokens(), "labels": tokens(), "attention_mask": four_dims(torch.float64)},
    "positions": lambda: {"input_ids": tokens(), "labels": tokens(), "position_ids": torch.arange(LENGTH)[None] + 5},
}


def for_one_process(given: dict[str, object]) -> dict[str, object]:
    """Documents by their positions, which is how transformers' "sdpa" is told of them."""
    return {name: value for name, value in given.items() if not name.startswith(("cu_seq", "max_length"))}


def every_case(family: str, chosen: str, names: tuple[str, ...]) -> None:
    both = sequence_sharded(family, chosen)
    for name in names:
        given = CASES[name]()
        expected = step(both.plain, **for_one_process(given))
        found = step(both.model, **given)
        close(found, expected, name)
        assert agree(found), name
        try:
            both.same_gradients()
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.matrix(corners=1, drawn=2)
@pytest.mark.parametrize(("family", "chosen"), [("mistral", "ring"), *(("llama", name) for name in ALGORITHMS)])
def test_loss_and_gradients_of_every_batch(family, chosen):
    run_on_ranks(4 if chosen in ("hybrid", "double ring") else 2, every_case, family, chosen, tuple(CASES))


def of_a_family(family: str, kinds: tuple[str, ...]) -> None:
    for tensor in (1, 2):
        both = sequence_sharded(family, "ulysses" if tensor == 2 else "ring", tensor, sequence_parallel=tensor == 2)
        for kind in kinds:
            expected, found = step(both.plain, **CASES[kind]()), step(both.model, **CASES[kind]())
            close(found, expected, f"{kind}, tensor {tensor}")
            both.same_gradients()


@pytest.mark.parametrize("family", ["gpt2", "gemma", "phi3", "qwen3_moe", "deepseek_v3", "qwen2_5_vl"])
def test_a_family(family):
    """With padding where a mixture of experts has a loss of its own, of all tokens but padding."""
    run_on_ranks(4, of_a_family, family, ("plain", "padding right"))


def outputs(family: str) -> None:
    both = sequence_sharded(family)
    ids, rank = tokens(2), dist.get_rank()
    given = {"input_ids": ids, "output_hidden_states": True, "position_ids": packed(2)}
    with tiny_models.Float64():
        found, expected = (each(**given) for each in (both.model, both.plain))
        close(found.logits, expected.logits, "logits")
        assert agree(found.logits)
        for one, other in zip(found.hidden_states, expected.hidden_states, strict=True):
            close(one, other, "hidden states")
        found, expected = (each(ids, None, labels=ids, return_dict=False) for each in (both.model, both.plain))
        close(found[0], expected[0], "tuple")
        assert type(found) is tuple
        whole = both.plain(input_ids=ids).logits
        index = shard_evenly(LENGTH, algorithm("ring", 2)).index(rank)
        trained = both.model(input_ids=ids, labels=ids).logits
        with pytest.raises(ShardAccessError, match="logits of all tokens"):
            close(trained, whole[:, index[0]])
        with allow_shard_access():
            close(trained, whole[:, index[0]], "what is trained on labels")
        both.model.eval()
        close(both.model(input_ids=ids, labels=ids).logits, whole, "evaluation")


@first_fast("family", ["llama", "gpt2"])
def test_outputs_are_whole_but_of_training_on_labels(family):
    run_on_ranks(2, outputs, family)


class Headed(torch.nn.Module):
    """A model of one's own around one of transformers: weights before it, and behind it."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.inner = inner
        self.prompt = torch.nn.Linear(32, 32).double()
        self.head = torch.nn.Linear(64, 5).double()

    def forward(self, ids: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        embedded = self.prompt(self.inner.get_input_embeddings()(ids))
        scores = self.head(self.inner(inputs_embeds=embedded, attention_mask=seen).logits).square()
        return scores[ids < 30].mean()


def around_it(kind: str) -> None:
    both = sequence_sharded("llama", wrap=Headed)
    losses = []
    for model in (both.model, both.plain):
        with tiny_models.Float64():
            losses.append(model(tokens(), padding(kind)))
            losses[-1].backward()
    close(*losses)
    both.same_gradients()


@first_fast("kind", ["left", "none"])
def test_weights_outside_and_a_loss_of_the_users_own(kind):
    run_on_ranks(2, around_it, kind)


def generated(family: str) -> None:
    both = sequence_sharded(family)
    texts, ids = [], tokens(2)
    # A batch of another length in between does not matter.
    step(both.model, input_ids=ids, labels=ids)
    for model in (both.model.eval(), both.plain.eval()):
        with tiny_models.Float64():
            texts.append(model.generate(ids[:, :5], max_new_tokens=6, do_sample=False, use_cache=True))
    assert torch.equal(*texts)
    with pytest.raises(ValueError, match="past_key_values"):
        both.model(input_ids=ids[:, :2], past_key_values=both.plain(ids, use_cache=True).past_key_values)


@first_fast("family", ["llama", "mistral"])
def test_generation_is_that_of_one_process(family):
    run_on_ranks(2, generated, family)


ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10000.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "short_factor": [1.0, 1.0, 1.0, 1.5],
        "factor": 2.0,
        "original_max_position_embeddings": 11,
    },
}


def rotary(kind: str) -> None:
    both = sequence_sharded("llama", "ulysses", max_position_embeddings=11, rope_parameters=ROPES[kind])
    angles = []
    for model in (both.model, both.plain):
        model.model.rotary_emb.register_forward_hook(lambda _, given, out: angles.append(out[0].shape[-2]))
    # Longer than what it was trained for, within it, and longer again: the angles go with the longest sequence.
    for length in (13, 9, 12):
        ids = tokens(2, length)
        expected, found = (step(each, input_ids=ids, labels=ids) for each in (both.plain, both.model))
        close(found, expected, str(length))
        both.same_gradients()
    assert angles == [13, 7 - dist.get_rank(), 9, 5 - dist.get_rank(), 12, 6]


@pytest.mark.parametrize("kind", ROPES)
def test_rotary_angles_that_depend_on_the_length(kind):
    run_on_ranks(2, rotary, kind)


def own_positions() -> None:
    """OPT counts positions in its mask, of which a rank sees a part: it must be told them."""
    options = {
        "num_key_value_heads": 4,
        "word_embed_proj_dim": 32,
        "ffn_dim": 48,
        "do_layer_norm_before": True,
        "dropout": 0.0,
    }
    config = transformers.OPTConfig(**tiny_models.COMMON | options | {"attn_implementation": "sdpa"})
    torch.manual_seed(2)
    plain = transformers.OPTForCausalLM(config).double().train()
    model = transformers.OPTForCausalLM(config).double().train()
    model.load_state_dict(plain.state_dict())
    topology = Topology(Degrees(cp=2))
    mlps = {"model.decoder.layers.*.fc1": "replicated", "model.decoder.layers.*.fc2": "replicated"}
    shard_sequences(model, plan_for(model, mlps), topology, algorithm("ring", 2))
    both = SequenceSharded(model, plain, topology)
    with pytest.raises(ValueError, match="OPTForCausalLM numbers positions in a way of its own"):
        step(model, **padded("left"))
    given = padded("left")
    positions = {"position_ids": given["attention_mask"].cumsum(1) - 1}
    close(step(model, **given, **positions), step(plain, **given))
    # All of them together: the biases of keys have none but for rounding.
    expected = {name: weight.grad for name, weight in plain.named_parameters()}
    assert rule.relative(both.gradients(), expected) <= EXACT


def test_positions_that_a_model_makes_itself():
    run_on_ranks(2, own_positions)


def checkpointed(family: str, chosen: str, reentrant: bool) -> None:
    both = sequence_sharded(family, chosen)
    batches = [CASES[name]() for name in ("padding left", "plain", "padding holes")]
    for model in (both.model, both.plain):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    # Layers are computed again after the forward of another batch.
    total = []
    for model in (both.plain, both.model):
        losses = [model(**given).loss for given in batches]
        total.append(sum(losses))
        total[-1].backward()
    # Not in float64: what is computed again in backward is out of the mode's reach.
    torch.testing.assert_close(total[1], total[0], rtol=1e-6, atol=0)
    found = both.gradients()
    for name, weight in both.plain.named_parameters():
        torch.testing.assert_close(found[name], weight.grad, rtol=1e-5, atol=1e-7, msg=lambda s, n=name: f"{n}: {s}")


@pytest.mark.parametrize(
    ("family", "chosen", "reentrant"),
    [
        ("llama", "ring", True),
        ("mistral", "ring", False),
        ("mixtral", "ring", False),
        ("llama", "ulysses", True),
        ("qwen3", "ulysses", False),
    ],
)
def test_checkpointed_layers_have_their_batch_again(family, chosen, reentrant):
    run_on_ranks(2, checkpointed, family, chosen, reentrant)


def own_loss() -> None:
    """Where logits are whole, so is the gradient that comes to them."""
    both = sequence_sharded("gpt2", "ulysses")
    losses, types = [], tokens() % 7
    for model in (both.model, both.plain):
        with tiny_models.Float64():
            logits = model(input_ids=tokens(), token_type_ids=types).logits
        losses.append(functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten()))
        losses[-1].backward()
    close(*losses)
    both.same_gradients()


def test_a_loss_of_the_users_own_from_whole_logits():
    run_on_ranks(2, own_loss)


def lengths_of_all_ranks() -> None:
    """The choice is made once, for the longest sequence of all ranks, at the first batch."""
    asked = []

    def choose(samples: int, length: int) -> object:
        asked.append((samples, length))
        return algorithm("ring", 2)

    both = sequence_sharded("llama", choose)
    choice = algorithm_choice_of(both.model)
    with pytest.raises(RuntimeError, match="no algorithm has been chosen"):
        step(both.model, input_ids=tokens(2, 9), labels=tokens(2, 9))
    choice.choose(2, 9 - dist.get_rank())
    for length in (9, 14):
        ids = tokens(2, length)
        close(step(both.model, input_ids=ids, labels=ids), step(both.plain, input_ids=ids, labels=ids))
    assert asked == [(2, 9)]


def test_the_algorithm_is_chosen_for_the_first_batch():
    run_on_ranks(2, lengths_of_all_ranks)


def in_chunks(chosen: str) -> None:
    sizes = {"attention_chunk_size": 5, "layer_types": ["chunked_attention", "full_attention"]}
    # A row of padding sees nothing: "eager" would give it a mean.
    model, plain = (tiny_models.tiny("llama4_text", attn_implementation="sdpa", **sizes) for _ in range(2))
    topology = Topology(Degrees(cp=2))
    shard_sequences(model, plan_for(model, {}), topology, algorithm(chosen, 2))
    both = SequenceSharded(model, plain, topology)
    for name in ("plain", "padding holes", "4d bool"):
        given = CASES[name]()
        close(step(both.model, **given), step(both.plain, **given), name)
        both.same_gradients()
    for name in ("packed", "padding left"):
        with pytest.raises(ValueError, match="in chunked attention"):
            step(both.model, **CASES[name]())


@pytest.mark.parametrize("chosen", ["ring", "ulysses"])
def test_chunked_attention(chosen):
    run_on_ranks(2, in_chunks, chosen)
