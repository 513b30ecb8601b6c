"""Cross-entropy with the head, a chunk of tokens at a time: the logits of all tokens never exist.

T tokens, C tokens of a chunk, H hidden, V this rank's words. A chunk's logits give its loss and, at once, the gradients
of its hidden states and of the head: 6 T H V FLOP, as many as without chunks. To compute the logits again in backward
would take 8 T H V, a third more for the head: 7 % of a step where the head has a fifth of the weights (Llama 3.2 1B).

Forward keeps the gradients of the sum of the losses for backward: [T, H] in place of the hidden states, and [V, H] in
float32. Backward multiplies them by the gradient of the sum. They are not divided by the number of tokens before, so
that float16 underflows no more than for gradients with a loss scale.

Source: Liger Kernel (Hsu et al. 2024, arXiv:2410.10989, section 3.2); over tensor ranks as Megatron-LM's cross-entropy
(Shoeybi et al. 2019, arXiv:1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from ds_npu.comm.collectives import all_gather
from ds_npu.ops.autograd import Context, applied
from ds_npu.ops.precision import accumulation_dtype
from ds_npu.parallel.runtime.paired_passes import running_pass
from ds_npu.parallel.tensor.chunked_head import TOKENS, HeadGradients, HeadShard, check_head, chunks, product_dtype
from ds_npu.parallel.tensor.cross_entropy import LocalTargets, check_words
from ds_npu.parallel.tensor.product import ScaledSum, WeightLayout
from ds_npu.parallel.tensor.shard_access import local_shard
from ds_npu.parallel.tensor.sharding import Sharding
from ds_npu.parallel.tensor.weight_gradient import GradientSink, gradient_sink, taken
from ds_npu.topology.topology import Topology

Transform = Callable[[torch.Tensor], torch.Tensor]
"""A model's change of the product with its head, [C, V]: softcapping, a scale. Autograd differentiates it."""


@dataclass(frozen=True)
class TargetWords:
    """The target words of a loss, one for each token."""

    words: torch.Tensor
    """The target of each token [...]: int64, among the words of all ranks."""
    ignore_index: int = -100
    """A value in place of a word; such a token has no loss."""
    smoothing: float = 0.0
    """The part of the target that is spread evenly over all words, in [0, 1] (label smoothing)."""


@dataclass(frozen=True)
class _Chunking:
    head: HeadShard
    transform: Transform | None
    tokens: int
    smoothing: float
    with_gradients: bool


