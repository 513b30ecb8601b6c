"""How many tokens of a model's loss are computed at a time: what ``chunked_loss`` says, or a plan for a budget."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from ds_npu.parallel.runtime.marks import Mark
from ds_npu.planner.chunk_choice import ChunkedHead

LOSS_CHUNKS: Mark[LossChunks] = Mark("loss chunks")
"""The loss chunks of a model."""


class LossChunks:
    """The tokens of a chunk of one model's loss."""

    def __init__(self, tokens: int, is_planned: bool) -> None:
        """``is_planned``: a plan is to choose another number."""
        self.tokens, self.is_planned = tokens, is_planned
        self.around: Callable[[ChunkedHead], AbstractContextManager[object]] | None = None
        """Makes a context in which a loss is computed; None: no context."""

    def computing(self, head: ChunkedHead) -> AbstractContextManager[object]:
        """A context in which the loss of ``head`` is computed."""
        return nullcontext() if self.around is None else self.around(head)


def loss_chunks_of(model: object) -> LossChunks | None:
    """The LossChunks of ``model``, if its loss is chunked on this rank."""
    return LOSS_CHUNKS.get(model)
