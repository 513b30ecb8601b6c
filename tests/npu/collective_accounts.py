"""Four ranks on NPUs 0, 1, 8 and 9, which are on two nodes: one call of each collective, by ``torchrun``."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

NPUS = (0, 1, 8, 9)
NUMBERS = 4096


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.npu.set_device(NPUS[rank])
    dist.init_process_group("hccl")
    own, whole = torch.ones(NUMBERS, device="npu"), torch.ones(len(NPUS) * NUMBERS, device="npu")
    dist.all_gather_into_tensor(whole, own)
    dist.reduce_scatter_tensor(own, whole)
    dist.all_reduce(whole)
    dist.all_to_all_single(torch.empty_like(whole), whole)
    dist.broadcast(own, 0)
    if rank == 0:
        dist.send(own, 1)
    if rank == 1:
        dist.recv(own, 0)
    if rank == 2:
        dist.send(own, 1)
    if rank == 1:
        dist.recv(own, 2)
    torch.npu.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
