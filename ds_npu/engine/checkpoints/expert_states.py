"""The state dict of an optimizer in two: of experts, and of all other weights.

An optimizer of torch has the states of parameters by their index in its groups. DeepSpeed's for 16 bits without ZeRO
(0.19.8 runtime/fp16/) has around that of its inner optimizer the float32 weights, by group.
"""

from __future__ import annotations

from typing import Any

State = dict[str, Any]

STATE, GROUPS = "state", "param_groups"
"""Keys of the state dict of an optimizer of torch."""
INNER = "optimizer_state_dict"
"""The key of it in that of DeepSpeed's optimizers for 16 bits."""
MASTERS = ("fp32_groups", "fp32_groups_flat")
"""Keys of float32 weights by group in the same state dict."""
OF_EXPERTS = "moe"
"""DeepSpeed's mark on a parameter group of experts."""


def part_of(optimizer: State | None, of_experts: bool) -> State | None:
    """The state dict of an optimizer with the states of experts' groups only, or of all others'."""
    if optimizer is None:
        return None
    inner: State = optimizer.get(INNER, optimizer)
    is_chosen = [bool(group.get(OF_EXPERTS)) == of_experts for group in inner[GROUPS]]
    groups = zip(inner[GROUPS], is_chosen, strict=True)
    indices = {index for group, chosen in groups if chosen for index in group["params"]}
    part = {**inner, STATE: {index: each for index, each in inner[STATE].items() if index in indices}}
    if inner is optimizer:
        return part
    masters = {
        key: [group if chosen else None for group, chosen in zip(optimizer[key], is_chosen, strict=True)]
        for key in MASTERS
        if key in optimizer
    }
    return {**optimizer, INNER: part, **masters}


def joined(dense: State, experts: State) -> State:
    """The state dict of which ``dense`` and ``experts`` are the parts."""
    inner, of_experts = dense.get(INNER, dense), experts.get(INNER, experts)
    whole = {**inner, STATE: {**inner[STATE], **of_experts[STATE]}}
    if inner is dense:
        return whole
    masters = {
        key: [other if group is None else group for group, other in zip(dense[key], experts[key], strict=True)]
        for key in MASTERS
        if key in dense
    }
    return {**dense, INNER: whole, **masters}
