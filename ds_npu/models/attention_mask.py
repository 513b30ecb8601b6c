"""Masks of Hugging Face models as data: transformers' mask functions are recognised instead of evaluated.

transformers (5.23, masking_utils) describes a mask by a function of (batch, head, row, key), a conjunction of a few of
its own. Where all of these are known here, the mask is a band, within documents if there are any, and takes no memory;
any other function is evaluated, as for transformers' "sdpa".
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from ds_npu.models.hugging_face_model import transformers_module
from ds_npu.ops.attention import Mask
from ds_npu.parallel.runtime.calls import Keywords
from ds_npu.parallel.runtime.forward_wraps import disable_tracing


@dataclass(frozen=True, eq=False)
class PackedMask:
    """``mask`` within documents of the B · S tokens; indices ``rows`` and ``keys`` (None: all) say which take part.

    A row that takes no part sees no key: its result is 0.
    """

    mask: Mask
    rows: torch.Tensor | None = None
    keys: torch.Tensor | None = None

    def on(self, device: torch.device) -> PackedMask:
        """Copy the indices to ``device``."""
        rows, keys = (None if x is None else x.to(device) for x in (self.rows, self.keys))
        return PackedMask(self.mask, rows, keys)


@dataclass(frozen=True)
class Pattern:
    """A band around the diagonal, and [B, S] numbers of the documents that do not see each other."""

    before: int | None = None
    after: int | None = None
    documents: torch.Tensor | None = None
    chunk: int | None = None
    """Tokens of a chunk: chunks do not see each other (Llama 4), the first begins behind padding on the left."""

    @property
    def is_empty(self) -> bool:
        """Whether no row sees a key: Qwen2-MoE makes a mask of a window of 0, and uses it in no layer."""
        return self.before is not None and self.after is not None and self.before + self.after < 0


@disable_tracing
def attention_mask(**arguments: Any) -> torch.Tensor | Mask | PackedMask | None:
    """The mask function for ``ALL_MASK_ATTENTION_FUNCTIONS``, with the arguments of transformers' ``sdpa_mask``.

    Returns what ``attention_function`` applies: None for a plain causal mask (rows at the last keys), a Mask or
    PackedMask, or, where neither can express it, transformers' tensor [B, 1, Sq, Sk], True where a key is seen.
    """
    pattern = pattern_of(arguments["mask_function"])
    offsets = arguments.get("q_offset", 0), arguments.get("kv_offset", 0)
    # A static cache's offset is on the device; the host does not wait for it.
    if pattern is None or pattern.chunk or pattern.is_empty or isinstance(offsets[0], torch.Tensor):
        return _evaluated(arguments)
    if not may_leave_out(arguments) and pattern.documents is None:
        return _evaluated(arguments)
    rows = arguments["q_length"]
    keys = arguments["kv_length"]
    if pattern.documents is not None:
        return PackedMask(Mask(pattern.before, pattern.after).packed(_ends(pattern.documents)))
    if arguments["attention_mask"] is not None:
        padding = _seen_keys(arguments["attention_mask"], offsets[1], keys)
        # One copy from the device for all layers, as transformers' own mask functions make it.
        bounds = padding_bounds(padding)
        if any(bound != (0, keys) for bound in bounds):
            found = _padded(pattern, bounds, keys) if (rows, offsets[0]) == (keys, offsets[1]) else None
            return _evaluated(arguments) if found is None else found.on(padding.device)
    # The keys a row sees, counted from the last row and key.
    shift = keys - rows - (offsets[0] - offsets[1])
    mask = Mask(
        None if pattern.before is None else pattern.before + shift,
        None if pattern.after is None else pattern.after - shift,
    )
    return None if (mask.before, mask.after) == (None, 0) else mask


def may_leave_out(arguments: Keywords) -> bool:
    """Whether the mask function may return None: transformers forbids it where it works on with the mask."""
    causal = arguments.get("allow_is_causal_skip", True)
    bidirectional = arguments.get("allow_is_bidirectional_skip")
    return bool(causal or bidirectional)


def pattern_of(function: Callable[..., Any]) -> Pattern | None:
    """The Pattern of transformers' mask function ``function``; None if it, or a part of it, is not known."""
    before: list[int] = []
    after: list[int] = []
    documents = chunk = None
    for part in _parts(function):
        if part.__module__ != "transformers.masking_utils":
            return None
        kept = inspect.getclosurevars(part).nonlocals
        match part.__qualname__.removesuffix(".<locals>.inner_mask"):
            case "causal_mask_function":
                after.append(0)
            case "bidirectional_mask_function":
                pass
            case "sliding_window_overlay":
                before.append(kept["sliding_window"] - 1)
            case "sliding_window_bidirectional_overlay":
                before.append(kept["sliding_window"])
                after.append(kept["sliding_window"])
            case "packed_sequence_mask_function" if documents is None:
                documents = kept["packed_sequence_mask"]
            case "chunked_overlay" if chunk is None:
                chunk = kept["chunk_size"]
            case _:
                return None
    return Pattern(min(before, default=None), min(after, default=None), documents, chunk)


