"""A forward beside a backward of another micro-batch through blocks of experts on two NPUs whose streams are recorded.

    ds_npu sim --devices 2 --trace FOLDER -- env PYTHONPATH=.:tests/support python tests/npu/paired_overlap.py [off]

``off``: one after the other.
"""

from __future__ import annotations

import sys

import tiny_models
import torch
from ranks import run_on_ranks

from ds_npu.config.sections import DsNpuConfig
from ds_npu.features.build import Build
from ds_npu.features.driver import apply_features, values_in
from ds_npu.parallel.runtime.micro_batch import new_forward
from ds_npu.parallel.runtime.paired_passes import PAIRED_PASS, PairedPass, PairRunner
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology


def body(is_paired: bool) -> None:
    model = tiny_models.tiny("qwen3_moe", torch.float32, mlp_only_layers=[])
    section = DsNpuConfig.model_validate({"parallel": {"expert": 2}})
    apply_features(values_in(section), Build(Topology(Degrees(dp=2, ep=2)), model))
    blocks = [layer.mlp.to("npu") for layer in model.model.layers]
    found: dict[PairedPass, torch.Tensor] = {}

    def forward(turns: PairedPass) -> None:
        with new_forward() as micro_batch:
            PAIRED_PASS.set(micro_batch, turns)
            x = torch.randn(2, 64, 32, device="npu", requires_grad=True)
            for block in blocks:
                x = x + block(x)
            found[turns] = x.sum()

    first, *others = (PairedPass() for _ in range(3))
    forward(first)
    with PairRunner(torch.device("npu")) as runner:
        for turns in others:
            if is_paired:
                runner.run(lambda turns=turns: forward(turns), found.pop(first).backward, (turns, first))
            else:
                forward(turns)
                found.pop(first).backward()
            first = turns
    torch.npu.synchronize()


if __name__ == "__main__":
    run_on_ranks(2, body, "off" not in sys.argv, backend="hccl", sets_device=True)
