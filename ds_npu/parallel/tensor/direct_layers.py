"""Linear layers and embeddings of one tensor rank that give the gradient of their weight to its sink."""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ds_npu.ops.autograd import Context, applied
from ds_npu.parallel.runtime.forward_wraps import has_class_forward, has_own_forward, replace_innermost_forward
from ds_npu.parallel.runtime.marks import Mark
from ds_npu.parallel.runtime.tensor_attribute import TensorAttribute
from ds_npu.parallel.tensor.linear import ColumnLinear, RowLinear, linear
from ds_npu.parallel.tensor.product import LookupProduct, Product, WeightLayout
from ds_npu.parallel.tensor.weight_gradient import GradientSink, gradient_sink, taken


class DirectLinear:
    """First base of the class of a plain linear layer: it multiplies by ``ds_npu.parallel.tensor.linear.linear``."""

    layout = WeightLayout()
    weight: nn.Parameter
    bias: nn.Parameter | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] to [..., N]."""
        return linear(x, self.weight, self.bias, self.layout)

    def __reduce__(self) -> tuple[object, ...]:
        return _as_plain(self, type(self).__bases__[1])


class _LookupContext(Context):
    padding_idx: int | None
    sink: GradientSink | None
    rows: int


class _Lookup(torch.autograd.Function):
    """Rows of an embedding [V, H] by word numbers [...]: [..., H]."""

    @staticmethod
    def forward(
        ctx: _LookupContext, words: torch.Tensor, weight: torch.Tensor, padding_idx: int | None
    ) -> torch.Tensor:
        ctx.padding_idx, ctx.sink, ctx.rows = padding_idx, gradient_sink(weight), weight.shape[0]
        ctx.save_for_backward(words)
        return functional.embedding(words, weight, padding_idx)

    @staticmethod
    def backward(ctx: _LookupContext, *dys: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (words,) = ctx.saved_tensors
        padding_idx = -1 if ctx.padding_idx is None else ctx.padding_idx
        return None, taken(ctx.sink, LookupProduct(dys[0], words, ctx.rows, padding_idx)), None


_lookup = applied(_Lookup, _Lookup.forward)


class DirectEmbedding(nn.Embedding):
    """A base before nn.Embedding in the class of an embedding; a subclass may change the result (Gemma scales it)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Word numbers [...] to [..., H]."""
        weight = self.weight
        if torch.compiler.is_compiling() or gradient_sink(weight) is None or not weight.requires_grad:
            return super().forward(input)
        return _lookup(input, weight, self.padding_idx)

    def __reduce__(self) -> tuple[object, ...]:
        return _as_plain(self, type(self).__bases__[0])


def _as_plain(module: object, kind: type) -> tuple[object, ...]:
    """The result of ``__reduce__`` that makes copies and pickles of ``module`` layers of the plain class ``kind``."""
    return copyreg._reconstructor, (kind, object, None), dict(vars(module))  # type: ignore[attr-defined]


def is_plain(module: nn.Module) -> bool:
    """Whether ``module`` is exactly an nn.Linear or a Conv1D of transformers, with the forward of its class."""
    kind = type(module)
    known = kind is nn.Linear or (kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils")
    return known and has_class_forward(module)


def is_lookup(module: nn.Module) -> bool:
    """Whether ``module`` is an embedding whose lookups each have a dense gradient of their own."""
    if not isinstance(module, nn.Embedding) or isinstance(module, DirectEmbedding) or not has_class_forward(module):
        return False
    return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse


def use_direct_gradient(module: nn.Module) -> None:
    """Make ``module``, for which ``is_plain`` or ``is_lookup``, use its weight's sink, in place."""
    # Not a forward of the instance: a copy of the module would multiply with the weight of the original.
    kind: Any = type(module)
    object.__setattr__(module, "__class__", _direct(kind))
    if has_own_forward(module):
        # Its wraps refer to the forward of its former class.
        replace_innermost_forward(module, functools.partial(_class_forward, module))


def _class_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the forward of the class that ``module`` has now: a copy of a DirectLinear is plain."""
    return type(module).forward(module, *args, **kwargs)


USES_SINK = TensorAttribute[bool]("ds_npu_uses_sink")
"""Marks weights outside of linear layers whose computation uses their sink (weights of experts)."""
PRODUCT: Mark[Product | None] = Mark("product")
"""The kind of product of a module of experts."""
LINEARS = (DirectLinear, ColumnLinear, RowLinear)


def direct_weights(model: nn.Module, kinds: tuple[type, ...] = LINEARS) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, weight) of layers of ``kinds`` and of experts that use a gradient sink; a tied weight once."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        for leaf, weight in module.named_parameters(recurse=False):
            direct = (leaf == "weight" and isinstance(module, kinds)) or USES_SINK.is_on(weight)
            if direct and id(weight) not in seen:
                seen.add(id(weight))
                yield f"{name}.{leaf}".lstrip("."), weight


def use_product(model: nn.Module, product: Product | None) -> None:
    """Make the linear layers and experts in ``model`` multiply by ``product``; None: by torch's kernels, as before.

    Experts in a list always multiply by torch's.
    """
    for module in list(model.modules()):
        if is_plain(module):
            use_direct_gradient(module)
        if isinstance(module, LINEARS):
            module.layout = replace(module.layout, product=product)
        elif any(map(USES_SINK.is_on, module.parameters(recurse=False))):
            PRODUCT.set(module, product)


@functools.cache
def _direct(kind: Any) -> type[nn.Module]:
    name = f"Direct{kind.__name__}"
    if issubclass(kind, nn.Embedding):
        return DirectEmbedding if kind is nn.Embedding else type(name, (kind, DirectEmbedding), {})
    return type(name, (DirectLinear, kind), {"layout": WeightLayout(transposed=kind is not nn.Linear)})
