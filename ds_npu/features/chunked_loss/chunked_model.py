"""A causal language model of transformers that computes logits and loss a chunk of tokens at a time.

It does so in training on labels: the head returns DeferredLogits instead of logits, and the loss function, which is
given them, calls the head again for the loss of its hidden states. So the head's weight is read within a call of the
head, where ZeRO-3 has gathered it, once for all chunks. In all other forwards the head returns its usual logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from ds_npu.features.loss.model_loss import LossChunks, LossFunction, LossLevel, link_of, wrap_loss
from ds_npu.models.attributes import attribute
from ds_npu.models.hugging_face_model import HuggingFaceModel
from ds_npu.models.logits import IGNORED_LABEL, LABEL_ARGUMENTS, AbsentLogits
from ds_npu.models.zero3 import unpartitioned_shape
from ds_npu.ops.precision import accumulation_dtype
from ds_npu.parallel.runtime.calls import Arguments, Keywords, Operation
from ds_npu.parallel.runtime.forward_wraps import Forward, Level, wrap_forward
from ds_npu.parallel.runtime.marks import Mark
from ds_npu.parallel.runtime.micro_batch import Fact, new_forward, running
from ds_npu.parallel.runtime.placement import sharding_of
from ds_npu.parallel.tensor.chunked_head import product_dtype
from ds_npu.parallel.tensor.chunked_loss import ChunkedLoss, TargetWords, Transform
from ds_npu.parallel.tensor.cross_entropy import mean_loss, next_token_targets
from ds_npu.parallel.tensor.product import WeightLayout
from ds_npu.planner.chunk_choice import ChunkedHead
from ds_npu.topology.topology import Topology

T = TypeVar("T")
KEY = "chunked_loss"
ELSEWHERE: Mark[bool] = Mark("loss elsewhere")
"""Marks a model whose last pipeline stage, on another rank, computes the loss of chunks."""

ELEMENTWISE = {"mul", "__mul__", "__rmul__", "div", "true_divide", "__truediv__", "tanh", "float", "to", "contiguous"}
"""Elementwise functions that a model may call between its head and its loss; they run chunk by chunk."""
NUMBERS = (int, float, torch.dtype, torch.device)


@dataclass(frozen=True)
class Operations:
    """Functions that a model applied to its logits, in order, with their other arguments."""

    calls: tuple[tuple[Operation, Arguments, Keywords], ...] = ()

    def __call__(self, product_CV: torch.Tensor) -> torch.Tensor:
        for function, args, kwargs in self.calls:
            product_CV = function(product_CV, *args, **kwargs)
        return product_CV

    def then(self, function: Operation, args: Arguments, kwargs: Keywords) -> Operations:
        return Operations((*self.calls, (function, args, kwargs)))

    def __bool__(self) -> bool:
        return bool(self.calls)


@dataclass(frozen=True)
class Source:
    """The head, hidden states and operations that deferred logits will be computed from."""

    head: nn.Module
    hidden: torch.Tensor
    """[..., H]."""
    operations: Operations = Operations()


class DeferredLogits(AbsentLogits):
    """Logits [..., V] of a head that was not called: its input, and the operations on its output."""

    source: Source

    @classmethod
    def of(cls, source: Source, shape: Sequence[int], dtype: torch.dtype, described: str) -> DeferredLogits:
        made = cls.like(shape, dtype, source.hidden.device, described)
        made.source = source
        return made

    @classmethod
    def __torch_function__(
        cls, func: Operation, types: Sequence[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        own, *others = args if args and isinstance(args[0], cls) else (None,)
        with torch._C.DisableTorchFunctionSubclass():
            given = [*others, *(kwargs or {}).values()]
            if own is not None and func.__name__ in ELEMENTWISE and all(isinstance(each, NUMBERS) for each in given):
                return own._then(func, tuple(others), kwargs or {})
            if own is not None and func is torch.Tensor.detach:
                return DeferredLogits.of(own.source, own.shape, own.dtype, own.described)
        return super().__torch_function__(func, types, args, kwargs)

    def _then(self, function: Operation, args: Arguments, kwargs: Keywords) -> DeferredLogits:
        dtype = function(torch.ones((), dtype=self.dtype, device=self.device), *args, **kwargs).dtype
        source = replace(self.source, operations=self.source.operations.then(function, args, kwargs))
        return DeferredLogits.of(source, self.shape, dtype, self.described)


@dataclass
class _Run:
    """One forward in training."""

    is_labelled: bool
    is_deferred: bool = False
    is_used: bool = False
    """Whether the loss was computed from the deferred logits."""


@dataclass(frozen=True)
class _LossOfHead:
    """A request to a head for the sum of the losses of ``targets``, in place of logits."""

    targets: TargetWords
    transform: Transform | None


class ChunkedModel:
    """Defers the logits of ``model``, and computes its loss in ``chunks``."""

    def __init__(self, model: HuggingFaceModel, topology: Topology, chunks: LossChunks) -> None:
        self.model, self._who, self.topology, self.chunks = model, type(model).__name__, topology, chunks
        self.smoothing = 0.0
        """Label smoothing of the losses that are computed now."""
        self._run: Fact[_Run | None] = Fact()

    def link_loss(self) -> None:
        self.loss = wrap_loss(self.model, self._link, LossLevel.CHUNKS, KEY)

    def wrap_model(self) -> None:
        self.signature = inspect.signature(self.model.forward)
        wrap_forward(self.model, self._forward, Level.MODEL)

    def wrap_head(self, model: nn.Module, name: str) -> None:
        """Wrap the module ``name`` of ``model``, which tensor parallelism may have replaced since it was declared."""
        head = model.get_submodule(name)
        weight = head.get_parameter("weight")
        vocabulary = sharding_of(weight)
        words = unpartitioned_shape(weight)[0] if vocabulary is None else vocabulary.size
        loss = ChunkedLoss(words, vocabulary, self.topology, attribute(head, "layout", WeightLayout))
        wrap_forward(head, partial(self._head, head=head, loss=loss), Level.OVERLAP)

    def _forward(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        given = {**self.signature.bind_partial(*args, **kwargs).arguments, **kwargs}
        is_labelled = any(given.get(name) is not None for name in LABEL_ARGUMENTS)
        run = _Run(is_labelled) if self.model.training else None
        if run is not None and is_labelled:
            self.loss.check_not_replaced(self.model)
        with new_forward() as micro_batch:
            self._run.set(micro_batch, run)
            out = forward(*args, **kwargs)
        return out if run is None or not run.is_deferred else self._finished(out, run)

    def _head(
        self,
        forward: Forward,
        hidden: torch.Tensor,
        *,
        head: nn.Module,
        loss: ChunkedLoss,
        asked: _LossOfHead | None = None,
    ) -> torch.Tensor:
        """Wrap a head's forward: it returns logits, deferred logits, or the loss that is ``asked`` for."""
        if asked is not None:
            weight = head.get_parameter("weight")
            bias = head.bias
            assert bias is None or isinstance(bias, torch.Tensor)
            with self.chunks.around(_head_of(hidden, weight, asked.transform)):
                return loss(hidden, weight, bias, asked.targets, asked.transform, self.chunks.tokens)
        run = self._run.of(running())
        if run is None or not (run.is_labelled or torch.is_grad_enabled()):
            logits: torch.Tensor = forward(hidden)
            return logits
        if not run.is_labelled:
            raise ValueError(
                f"ds_npu.{KEY}: {self._who} is trained without labels, so all of its logits are needed (losses that a "
                f"script computes of logits do so). What to do: give it labels, or leave ds_npu.{KEY} out"
            )
        run.is_deferred = True
        described = (
            f"The logits of {self._who} do not exist: ds_npu.{KEY} computes the loss a chunk of tokens at a time where "
            "a model is trained on labels. What to do: call it without labels under torch.no_grad(), or under "
            f"model.eval(), or leave ds_npu.{KEY} out."
        )
        shape = (*hidden.shape[:-1], loss.words)
        return DeferredLogits.of(Source(head, hidden), shape, product_dtype(hidden), described)

    def _link(self, inner: LossFunction, logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The link in the loss: computes the loss of deferred logits, and leaves other logits to ``inner``."""
        if not isinstance(logits, DeferredLogits):
            return inner(logits, *args, **kwargs)
        run = self._run.of(running())
        assert run is not None, "logits are deferred within a forward only"
        run.is_used = True
        return self._loss(logits, *args, **kwargs)

    def _loss(
        self,
        logits: DeferredLogits,
        labels: torch.Tensor | None,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = IGNORED_LABEL,
        shift_labels: torch.Tensor | None = None,
        **_others: Any,
    ) -> torch.Tensor:
        """As transformers.loss.loss_utils.ForCausalLMLoss, in the accumulation dtype."""
        source = logits.source
        if vocab_size != logits.shape[-1]:
            raise ValueError(f"the loss of {vocab_size} words was asked for; the head has {logits.shape[-1]}")
        targets = next_token_targets(labels, shift_labels, ignore_index).to(source.hidden.device)
        words = TargetWords(targets, ignore_index, self.smoothing)
        asked = _LossOfHead(words, source.operations or None)
        total: torch.Tensor = source.head(source.hidden, asked=asked)
        return mean_loss(total, targets, num_items_in_batch, ignore_index)

    def _finished(self, out: T, run: _Run) -> T:
        """``out`` of a forward that deferred its logits, in which they no longer hold the head's input."""
        if not run.is_used:
            raise ValueError(
                f"{self._who} did not call its loss_function in training on labels, so its loss is its own, and "
                f"ds_npu.{KEY} cannot compute it. What to do: leave ds_npu.{KEY} out"
            )
        if isinstance(out, MutableMapping):
            for name in [name for name, value in out.items() if isinstance(value, DeferredLogits)]:
                out[name] = _absent(out[name])
        elif isinstance(out, tuple):
            return type(out)(_absent(value) for value in out)
        return out


def _head_of(hidden: torch.Tensor, weight: torch.Tensor, transform: Transform | None) -> ChunkedHead:
    dtype, width = product_dtype(hidden), hidden.shape[-1]
    return ChunkedHead(
        tokens=hidden.numel() // width,
        hidden=width,
        words=len(weight),
        itemsize=dtype.itemsize,
        wide=accumulation_dtype(dtype).itemsize,
        copies=1 if transform is None else 2,
        trains_weight=weight.requires_grad,
    )


@contextmanager
def smoothed(model: nn.Module, factor: float) -> Iterator[bool]:
    """Smooth the labels of the losses that ``model``, or a model in it, computes in chunks within this context.

    Yields whether a model in training computes such a loss, here or in the last pipeline stage.
    """
    modules = list(model.modules())
    links = (link_of(module, LossLevel.CHUNKS) for module in modules)
    owners = [link.__self__ for link in links if inspect.ismethod(link)]
    chunked = [each for each in owners if isinstance(each, ChunkedModel) and each.model.training]
    is_elsewhere = any(ELSEWHERE.get(module) and module.training for module in modules)
    for each in chunked:
        each.smoothing = factor
    try:
        yield bool(chunked) or is_elsewhere
    finally:
        for each in chunked:
            each.smoothing = 0.0


def _absent(value: Any) -> Any:
    if not isinstance(value, DeferredLogits):
        return value
    return AbsentLogits.like(value.shape, value.dtype, value.device, value.described)
