"""A block of experts on two NPUs whose streams are recorded, forward and backward, twice.

    ds_npu sim --devices 2 --trace FOLDER -- env PYTHONPATH=.:tests/support python tests/npu/expert_overlap.py [off]

``off``: without ``moe.overlap``.
"""

from __future__ import annotations

import sys

import tiny_models
import torch
from ranks import run_on_ranks

from ds_npu.config.sections import DsNpuConfig
from ds_npu.features.build import Build
from ds_npu.features.driver import apply_features, values_in
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology


def body(overlap: bool) -> None:
    model = tiny_models.tiny("deepseek_v3", torch.float32)
    section = DsNpuConfig.model_validate({"parallel": {"expert": 2}, "moe": {"overlap": overlap}})
    apply_features(values_in(section), Build(Topology(Degrees(dp=2, ep=2)), model))
    block = model.model.layers[1].mlp.to("npu")
    for _ in range(2):
        x = torch.randn(2, 64, 32, device="npu", requires_grad=True)
        block(x).sum().backward()
    torch.npu.synchronize()


if __name__ == "__main__":
    run_on_ranks(2, body, "off" not in sys.argv, backend="hccl", sets_device=True)
