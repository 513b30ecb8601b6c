"""The chain of a model's loss: its levels decide who calls whom; a replaced loss is seen."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import weakref

import pytest
import tiny_models
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss

from ds_npu.features.fused_ops.fused_model import fuse
from ds_npu.features.fused_ops.fusion_result import FusionResult, result_lines
from ds_npu.features.fused_ops.loss import WHOLE_LOGITS
from ds_npu.features.loss.model_loss import LossLevel, own_loss, users_loss, wrap_loss
from ds_npu.models.globs import plan_for
from ds_npu.parallel.runtime.micro_batch import new_forward

LLAMA = tiny_models.tiny("llama")
LOGITS = torch.randn(2, 5, tiny_models.VOCABULARY, generator=torch.Generator().manual_seed(1))
ARGUMENTS = {"labels": tiny_models.tokens(2, 5), "vocab_size": tiny_models.VOCABULARY}


class Own(nn.Module):
    """A model whose class has a loss function."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def loss_function(self, logits: torch.Tensor) -> torch.Tensor:
        self.called.append("its own")
        return logits.sum()


def noting(called: list[str], what: str):
    def link(inner, *args, **kwargs):
        called.append(what)
        return inner(*args, **kwargs)

    return link


def test_the_order_of_adding_means_nothing():
    @given(st.permutations(list(LossLevel)), st.integers(0, len(LossLevel)))
    def drawn(levels, count):
        model = Own()
        for level in levels[:count]:
            loss = wrap_loss(model, noting(model.called, level.name), level, level.name)
            assert model.loss_function is loss
        assert model.loss_function(torch.ones(3)) == 3
        assert model.called == [*(level.name for level in LossLevel if level in levels[:count]), "its own"]

    drawn()


def test_two_links_of_one_level_are_refused_by_their_keys():
    model = Own()
    for level in LossLevel:
        wrap_loss(model, noting(model.called, "first"), level, "parallel.context")
        said = (
            rf"ds_npu\.parallel\.context and ds_npu\.chunked_loss both set the {level.name.lower()} link of Own's loss"
        )
        with pytest.raises(ValueError, match=said):
            wrap_loss(model, noting(model.called, "second"), level, "chunked_loss")
    model.loss_function(torch.ones(3))
    assert model.called == ["first"] * len(LossLevel) + ["its own"]


def mine(logits, labels, **_):
    return logits.square().mean()


def test_a_loss_that_was_replaced_is_seen():
    model = copy.deepcopy(LLAMA)
    assert users_loss(model) is None
    loss = wrap_loss(model, noting([], ""), LossLevel.SHARE, "parallel.context")
    loss = wrap_loss(model, noting([], ""), LossLevel.VOCABULARY, "parallel.tensor")
    loss.check_not_replaced(model)
    assert own_loss(model) is ForCausalLMLoss and users_loss(model) is None
    said = "LlamaForCausalLM was replaced by {}: it leaves out the loss of ds_npu.parallel.context and ds_npu.parallel."
    # Also where it calls what was there, or where transformers' own is back.
    for other in (mine, lambda *args, **kwargs: 2 * loss(*args, **kwargs)):
        model.loss_function = other
        assert users_loss(model) is other
        with pytest.raises(ValueError, match=re.escape(said.format(other))):
            loss.check_not_replaced(model)
    del model._loss_function
    with pytest.raises(ValueError, match=re.escape(said.format(ForCausalLMLoss))):
        wrap_loss(model, noting([], ""), LossLevel.OPERATOR, "fused_ops.cross_entropy")
    model.loss_function = loss
    loss.check_not_replaced(model)


def test_a_loss_that_was_set_before_stays_inside():
    model = copy.deepcopy(LLAMA)
    model.loss_function = mine
    assert users_loss(model) is mine and own_loss(model) is mine
    wrap_loss(model, noting([], ""), LossLevel.SHARE, "parallel.context")
    assert own_loss(model) is mine
    assert torch.equal(model.loss_function(LOGITS, **ARGUMENTS), mine(LOGITS, None))


def test_what_the_model_adds_to_its_loss_is_told():
    model = Own()
    loss = wrap_loss(model, lambda inner, x: inner(x), LossLevel.SHARE, "parallel.context")
    with new_forward() as micro_batch:
        model.loss_function(torch.ones(3))
        assert loss.run_of(micro_batch).calls == 0, "nobody watches"
        loss.watch(micro_batch)
        returned = model.loss_function(torch.ones(3))
        run = loss.run_of(micro_batch)
        assert (run.calls, run.computed, run.added(returned)) == (1, 3, None)
        assert run.added(returned + 2) == 2
        # In place: what was computed stays as it was.
        returned += 4
        assert (run.computed, run.added(returned)) == (3, 4)
        with new_forward() as inner:
            loss.watch(inner)
            model.loss_function(torch.ones(5))
            assert loss.run_of(inner).computed == 5
        assert (run.calls, loss.run_of(micro_batch).computed) == (1, 3), "each forward has its own"
    assert loss.run_of(micro_batch).calls == 0, "nothing is kept"


@pytest.fixture
def fused():
    model = copy.deepcopy(LLAMA)
    said = fuse(model, plan_for(model, {}), ["cross_entropy"])
    assert said == [f"cross_entropy is in the model, used where {WHOLE_LOGITS}"]
    return model


def test_copies_files_and_pickles_are_the_models_own(fused, tmp_path):
    expected = fused.loss_function(LOGITS, **ARGUMENTS)
    for other in (copy.deepcopy(fused), copy.copy(fused), pickle.loads(pickle.dumps(fused))):
        loss = wrap_loss(other, noting([], ""), LossLevel.VOCABULARY, "parallel.tensor")
        assert other.loss_function is loss and own_loss(other) is ForCausalLMLoss
        assert torch.equal(other.loss_function(LOGITS, **ARGUMENTS), expected)
        if loss is fused.loss_function:
            # A shallow copy shares what the model has.
            del loss._links[LossLevel.VOCABULARY]
    assert fused.loss_function.keys == {LossLevel.OPERATOR: "fused_ops.cross_entropy"}
    fused.save_pretrained(tmp_path)
    assert type(fused).from_pretrained(tmp_path).loss_function is ForCausalLMLoss


def test_the_chain_does_not_keep_its_model():
    model = copy.deepcopy(LLAMA)
    wrap_loss(model, noting([], ""), LossLevel.SHARE, "parallel.context")
    kept = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert kept() is None
    finally:
        gc.enable()


def test_a_loss_of_ones_own_that_is_set_later_is_used_instead_of_the_operator(fused):
    """The operator computes what the model's own loss does: without it nothing is wrong."""
    fused.loss_function = mine
    ids = tiny_models.tokens(2, 5)
    out = fused(input_ids=ids, labels=ids)
    assert torch.equal(out.loss, mine(out.logits, ids))


def test_lines_say_when_an_operator_is_used():
    results = [FusionResult("a.0"), FusionResult("a.1"), FusionResult("b", condition="x"), FusionResult("c", "it is d")]
    assert list(result_lines("it", results)) == [
        "it is in a.{0..1}",
        "it is in b, used where x",
        "it is not in c: it is d",
    ]
