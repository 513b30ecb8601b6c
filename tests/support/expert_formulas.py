"""What the operators of experts compute, written down a second time: with masks and one product for each row."""

from __future__ import annotations

import torch

from ds_npu.ops.grouped_matmul import grouped_matmul, grouped_outer, grouped_outer_accumulate_
from ds_npu.ops.token_permutation import token_permute, token_unpermute


def groups_of(counts: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(counts)).repeat_interleave(counts)


def products(x, weight, counts):
    return torch.einsum("pk,pkn->pn", x, weight[groups_of(counts)])


def outers(a, b, counts):
    chosen = torch.nn.functional.one_hot(groups_of(counts), len(counts)).to(a.dtype)
    return torch.einsum("pe,pm,pn->emn", chosen, a, b)


def permuted(x, ids, rows):
    # Python's sort is stable, too.
    pairs = sorted((int(each), place) for place, each in enumerate(ids.flatten()))
    order = torch.tensor([place for _, place in pairs])
    places = torch.tensor([int((order == place).nonzero()) for place in range(len(order))])
    return x[order // ids.shape[1]][:rows], places.int()


def unpermuted(rows, places):
    there = torch.cat([rows, rows.new_zeros(places.numel(), rows.shape[1])])
    return there[places.long()].sum(1)


FORMULAS = {
    grouped_matmul: products,
    grouped_outer: outers,
    grouped_outer_accumulate_: lambda buffer, a, b, counts: buffer + outers(a, b, counts),
    token_permute: permuted,
    token_unpermute: unpermuted,
}


def results(found) -> list[torch.Tensor]:
    return list(found) if isinstance(found, tuple) else [found]