def _over_ranks(
    group: dist.ProcessGroup | None, top_C: torch.Tensor, z_C: torch.Tensor, *parts_C: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """(largest logit, sum of exp(logit - largest), sums of ``parts_C``) over all ranks, from this rank's.

    One message: an all-gather of C numbers each.
    """
    if group is None:
        return top_C, z_C, *parts_C
    tops, sums, *parts = all_gather(torch.stack((top_C, z_C, *parts_C)).unsqueeze(0), 0, group).wait().unbind(1)
    top_C = tops.amax(0)
    return top_C, (sums * (tops - top_C).exp()).sum(0), *(part.sum(0) for part in parts)


def _chunk(
    hidden_CH: torch.Tensor,
    cast_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets: LocalTargets,
    chunking: _Chunking,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(losses [C] of a chunk, gradient [C, V] of their sum by the products); ignored tokens get no gradient."""
    head, wide = chunking.head, accumulation_dtype(chunking.head.dtype)
    product_CV = head.product(hidden_CH, cast_VH, bias_V)
    logits_CV: torch.Tensor | None = None
    if chunking.transform is None:
        e_CV = product_CV.to(wide)
        del product_CV
    else:
        with torch.set_grad_enabled(chunking.with_gradients):
            logits_CV = chunking.transform(product_CV.requires_grad_(chunking.with_gradients))
        # A copy: the graph of the transform may have kept its result.
        e_CV = logits_CV.detach().to(wide, copy=True)
    own_top_C = e_CV.amax(1)
    target_C = e_CV.gather(1, targets.index).squeeze(1).masked_fill_(targets.elsewhere, 0)
    # Label smoothing: part of the target is the mean of all words.
    kept = 1 - chunking.smoothing
    spread = chunking.smoothing / head.words
    if chunking.smoothing:
        target_C = kept * target_C + spread * e_CV.sum(1)
    e_CV.sub_(own_top_C[:, None]).exp_()
    top_C, z_C, target_C = _over_ranks(head.group, own_top_C, e_CV.sum(1), target_C)
    losses_C = z_C.log() - (target_C - top_C)
    if not chunking.with_gradients:
        return losses_C, None
    # softmax - target: rounded to the dtype of the products only after the difference.
    factor_C = ((own_top_C - top_C).exp() / z_C).masked_fill_(targets.ignored, 0)
    e_CV.mul_(factor_C[:, None]).scatter_add_(1, targets.index, targets.elsewhere[:, None].to(wide).sub_(1).mul_(kept))
    if chunking.smoothing:
        e_CV.sub_(targets.ignored[:, None].logical_not().to(wide).mul_(spread))
    rounded_CV = e_CV.to(head.dtype if logits_CV is None else logits_CV.dtype)
    del e_CV
    if logits_CV is not None:
        # The paired backward may hold autograd's one NPU thread.
        running_pass().finish_backward()
        (rounded_CV,) = torch.autograd.grad(logits_CV, product_CV, rounded_CV)
    return losses_C, rounded_CV


class _ChunkedContext(Context):
    sink: GradientSink | None
    dtypes: tuple[torch.dtype, torch.dtype]
    """The dtypes of hidden states and weights."""


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _ChunkedContext,
        hidden_TH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets: LocalTargets,
        chunking: _Chunking,
    ) -> torch.Tensor:
        wanted = [needed and chunking.with_gradients for needed in ctx.needs_input_grad[:3]]
        chunking = replace(chunking, with_gradients=any(wanted))
        head = chunking.head
        gradients = HeadGradients(hidden_TH, weight_VH, bias_V, wanted, head.layout)
        losses_T = hidden_TH.new_empty(len(hidden_TH), dtype=accumulation_dtype(head.dtype))
        cast_VH = local_shard(weight_VH).to(head.dtype)
        for rows in chunks(len(hidden_TH), chunking.tokens):
            losses_T[rows], gradient_CV = _chunk(hidden_TH[rows], cast_VH, bias_V, targets.of(rows), chunking)
            if gradient_CV is not None:
                gradients.add(rows, hidden_TH, cast_VH, gradient_CV)
            del gradient_CV
        gradients.sum_hidden(head.group)
        ctx.sink = gradient_sink(weight_VH)
        ctx.dtypes = (hidden_TH.dtype, weight_VH.dtype)
        ctx.save_for_backward(gradients.hidden, gradients.weight, gradients.bias)
        return losses_T.masked_fill_(targets.ignored, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: _ChunkedContext, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (scale,) = gradients
        of_hidden, of_weight, of_bias = ctx.saved_tensors
        hidden_dtype, weight_dtype = ctx.dtypes
        return (
            None if of_hidden is None else (of_hidden.to(scale.dtype) * scale).to(hidden_dtype),
            None if of_weight is None else taken(ctx.sink, ScaledSum(of_weight, scale, weight_dtype)),
            None if of_bias is None else (of_bias * scale).to(weight_dtype),
            None,
            None,
        )


_chunked_loss = applied(_ChunkedLoss, _ChunkedLoss.forward)


class ChunkedLoss:
    """The loss of a causal language model from the hidden states before its head, which may be sharded by its words.

    With ``vocabulary`` the head is sharded over the tensor ranks; with None it is whole.
    """

    def __init__(
        self, words: int, vocabulary: Sharding | None, topology: Topology, layout: WeightLayout | None = None
    ) -> None:
        """``words``: the number of all ranks' words; ``layout``: the head's, None for that of nn.Linear."""
        self.words, self.layout = words, layout or WeightLayout()
        self.group = None if vocabulary is None else topology.group("tp")
        ((self.start, self.stop),) = ((0, words),) if vocabulary is None else vocabulary.ranges[topology.rank("tp")]

    def __call__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: TargetWords,
        transform: Transform | None = None,
        tokens: int = TOKENS,
    ) -> torch.Tensor:
        """The sum of the losses of the tokens of ``hidden`` [..., H] that have a target: a scalar.

        ``weight`` [V, H] and ``bias`` [V] are this rank's; a chunk has ``tokens`` tokens. Hidden states, targets, loss
        and the gradient of hidden states are the same on every tensor rank. The products are in
        autocast's dtype, or that of ``hidden``; the loss is in float32, or float64.

        Messages: for each chunk an all-gather of 3 numbers a token, and an all-reduce of the gradient of ``hidden``,
        all in forward; none where there is one tensor rank. Memory: C x V numbers once in float32 and once in the dtype
        of the products, and the tensors that ``transform`` saves; until backward the gradients of ``hidden`` and, in
        float32, ``weight``, each where it is trained.
        Raises ValueError for a weight of another shard, and IndexError for targets outside of the vocabulary, which
        are looked for on the CPU only: a device would have to be waited for.
        """
        check_head(weight, range(self.start, self.stop), self.words)
        check_words(targets.words, self.words, targets.ignore_index)
        head = HeadShard(self.start, self.words, self.group, product_dtype(hidden), self.layout)
        chunking = _Chunking(head, transform, tokens, targets.smoothing, torch.is_grad_enabled())
        own = LocalTargets.among(targets.words.flatten(), targets.ignore_index, self.start, self.stop - self.start)
        with torch.autocast(hidden.device.type, enabled=False):
            return _chunked_loss(hidden.flatten(0, -2), weight, bias, own, chunking)
