"""Two steps of AdamW over state in host memory, in eight chunks, on an NPU whose streams are recorded.

ds_npu sim --devices 1 --trace FOLDER -- env PYTHONPATH=.:tests/support python tests/npu/swapped_step.py
"""

from __future__ import annotations

import torch
import torch_npu  # noqa: F401

from ds_npu.memory import state_chunks
from ds_npu.memory.chunked_step import ChunkedStep
from ds_npu.memory.state_chunks import Keeping, StateShard

CHUNKS, ELEMENTS = 8, 4096


def main() -> None:
    state_chunks.CHUNK = ELEMENTS
    weight = torch.randn(CHUNKS * ELEMENTS, device="npu").to(torch.bfloat16)
    master = weight.float().requires_grad_()
    adam = torch.optim.AdamW([master], lr=0.1, foreach=False)
    shard = StateShard(master, [weight], Keeping(False, "fp32"), 0)
    for chunk in shard.chunks:
        chunk.on_host = True
    shard.take({})
    step = ChunkedStep(adam, [shard])
    for _ in range(2):
        master.grad = torch.ones(CHUNKS * ELEMENTS, device="npu")
        step()
        shard.close()
    torch.npu.synchronize()


if __name__ == "__main__":
    main()
