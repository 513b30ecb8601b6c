"""Writes what every function, method and class of torch and its libraries is, with or without ds_npu, as JSON.

    python patched_names.py FILE [ds_npu | planted]

Both ways an engine is made and takes a step, so that what ds_npu changes while it works is seen too.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "deepspeed", "accelerate", "transformers", "trl")
MODULES = (
    "accelerate.accelerator",
    "torch.distributed.tensor.parallel",
    "deepspeed.accelerator.npu_accelerator",
    "deepspeed.env_report",
    "deepspeed.runtime.pipe.engine",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.checkpoint",
    "deepspeed.moe.layer",
    "deepspeed.sequence.layer",
    "transformers.trainer",
    "trl.trainer.grpo_trainer",
    "trl.trainer.rloo_trainer",
    "transformers.trainer_jit_checkpoint",
)


def described(value: object) -> str | None:
    """What tells ``value`` from whatever may stand in its place; None for what is no code."""
    if isinstance(value, staticmethod | classmethod):
        return f"{type(value).__name__} {described(value.__func__)}"
    if isinstance(value, property):
        return f"property {described(value.fget)} {described(value.fset)}"
    if isinstance(value, types.FunctionType):
        code = value.__code__
        return f"{value.__module__}.{value.__qualname__} {code.co_filename}:{code.co_firstlineno}"
    if isinstance(value, type | types.BuiltinFunctionType | types.MethodDescriptorType | types.WrapperDescriptorType):
        return f"{type(value).__name__} {getattr(value, '__module__', '')}.{value.__qualname__}"
    return None


def names() -> dict[str, str]:
    """Full name -> description, for all that is imported of ``PACKAGES``."""
    found: dict[str, str] = {}
    for module_name, module in sorted(sys.modules.items()):
        if module_name.partition(".")[0] not in PACKAGES or not isinstance(module, types.ModuleType):
            continue
        for name, value in list(vars(module).items()):
            found[f"{module_name}.{name}"] = described(value)
            for base in value.__mro__ if isinstance(value, type) else ():
                if base.__module__.partition(".")[0] in PACKAGES:
                    prefix = f"{base.__module__}.{base.__qualname__}"
                    found.update({f"{prefix}.{key}": described(each) for key, each in list(vars(base).items())})
    return {name: said for name, said in found.items() if said is not None}


def work(section: dict[str, object]) -> None:
    """Make an engine and take a step, with ``section`` added to its config."""
    import deepspeed
    import torch

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    optimizer = {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}}
    config = {"train_batch_size": 1, "optimizer": optimizer, "zero_optimization": {"stage": 1}, **section}
    # Compiling takes a minute, and nothing here uses it.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 4), config=config)
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    torch.distributed.destroy_process_group()


def main() -> None:
    file, way = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    # As if it were not installed: without CANN transformers fails to import where it is.
    sys.modules["torch_npu"] = None
    if way:
        import ds_npu  # noqa: F401
    for name in MODULES:
        importlib.import_module(name)
    work({"ds_npu": {}} if way else {})
    if way == "planted":
        import deepspeed
        import torch

        torch.nn.Linear.forward = lambda self, x: x
        torch.nn.functional.gelu = torch.nn.functional.relu
        deepspeed.PipelineEngine.planted = lambda self: None
    with open(file, "w") as out:
        json.dump(names(), out)


if __name__ == "__main__":
    main()
