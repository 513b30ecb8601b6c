"""Small attentions over the ranks of a Ulysses group, exact in any order of summation, and the same in one process."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ds_npu.parallel.context.ulysses import Heads, UlyssesAllToAll, post_to_heads, post_to_tokens, share_heads


@dataclass(frozen=True)
class Case:
    """An attention over all ranks: heads, tokens of each rank (the first as many as there are), sizes."""

    query_heads: int
    kv_heads: int
    counts: tuple[int, ...]
    batch: int = 1
    width: int = 4
    width_v: int = 4

    @property
    def heads(self) -> Heads:
        return share_heads(self.query_heads, self.kv_heads, dist.get_world_size())

    def exchange(self, heads: tuple[range, ...]) -> UlyssesAllToAll:
        return UlyssesAllToAll(dist.group.WORLD, dist.get_rank(), self.counts[: dist.get_world_size()], heads)

    @property
    def exchanges(self) -> list[UlyssesAllToAll]:
        """Of q, k and v."""
        return [self.exchange(heads) for heads in (self.heads.queries, self.heads.keys, self.heads.keys)]

    def whole(self, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
        """q, k and v of all ranks together, [B, S, N, D]: small integers, of which every sum is exact."""
        generator = torch.Generator().manual_seed(7)
        tokens = sum(self.counts[: dist.get_world_size()])
        shapes = ((self.query_heads, self.width), (self.kv_heads, self.width), (self.kv_heads, self.width_v))
        return [torch.randint(-8, 9, (self.batch, tokens, *each), generator=generator).to(dtype) for each in shapes]


CASES = (
    Case(4, 4, (3, 3, 3, 3)),
    Case(7, 7, (5, 2, 1, 4), batch=2),
    Case(8, 2, (2, 3, 4, 2), batch=2, width_v=3),
    Case(6, 3, (1, 4, 2, 3), width=6),
    Case(5, 1, (4, 1, 3, 2), batch=3, width_v=2),
    Case(9, 3, (1, 1, 1, 1), width=1, width_v=5),
)
"""Multi-head, uneven heads, fewer key heads than ranks, heads that cross, multi-query, a token each."""


def mine_of(x: torch.Tensor, exchange: UlyssesAllToAll) -> torch.Tensor:
    """This rank's tokens of the whole."""
    return torch.split(x, exchange.counts, dim=1)[exchange.rank].contiguous()


def heads_of(x: torch.Tensor, exchange: UlyssesAllToAll) -> torch.Tensor:
    """This rank's heads of the whole."""
    heads = exchange.heads[exchange.rank]
    return x[:, :, heads.start : heads.stop]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, repeated: tuple[int, ...] | None) -> torch.Tensor:
    """q, k and v are [B, S, N, D]; without the softmax, so that integers stay exact in any order of summation."""
    index = repeated or [head * k.shape[2] // q.shape[2] for head in range(q.shape[2])]
    k, v = k[:, :, list(index)], v[:, :, list(index)]
    return torch.einsum("bsnd,btnd,btne->bsne", q, k, v)


def one_process(case: Case) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """The result, the gradient it is given, and those of q, k and v."""
    inputs = [x.requires_grad_() for x in case.whole()]
    out = attention(*inputs, None)
    grad = torch.randint(-8, 9, out.shape, generator=torch.Generator().manual_seed(8)).to(out.dtype)
    return out.detach(), grad, list(torch.autograd.grad(out, inputs, grad))


def attend(case: Case, *inputs: torch.Tensor) -> torch.Tensor:
    """The result for this rank's tokens."""
    exchanges = case.exchanges
    flying = [post_to_heads(x, exchange) for x, exchange in zip(inputs, exchanges, strict=True)]
    out = attention(*[each.wait() for each in flying], case.heads.key_head_indices(dist.get_rank()))
    return post_to_tokens(out, exchanges[0]).wait()
