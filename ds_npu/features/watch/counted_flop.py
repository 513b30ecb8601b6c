"""Counts the FLOP of products while it is entered: those of the model, and those that are executed.

Products of matrices have 2 FLOP for each multiplication and addition; other operators have none. The model's FLOP
leave out what is computed again (recomputation, the scores in the backward of a fused attention) and pairs of rows and
keys that a mask hides. Source: ``torch.utils.flop_counter``; Korthikanti et al. 2022 (arXiv 2205.05198) for the two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from ds_npu.features.recorded_calls.module_calls import ModuleCall, ModuleCalls
from ds_npu.features.recorded_calls.observed_step import PausedMode
from ds_npu.memory.storage_record import has_storage
from ds_npu.ops.attention.mask import Mask
from ds_npu.parallel.runtime.calls import Arguments, Keywords
from ds_npu.parallel.runtime.micro_batch import is_in_backward

BATCHED = ("aten::bmm", "aten::baddbmm")
BATCH_DIMS = 3
WHOLE_PRODUCTS = ("matmul", "linear", "npu_linear")
"""Products that NPUs have kernels for, and other devices take apart."""
FUSED, NPU_FUSED = "_scaled_dot_product", "npu_fusion_attention"
GROUPED = ("_grouped_mm", "npu_grouped_matmul", "npu_grouped_matmul_add_")
SPARSE_CAUSAL, SPARSE_BAND = {2: True, 3: False}, 4
"""CANN's sparse modes: causal from the first row and key, and from the last; a band."""
LAYOUTS: Mapping[str, tuple[int | None, int, int]] = {
    **{"BSND": (0, 1, 3), "BNSD": (0, 2, 3), "SBH": (1, 0, 2), "BSH": (0, 1, 2), "TND": (None, 0, 2)}
}
"""The dims of batch, rows and width in torch_npu's layouts of attention."""
UNLIMITED = 2**31 - 1
HIDDEN = -3e4
"""Scores that are lower are masked: masks add the least number of their dtype, of float16 -65504."""


@dataclass(frozen=True)
class Flop:
    """FLOP of products."""

    model: float = 0.0
    executed: float = 0.0

    def __add__(self, other: Flop) -> Flop:
        return Flop(self.model + other.model, self.executed + other.executed)


