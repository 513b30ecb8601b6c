"""``ds_npu.chunked_loss``: logits and loss of a chunk of tokens at a time, in training on labels."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from torch import nn

from ds_npu.config.roles import Role
from ds_npu.config.sections import ChunkedLossTokens
from ds_npu.features.build import Build, Feature
from ds_npu.features.chunked_loss.chunked_model import ELSEWHERE, KEY, ChunkedModel
from ds_npu.features.declaration import Change, Phase
from ds_npu.features.loss.model_loss import (
    LOSS_CHUNKS,
    LossChunks,
    LossLevel,
    has_causal_lm_loss,
    loss_chunks_of,
    users_loss,
)
from ds_npu.models import names
from ds_npu.models.hugging_face_model import HuggingFaceModel
from ds_npu.parallel.pipeline.pass_through import stages_in
from ds_npu.parallel.runtime.forward_wraps import Level
from ds_npu.parallel.tensor.chunked_head import TOKENS
from ds_npu.parallel.tensor.linear import ColumnLinear
from ds_npu.planner.chunk_choice import LEAST_TOKENS

LINEARS = (nn.Linear, ColumnLinear)


def _asked(value: ChunkedLossTokens, build: Build) -> str:
    return f"chunks of {_in_words(value)} tokens" if value else ""


def _chunks(value: ChunkedLossTokens) -> LossChunks:
    if isinstance(value, str):
        # The choice with the least memory, until the plan is made.
        return LossChunks(LEAST_TOKENS, is_planned=True)
    return LossChunks(TOKENS if value is True else value, is_planned=False)


def _in_words(value: ChunkedLossTokens) -> str:
    chunks = _chunks(value)
    return "a planned number of" if chunks.is_planned else str(chunks.tokens)


def _parts(value: ChunkedLossTokens, build: Build) -> Iterable[Change]:
    if value and not stages_in(build.model):
        # Checked before the model is cut, so that every rank refuses what only the last stage would find.
        _chunkable(build)
    return ()


def _declare(value: ChunkedLossTokens, build: Build) -> Iterable[Change]:
    stages = stages_in(build.model)
    known = loss_chunks_of(build.model)
    if not value:
        return
    if known is not None and not isinstance(value, str):
        # The plan has chosen.
        yield Change("sets", "", LOSS_CHUNKS.name, partial(setattr, known, "tokens", value))
        return
    if stages and stages[-1].index < stages[-1].count - 1:
        # The last stage of a pipeline has the head, and computes the loss.
        yield Change("sets", "", ELSEWHERE.name, partial(ELSEWHERE.set, build.model, True))
        return
    model, owner, heads = _chunkable(build)
    chunks = _chunks(value)
    chunked = ChunkedModel(model, build.topology, chunks)
    what = f"logits of {_in_words(value)} tokens at a time in training on labels"
    yield Change("sets", "", LOSS_CHUNKS.name, partial(LOSS_CHUNKS.set, build.model, chunks))
    yield Change(
        "links", owner, f"loss of the hidden states before the head, {what}", chunked.link_loss, LossLevel.CHUNKS
    )
    yield Change("wraps", owner, "says whether it is trained on labels", chunked.wrap_model, Level.MODEL)
    for head in heads:
        yield Change("wraps", head, what, partial(chunked.wrap_head, build.model, head), Level.OVERLAP)


def _chunkable(build: Build) -> tuple[HuggingFaceModel, str, list[str]]:
    """The model with a head, its name, its heads' names; raises ValueError where its loss cannot be chunked."""
    heads = build.block_plan.named(Role.HEAD)
    owner = names.owner(heads[0]) if heads else ""
    reason, who = "", type(build.model).__name__
    model = build.model.get_submodule(owner)
    if build.is_pipeline:
        reason = f"{who} is a deepspeed.PipelineModule, whose loss is a function of its own"
    elif not heads:
        reason = f"{who} has no head, a linear layer from hidden states to logits (role {Role.HEAD} of ds_npu.plan)"
    elif adapted := [each for each in heads if names.is_adapted(each)]:
        reason = f"{adapted[0]} of {who} has an adapter, so its logits are a sum of two products"
    elif other := [type(each).__name__ for each in map(build.model.get_submodule, heads) if type(each) not in LINEARS]:
        reason = f"the head of {who} is a {other[0]}, not an nn.Linear"
    elif users_loss(model) is not None or not has_causal_lm_loss(model):
        reason = f"the loss of {type(model).__name__} is not transformers' ForCausalLMLoss, the mean over next tokens"
    if reason or not has_causal_lm_loss(model):
        raise ValueError(f"ds_npu.{KEY}: {reason}. What to do: leave ds_npu.{KEY} out")
    return model, owner, heads


CHUNKED_LOSS: Feature[ChunkedLossTokens] = Feature(KEY, Phase.OPERATORS, declare=_declare, parts=_parts, asked=_asked)
