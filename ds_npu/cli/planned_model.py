"""A model as rank 0 of a planned world would hold it: made, changed and given placements on the meta device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from ds_npu.checkpoint.loading import meta_model
from ds_npu.config.check import Checked
from ds_npu.config.problems import printable
from ds_npu.engine.placements import complete_placements
from ds_npu.features.build import Build
from ds_npu.features.declaration import table
from ds_npu.features.driver import apply_features, values_in
from ds_npu.models import names
from ds_npu.models.hugging_face_model import setting
from ds_npu.parallel.runtime.forward_wraps import wraps_of
from ds_npu.parallel.runtime.marks import marks_of
from ds_npu.parallel.runtime.placement import Placement, placement_of
from ds_npu.topology.degrees import Axis, Degrees
from ds_npu.topology.topology import PlannedTopology

ASSUMED = (
    "Assumed: NPUs whose kernels pass their checks, and weights that agree with their roles (the probe was not run)."
)

MOST_LAYERS = 1000
OF_DS_NPU = "ds_npu_"
"""The beginning of the names of the attributes that ds_npu gives tensors."""

Row = tuple[str, str, str, str, str]


def lines(path: Path, checked: Checked, all_changes: bool) -> Iterator[str]:
    """The changes to the model of the config at ``path``, and the placements of its parameters on rank 0.

    ``all_changes``: also what ds_npu has then left on modules and parameters.
    Raises ValueError for a model that a feature refuses.
    """
    model = model_without_weights(path)
    if isinstance(model, str):
        yield from ("", f"What ds_npu changes of the model is not known: {printable(model)}")
        return
    topology = PlannedTopology(checked.degrees)
    build = Build(topology, model, checked.config.plan, "npu", is_planned=True)
    declarations = apply_features(values_in(checked.config), build)
    complete_placements(model, topology, ("pp",) if build.is_cut_into_stages else (), checked.zero_stage or 0)
    yield from ("", f"What ds_npu changes for {type(model).__name__}, in this order")
    yield from (f"  {line}" for line in (*(list(table(declarations)) or ["nothing"]), *build.notes))
    if all_changes:
        yield from ("", f"What ds_npu leaves on {type(model).__name__}", *(f"  {line}" for line in left_on(model)))
    yield from ("", "Parameters of rank 0", *(f"  {line}" for line in (*placements(model, checked.degrees), ASSUMED)))


def model_without_weights(path: Path) -> nn.Module | str:
    """The model of the Hugging Face config at ``path`` without weights, in training mode; or why there is none."""
    try:
        config: Any = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
        layers = setting(config.get_text_config(), "num_hidden_layers", int) or 0
        if layers > MOST_LAYERS:
            return f"{layers:,} layers, more than {MOST_LAYERS:,}"
        autos = (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText)
        kinds = [auto for auto in autos if type(config) in auto._model_mapping] or [transformers.AutoModel]
        # The dtype does not matter, so no checkpoint has to tell it.
        model: nn.Module = meta_model(kinds[0], path, torch.float32, trust_remote_code=False).train()
    except Exception as error:  # Any: the values of a config may be anything, and transformers computes with them.
        return f"transformers cannot make it ({type(error).__name__}: {error})"
    return model


def left_on(model: nn.Module) -> Iterator[str]:
    """A table of the records of modules, the wraps of their forwards, and the marks of parameters."""
    found: list[tuple[str, str, str, str]] = []
    for name, module in model.named_modules():
        found += [("record", mark, type(value).__name__, name) for mark, value in marks_of(module).items()]
        if levels := [wrap.level.name for wrap in wraps_of(module)]:
            found.append(("forward", "wraps, outermost first", ", ".join(levels), name))
    for name, parameter in model.named_parameters():
        for mark, value in vars(parameter).items():
            if mark.startswith(OF_DS_NPU):
                words = mark.removeprefix(OF_DS_NPU).replace("_", " ")
                found.append(("parameter", words, type(value).__name__, name))
    groups: dict[tuple[str, ...], list[str]] = {}
    for *row, name in found:
        groups.setdefault((*row, names.generic(name)), []).append(name)
    rows = [(*row[:3], names.abbreviated(parts) or "the model") for row, parts in groups.items()]
    yield from columns(rows) if rows else ["nothing"]


def columns(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """``rows`` as lines whose columns begin below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{each:<{width}}" for each, width in zip(row, widths, strict=True)).rstrip()


def placements(model: nn.Module, degrees: Degrees) -> Iterator[str]:
    """A table with a row for parameters that differ only in indices, and the sums below it."""
    groups: dict[Row, list[str]] = {}
    whole = held = 0
    for parameter in model.parameters():
        placement = placement_of(parameter)
        whole, held = whole + math.prod(placement.shape), held + parameter.numel()
        row = (names.generic(placement.name), str(list(placement.shape)), *_along(placement, degrees))
        groups.setdefault(row, []).append(placement.name)
    rows: list[Row] = [("parameter", "whole shape", "held by this rank", "same values over", "gradient")]
    rows += [(names.abbreviated(parts), *row[1:]) for row, parts in groups.items()]
    yield from columns(rows)
    yield f"{held:,} of {whole:,} numbers, before ZeRO shards them"


def _along(placement: Placement, degrees: Degrees) -> tuple[str, str, str]:
    def ranks(axes: Iterable[Axis]) -> str:
        return " x ".join(axis for axis in axes if degrees.size(axis) > 1) or "no other rank"

    held = [
        f"dim {each.dim} over {axis}: {each.length(0):,} of {each.size:,}" for axis, each in placement.sharded.items()
    ]
    partial = "".join(f"summed over {axis}, then " for axis in placement.partial)
    same = [axis for axis in placement.view if axis in (*placement.data_axes, *placement.copied)]
    return ", ".join(held) or "all", ranks(same), f"{partial}reduced over {ranks(placement.data_axes)}"
