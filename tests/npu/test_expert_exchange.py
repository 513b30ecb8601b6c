"""Products of experts fused with an all-to-all, on a simulated A3: the kernels, and a layer that uses them."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch_npu
from agreement import agree, numbers
from expert_cases import Layout
from ranks import run_on_ranks

from ds_npu.ops import expert_exchange
from ds_npu.parallel.expert.axis import ExpertAxis
from ds_npu.parallel.expert.experts import ExpertOptions, compute_experts
from ds_npu.parallel.expert.weights import ExpertWeights
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology

RANKS, LOCAL = 8, 2
E, H, COLUMNS, K, T = RANKS * LOCAL, 512, 96, 4, 768

pytestmark = pytest.mark.skipif(
    not torch_npu.npu.get_device_name().startswith(expert_exchange.A3), reason="only an A3 has these kernels"
)


def group_name() -> str:
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("npu"))
    return backend.get_hccl_comm_name(dist.get_rank())


def kernels() -> None:
    rank, dtype = dist.get_rank(), torch.bfloat16
    counts = torch.randint(100, 200, (RANKS, E), generator=torch.Generator().manual_seed(3)).tolist()
    sent = counts[rank]
    received = [counts[other][rank * LOCAL + expert] for other in range(RANKS) for expert in range(LOCAL)]
    fed = [numbers(sum(counts[other]), H, seed=other, dtype=dtype) for other in range(RANKS)]
    weights = numbers(E, H, 3 * 16, seed=50, dtype=dtype)
    parts = [each.split(counts[other]) for other, each in enumerate(fed)]
    mine = [torch.cat([part[rank * LOCAL + expert] for part in parts]) for expert in range(LOCAL)]
    own = weights[rank * LOCAL : (rank + 1) * LOCAL]
    for transposed in (False, True):
        weight = own.to(dtype).npu()
        weight = weight.transpose(1, 2).contiguous() if transposed else weight
        y, _, rows = torch_npu.npu_alltoallv_gmm(
            fed[rank].to(dtype).npu(), weight, group_name(), RANKS, sent, received, trans_gmm_weight=transposed,
            permute_out_flag=True,
        )  # fmt: skip
        agree(rows, torch.cat(mine), roundings=0)
        pairs = [(x @ w, x.abs() @ w.abs()) for x, w in zip(mine, own, strict=True)]
        agree(y, torch.cat([each for each, _ in pairs]), magnitude=torch.cat([each for _, each in pairs]))
        # Back to where the rows came from, times other matrices.
        back = numbers(E, H, H, seed=51, dtype=dtype)
        weight = back[rank * LOCAL : (rank + 1) * LOCAL].to(dtype).npu()
        weight = weight.transpose(1, 2).contiguous() if transposed else weight
        found, _ = torch_npu.npu_gmm_alltoallv(
            rows, weight, group_name(), RANKS, received, sent, trans_gmm_weight=transposed
        )
        pairs = [(x @ w, x.abs() @ w.abs()) for x, w in zip(parts[rank], back, strict=True)]
        agree(found, torch.cat([each for each, _ in pairs]), magnitude=torch.cat([each for _, each in pairs]))


def nothing() -> None:
    weight, few = torch.zeros(LOCAL, H, H).bfloat16().npu(), [0] * E
    torch_npu.npu_alltoallv_gmm(weight[0, :0], weight, group_name(), RANKS, few, few)
    torch.npu.synchronize()


def test_few_bytes_are_refused():
    with pytest.raises(Exception, match="CANN supports 2 MiB to 100 MiB"):
        run_on_ranks(RANKS, nothing, backend="hccl", sets_device=True, deadline_s=300.0)


def test_the_kernels():
    run_on_ranks(RANKS, kernels, backend="hccl", sets_device=True, deadline_s=300.0)


def layer(is_transposed: bool) -> None:
    """Within twice the error of separate calls; too small a micro-batch is dispatched by alltoall."""
    axis = ExpertAxis.of(Topology(Degrees(dp=RANKS, ep=RANKS)), tokens_are_sharded=False)
    layout, generator = Layout(is_transposed=is_transposed), torch.Generator().manual_seed(1)
    whole = {
        "up": torch.randn(E, 2 * COLUMNS, H, generator=generator) * 0.05,
        "down": torch.randn(E, H, COLUMNS, generator=generator) * 0.05,
    }
    if is_transposed:
        whole = {name: each.transpose(1, 2).contiguous() for name, each in whole.items()}
    whole = {name: each.bfloat16().double() for name, each in whole.items()}
    own = torch.Generator().manual_seed(10 + axis.rank)
    x = torch.randn(T, H, generator=own).bfloat16().double()
    weights, ids = torch.rand(T, K, generator=own).double(), torch.rand(T, E, generator=own).argsort(1)[:, :K]
    right = gradients(lambda x, weights, up, down: dense(x, ids, weights, up, down, layout), x, weights, whole)
    summed = [each.float().npu() for each in right[3:]]
    for each in summed:
        dist.all_reduce(each)
    right = [*right[:3], *(each.cpu().double().chunk(RANKS)[axis.rank] for each in summed)]
    shards = {name: each.chunk(RANKS)[axis.rank].bfloat16().npu() for name, each in whole.items()}
    errors = {}
    for options, used in itertools.product(("alltoall", "fused"), (x, x[:16])):
        run = partial(step, options, ids[: len(used)].npu(), layout, axis)
        found = gradients(run, used.bfloat16().npu(), weights[: len(used)].float().npu(), shards)
        if len(used) == T:
            errors[options] = [
                float((a.cpu().double() - b).norm() / b.norm()) for a, b in zip(found, right, strict=True)
            ]
    assert all(one <= 2 * other for one, other in zip(errors["fused"], errors["alltoall"], strict=True)), errors


def step(dispatcher, ids, layout, axis, *leaves):
    x, weights, up, down = leaves
    experts = ExpertWeights(up, down, layout.activation, layout.is_transposed)
    return compute_experts(x, ids, weights, experts, axis, ExpertOptions(dispatcher))


def dense(x, ids, weights, up, down, layout):
    """``plain`` of as many experts as there are here."""
    out = torch.zeros_like(x)
    for expert, choice in itertools.product(range(E), range(K)):
        chosen = (ids[:, choice] == expert).nonzero()[:, 0]
        first = x[chosen] @ (up[expert] if layout.is_transposed else up[expert].t())
        y = layout.activation(first) @ (down[expert] if layout.is_transposed else down[expert].t())
        out = out.index_add(0, chosen, y * weights[chosen, choice, None])
    return out


def gradients(run, x, weights, of) -> list[torch.Tensor]:
    leaves = [each.clone().requires_grad_() for each in (x, weights, of["up"], of["down"])]
    out = run(*leaves)
    coefficients = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(out)
    return [out.detach(), *torch.autograd.grad((out * coefficients).sum(), leaves)]


@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_layer(is_transposed):
    run_on_ranks(RANKS, layer, is_transposed, backend="hccl", sets_device=True, deadline_s=300.0)
