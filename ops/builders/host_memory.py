"""Pinned host memory, and files read and written past the page cache (ZeRO-Infinity)."""

from __future__ import annotations

from deepspeed.ops.op_builder import npu

from ds_npu.ops.builders import builder


class AsyncIOBuilder(builder.Compiled, npu.AsyncIOBuilder):  # type: ignore[misc]
    """Asynchronous file input and output with libaio."""

    def is_compatible(self, verbose: bool = False) -> bool:
        compatible: bool = super().is_compatible(verbose)
        if not compatible and not self.error_log:
            self.error_log = "libaio's header or library was not found; install libaio-dev (apt) or libaio-devel (yum)"
        return compatible


class PinMemoryBuilder(builder.Answer, npu.PinMemoryBuilder):  # type: ignore[misc]
    """Page-locked host memory; the same C++ on every device, without CANN."""

    def missing(self) -> str:
        return builder.missing_compiler()
