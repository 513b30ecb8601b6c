"""Vocabulary-parallel cross-entropy of logits that are sharded over the tensor ranks, without gathering them.

T tokens, V vocabulary; ``logits_TV`` holds this rank's shard of the vocabulary. After Megatron-LM's vocabulary-parallel
cross-entropy (Shoeybi et al. 2019, arXiv:1909.08053, section 3), but keeping the logits instead of their softmax.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ds_npu.ops.autograd import Context, applied
from ds_npu.ops.precision import accumulation_dtype
from ds_npu.parallel.tensor.sharding import Sharding
from ds_npu.parallel.tensor.whole_weight import from_shard, gather_shards
from ds_npu.topology.topology import Topology

BLOCK_BYTES = {"cpu": 1 << 20, "npu": 1 << 25}
"""Bytes of float32 logits in one block: on a CPU they fit a core's cache, on an NPU they outlast kernel launches."""


def _blocks(logits_TV: torch.Tensor, dtype: torch.dtype) -> Iterator[slice]:
    """Slices of the rows of ``logits_TV``, each of ``BLOCK_BYTES`` in ``dtype``, or of one row."""
    tokens, words = logits_TV.shape
    size = BLOCK_BYTES.get(logits_TV.device.type, BLOCK_BYTES["npu"])
    rows = max(1, size // (words * dtype.itemsize))
    return (slice(first, first + rows) for first in range(0, tokens, rows))


@dataclass(frozen=True)
class LocalTargets:
    """The targets of T tokens among this rank's words."""

    index: torch.Tensor
    """[T, 1]: the target's index among this rank's words; 0 where it is none of them."""
    elsewhere: torch.Tensor
    """[T]: whether the target is none of this rank's words."""
    ignored: torch.Tensor
    """[T]: whether the token has no loss."""

    def of(self, rows: slice) -> LocalTargets:
        return LocalTargets(self.index[rows], self.elsewhere[rows], self.ignored[rows])

    @staticmethod
    def among(targets_T: torch.Tensor, ignore_index: int, start: int, words: int) -> LocalTargets:
        """The targets among this rank's words, ``start`` to ``start + words - 1``."""
        ignored_T = targets_T == ignore_index
        local_T = targets_T - start
        elsewhere_T = (local_T < 0) | (local_T >= words) | ignored_T
        return LocalTargets(local_T.masked_fill(elsewhere_T, 0).unsqueeze(1), elsewhere_T, ignored_T)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        logits_TV: torch.Tensor,
        targets_T: torch.Tensor,
        start: int,
        group: dist.ProcessGroup | None,
        ignore_index: int,
    ) -> torch.Tensor:
        dtype = accumulation_dtype(logits_TV.dtype)
        top_T = logits_TV.amax(dim=1).to(dtype)
        dist.all_reduce(top_T, dist.ReduceOp.MAX, group)
        targets = LocalTargets.among(targets_T, ignore_index, start, logits_TV.shape[1])
        # Row 0: the sum of the exponentials. Row 1: the target's logit, which one rank has. One message for both.
        sums_2T = top_T.new_empty(2, len(top_T))
        for rows in _blocks(logits_TV, dtype):
            sums_2T[0, rows] = (logits_TV[rows] - top_T[rows, None]).exp_().sum(dim=1)
        sums_2T[1] = (logits_TV.gather(1, targets.index).squeeze(1) - top_T).masked_fill_(targets.elsewhere, 0)
        dist.all_reduce(sums_2T, group=group)
        ctx.save_for_backward(logits_TV, top_T, sums_2T, targets.index, targets.elsewhere, targets.ignored)
        return (sums_2T[0].log() - sums_2T[1]).masked_fill_(targets.ignored, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient_T: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits_TV, top_T, sums_2T, index_T1, elsewhere_T, ignored_T = ctx.saved_tensors
        gradient_T = gradient_T.masked_fill(ignored_T, 0)
        scale_T1 = (gradient_T / sums_2T[0]).unsqueeze(1)
        at_target_T1 = gradient_T.masked_fill(elsewhere_T, 0).neg_().unsqueeze(1)
        gradient_TV = torch.empty_like(logits_TV)
        for rows in _blocks(logits_TV, top_T.dtype):
            # softmax - one-hot: rounded to the logits' dtype only after the difference.
            block = (logits_TV[rows] - top_T[rows, None]).exp_().mul_(scale_T1[rows])
            gradient_TV[rows] = block.scatter_add_(1, index_T1[rows], at_target_T1[rows])
            del block  # before there is a second one
        return gradient_TV, None, None, None, None


_cross_entropy = applied(_VocabParallelCrossEntropy, _VocabParallelCrossEntropy.forward)


def vocab_parallel_cross_entropy(
    logits_TV: torch.Tensor,
    targets_T: torch.Tensor,
    start: int,
    group: dist.ProcessGroup | None,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Loss of each token [T], 0 for those whose target is ``ignore_index``; the same on every rank of ``group``.

    The first column of this rank's ``logits_TV`` is word ``start``; ``targets_T`` (int64) number the words of the whole
    vocabulary. Computed and returned in float32, of float64 logits in float64.

    Messages: two all-reduces, of T and of 2 T numbers, in forward, none in backward. Memory: backward needs the logits
    themselves and 22 more bytes for each token, but nothing else of the size of the logits; forward and backward work
    on ``BLOCK_BYTES`` of them in float32 at a time (and torch_npu casts bf16 in a second block).
    """
    return _cross_entropy(logits_TV, targets_T, start, group, ignore_index)


class VocabParallelLoss:
    """The loss function of a causal language model whose head is sharded by ``vocabulary`` over the tensor ranks.

    Called with this rank's logits and otherwise as Hugging Face's models call theirs
    (transformers.loss.loss_utils.ForCausalLMLoss). The mean is nan where all labels are ignored, as in torch.
    """

    def __init__(self, topology: Topology, vocabulary: Sharding) -> None:
        self.words = vocabulary.size
        ((self.start, self.stop),) = vocabulary.ranges[topology.rank("tp")]
        self.group = topology.group("tp")

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor | None,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **_others: Any,
    ) -> torch.Tensor:
        """Mean over the tokens that count, or their sum divided by ``num_items_in_batch``.

        ``logits`` [..., S, this rank's V]; ``labels`` [..., S], of which token s predicts number s + 1, or
        ``shift_labels`` [..., S], of which it predicts number s. Raises ValueError for logits or a ``vocab_size`` of
        another vocabulary, and on the CPU IndexError for labels outside of it (a device would have to be waited for).
        """
        if vocab_size != self.words or logits.shape[-1] != self.stop - self.start:
            raise ValueError(
                f"logits of {logits.shape[-1]} words of {vocab_size} were given; this rank's head has the "
                f"{self.stop - self.start} from {self.start} on of {self.words}"
            )
        targets = next_token_targets(labels, shift_labels, ignore_index).to(logits.device)
        check_words(targets, self.words, ignore_index)
        logits_TV = logits.reshape(-1, logits.shape[-1])
        losses_T = vocab_parallel_cross_entropy(logits_TV, targets.reshape(-1), self.start, self.group, ignore_index)
        return mean_loss(losses_T.sum(), targets, num_items_in_batch, ignore_index)


def next_token_targets(
    labels: torch.Tensor | None, shift_labels: torch.Tensor | None, ignore_index: int
) -> torch.Tensor:
    """The target of each token: ``shift_labels``, or the next of ``labels`` [..., S]; ValueError for neither."""
    if shift_labels is not None:
        return shift_labels
    if labels is None:
        raise ValueError("neither labels nor shift_labels were given")
    return functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]


def mean_loss(
    total: torch.Tensor, targets: torch.Tensor, num_items_in_batch: torch.Tensor | int | None, ignore_index: int
) -> torch.Tensor:
    """The sum of losses ``total`` over ``num_items_in_batch``, or over how many of ``targets`` count."""
    if num_items_in_batch is None:
        return total / (targets != ignore_index).sum()
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch


def check_words(targets: torch.Tensor, words: int, ignore_index: int) -> None:
    """Raise IndexError for ``targets`` neither words nor ignored, on the CPU only: the host would wait for a device."""
    if targets.device.type == "cpu":
        wrong = (targets != ignore_index) & ((targets < 0) | (targets >= words))
        if bool(wrong.any()):
            raise IndexError(f"label {int(targets[wrong][0])} is no word of a vocabulary of {words}, nor ignore_index")


def gather_vocabulary(logits: torch.Tensor, vocabulary: Sharding, group: dist.ProcessGroup | None) -> torch.Tensor:
    """All-gather logits [..., V] on every rank of ``group`` from the shards of its ranks, by ``vocabulary``.

    The gradient of the whole must be the same on every rank; each takes its shard of it, without a message.
    """
    columns = replace(vocabulary, dim=-1)
    return from_shard(logits, lambda mine: gather_shards(mine, columns, group), columns, group)


@torch.no_grad()
def vocabulary_argmax(logits: torch.Tensor, vocabulary: Sharding, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The word with the largest of all logits [..., V], the first of several, int64 [...]; every rank calls it.

    ``logits`` [..., V / tp] are this rank's. Sends two numbers for each token: the logit in float32, and the word.
    """
    ranges = vocabulary.ranges[dist.get_rank(group)]
    words = torch.cat([torch.arange(start, stop, device=logits.device) for start, stop in ranges])
    largest, index = logits.max(-1)
    # Float32 represents bf16 and fp16 exactly; HCCL has no maximum of wider types.
    best = largest.float() if largest.itemsize < torch.float32.itemsize else largest.clone()
    mine = best.clone()
    dist.all_reduce(best, dist.ReduceOp.MAX, group=group)
    found = torch.where(mine == best, words[index], vocabulary.size - 1).int()
    dist.all_reduce(found, dist.ReduceOp.MIN, group=group)
    return found.long()
