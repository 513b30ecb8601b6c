"""Calls of the operators of ``ds_npu.ops``: small ones at the corners of what kernels take, and those of real models.

Names of shapes: T tokens, H hidden, V vocabulary, B batch, S sequence, N heads, D width of a head.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ds_npu.acceptance.case import Case, Scope
from ds_npu.acceptance.expert_cases import LARGE_EXPERTS, SMALL_EXPERTS
from ds_npu.acceptance.operator_call import Arguments, Call, drawn, maker
from ds_npu.ops.adamw import AdamStep, adamw_
from ds_npu.ops.all import OPERATORS
from ds_npu.ops.attention import CAUSAL, FULL, Mask, Options, attention, sliding
from ds_npu.ops.layers import add_rms_norm, cross_entropy, rms_norm, rotary, softmax, swiglu
from ds_npu.ops.matmul_accumulate import matmul_accumulate_
from ds_npu.ops.self_check import ROUNDINGS

EPS = 1e-5
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGE_S = 300.0
"""Seconds of a large call: its reference, in float64 on the CPU, may take minutes."""

RMS_ROUNDINGS = 1.0
TOLERANCE = (
    "Relative to the reference in float64, for results, arguments written in place, and gradients, in each tensor's "
    "own dtype. u is the dtype's epsilon, and 2**-13 at least, the unit in which CANN accepts float32 functions. The "
    f"largest error may be {ROUNDINGS:g} u of the largest value (CANN allows as much of each value); the root mean "
    f"square of the errors {RMS_ROUNDINGS:g} u of that of the values: rounding once gives 0.29 u."
)


@dataclass(frozen=True)
class OperatorCase(Case):
    """A call in one dtype.

    Without a call, it is the check of its kernel that ``operator`` makes before a training begins.
    """

    call: Call | None = None
    dtype: torch.dtype = torch.float32
    operator: str = ""


def operator_cases(scope: Scope) -> list[OperatorCase]:
    """Every operator's own check, then every call in every dtype; the small calls alone where ``scope`` says so."""
    found = [OperatorCase(f"{each.name}: its own check", operator=each.name) for each in OPERATORS]
    found += [
        OperatorCase(f"{call.name}, {short(dtype)}", call=call, dtype=dtype)
        for call, dtype in itertools.product((*SMALL_CALLS, *SMALL_EXPERTS, *SMALL_ATTENTION), DTYPES)
    ]
    if scope.small:
        return found
    return found + [
        OperatorCase(f"{call.name}, {short(dtype)}", timeout_s=LARGE_S, call=call, dtype=dtype)
        for call, dtype in itertools.product((*LARGE_CALLS, *LARGE_EXPERTS), DTYPES)
    ]


def short(dtype: torch.dtype) -> str:
    """``torch.float32`` as ``float32``."""
    return str(dtype).removeprefix("torch.")


@maker
def norm_args(dtype: torch.dtype, *shape: int, offset: float) -> Arguments:
    """x [*shape] and weight [H]."""
    return (
        drawn(*shape, seed=1, dtype=dtype),
        drawn(shape[-1], seed=2, dtype=dtype),
        EPS,
        offset,
    )


@maker
def add_norm_args(dtype: torch.dtype, *shape: int) -> Arguments:
    """x and residual [*shape], weight [H]."""
    return (
        *(drawn(*shape, seed=seed, dtype=dtype) for seed in (1, 2)),
        drawn(shape[-1], seed=3, dtype=dtype),
        EPS,
    )


@maker
def swiglu_args(dtype: torch.dtype, *shape: int, dim: int = -1) -> Arguments:
    """gate_up [*shape]."""
    return (drawn(*shape, seed=1, dtype=dtype), dim)


