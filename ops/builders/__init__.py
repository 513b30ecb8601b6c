"""The operator builders of DeepSpeed on NPUs: the package ``NpuAccelerator.op_builder_dir`` names."""

from ds_npu.ops.builders.builder import ModuleBuilder, NotImplementedBuilder
from ds_npu.ops.builders.fused_adam import FusedAdamBuilder
from ds_npu.ops.builders.fused_optimizer import FusedLambBuilder, FusedLionBuilder
from ds_npu.ops.builders.host_memory import AsyncIOBuilder, PinMemoryBuilder
from ds_npu.ops.builders.host_optimizer import CPUAdagradBuilder, CPUAdamBuilder, CPULionBuilder
from ds_npu.ops.builders.inference import InferenceBuilder, QuantizerBuilder

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