def _parts(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """The functions that ``function`` joins by "and"; itself where it joins none."""
    name = function.__qualname__ if inspect.isfunction(function) else ""
    if name == "and_masks.<locals>.and_mask":
        for each in inspect.getclosurevars(function).nonlocals["mask_functions"]:
            yield from _parts(each)
    elif name == "remap_positions_for_packed_sequence.<locals>.inner_mask":
        # Within a document positions rise by one, so a band by position is one by index.
        yield from _parts(inspect.getclosurevars(function).nonlocals["mask_function"])
    else:
        yield function


def _evaluated(arguments: Keywords) -> torch.Tensor:
    sdpa_mask: Callable[..., torch.Tensor] = transformers_module("masking_utils").sdpa_mask
    return sdpa_mask(**{**arguments, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


def _ends(documents: torch.Tensor) -> list[int]:
    """The ends of the documents of [B, S] among the B · S tokens: on the host, where the kernel takes them."""
    last = torch.ones_like(documents, dtype=torch.bool)
    last[:, :-1] = documents[:, 1:] != documents[:, :-1]
    ends: list[int] = (last.flatten().nonzero().flatten() + 1).tolist()
    return ends


def _seen_keys(attention_mask: torch.Tensor, offset: int, keys: int) -> torch.Tensor:
    """The keys [B, Sk] of the tokens in transformers' ``attention_mask`` [B, S]: True where not padding."""
    missing = max(offset + keys - attention_mask.shape[1], 0)
    return torch.nn.functional.pad(attention_mask, (0, missing))[:, offset : offset + keys]


def padding_bounds(seen: torch.Tensor) -> list[tuple[int, int] | None]:
    """The first seen key and the one past the last, of each sample of ``seen`` [B, S].

    (0, 0) where none is seen; None where one between them is not.
    """
    past = seen.shape[1] - seen.flip(1).int().argmax(1)
    found = torch.stack([seen.sum(1), seen.int().argmax(1), past], 1).tolist()
    return [(0, 0) if n == 0 else (begin, end) if end - begin == n else None for n, begin, end in found]


def _padded(pattern: Pattern, bounds: list[tuple[int, int] | None], length: int) -> PackedMask | None:
    """A PackedMask with a document for each sample: its keys that are not padding, and the rows that see any of them.

    None where a band cannot express it.
    """
    known = [bound for bound in bounds if bound is not None]
    band = (pattern.before, pattern.after)
    to_the_left = all(end in (0, length) for _, end in known)
    if len(known) < len(bounds) or not any(end for _, end in known):
        return None
    if band not in ((None, None), (None, 0)) and not (pattern.after == 0 and to_the_left):
        return None
    keys = [range(begin, end) for begin, end in known]
    # A causal row before the first key sees none; one past the last key sees all: the band counts from the first.
    rows = [range(0 if band == (None, None) else begin, length if end else begin) for begin, end in known]
    ends_q, ends_k = (list(accumulate(map(len, each))) for each in (rows, keys))
    return PackedMask(
        Mask(*band, from_start=not to_the_left).packed(ends_q, ends_k), _tokens(rows, length), _tokens(keys, length)
    )


def _tokens(parts: list[range], length: int) -> torch.Tensor | None:
    """Indices, among the B · S tokens, of ``parts``: a range for each sample.

    None if these are all tokens.
    """
    if all(len(part) == length for part in parts):
        return None
    return torch.cat([torch.arange(part.start, part.stop) + i * length for i, part in enumerate(parts)])
