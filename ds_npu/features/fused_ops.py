"""``ds_npu.fused_ops``: operators that one NPU kernel does, in place of the model's own."""

from __future__ import annotations

from ds_npu.config import Section
from ds_npu.features.feature import Feature


class FusedOpsSection(Section):
    """One key an operator; ds_npu chooses for a key that is left out."""

    flash_attention: bool | None = None
    """Attention in one kernel that never stores the score matrix."""
    rms_norm: bool | None = None
    """RMSNorm in one kernel."""
    swiglu: bool | None = None
    """SwiGLU (SiLU gate times up projection) in one kernel."""
    rotary: bool | None = None
    """Rotary position embedding in one kernel."""
    cross_entropy: bool | None = None
    """Cross entropy in one kernel."""
    adamw: bool | None = None
    """The AdamW update in one kernel."""
    matmul_accumulate: bool | None = None
    """Weight gradients added to their buffer by the matrix multiplication itself."""


FUSED_OPS: Feature[FusedOpsSection] = Feature("fused_ops", planned=("fused_ops",))
