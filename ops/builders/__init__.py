"""The operator builders of DeepSpeed on NPUs: the package ``NpuAccelerator.op_builder_dir`` names."""

from ds_npu.ops.builders.builder import ModuleBuilder, NotImplementedBuilder
from ds_npu.ops.builders.fused_adam import FusedAdamBuilder
from ds_npu.ops.builders.upstream_operators import (
    AsyncIOBuilder,
    CPUAdagradBuilder,
    CPUAdamBuilder,
    CPULionBuilder,
    FusedLambBuilder,
    FusedLionBuilder,
    InferenceBuilder,
    PinMemoryBuilder,
    QuantizerBuilder,
)

__all__ = [
    "AsyncIOBuilder",
    "CPUAdagradBuilder",
    "CPUAdamBuilder",
    "CPULionBuilder",
    "FusedAdamBuilder",
    "FusedLambBuilder",
    "FusedLionBuilder",
    "InferenceBuilder",
    "ModuleBuilder",
    "NotImplementedBuilder",
    "PinMemoryBuilder",
    "QuantizerBuilder",
]
