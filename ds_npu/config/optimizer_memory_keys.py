"""DeepSpeed's keys that cannot go with ``ds_npu.optimizer_memory``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ds_npu.config.deepspeed_keys import value_at
from ds_npu.config.deepspeed_readers import value_of
from ds_npu.config.deepspeed_schema import is_auto
from ds_npu.config.problems import Problem
from ds_npu.config.sections import DsNpuConfig, switched_on

STATE_LOCATION = "it decides where the optimizer's state is, and so does"
UNTRIED = "it was not tried with"
REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "zero_optimization.offload_optimizer.device": (("none",), STATE_LOCATION),
    "zero_optimization.offload_param.device": (("none",), "the weights must be on the device for"),
    "zero_optimization.zenflow": ((), STATE_LOCATION),
    "zero_optimization.zero_hpz_partition_size": ((1,), UNTRIED),
    "zero_optimization.zero_quantized_weights": ((False,), UNTRIED),
    "zero_optimization.zero_quantized_nontrainable_weights": ((False,), UNTRIED),
    "zero_optimization.round_robin_gradients": ((False,), UNTRIED),
    "bf16.bf16_master_weights_and_grads": ((False,), "there is no fp32 master weight for"),
    "bf16.bf16_optimizer_states": ((False,), "it keeps moments in bf16 by itself, beside"),
    "compile.deepcompile": ((False,), UNTRIED),
    "checkpoint.load_universal": ((False,), UNTRIED),
    "hybrid_engine.enabled": ((False,), UNTRIED),
}
"""DeepSpeed's keys: the accepted values, and why others are refused."""
ADAM = ("adam", "adamw")


def optimizer_memory_problems(ds_config: dict[str, Any], config: DsNpuConfig) -> Iterator[Problem]:
    """Keys that ``ds_npu.optimizer_memory`` refuses where it is on."""
    asked = [path for path, _ in switched_on(config.optimizer_memory, "ds_npu.optimizer_memory.")]
    if not asked:
        return
    keys = ", ".join(asked)
    # "auto": the Trainer and accelerate have not filled it in yet.
    if not value_at(ds_config, "bf16.enabled") and not is_auto(value_of(ds_config, "bf16.enabled")):
        yield Problem("bf16.enabled", value_at(ds_config, "bf16.enabled"), f"true with {keys}; or leave {keys} out")
    optimizer = value_at(ds_config, "optimizer.type")
    if isinstance(optimizer, str) and optimizer.lower() not in ADAM:
        accepted = f"'Adam' or 'AdamW' with {keys}, whose steps can be divided into chunks; or leave {keys} out"
        yield Problem("optimizer.type", optimizer, accepted)
    for path, (fine, why) in REFUSED.items():
        found = value_at(ds_config, path)
        if found is not None and found not in fine:
            accepted = " or ".join(repr(each) for each in fine) or "nothing"
            yield Problem(path, found, f"{accepted}: {why} {keys}. Leave one of them out")
    if config.moe.placement_interval:
        accepted = f"0 with {keys}: experts that move take the optimizer's state with them"
        yield Problem("ds_npu.moe.placement_interval", config.moe.placement_interval, accepted)
