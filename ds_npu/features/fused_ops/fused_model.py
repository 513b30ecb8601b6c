"""Puts the fused operators of ``ds_npu.ops`` into a planned model.

Only modules of this one model change, never a class or a source file: they keep their class, parameters and hooks, and
get a forward of their own. Whether a module computes what an operator does is found by running both, not by its name.
An operator goes inside of forwards that tensor parallelism has wrapped; the order of the two features does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial

from torch import nn

from ds_npu.config.roles import Role
from ds_npu.features.declaration import Change, make_changes
from ds_npu.features.fused_ops.fusion_result import FusionResult, result_lines
from ds_npu.features.fused_ops.loss import fuse_loss
from ds_npu.features.fused_ops.mlp import fuse_mlps
from ds_npu.features.fused_ops.norm import fuse_norms
from ds_npu.features.fused_ops.rotary import fuse_rotary
from ds_npu.features.modules.attention_exchange import exchanges_of_attention
from ds_npu.models.attention_function import check_exchangeable, use_attention
from ds_npu.models.plan import ModelPlan
from ds_npu.parallel.runtime.marks import Mark

FUSED_KEYS: Mark[frozenset[str]] = Mark("fused ops")
"""The keys of the operators in a model."""


def fuse_attention(model: nn.Module, plan: ModelPlan) -> Iterator[FusionResult]:
    """Yield for each attention whether it uses ``ops.attention``, or why not.

    The first result has the changes for all attentions.
    """
    reason = ""
    changes = exchanges_of_attention(model, "ds_npu's", partial(use_attention, model))
    try:
        check_exchangeable(model)
    except (TypeError, ValueError) as error:
        reason, changes = str(error), ()
    for name in plan.named(Role.ATTENTION):
        yield FusionResult(name, reason, changes=changes)
        changes = ()  # The first result makes all changes.


FUSIONS: Mapping[str, Callable[[nn.Module, ModelPlan], Iterable[FusionResult]]] = {
    "flash_attention": fuse_attention,
    "rms_norm": fuse_norms,
    "swiglu": fuse_mlps,
    "rotary": fuse_rotary,
    "cross_entropy": fuse_loss,
}
"""The function that puts in an operator, for each key of ``ds_npu.fused_ops``."""


def fused_keys(model: nn.Module) -> frozenset[str]:
    """The keys of the operators that ``model`` was given already."""
    return FUSED_KEYS.get(model) or frozenset()


def fuse(model: nn.Module, plan: ModelPlan, wanted: Collection[str]) -> list[str]:
    """Put the operators whose keys are ``wanted`` into ``model``, each once.

    Returns lines for people: where each operator is, where it is not, and why. Call it before DeepSpeed takes the
    model, so that ZeRO-3's hooks are outermost; weights may be on the meta device.
    """
    changes, lines = declare_operators(model, plan, wanted)
    make_changes(changes)
    return lines


def declare_operators(model: nn.Module, plan: ModelPlan, wanted: Collection[str]) -> tuple[list[Change], list[str]]:
    """Declare the changes of ``fuse``, in order, with the lines that it returns; the arguments are the same."""
    lines: list[str] = []
    changes: list[Change] = []
    new = [key for key in FUSIONS if key in wanted and key not in fused_keys(model)]
    for key in new:
        results = list(FUSIONS[key](model, plan))
        lines += result_lines(key, results)
        changes += [change for result in results for change in result.changes]
    if new:
        keys = fused_keys(model).union(new)
        changes.append(Change("sets", "", FUSED_KEYS.name, partial(FUSED_KEYS.set, model, keys)))
    return changes, lines
