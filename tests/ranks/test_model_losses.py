"""The loss of models whose weights, sequences and operators are changed together, and losses that are not the usual."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import tiny_models
import torch
import transformers
from ranks import run_on_ranks
from sequence_sharded_models import SequenceSharded, algorithm, padded, sequence_sharded, step
from sharded_models import Pair, close, pair
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ds_npu.features.context_parallel.sharded_sequences import shard_sequences
from ds_npu.features.fused_ops.fused_model import fuse
from ds_npu.features.fused_ops.loss import WHOLE_LOGITS
from ds_npu.features.loss.model_loss import LossLevel
from ds_npu.features.tensor_parallel.sharded_model import shard_model
from ds_npu.models.globs import plan_for
from ds_npu.models.logits import likeliest_words
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology

KEYS = {
    LossLevel.SHARE: "parallel.context",
    LossLevel.VOCABULARY: "parallel.tensor",
    LossLevel.OPERATOR: "fused_ops.cross_entropy",
}


def in_order(order: Sequence[str], family: str, **changes: object) -> SequenceSharded:
    """A model changed by features, in this order, over two tensor and two context ranks."""
    topology = Topology(Degrees(cp=2, tp=2))
    model, plain = (tiny_models.tiny(family, attn_implementation="sdpa", **changes) for _ in range(2))
    plan = plan_for(model, {})
    said = []
    features: dict[str, Callable[[], object]] = {
        "tensor": lambda: shard_model(model, plan, topology, sequence_parallel=True),
        "context": lambda: shard_sequences(model, plan, topology, algorithm("ring", 2)),
        "fused": lambda: said.extend(fuse(model, plan, ["cross_entropy"])),
    }
    for feature in order:
        features[feature]()
    assert said == [f"cross_entropy is in the model, used where {WHOLE_LOGITS}"]
    assert model.loss_function.keys == KEYS
    return SequenceSharded(model, plain, topology)


def every_order() -> None:
    for order in itertools.permutations(("tensor", "context", "fused")):
        both = in_order(order, "llama")
        for given in (padded("right"), padded("none") | {"num_items_in_batch": 30}):
            close(step(both.model, **given), step(both.plain, **given), str(order))
            both.same_gradients()
            with torch.no_grad(), tiny_models.Float64():
                found, expected = (likeliest_words(each(**given).logits) for each in (both.model, both.plain))
            counts = given["labels"] != -100
            assert torch.equal(found[counts], expected[counts]), str(order)
            both.model.eval()
            with torch.no_grad(), tiny_models.Float64():
                close(both.model(**given).loss, both.plain(**given).loss, str(order))
            both.model.train()


def with_routers() -> None:
    """A router's auxiliary loss, which the model adds to the share."""
    both = in_order(("fused", "context", "tensor"), "mixtral", output_router_logits=True)
    given = padded("right")
    close(step(both.model, **given), step(both.plain, **given))
    both.same_gradients()


@pytest.mark.parametrize("body", [every_order, with_routers])
def test_tensor_context_and_fused_compute_what_one_process_does(body):
    run_on_ranks(4, body)


def users(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: object) -> torch.Tensor:
    return functional.cross_entropy(logits.view(-1, vocab_size), labels.view(-1), label_smoothing=0.1)


class OwnLoss(transformers.LlamaForCausalLM):
    """As models that came without transformers' library compute theirs."""

    def forward(self, input_ids=None, labels=None, position_ids=None, **kwargs):
        out = super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)
        if labels is not None:
            out.loss = functional.cross_entropy(out.logits.flatten(0, 1), labels.flatten() % 32)
        return out


def of_another_class(kind: type[nn.Module]) -> nn.Module:
    """The tiny Llama as a ``kind``."""
    model = tiny_models.tiny("llama")
    made = kind(model.config)
    made.load_state_dict(model.state_dict())
    return made.double().train()


def sharded(model: nn.Module, tensor: bool) -> None:
    topology, plan = Topology(Degrees(tp=2) if tensor else Degrees(cp=2)), plan_for(model, {})
    if tensor:
        shard_model(model, plan, topology)
    else:
        shard_sequences(model, plan, topology, algorithm("ulysses", 2))


