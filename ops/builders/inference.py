"""Operators of DeepSpeed's inference engine and of its quantized communication (ZeRO++), in torch operators."""

from __future__ import annotations

from deepspeed.ops.op_builder import npu

from ds_npu.ops.builders import builder


class InferenceBuilder(builder.AscendPaths, npu.InferenceBuilder):  # type: ignore[misc]
    """The transformer layer of ``deepspeed.init_inference``."""


class QuantizerBuilder(builder.upstream("QuantizerBuilder")):  # type: ignore[misc]
    """Blockwise integer quantization."""

    NAME = "quantizer"