class FlopCounter(PausedMode):
    """Counts while it is entered and ``calls`` are recorded.

    ``shares``: by a module's name, the part of its products that counts. The host waits for the device at each mask.
    """

    def __init__(self, calls: ModuleCalls, shares: Mapping[str, float]) -> None:
        PausedMode.__init__(self)
        self.flop = Flop()
        self._calls, self._shares = calls, shares
        self._seen: dict[int, tuple[tuple[int, int], float]] = {}
        """Rows, keys and visible share of the scores of a module's call, by its number."""
        self._scores: list[tuple[ModuleCall | None, tuple[int, int, int], Flop]] = []
        """Products of the running forward that may be scores, whose mask is not known yet."""

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Iterable[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        if not all(map(has_storage, types)):
            return NotImplemented
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name
        if self.is_paused:
            return out
        if name in ("aten::_softmax", "aten::_safe_softmax"):
            self._see_scores(args[0])
        elif (found := self._flop_of(func, args, kwargs, out)).executed:
            call, _ = self._calls.current()
            is_again = is_in_backward() and (torch.is_grad_enabled() or (call is not None and _recomputes(call)))
            share = self._shares.get(call.name, 1.0) if call is not None else 1.0
            self.flop += Flop(0.0 if is_again else share * found.model, found.executed)
        return out

    def _flop_of(self, func: torch._ops.OpOverload, args: Arguments, kwargs: Keywords, out: Any) -> Flop:
        namespace, _, name = func._schema.name.partition("::")
        given = _by_name(func, args, kwargs)
        if namespace == "aten" and name.startswith(FUSED):
            return fused_flop(given, backward=name.endswith("_backward"))
        if name in (NPU_FUSED, f"{NPU_FUSED}_grad"):
            return npu_fused_flop(given, backward=name != NPU_FUSED)
        if name in GROUPED:
            return grouped_flop(given)
        product = whole_product(name, args, out)
        if product is not None:
            return self._whole(*product)
        # torch's counter knows no operators that write their first argument, as addmm_.
        packet = getattr(torch.ops.aten, name.removesuffix("_"), None) if namespace == "aten" else None
        count = flop_registry.get(func._overloadpacket) or flop_registry.get(packet)
        if count is None:
            return Flop()
        flop = float(count(*args, **kwargs, out_val=out))
        if f"{namespace}::{name}" not in BATCHED:
            return Flop(flop, flop)
        return self._batched(args[-2].shape, args[-1].shape, flop)

    def _whole(self, left: Sequence[int], right: Sequence[int], flop: float) -> Flop:
        """The FLOP of a product that NPUs do not take apart, of matrices or of batches of them."""
        if len(left) < BATCH_DIMS or len(right) < BATCH_DIMS:
            return Flop(flop, flop)
        batch = math.prod(left[:-2])
        return self._batched((batch, *left[-2:]), (batch, *right[-2:]), flop)

    def _batched(self, left: Sequence[int], right: Sequence[int], flop: float) -> Flop:
        """The FLOP of a product of batches, which may be one of an attention's four (in forward, two) with scores."""
        call, backward = self._calls.current()
        visible = self._seen.get(-1 if call is None else call.index)
        sides = {(left[1], left[2]), (right[1], right[2]), (left[1], right[2])}
        if visible is not None and ({visible[0], visible[0][::-1]} & sides):
            return Flop(visible[1] * flop, flop)
        if not backward:
            # The first product of an attention: its softmax follows.
            self._scores.append((call, (left[0], left[1], right[2]), Flop(flop, flop)))
        return Flop(flop, flop)

    def _see_scores(self, scores: torch.Tensor) -> None:
        """Note which part of the ``scores`` of the running call a mask hides, and take it from their product."""
        call, _ = self._calls.current()
        if scores.dim() < 3:
            return
        shape = (math.prod(scores.shape[:-2]), scores.shape[-2], scores.shape[-1])
        own = [each for each in self._scores if each[0] is call and each[1] == shape]
        if not own:
            return
        share = (scores > HIDDEN).sum().item() / max(1, scores.numel())
        self._scores.clear()
        if call is not None:
            self._seen[call.index] = (shape[1:], share)
        flop = own[-1][2]
        is_again = is_in_backward()
        self.flop += Flop(0.0 if is_again else (share - 1) * flop.model, 0.0)


def whole_product(name: str, args: Arguments, out: Any) -> tuple[Sequence[int], Sequence[int], float] | None:
    """Shapes and FLOP of a product that NPUs do not take apart, or of the products in its backward; else None."""
    if name in WHOLE_PRODUCTS:
        return args[0].shape, args[1].shape, 2.0 * out.numel() * args[0].shape[-1]
    if name == "matmul_backward":
        gradient, left, right, needed = args
        return left.shape, right.shape, 2.0 * gradient.numel() * left.shape[-1] * sum(needed)
    if name == "linear_backward":
        left, gradient, right, needed = args
        return left.shape, right.shape, 2.0 * gradient.numel() * left.shape[-1] * sum(needed[:2])
    return None


def _recomputes(call: ModuleCall) -> bool:
    return call.is_recomputed and call.end_node is None


def _by_name(func: torch._ops.OpOverload, args: Arguments, kwargs: Keywords) -> dict[str, Any]:
    """The arguments of a call by the names of its schema, defaults too."""
    schema = func._schema.arguments
    defaults = {each.name: each.default_value for each in schema if each.has_default_value()}
    return defaults | {each.name: value for each, value in zip(schema, args, strict=False)} | dict(kwargs)


def attention_flop(heads: int, widths: tuple[int, int], pairs: tuple[float, float], *, backward: bool) -> Flop:
    """FLOP of a fused attention: ``widths`` of keys and values, ``pairs`` that are visible and that are computed.

    Forward has 2 products, backward 4, and 5 with the scores that a fused one computes again.
    """
    key, value = widths
    model = 2.0 * heads * (key + value) * (2 if backward else 1)
    executed = 2.0 * heads * (3 * key + 2 * value if backward else key + value)
    return Flop(model * pairs[0], executed * pairs[1])


def fused_flop(given: Keywords, *, backward: bool) -> Flop:
    """FLOP of one of torch's ``scaled_dot_product`` operators: query [B, N, S, D], key and value alike."""
    q, v = given["query"], given["value"]
    batch, heads, rows, key = q.shape
    keys, value = v.shape[-2:]
    mask = next((given[name] for name in ("attn_mask", "attn_bias") if given.get(name) is not None), None)
    pairs = float(batch * rows * keys)
    if given.get("is_causal"):
        pairs = batch * visible_pairs(Mask(after=0, from_start=True), rows, keys)
    elif mask is not None:
        pairs = float(_visible(mask).expand(batch, heads, rows, keys).sum().item()) / heads
    return attention_flop(heads, (key, value), (pairs, pairs), backward=backward)


def _visible(mask: torch.Tensor) -> torch.Tensor:
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def npu_fused_flop(given: Keywords, *, backward: bool) -> Flop:
    """FLOP of npu_fusion_attention or its gradient, by layout, sparse mode, band, and lengths of documents."""
    q, k, v = given["query"], given["key"], given["value"]
    heads, layout = given["head_num"], given["input_layout"]
    in_batch, in_rows, in_width = LAYOUTS[layout]
    batch = 1 if in_batch is None else q.shape[in_batch]
    rows = q.shape[in_rows]
    keys = k.shape[in_rows]
    key = q.shape[in_width]
    value = v.shape[in_width]
    if layout in ("SBH", "BSH"):
        # As many heads of values as of keys.
        key = key // heads
        value = value * key // k.shape[in_width]
    mode = given.get("sparse_mode") or 0
    dense = given.get("atten_mask")
    mask = Mask()
    if dense is not None and mode in SPARSE_CAUSAL:
        mask = Mask(after=0, from_start=SPARSE_CAUSAL[mode])
    elif dense is not None and mode == SPARSE_BAND:
        before, after = (None if each >= UNLIMITED else each for each in (given["pre_tockens"], given["next_tockens"]))
        mask = Mask(before, after)
    elif dense is not None:
        hidden = dense if dense.dim() == 4 else dense.view(*[1] * (4 - dense.dim()), *dense.shape)
        pairs = float((~hidden.bool()).expand(batch, heads, rows, keys).sum().item()) / heads
        return attention_flop(heads, (key, value), (pairs, pairs), backward=backward)
    ends_q = given.get("actual_seq_qlen") or ()
    ends_k = given.get("actual_seq_kvlen") or ()
    pairs = batch * visible_pairs(mask, rows, keys, tuple(ends_q), tuple(ends_k))
    return attention_flop(heads, (key, value), (pairs, pairs), backward=backward)


def visible_pairs(
    mask: Mask, rows: int, keys: int, ends_q: tuple[int, ...] = (), ends_k: tuple[int, ...] = ()
) -> float:
    """Pairs of a row and a key that it sees, of one sample and head; documents end at ``ends_q`` and ``ends_k``."""
    documents: Iterator[tuple[int, int]] = iter([(rows, keys)])
    if ends_q:
        lengths = ((end - begin for begin, end in pairwise((0, *ends))) for ends in (ends_q, ends_k))
        documents = zip(*lengths, strict=True)
    total = 0
    for height, width in documents:
        band = mask.band(height, width)
        total += sum(len(band.keys_of(range(row, row + 1), width)) for row in range(height))
    return float(total)


def grouped_flop(given: Keywords) -> Flop:
    """FLOP of a product of groups of rows, each with a matrix, or of groups of both: 2 P K N, whatever the groups."""
    pair = ("x", "weight") if "x" in given else ("self", "mat2")
    left, right = (each[0] if isinstance(each, list | tuple) else each for each in map(given.__getitem__, pair))
    flop = 2.0 * left.numel() * right.shape[-1]
    return Flop(flop, flop)
