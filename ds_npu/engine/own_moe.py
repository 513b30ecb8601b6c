"""Layers of DeepSpeed's own mixture of experts in a model: right with data ranks only."""

from __future__ import annotations

from deepspeed.moe.layer import MoE
from torch import nn

from ds_npu.engine.clients.asked_twice import MODEL_AXES
from ds_npu.topology.degrees import NAMES, Axis, Degrees

OTHER_AXES: tuple[Axis, ...] = (*MODEL_AXES, "ep", "etp")
"""All but those of data."""


def check_no_own_experts(model: nn.Module, degrees: Degrees) -> None:
    """Raise ValueError where ``model`` has layers of DeepSpeed's own MoE, and ``degrees`` more than data ranks.

    DeepSpeed makes their groups of consecutive ranks, whatever the ranks hold: of tensor or context ranks, which share
    samples, and of those that ds_npu calls by the same name (DeepSpeed 0.19.8 utils/groups.py).
    """
    found = next((name for name, each in model.named_modules() if isinstance(each, MoE)), None)
    sizes = {axis: degrees.size(axis) for axis in OTHER_AXES}
    others = ", ".join(f"{NAMES[axis]} {size}" for axis, size in sizes.items() if size > 1)
    if found is not None and others:
        raise ValueError(
            f"ds_npu.parallel: found {others} for a model with {found} (deepspeed.moe.layer.MoE), which DeepSpeed "
            "puts on ranks itself (its ep_size), right beside data ranks only. What to do: leave these keys out; or a "
            "module of experts that ds_npu places (docs/experts.md), with ds_npu.parallel.expert"
        )