def unusual_losses() -> None:
    """Those that were set before are computed from whole logits; others are refused."""
    ids = tiny_models.tokens(2, 9)

    def token_by_token(model: nn.Module) -> None:
        model.loss_type = "ForMaskedLM"

    for change in (lambda model: setattr(model, "loss_function", users), token_by_token):
        both = pair_of(partial(tiny_models.tiny, "llama"), change)
        close(step(both.model, input_ids=ids, labels=ids), step(both.plain, input_ids=ids, labels=ids))
        both.same_gradients()
        assert both.model(input_ids=ids, labels=ids).logits.shape[-1] == tiny_models.VOCABULARY

    for tensor, said in ((True, "did not call its loss_function in training"), (False, "its loss_function 0 times")):
        model = of_another_class(OwnLoss)
        sharded(model, tensor)
        with pytest.raises(ValueError, match=said):
            model(input_ids=ids, labels=ids)

    for tensor, feature in ((True, "tensor"), (False, "context")):
        model = tiny_models.tiny("llama")
        sharded(model, tensor)
        expected = model(input_ids=ids, labels=ids).loss
        chain, model.loss_function = model.loss_function, users
        with pytest.raises(
            ValueError, match=rf"LlamaForCausalLM was replaced by .*users.*ds_npu\.parallel\.{feature},"
        ):
            model(input_ids=ids, labels=ids)
        assert model(input_ids=ids).logits.shape == (2, 9, tiny_models.VOCABULARY)
        model.loss_function = chain
        close(model(input_ids=ids, labels=ids).loss, expected)


def pair_of(make: Callable[[], nn.Module], change: Callable[[nn.Module], object] = lambda model: None) -> Pair:
    model, plain = make(), make()
    change(model)
    change(plain)
    sharded(model, tensor=True)
    return Pair(model, plain, Topology(Degrees(tp=2)))


def test_losses_that_are_not_the_usual():
    run_on_ranks(2, unusual_losses)


def heads_in_flight() -> None:
    """Forwards on labels and without, one within the other, with heads that are computed again: each has its own."""
    first, second = tiny_models.tokens(4, 9).split(2)
    for sequence_parallel, reentrant in itertools.product((False, True), repeat=2):
        both = pair("llama", sequence_parallel)
        inner = both.model.lm_head.forward
        both.model.lm_head.forward = lambda x, inner=inner, r=reentrant: checkpoint(inner, x, use_reentrant=r)
        losses = []
        for model in (both.plain, both.model):
            model.zero_grad()
            with tiny_models.Float64():
                labelled = model(input_ids=first, labels=first).loss
                logits = model(input_ids=second).logits
                assert logits.shape[-1] == tiny_models.VOCABULARY
                # Its head is called outside of a forward, too.
                whole = model.lm_head(model.model(input_ids=first).last_hidden_state)
                again = model(input_ids=second, labels=second).loss
            for loss in (labelled, logits.square().mean(), again, whole.square().mean()):
                with tiny_models.Float64():
                    loss.backward()
            losses.append(torch.stack([labelled, again, logits.square().mean(), whole.square().mean()]).detach())
        close(losses[1], losses[0])
        both.same_gradients()


def within(model: nn.Module, seen: list[torch.Tensor], ids: torch.Tensor, *_: object) -> None:
    """A hook that calls ``model``, of which it is part, once."""
    if not seen:
        seen.append(ids)
        with torch.no_grad():
            seen.append(model(input_ids=ids, labels=ids, use_cache=True).loss)
            seen.append(model(input_ids=ids).logits)


def a_forward_within_another() -> None:
    """Without labels, in a forward on labels: its logits are whole, and the loss around it stays a shard's."""
    ids = tiny_models.tokens(2, 9)
    for both in (pair("llama"), sequence_sharded("llama")):
        expected = step(both.plain, input_ids=ids, labels=ids)
        seen: list[torch.Tensor] = []
        both.model.lm_head.register_forward_pre_hook(partial(within, both.model, seen, ids))
        close(step(both.model, input_ids=ids, labels=ids), expected)
        both.same_gradients()
        close(seen[1], expected)
        assert seen[2].shape == (2, 9, tiny_models.VOCABULARY)


@pytest.mark.parametrize("body", [heads_in_flight, a_forward_within_another])
def test_each_forward_knows_its_own_logits(body):
    run_on_ranks(2, body)
