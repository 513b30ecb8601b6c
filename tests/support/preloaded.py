"""What ranks import, imported once in the forkserver: a world of ranks then starts in a fraction of a second.

No backward and no device: what they start would not survive the fork.
"""

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
    "ds_npu.engine.engines",
    "ds_npu.engine.pretrained",
    "gradient_rule",
    "peft",
    "sharded_models",
    "sequence_sharded_models",
    "tensor_parallel_rule",
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "torch._inductor.utils",
    "torch.distributed.device_mesh",
    "torch.distributed.tensor",
    "torch.fx.experimental.symbolic_shapes",
    "wire",
)

for name in MODULES:
    importlib.import_module(name)
if os.environ.get("DS_ACCELERATOR") == "cpu":
    with torch.no_grad():
        for family in tiny_models.FAMILIES:
            tiny_models.tiny(family, torch.float32)(input_ids=torch.ones(1, 4, dtype=torch.long))

# Ranks collect none of what is here already: that took a third of their time, and copied the pages that they share.
gc.collect()
gc.freeze()
