"""The keys that tokens of a batch see within the band of their layer, read once from the arguments of a forward.

A Hugging Face model takes padding as an ``attention_mask`` [B, S], packed documents as ``position_ids`` that restart
or as ``cu_seq_lens_q``, and anything else as a mask of four dims. They mean what they mean in transformers
(masking_utils, 5.23), except that a row of padding sees nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ds_npu.models.attention_function import hidden_of
from ds_npu.models.logits import IGNORED_LABEL

CUMULATIVE = ("cu_seq_lens_q", "cu_seq_lens_k")
VISIBILITY_ARGUMENTS = ("attention_mask", *CUMULATIVE, "max_length_q", "max_length_k", "seq_idx")
"""Arguments that are read here and not passed on to the model (seq_idx numbers packed documents for layers other than
attention, which context parallelism refuses)."""


@dataclass(frozen=True, eq=False)
class Visibility:
    """Documents (ranges of b * S + s; None: each sample is one), or padding, or a mask of the user's."""

    documents: tuple[range, ...] | None = None
    padding: torch.Tensor | None = None
    """[B, S], True for keys that no row sees, where documents cannot express them."""
    dense: torch.Tensor | None = None
    """[B or 1, N or 1, S, S], True where a row does not see a key; it includes the layer's band."""


EVERYTHING = Visibility()


@dataclass(frozen=True)
class BatchArguments:
    """A batch as the script gives it: ``samples`` sequences of ``length`` tokens, and the arguments of the forward."""

    samples: int
    length: int
    given: Mapping[str, Any]
    targets: torch.Tensor | None = None
    """[B, S]: the label that each token is to predict."""
    ignored: int = IGNORED_LABEL
    """The label of tokens without a target."""
    shifted: bool = True
    """Whether a token predicts the next one: then the last token of padding on the left has a target."""

    def visibility(self) -> Visibility:
        """The Visibility of the batch; raises ValueError for arguments that contradict each other or are not known."""
        mask, ends = self.given.get("attention_mask"), [self.given.get(name) for name in CUMULATIVE]
        if any(each is not None for each in ends):
            if mask is not None or any(each is None for each in ends):
                raise ValueError(
                    "packed documents are given by cu_seq_lens_q and cu_seq_lens_k together and without an "
                    "attention_mask: either says which keys are seen"
                )
            return Visibility(self._cumulative(*ends))
        if mask is None:
            return self._packed(self.given.get("position_ids"))
        if not isinstance(mask, torch.Tensor) or mask.dim() not in (2, 4):
            found = f"{mask.dim()} dims" if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise ValueError(f"attention_mask: found {found}; [B, S] or [B, N, S, S] is accepted")
        return self._padded(mask) if mask.dim() == 2 else Visibility(dense=self._whole(mask))

    def _cumulative(self, ends_q: Any, ends_k: Any) -> tuple[range, ...]:
        # The host waits for the device, once a batch: the shards depend on the documents.
        found, keys = (each.tolist() for each in (ends_q, ends_k))
        if self.samples != 1 or found != keys or found[:1] != [0] or found[-1] != self.length:
            raise ValueError(
                f"cu_seq_lens_q {found} and cu_seq_lens_k {keys} with a batch of {self.samples} x {self.length} "
                f"tokens: packed documents come in a batch of 1, both are the same, from 0 to {self.length}"
            )
        return tuple(range(begin, end) for begin, end in itertools.pairwise(found) if end > begin)

    def _packed(self, positions: torch.Tensor | None) -> Visibility:
        """A position that is not its predecessor plus one begins a document."""
        if positions is None or (positions.dim() == 3 and len(positions) != 4):
            return EVERYTHING
        # Qwen2-VL has four rows of positions; the first is that of the text.
        rows = positions[0] if positions.dim() == 3 else positions
        # The host waits, as above, once a batch.
        begins = (rows[:, 1:] != rows[:, :-1] + 1).cpu()
        if not begins.any():
            return EVERYTHING
        starts = [(row.nonzero().flatten() + 1).tolist() for row in begins.expand(self.samples, -1)]
        return Visibility(
            tuple(
                range(sample * self.length + begin, sample * self.length + end)
                for sample, inside in enumerate(starts)
                for begin, end in itertools.pairwise((0, *inside, self.length))
            )
        )

    def _padded(self, mask: torch.Tensor) -> Visibility:
        if mask.shape != (self.samples, self.length):
            raise ValueError(f"attention_mask: found {list(mask.shape)}; [{self.samples}, {self.length}] is accepted")
        counted = torch.zeros_like(mask) if self.targets is None else self.targets != self.ignored
        # The host waits, as above, once a batch.
        seen, counted = torch.stack([mask != 0, counted != 0]).cpu()
        if seen.all():
            return EVERYTHING
        documents = []
        for sample, (tokens, targets) in enumerate(zip(seen, counted, strict=True)):
            positions = tokens.nonzero().flatten()
            if not len(positions):
                continue
            first, past = int(positions[0]), int(positions[-1]) + 1
            # The loss counts a row of padding with a target, and the mask says what it sees, which documents cannot.
            counts = targets[past:].any() or (not self.shifted and targets[:first].any())
            if past - first != len(positions) or counts:
                return Visibility(padding=mask == 0)
            documents.append(range(sample * self.length + first, sample * self.length + past))
        return Visibility(tuple(documents))

    def _whole(self, mask: torch.Tensor) -> torch.Tensor:
        size = self.length
        if mask.shape[0] not in (1, self.samples) or mask.shape[2] not in (1, size) or mask.shape[3] != size:
            raise ValueError(
                f"attention_mask: found {list(mask.shape)}; [{self.samples}, N, {size}, {size}], the mask of the whole "
                "sequences, is accepted"
            )
        hidden: torch.Tensor = hidden_of(mask)
        return hidden.expand(-1, -1, size, -1)