def angles(positions: int, head: int, interleaved: bool, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [positions, head], computed as models do."""
    speeds = 10000.0 ** -(torch.arange(0, head, 2) / head)
    half = torch.outer(torch.arange(positions).float(), speeds)
    both = half.repeat_interleave(2, 1) if interleaved else torch.cat([half, half], 1)
    return both.cos().bfloat16().to(dtype), both.sin().bfloat16().to(dtype)


@maker
def rotary_args(
    dtype: torch.dtype, x_shape: tuple[int, ...], angle_shape: tuple[int, ...], interleaved: bool = False
) -> Arguments:
    """x, and cos and sin that broadcast to it."""
    cos, sin = angles(math.prod(angle_shape[:-1]), x_shape[-1], interleaved, dtype)
    return drawn(*x_shape, seed=1, dtype=dtype), cos.view(angle_shape), sin.view(angle_shape), interleaved


@maker
def softmax_args(dtype: torch.dtype, *shape: int, scale: float, masked: bool = True) -> Arguments:
    """x [B, N, S, T] and a causal mask [B, 1, S, T]."""
    mask = torch.ones(shape[0], 1, *shape[2:], dtype=torch.bool).triu(1 + shape[3] - shape[2])
    return drawn(*shape, seed=1, dtype=dtype), mask if masked else None, scale


@maker
def cross_entropy_args(
    dtype: torch.dtype, tokens: int, words: int, ignored: int | None, ignore_index: int = -100
) -> Arguments:
    """logits [T, V] and targets [T], every ``ignored``-th of them ignored."""
    targets = torch.randint(0, words, (tokens,), generator=torch.Generator().manual_seed(2))
    if ignored:
        targets[::ignored] = ignore_index
    return drawn(tokens, words, seed=1, dtype=dtype), targets, ignore_index


@maker
def accumulate_args(dtype: torch.dtype, out: int, into: int, tokens: int) -> Arguments:
    """buffer [out, in] in float32, dy [T, out] and x [T, in]."""
    buffer, dy, x = (
        drawn(*shape, seed=seed, dtype=torch.float32, gradient=False)
        for seed, shape in enumerate(((out, into), (tokens, out), (tokens, into)))
    )
    return buffer, dy.to(dtype), x.to(dtype)


@maker
def adamw_args(dtype: torch.dtype, *sizes: int) -> Arguments:
    """Parameters, gradients, both moments, and the numbers of the third step."""
    lists = [
        [drawn(size, seed=10 * i + j, dtype=dtype, gradient=False) for j, size in enumerate(sizes)] for i in range(4)
    ]
    lists[3] = [x.abs() for x in lists[3]]
    return (*lists, AdamStep(lr=0.05, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1, step=3))


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes of an attention call; ``heads``: the query's and the key's; ``widths``: the key's and the value's."""

    heads: tuple[int, int]
    rows: int
    keys: int
    widths: tuple[int, int]
    batch: int = 1


@maker
def attention_args(dtype: torch.dtype, sizes: AttentionSizes, options: Options) -> Arguments:
    """q, k and v in the layout of ``options``."""
    shapes = (
        (sizes.batch, sizes.rows, sizes.heads[0], sizes.widths[0]),
        (sizes.batch, sizes.keys, sizes.heads[1], sizes.widths[0]),
        (sizes.batch, sizes.keys, sizes.heads[1], sizes.widths[1]),
    )
    tensors = (drawn(*shape, seed=i, dtype=dtype, gradient=False) for i, shape in enumerate(shapes))
    return (*(_laid_out(x, options).requires_grad_() for x in tensors), options)


def _laid_out(x_BSND: torch.Tensor, options: Options) -> torch.Tensor:
    match options.layout:
        case "BSND":
            return x_BSND
        case "BNSD":
            return x_BSND.transpose(1, 2).contiguous()
        case "SBH":
            return x_BSND.transpose(0, 1).flatten(2).contiguous()
        case "TND":
            return x_BSND[0]


def attention_output(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> torch.Tensor:
    """The output of ``attention`` alone, as models use it: lse has no gradient."""
    return attention(q, k, v, options)[0]


def _attention_call(title: str, sizes: AttentionSizes, options: Options, with_lse: bool = False) -> Call:
    heads, key_heads = sizes.heads
    width, value_width = sizes.widths
    of_widths = f"{width}" if width == value_width else f"{width} and {value_width}"
    name = f"attention {options.layout} {title}, {sizes.batch} x {sizes.rows} rows, {sizes.keys} keys, "
    name += f"{heads} heads on {key_heads} of {of_widths}"
    return Call(name, attention if with_lse else attention_output, attention_args(sizes, options))


def _random_mask(batch: int, rows: int, keys: int) -> torch.Tensor:
    """[B, 1, S, T], True hides; the first row of each sequence sees no key."""
    mask = torch.rand(batch, 1, rows, keys, generator=torch.Generator().manual_seed(3)) < 0.5
    mask[:, :, 0] = True
    return mask


SMALL_CALLS = (
    Call("norm", rms_norm, norm_args(5, 33, 128, offset=0.0)),
    Call("norm, Gemma's", rms_norm, norm_args(40, 96, offset=1.0)),
    Call("sum and norm", add_rms_norm, add_norm_args(3, 17, 96)),
    Call("swiglu", swiglu, swiglu_args(3, 17, 64)),
    Call("swiglu, first dim", swiglu, swiglu_args(34, 5, 6, dim=0)),
    Call("rotary BNSD", rotary, rotary_args((2, 3, 17, 32), (17, 32))),
    Call("rotary BSND, angles of each row", rotary, rotary_args((2, 17, 3, 32), (2, 17, 1, 32))),
    Call("rotary BNSD of one head", rotary, rotary_args((2, 1, 17, 32), (1, 1, 17, 32))),
    Call("rotary BSND of one head, interleaved", rotary, rotary_args((2, 17, 1, 32), (1, 17, 1, 32), True)),
    Call("rotary TND", rotary, rotary_args((34, 3, 32), (34, 1, 32))),
    Call("rotary BSND, interleaved", rotary, rotary_args((2, 17, 3, 32), (1, 17, 1, 32), True)),
    Call("softmax, causal", softmax, softmax_args(2, 3, 32, 64, scale=0.125)),
    Call("loss", cross_entropy, cross_entropy_args(33, 100, None)),
    Call("loss, some ignored", cross_entropy, cross_entropy_args(33, 100, 3)),
    Call("loss, token 0 ignored", cross_entropy, cross_entropy_args(33, 100, 4, ignore_index=0)),
    Call("weight gradient", matmul_accumulate_, accumulate_args(24, 40, 33)),
    Call("adamw", adamw_, adamw_args(7, 130)),
)
"""Calls at the corners of what the kernels take."""

_TINY = AttentionSizes((4, 2), 24, 40, (32, 32), batch=2)
_PACKED = AttentionSizes((4, 2), 40, 40, (32, 32))
SMALL_ATTENTION = (
    _attention_call("full", _TINY, Options("BNSD", FULL)),
    _attention_call("causal, gradient of lse", _TINY, Options("BSND", CAUSAL), with_lse=True),
    _attention_call("causal from the first key", _TINY, Options("BSND", Mask(after=0, from_start=True))),
    _attention_call("sliding", _TINY, Options("SBH", sliding(9), heads=4)),
    _attention_call("band", _TINY, Options("BNSD", Mask(before=5, after=3), scale=0.2)),
    _attention_call("mask", _TINY, Options("BSND", Mask(dense=_random_mask(2, 24, 40)))),
    _attention_call("packed, causal", _PACKED, Options("TND", CAUSAL.packed((5, 6, 40)))),
    _attention_call(
        "causal", AttentionSizes((4, 1), 33, 33, (48, 32), batch=2), Options("BSND", CAUSAL), with_lse=True
    ),
)
"""A call for each layout and each kind of mask."""

_8B = AttentionSizes((8, 2), 4096, 4096, (128, 128))
LARGE_CALLS: Sequence[Call] = (
    Call("norm 8192 x 4096", rms_norm, norm_args(8192, 4096, offset=0.0)),
    Call("norm 2 x 4096 x 5120", rms_norm, norm_args(2, 4096, 5120, offset=0.0)),
    Call("norm, Gemma's, 4096 x 3072", rms_norm, norm_args(4096, 3072, offset=1.0)),
    Call("norm of heads 4096 x 32 x 128", rms_norm, norm_args(4096, 32, 128, offset=0.0)),
    Call("norm of one row of 16384", rms_norm, norm_args(1, 16384, offset=0.0)),
    Call("norm of odd rows 511 x 1003", rms_norm, norm_args(511, 1003, offset=0.0)),
    Call("sum and norm 4096 x 4096", add_rms_norm, add_norm_args(4096, 4096)),
    Call("sum and norm 1 x 2048 x 8192", add_rms_norm, add_norm_args(1, 2048, 8192)),
    Call("swiglu 1024 x 28672", swiglu, swiglu_args(1024, 28672)),
    Call("swiglu 2 x 1001 x 11008", swiglu, swiglu_args(2, 1001, 11008)),
    Call("rotary BSND 1 x 8192 x 32 x 128", rotary, rotary_args((1, 8192, 32, 128), (1, 8192, 1, 128))),
    Call("rotary BNSD 2 x 8 x 4096 x 64", rotary, rotary_args((2, 8, 4096, 64), (1, 1, 4096, 64))),
    Call("rotary BSND 2 x 2047 x 16 x 64, interleaved", rotary, rotary_args((2, 2047, 16, 64), (1, 2047, 1, 64), True)),
    Call("rotary TND 8192 x 40 x 128", rotary, rotary_args((8192, 40, 128), (8192, 1, 128))),
    Call("softmax 1 x 8 x 2048 x 2048", softmax, softmax_args(1, 8, 2048, 2048, scale=0.0884)),
    Call("softmax 2 x 4 x 1024 x 4096", softmax, softmax_args(2, 4, 1024, 4096, scale=0.125)),
    Call("loss 1024 x 128256", cross_entropy, cross_entropy_args(1024, 128256, 7)),
    Call("loss 4095 x 32000", cross_entropy, cross_entropy_args(4095, 32000, None)),
    Call("weight gradient 4096 x 11008 of 2048", matmul_accumulate_, accumulate_args(4096, 11008, 2048)),
    Call("weight gradient 1003 x 4096 of 4095", matmul_accumulate_, accumulate_args(1003, 4096, 4095)),
    Call("adamw of 16 million and small ones", adamw_, adamw_args(4096 * 4096, 1, 4097, 128)),
    _attention_call("causal", _8B, Options("BSND", CAUSAL)),
    _attention_call("causal, gradient of lse", _8B, Options("BNSD", CAUSAL), with_lse=True),
    _attention_call("full", _8B, Options("SBH", FULL, heads=8)),
    _attention_call("sliding 1024", _8B, Options("BSND", sliding(1024))),
    _attention_call("causal", AttentionSizes((4, 4), 16384, 16384, (64, 64)), Options("BSND", CAUSAL)),
    _attention_call("causal, uneven", AttentionSizes((5, 5), 1001, 3003, (80, 80)), Options("BNSD", CAUSAL)),
    _attention_call("causal", AttentionSizes((16, 16), 2048, 2048, (192, 128)), Options("BSND", CAUSAL)),
    _attention_call("causal", AttentionSizes((8, 1), 2048, 2048, (256, 256), batch=2), Options("BNSD", CAUSAL)),
    _attention_call(
        "mask",
        AttentionSizes((8, 8), 1024, 1024, (128, 128), batch=2),
        Options("BSND", Mask(dense=_random_mask(2, 1024, 1024))),
    ),
    _attention_call("packed, causal", _8B, Options("TND", CAUSAL.packed((1, 700, 701, 2800, 4096)))),
    _attention_call("packed, sliding", _8B, Options("TND", sliding(256).packed((512, 4096)))),
)
"""Calls with sizes of models, and with sizes that nothing divides."""
