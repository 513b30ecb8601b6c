"""Puts the fused operators of ``ds_npu.ops`` into a planned Hugging Face model, as ``ds_npu.fused_ops`` says.

Only modules of this one model change, never a class or a file of functions: modules keep their class, parameters and
hooks, and get a forward of their own. That a module computes what the operator does is shown by running both, not
taken from its name. Where tensor parallelism has wrapped a forward already, the operator goes inside of that; it may
as well come first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from torch import nn

from ds_npu.config.roles import Role
from ds_npu.features.fused_ops.loss import fuse_loss
from ds_npu.features.fused_ops.mlp import fuse_mlps
from ds_npu.features.fused_ops.norm import fuse_norms
from ds_npu.features.fused_ops.outcome import Outcome, described
from ds_npu.features.fused_ops.rotary import fuse_rotary
from ds_npu.models.attention_function import use_attention
from ds_npu.models.plan import ModelPlan

FUSED_OPS_ATTRIBUTE = "ds_npu_fused_ops"
"""The attribute of a model that says which operators it was given."""


def fuse_attention(model: nn.Module, plan: ModelPlan) -> Iterator[Outcome]:
    """Let the transformers models in ``model`` compute their attention with ``ops.attention``."""
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
        yield Outcome(name, reason)


FUSIONS: Mapping[str, Callable[[nn.Module, ModelPlan], Iterable[Outcome]]] = {
    "flash_attention": fuse_attention,
    "rms_norm": fuse_norms,
    "swiglu": fuse_mlps,
    "rotary": fuse_rotary,
    "cross_entropy": fuse_loss,
}
"""By the key of the section."""


def fused_keys(model: nn.Module) -> set[str]:
    """The keys of what ``model`` was given already."""
    keys: set[str] = vars(model).setdefault(FUSED_OPS_ATTRIBUTE, set())
    return keys


def fuse(model: nn.Module, plan: ModelPlan, wanted: Collection[str]) -> list[str]:
    """Put the operators whose keys are ``wanted`` into ``model``; what was asked for before is not done again.

    Returns what became of it, in lines for people: where each operator is, and where it is not, and why. Call it before
    DeepSpeed takes the model, so that ZeRO-3's hooks stay outside; weights may be on the meta device.
    """
    done = fused_keys(model)
    lines: list[str] = []
    for key, fusion in FUSIONS.items():
        if key in wanted and key not in done:
            lines += described(key, list(fusion(model, plan)))
            done.add(key)
    return lines
