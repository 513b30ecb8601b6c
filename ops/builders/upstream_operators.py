"""Builders of operators that DeepSpeed implements for NPUs: in torch operators, or in C++ for the host."""

from __future__ import annotations

from deepspeed.ops.op_builder import npu

from ds_npu.ops.builders import builder


class FusedLambBuilder(builder.upstream("FusedLambBuilder")):  # type: ignore[misc]
    """Lamb (``FusedLamb``), in torch operators."""

    NAME = "fused_lamb"


class FusedLionBuilder(builder.upstream("FusedLionBuilder")):  # type: ignore[misc]
    """Lion (``FusedLion``), in torch operators."""

    NAME = "fused_lion"


class AsyncIOBuilder(builder.Compiled, npu.AsyncIOBuilder):  # type: ignore[misc]
    """Files read and written past the page cache (ZeRO-Infinity), asynchronously, with libaio."""

    def is_compatible(self, verbose: bool = False) -> bool:
        compatible: bool = super().is_compatible(verbose)
        if not compatible and not self.error_log:
            self.error_log = "libaio's header or library was not found; install libaio-dev (apt) or libaio-devel (yum)"
        return compatible


class PinMemoryBuilder(builder.Answer, npu.PinMemoryBuilder):  # type: ignore[misc]
    """Page-locked host memory; the same C++ on every device, without CANN."""

    def missing(self) -> str:
        return builder.missing_compiler()


class CPUAdamBuilder(builder.Compiled, npu.CPUAdamBuilder):  # type: ignore[misc]
    """Adam and AdamW on the host (``DeepSpeedCPUAdam``)."""


class CPUAdagradBuilder(builder.Compiled, npu.CPUAdagradBuilder):  # type: ignore[misc]
    """Adagrad on the host (``DeepSpeedCPUAdagrad``)."""


class CPULionBuilder(builder.Compiled, npu.CPULionBuilder):  # type: ignore[misc]
    """Lion on the host (``DeepSpeedCPULion``)."""


class InferenceBuilder(builder.AscendPaths, npu.InferenceBuilder):  # type: ignore[misc]
    """The transformer layer of ``deepspeed.init_inference``."""


class QuantizerBuilder(builder.upstream("QuantizerBuilder")):  # type: ignore[misc]
    """Blockwise integer quantization (ZeRO++), in torch operators."""

    NAME = "quantizer"
