"""``ds_npu.swap``: activations that wait for backward in host memory."""

from __future__ import annotations

from ds_npu.config.section import Section


class SwapSection(Section):
    """What moves to host memory and back."""

    activations: bool = False
    """Copy activations to the host after forward and back before their backward."""
