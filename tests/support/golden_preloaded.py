"""The modules that ranks of goldens import, imported once in the forkserver; none of ds_npu by its name."""

from __future__ import annotations

import gc
import importlib
import os

import tiny_models
import torch

MODULES = (
    "accelerate",
    "deepspeed.moe.ep_experts",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "golden_runs",
    "peft",
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "torch._inductor.utils",
    "torch.distributed.device_mesh",
    "torch.distributed.tensor",
    "torch.fx.experimental.symbolic_shapes",
)

for name in MODULES:
    importlib.import_module(name)
if os.environ.get("DS_ACCELERATOR") == "cpu":
    with torch.no_grad():
        for family in tiny_models.FAMILIES:
            tiny_models.tiny(family, torch.float32)(input_ids=torch.ones(1, 4, dtype=torch.long))
gc.collect()
gc.freeze()
