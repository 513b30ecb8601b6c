"""Puts the fused operators of ``ds_npu.ops`` into a planned model.

Only modules of this one model change, never a class or a source file: they keep their class, parameters and hooks, and
get a forward of their own. Whether a module computes what an operator does is found by running both, not by its name.
An operator goes inside of forwards that tensor parallelism has wrapped; the order of the two features does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from torch import nn

from ds_npu.config.roles import Role
from ds_npu.features.fused_ops.fusion_result import FusionResult, result_lines
from ds_npu.features.fused_ops.loss import fuse_loss
from ds_npu.features.fused_ops.mlp import fuse_mlps
from ds_npu.features.fused_ops.norm import fuse_norms
from ds_npu.features.fused_ops.rotary import fuse_rotary
from ds_npu.models.attention_function import use_attention
from ds_npu.models.attributes import attribute, set_attribute
from ds_npu.models.plan import ModelPlan

FUSED_KEYS = "ds_npu_fused_ops"
"""The attribute of a model that is the set of the keys of its operators."""


def fuse_attention(model: nn.Module, plan: ModelPlan) -> Iterator[FusionResult]:
    """Make the transformers models in ``model`` compute their attention with ``ops.attention``."""
    attentions = plan.named(Role.ATTENTION)
    if not attentions:
        return
    try:
        use_attention(model)
    except (TypeError, ValueError) as error:
        reason = str(error)
    else:
        reason = ""
    for name in attentions:
        yield FusionResult(name, reason)


FUSIONS: Mapping[str, Callable[[nn.Module, ModelPlan], Iterable[FusionResult]]] = {
    "flash_attention": fuse_attention,
    "rms_norm": fuse_norms,
    "swiglu": fuse_mlps,
    "rotary": fuse_rotary,
    "cross_entropy": fuse_loss,
}
"""By the key of ``ds_npu.fused_ops``."""


def fused_keys(model: nn.Module) -> set[str]:
    """The keys of the operators that ``model`` was given already; the set belongs to the model."""
    keys = attribute(model, FUSED_KEYS, set)
    if keys is None:
        keys = set()
        set_attribute(model, FUSED_KEYS, keys)
    return keys


def fuse(model: nn.Module, plan: ModelPlan, wanted: Collection[str]) -> list[str]:
    """Put the operators whose keys are ``wanted`` into ``model``, each once.

    Returns lines for people: where each operator is, where it is not, and why. Call it before DeepSpeed takes the
    model, so that ZeRO-3's hooks stay outside; weights may be on the meta device.
    """
    done = fused_keys(model)
    lines: list[str] = []
    for key, fusion in FUSIONS.items():
        if key in wanted and key not in done:
            lines += result_lines(key, list(fusion(model, plan)))
            done.add(key)
    return lines
