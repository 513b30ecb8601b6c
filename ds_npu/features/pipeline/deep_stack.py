"""DeepStack over stages: visual features that a text model adds to the hidden states behind each of its first blocks.

The first stage computes all of them. Those of the blocks of later stages travel with the hidden states, and so does
the mask that says to which tokens they belong. Source: Meng et al. 2024 (arXiv 2406.04334); Qwen3-VL.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from ds_npu.parallel.pipeline.pass_through import BORDER_STATES
from ds_npu.parallel.runtime.micro_batch import running

FEATURES, MASK = "deepstack_visual_embeds", "visual_pos_masks"
"""Arguments of transformers' text models: for each block in order [visual tokens, H], or None; bool [B, S]."""


def link_deep_stack(model: nn.Module) -> None:
    """Make the text models of ``model``, in stages, send on the features that later stages add."""
    for module in model.modules():
        if FEATURES in inspect.signature(module.forward).parameters:
            module.register_forward_pre_hook(_crossing, with_kwargs=True)


def _crossing(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    states = BORDER_STATES.of(running())
    if states is None:
        return args, kwargs
    if states.arrived_extra:
        mask, *features = states.arrived_extra
        # The blocks before this stage have theirs.
        kwargs = kwargs | {MASK: mask, FEATURES: [torch.zeros_like(features[0])] * states.stage.before + features}
    later = (kwargs.get(FEATURES) or [])[states.stage.before + states.stage.blocks :]
    if later and states.stage.index < states.stage.count - 1:
        states.leaving_extra = (kwargs[MASK], *later)
    return args, kwargs
