"""The head of a language model, a chunk of tokens at a time: its products, and the gradients that chunks add up to.

T tokens, C tokens of a chunk, H hidden, V this rank's words. Both the loss and the log-probabilities of tokens are
computed so: only the logits of one chunk exist at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.nn import functional

from ds_npu.comm.collectives import all_reduce
from ds_npu.ops.precision import accumulation_dtype
from ds_npu.parallel.tensor.product import WeightLayout

TOKENS = 1024
"""Tokens whose logits exist at a time: enough that reading the weight does not bound matrix multiplications.

With bf16, a chunk of a loss multiplies 6 C H V FLOP and moves 12 H V bytes of the weight: 4 to read it twice, 8 to read
and write the float32 sum of its gradient. An Ascend 910B does about 200 FLOP in the time of a byte, so C must be well
above 400.
"""


@dataclass(frozen=True)
class HeadShard:
    """This rank's words of a head, and the dtype of its products."""

    start: int
    words: int
    """The number of words of all ranks."""
    group: dist.ProcessGroup | None
    """The tensor ranks; None: the head is whole."""
    dtype: torch.dtype
    layout: WeightLayout = field(default_factory=WeightLayout)

    def product(self, hidden_CH: torch.Tensor, cast_VH: torch.Tensor, bias_V: torch.Tensor | None) -> torch.Tensor:
        """The head's product [C, V] in ``dtype``, which ``cast_VH`` has already."""
        bias_V = None if bias_V is None else bias_V.to(self.dtype)
        return functional.linear(hidden_CH.to(self.dtype), self.layout.forward(cast_VH).t(), bias_V)


def check_head(weight: torch.Tensor, own: range, words: int) -> None:
    """Raise ValueError unless ``weight`` has as many rows as this rank has words: ``own``, among ``words`` in all."""
    if len(weight) != len(own):
        raise ValueError(
            f"a head of {len(weight)} words was given; this rank's has the {len(own)} from {own.start} on of {words}"
        )


def product_dtype(hidden: torch.Tensor) -> torch.dtype:
    """The dtype in which a head multiplies ``hidden``: autocast's, or its own."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def chunks(tokens: int, size: int) -> Iterator[slice]:
    """Slices of ``size`` tokens, the last one shorter."""
    return (slice(first, min(first + size, tokens)) for first in range(0, tokens, size))


class HeadGradients:
    """The gradients of hidden states [T, H], weight [V, H] and bias [V], chunk by chunk; None where not ``wanted``.

    The gradients of weight and bias are summed in float32, or float64.
    """

    def __init__(
        self,
        hidden_TH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        wanted: Sequence[bool],
        layout: WeightLayout,
    ) -> None:
        self.layout = layout
        wide = accumulation_dtype(hidden_TH.dtype)
        of_hidden, of_weight, of_bias = wanted
        self.hidden = torch.empty_like(hidden_TH) if of_hidden else None
        self.weight = hidden_TH.new_zeros(weight_VH.shape, dtype=wide) if of_weight else None
        self.bias = hidden_TH.new_zeros(bias_V.shape, dtype=wide) if of_bias and bias_V is not None else None

    def add(self, rows: slice, hidden_TH: torch.Tensor, cast_VH: torch.Tensor, rounded_CV: torch.Tensor) -> None:
        """Add the gradients of the chunk ``rows``; ``rounded_CV`` is that of its products, in ``cast_VH``'s dtype."""
        if self.bias is not None:
            self.bias += rounded_CV.sum(0, dtype=self.bias.dtype)
        if self.hidden is not None:
            by = self.layout.input_gradient(cast_VH)
            self.hidden[rows] = torch.matmul(rounded_CV, by).to(self.hidden.dtype)
        if self.weight is not None:
            x_CH = hidden_TH[rows].to(cast_VH.dtype)
            self.layout.weight_gradient(cast_VH, x_CH, rounded_CV).add_to(self.weight)

    def sum_hidden(self, group: dist.ProcessGroup | None) -> None:
        """Sum the gradient of hidden states over the tensor ranks, each of which has the part of its words."""
        if self.hidden is not None and group is not None:
            all_reduce(self.hidden, group).wait()
