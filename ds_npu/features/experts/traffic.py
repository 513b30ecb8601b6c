"""The rows that a layer of experts sends for each token if all experts are chosen equally often, as lines of text."""

from __future__ import annotations

import math

from torch import nn

from ds_npu.config.moe import MoeSection
from ds_npu.features.build import Build
from ds_npu.features.experts.layout import Layout
from ds_npu.features.experts.listed import ListedLayout
from ds_npu.models import names
from ds_npu.models.hugging_face_model import config_of, setting
from ds_npu.models.kinds import own_shapes

BFLOAT16_BYTES = 2


def rows_away(experts: int, choices: int, ep: int, etp: int = 1) -> float:
    """The mean number of other ranks that a token goes to, once to each, over all choices and ranks."""
    not_there = math.comb(experts - experts // ep, choices) / math.comb(experts, choices)
    return (ep * etp - 1) * (1 - not_there)


def traffic(section: MoeSection, build: Build, layouts: dict[str, Layout]) -> list[str]:
    """Lines for people, one for each kind of layer; none where nothing is sent, or the choices are not known."""
    ep, etp = build.topology.size("ep"), build.topology.size("etp")
    config = config_of(build.model)
    choices = None if config is None else setting(config.get_text_config(), "num_experts_per_tok", int)
    if ep * etp == 1 or choices is None:
        return []
    lines = []
    for name, layout in layouts.items():
        if choices > layout.count:
            continue
        if section.dispatching.sends_to == "all ranks":
            rows: float = ep * etp - 1
        elif section.pad_to_capacity and section.capacity_factor is not None:
            rows = section.capacity_factor * choices * etp * (1 - 1 / (ep * etp))
        elif section.dispatching.sends_to == "experts":
            rows = choices * etp * (1 - 1 / (ep * etp))
        else:
            rows = rows_away(layout.count, choices, ep, etp)
        size = rows * _hidden(build.model.get_submodule(name), layout) * BFLOAT16_BYTES
        lines.append(
            f"moe: {names.generic(name)} sends a token to {rows:.2f} other ranks and back, where experts are chosen "
            f"equally often: {size:,.0f} bytes each way in bfloat16, in forward and in backward"
        )
    return list(dict.fromkeys(lines))


def _hidden(module: nn.Module, layout: Layout) -> int:
    """H, the hidden size of the tokens that the experts of ``module`` take."""
    if isinstance(layout, ListedLayout):
        return layout.hidden
    return own_shapes(module)["down_proj"][2 if layout.is_transposed else 1]
