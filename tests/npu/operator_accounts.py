"""Calls operators that a seed draws on a simulated NPU, and prints what Python says of each: a line of JSON a call."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable

import torch
from torch.utils._pytree import tree_map_only

from ds_npu.memory.operator_seconds import operator_seconds
from ds_npu.ops.attention import Inputs, Options, attention_backward, attention_forward
from ds_npu.ops.attention.mask import CAUSAL
from ds_npu.ops.grouped_matmul import grouped_matmul
from ds_npu.ops.layers import rms_norm, swiglu
from ds_npu.topology.machine import machine_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def tell(name: str, **said: float) -> None:
    torch.npu.synchronize()
    print(json.dumps({"name": name} | said))


def aten(name: str, func: Callable, *args: torch.Tensor | list[torch.Tensor] | float) -> None:
    """Call ``func`` on NPU copies; what it costs by torch's dispatch of it."""
    on_npu = tree_map_only(torch.Tensor, torch.Tensor.npu, args)
    torch.npu.synchronize()
    out = func(*on_npu)
    machine = machine_of(torch.npu.get_device_name())
    tell(name, seconds=operator_seconds(func, on_npu, {}, out, machine))


def drawn(seed: int) -> None:
    draw = random.Random(seed)
    ops = torch.ops.aten

    def size(most: int = 700) -> int:
        return draw.randint(1, most)

    dtype = draw.choice(DTYPES)
    m, n, k, b = size(), size(), size(), size(9)
    x, y, z = (torch.randn(*sizes, dtype=dtype) for sizes in ((m, k), (k, n), (m, n)))
    aten("aclnnMm", ops.mm.default, x, y)
    aten("aclnnAddmm", ops.addmm.default, z, x, y)
    aten("aclnnBatchMatMul", ops.bmm.default, x.expand(b, m, k).contiguous(), y.expand(b, k, n).contiguous())
    aten("aclnnSub", ops.sub.Tensor, z, torch.randn(n, dtype=dtype))
    aten("aclnnMul", ops.mul.Tensor, z, torch.randn(m, 1, dtype=dtype).expand(m, n))
    aten("aclnnInplaceAdd", ops.add_.Tensor, z, torch.randn(m, n, dtype=dtype))
    aten("aclnnExp", ops.exp.default, z)
    aten("aclnnEmbedding", ops.embedding.default, z, torch.randint(0, m, (size(50), 7)))
    aten("aclnnIndexSelect", ops.index_select.default, z, 0, torch.randint(0, m, (size(50),)))
    aten("aclnnInplaceZero", ops.zero_.default, z)
    aten("aclnnInplaceUniform", ops.uniform_.default, z)
    aten("aclnnSort", ops.sort.default, z)
    aten("aclnnTopkV2", ops.topk.default, z, draw.randint(1, n))
    rows = draw.randint(1, 50)
    aten(
        "aclnnIndexPutImpl",
        ops.index_put_.default,
        z,
        [torch.randint(0, m, (rows,))],
        torch.randn(rows, n, dtype=dtype),
    )
    layers(draw, dtype)
    convolution(draw, dtype)
    attention(draw)


def layers(draw: random.Random, dtype: torch.dtype) -> None:
    rows, width = draw.randint(1, 300), 16 * draw.randint(1, 40)
    x, weight = torch.randn(rows, width, dtype=dtype), torch.randn(width, dtype=dtype)
    rms_norm(x.npu(), weight.npu(), 1e-6)
    cost = rms_norm.cost(x, weight)
    # CANN keeps the reciprocal of each row's mean for the backward.
    tell("aclnnRmsNorm", flop=0, bytes=cost.read_bytes + cost.written_bytes + 4 * rows, arithmetic=0)
    swiglu(x.npu())
    cost = swiglu.cost(x)
    tell("aclnnSwiGlu", flop=0, bytes=cost.read_bytes + cost.written_bytes, arithmetic=0)
    experts, columns = draw.randint(1, 8), 16 * draw.randint(1, 20)
    half = x.to(torch.bfloat16)
    counts = torch.full((experts,), rows // experts)
    counts[0] += rows - counts.sum()
    weights = torch.randn(experts, width, columns, dtype=torch.bfloat16)
    grouped_matmul(half.npu(), weights.npu(), counts.npu())
    cost = grouped_matmul.cost(half, weights, counts)
    machine = machine_of(torch.npu.get_device_name())
    arithmetic = machine.product_seconds(math.ceil(rows / experts), columns, width, 2, experts)
    of_whole_groups = 2 * experts * math.ceil(rows / experts) * width * columns
    assert of_whole_groups >= cost.flop
    tell(
        "aclnnGroupedMatmulV5", flop=of_whole_groups, bytes=cost.read_bytes + cost.written_bytes, arithmetic=arithmetic
    )


def convolution(draw: random.Random, dtype: torch.dtype) -> None:
    groups, width, length = draw.randint(1, 4), draw.randint(1, 5), draw.randint(16, 200)
    ins, outs = groups * draw.randint(1, 40), groups * draw.randint(1, 40)
    x = torch.randn(2, ins, length, dtype=dtype).npu().requires_grad_()
    weight = torch.randn(outs, ins // groups, width, dtype=dtype).npu().requires_grad_()
    y = torch.nn.functional.conv1d(x, weight, padding=width - 1, groups=groups)
    machine, inner = machine_of(torch.npu.get_device_name()), ins // groups * width
    rows, moved = y.numel() // outs, sum(each.numel() * each.itemsize for each in (x, weight, y))
    flop = 2 * y.numel() * inner
    arithmetic = machine.product_seconds(rows, outs // groups, inner, y.itemsize, groups)
    tell("aclnnConvolution", flop=flop, bytes=moved, arithmetic=arithmetic)
    torch.autograd.grad(y, (x, weight), y.detach())
    moved += (x.numel() + weight.numel()) * y.itemsize
    arithmetic = machine.product_seconds(rows, outs // groups, inner, y.itemsize, 2 * groups)
    tell("aclnnConvolutionBackward", flop=2 * flop, bytes=moved, arithmetic=arithmetic)


def attention(draw: random.Random) -> None:
    batch, length, shared, share = draw.randint(1, 3), draw.randint(16, 200), draw.randint(1, 3), draw.randint(1, 3)
    q, k, v = (
        torch.randn(batch, length, heads, 64, dtype=torch.bfloat16) for heads in (shared * share, shared, shared)
    )
    causal = draw.random() < 0.5
    pairs = batch * (length * (length + 1) // 2 if causal else length * length)
    options = Options(mask=CAUSAL) if causal else Options()
    inputs = [each.npu() for each in (q, k, v)]
    result = attention_forward(*inputs, options)
    machine = machine_of(torch.npu.get_device_name())
    cost = attention_forward.cost(q, k, v, pairs)
    seconds = machine.attention_seconds(cost.flop, length)
    tell("aclnnFlashAttentionScore", flop=cost.flop, arithmetic=seconds)
    attention_backward(result.out, Inputs(*inputs), result, options)
    cost = attention_backward.cost(q, k, v, pairs)
    tell("aclnnFlashAttentionScoreGrad", flop=cost.flop, arithmetic=machine.attention_seconds(cost.flop, length))


if __name__ == "__main__":
    torch.manual_seed(0)
    for each in sys.argv[1:]:
        drawn(int(each))
