"""``ds_npu.fused_ops``: operators that one NPU kernel does, in place of the model's own."""

from __future__ import annotations

from ds_npu.config.section import Section


class FusedOpsSection(Section):
    """One key an operator. Left out: used on NPUs whose kernel passes a check at the start, nothing on the CPU."""

    flash_attention: bool | None = None
    """Attention in one kernel that never stores the score matrix."""
    rms_norm: bool | None = None
    """RMSNorm in one kernel."""
    swiglu: bool | None = None
    """SwiGLU (SiLU gate times up projection) in one kernel."""
    rotary: bool | None = None
    """Rotary position embedding in one kernel."""
    cross_entropy: bool | None = None
    """Cross entropy in one kernel; trained on labels, tensor ranks compute the vocabulary-parallel loss instead."""
    adamw: bool | None = None
    """The AdamW update of DeepSpeed's FusedAdam in one kernel; false: in PyTorch's operators, in all of the process."""
    matmul_accumulate: bool | None = None
    """Weight gradients added to their buffer by the matrix multiplication itself, with ZeRO 0 to 2."""
