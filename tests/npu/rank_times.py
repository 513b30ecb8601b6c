"""Two ranks, the second of which is late for an all-reduce, by ``torchrun`` on simulated NPUs with ``--trace``."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

ELEMENTS = 1 << 20


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.npu.set_device(rank)
    dist.init_process_group("hccl")
    x = torch.ones(ELEMENTS, device="npu")
    dist.all_reduce(x)
    torch.npu.synchronize()
    a = torch.ones((1 + rank) * 1024, 1024, device="npu", dtype=torch.bfloat16)
    b = torch.ones(1024, (1 + 7 * rank) * 1024, device="npu", dtype=torch.bfloat16)
    torch.mm(a, b)
    work = dist.all_reduce(x, async_op=True)
    # Nothing else tells a host that asks in a loop that the other rank has come.
    while not work.is_completed():
        pass
    if rank == 0:
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
    torch.npu.synchronize()
    assert x[0].item() == 4
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
