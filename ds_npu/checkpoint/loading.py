"""Loads a Hugging Face checkpoint into a model; each rank reads and keeps its shards, or its stage, only.

    model = meta_model(AutoModelForCausalLM, folder)    # no memory
    ...                                                 # modules sharded in place, parameters marked
    load_checkpoint(model, folder, {"tp": rank})

Except for the model's own shards, loading needs no memory on the host that grows with the checkpoint: files are mapped,
and weights that have to be converted are built one at a time, or one index of dim 0 (an expert) at a time.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.modeling_utils import set_zero3_state

from ds_npu.checkpoint.conversion import Converter, Recipe, check_fit, conversions
from ds_npu.checkpoint.files import CheckpointError, open_checkpoint
from ds_npu.models.attributes import copy_attributes, set_attribute
from ds_npu.models.hugging_face_model import settings
from ds_npu.parallel.pipeline.pass_through import absent_weights, tied_in
from ds_npu.parallel.runtime.placement import placement_of
from ds_npu.parallel.tensor.sharding import Sharding
from ds_npu.topology.degrees import Axis

Coordinates = Mapping[Axis, int]
"""A rank's index along axes of the grid."""
Part = tuple[Sharding, int]
"""One rank's part of a weight along an axis: how the weight is sharded, and the rank."""

INITIALIZED = "_is_hf_initialized"
"""transformers' initialisation skips tensors and modules with this attribute."""


def meta_model(
    auto_class: Any, folder: str | Path, dtype: torch.dtype | str | None = None, **options: Any
) -> PreTrainedModel:
    """The model of ``folder``'s config on the meta device, in eval mode, as ``auto_class.from_pretrained`` makes it.

    ``auto_class`` is one of transformers' Auto classes or a model class. ``dtype`` is the config's where it is None or
    "auto", and that of the checkpoint's first floating-point tensor where the config has none. ``options`` are those of
    from_pretrained: values of the config, ``attn_implementation``, ``trust_remote_code``.
    Raises CheckpointError for a quantized checkpoint.
    """
    folder = Path(folder)
    config, rest = AutoConfig.from_pretrained(folder, return_unused_kwargs=True, **options)
    if settings(config).get("quantization_config") is not None:
        raise CheckpointError(f"{folder}: the checkpoint is quantized; a sharded model loads full-precision weights")
    if dtype in (None, "auto"):
        stored = (each.dtype for each in open_checkpoint(folder).values() if each.is_floating_point())
        dtype = config.dtype if config.dtype is not None else next(stored)
    # As from_pretrained does; from_config of older releases does not.
    config.dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    is_auto = not (isinstance(auto_class, type) and issubclass(auto_class, PreTrainedModel))
    make = auto_class.from_config if is_auto else auto_class._from_config
    if is_auto and "trust_remote_code" in options:
        rest["trust_remote_code"] = options["trust_remote_code"]
    # Under DeepSpeed's ZeRO-3, transformers would partition weights that are not there yet.
    with torch.device("meta"), set_zero3_state():
        model = make(config, dtype=dtype, **rest)
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


def load_checkpoint(
    model: PreTrainedModel,
    folder: str | Path,
    coordinates: Coordinates,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> None:
    """Load each parameter and persistent buffer of ``model``, or this rank's shard of it, from ``folder``.

    ``model`` is a transformers model, or a stage of one (``cut_into_stages``), whose sharded parameters have local
    shapes and a placement; ``coordinates`` are this rank's along the axes over which they are sharded. Tensors on the
    meta device are allocated on ``device``, in ``dtype`` if given (except weights that the model keeps in a dtype of
    their own), with their attributes; tied parameters remain one object. Other tensors keep object, dtype and device.
    Buffers that no checkpoint holds are computed as transformers computes them.

    Raises CheckpointError with every name that is missing, left over or of another shape, before anything is changed.
    """
    folder = Path(folder)
    tensors = open_checkpoint(folder)
    weights = _weights(model)
    # Weights of other stages belong to the model, too: the checkpoint fits all of it, or no stage of it.
    elsewhere = {name: torch.empty(shape, device="meta") for name, shape in absent_weights(model).items()}
    every = weights | elsewhere
    # Two stages hold a weight that the checkpoint may have under either name.
    tied = tied_in(model) or ()
    held = next((name for name in tied if name in weights), None)
    for name in tied:
        every[name] = every[held or next(iter(tied))]
    found = conversions(model, every, tensors)
    converter = Converter({name: whole_shape(name, each, coordinates) for name, each in every.items()}, model.config)
    loaded = check_fit(model, folder, every, found, converter, tensors) - elsewhere.keys()
    loaded |= {held} if held is not None else set()
    fresh = _materialize(model, dtype, torch.device(device))
    weights = _weights(model)
    with torch.no_grad():
        for recipe in found.recipes:
            if recipe.target in tied and held is not None:
                recipe = replace(recipe, target=held)
            if recipe.target not in elsewhere:
                _fill(recipe, weights, converter, tensors, coordinates)
    # transformers' save_pretrained reverts these conversions.
    model._weight_conversions = found.used
    _initialize(model, fresh - {id(weights[name]) for name in loaded})


def make_empty(model: PreTrainedModel, dtype: torch.dtype | None, device: torch.device | str) -> None:
    """Allocate what ``load_checkpoint`` would load; weights have no defined values, buffers are computed."""
    fresh = _materialize(model, dtype, torch.device(device))
    _initialize(model, fresh - {id(each) for each in _weights(model).values()})


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by each of their names."""
    return {name: each for name, each in model.state_dict(keep_vars=True).items() if isinstance(each, torch.Tensor)}


def shardings_of(tensor: torch.Tensor) -> Mapping[Axis, Sharding]:
    """The sharding of ``tensor`` along each axis; empty where it is whole, as buffers are."""
    return placement_of(tensor).sharded if isinstance(tensor, nn.Parameter) else {}


def parts_of(tensor: torch.Tensor, coordinates: Coordinates) -> list[Part]:
    """The part that the rank at ``coordinates`` holds of ``tensor``; empty where that is all of it."""
    return [(sharding, coordinates[axis]) for axis, sharding in shardings_of(tensor).items()]


def whole_shape(name: str, tensor: torch.Tensor, coordinates: Coordinates) -> torch.Size:
    """The shape of the whole weight; raises ValueError where the shape of ``tensor`` contradicts its placement."""
    shape = list(tensor.shape)
    for sharding, rank in parts_of(tensor, coordinates):
        if shape[sharding.dim] != sharding.length(rank):
            raise ValueError(
                f"{name} has the shape {tuple(tensor.shape)}, but by its sharding rank {rank} holds "
                f"{sharding.length(rank)} of {sharding.size} indices of dim {sharding.dim}"
            )
        shape[sharding.dim] = sharding.size
    return torch.Size(shape)


def _materialize(model: PreTrainedModel, dtype: torch.dtype | None, device: torch.device) -> set[int]:
    """Replace tensors on the meta device by uninitialised ones; return the ids of the new tensors."""
    main: torch.dtype = model.dtype
    kept = model._get_dtype_plan(dtype or main)
    stored = set(_weights(model))

    def wanted_dtype(name: str, old: torch.Tensor) -> torch.dtype:
        if name not in stored or not old.is_floating_point():
            return old.dtype
        own = (found for glob, found in kept.items() if re.search(glob.replace("*", ".*"), name))
        return next(own, dtype if dtype and old.dtype == main else old.dtype)

    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for path, module in model.named_modules():
        for held in (module._parameters, module._buffers):
            for leaf, old in held.items():
                if old is None or not old.is_meta:
                    continue
                if id(old) not in made:
                    name = f"{path}.{leaf}".removeprefix(".")
                    made[id(old)] = old, _real(old, wanted_dtype(name, old), device)
                held[leaf] = made[id(old)][1]
    return {id(new) for _, new in made.values()}


def _real(old: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    new = torch.empty_like(old, dtype=dtype, device=device, requires_grad=False)
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
    copy_attributes(old, new)
    # Hooks, which sum gradients over tensor ranks, are no attributes.
    new._backward_hooks = old._backward_hooks
    return new


def _fill(
    recipe: Recipe,
    weights: Mapping[str, torch.Tensor],
    converter: Converter,
    tensors: Mapping[str, torch.Tensor],
    coordinates: Coordinates,
) -> None:
    if not recipe.stacked:
        for name, whole in converter.convert(recipe, tensors).items():
            _copy_part(weights[name], whole, parts_of(weights[name], coordinates))
        return
    # One expert at a time: all at once would need twice the memory of the largest weight, and other ranks' experts
    # are not read.
    out = weights[recipe.target]
    parts = parts_of(out, coordinates)
    indices: list[int] | range = range(len(out))
    for sharding, rank in parts:
        if sharding.dim == 0:
            indices = list(itertools.chain.from_iterable(range(*bounds) for bounds in sharding.ranges[rank]))
    within = [(sharding, rank) for sharding, rank in parts if sharding.dim > 0]
    for held, index in zip(torch.split(out, 1), indices, strict=True):
        _copy_part(held, converter.convert(recipe.only(index), tensors)[recipe.target], within)


def same_elements(
    part: torch.Tensor, whole: torch.Tensor, parts: Sequence[Part]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Views of ``part``, which one rank holds, each with the view of the same elements of ``whole``."""
    if not parts:
        yield part, whole
        return
    (sharding, rank), *rest = parts
    begin = 0
    for start, stop in sharding.ranges[rank]:
        length = stop - start
        held = part.narrow(sharding.dim, begin, length)
        yield from same_elements(held, whole.narrow(sharding.dim, start, length), rest)
        begin += length


def _copy_part(out: torch.Tensor, whole: torch.Tensor, parts: Sequence[Part]) -> None:
    """Copy a part of ``whole`` into ``out``; nothing else of ``whole`` is read."""
    for held, given in same_elements(out, whole, parts):
        held.copy_(given)


def _initialize(model: PreTrainedModel, empty: set[int]) -> None:
    """Have transformers compute the tensors with the given ids, and no others.

    These are buffers that no checkpoint holds (rotary frequencies) and weights that the model's class allows to be
    missing. Raises CheckpointError where the model's ``_init_weights`` does not write one of them.
    """
    computed: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        tensors = {**module._parameters, **module._buffers}
        mine = {f"{path}.{leaf}".removeprefix("."): each for leaf, each in tensors.items() if id(each) in empty}
        for each in tensors.values():
            if each is not None and id(each) not in empty:
                set_attribute(each, INITIALIZED, True)
        set_attribute(module, INITIALIZED, not mine)
        computed |= mine
    # Each write raises a tensor's version, which shows the tensors that were not written.
    before = {name: (each, each._version) for name, each in computed.items()}
    if computed:
        model.initialize_weights()
    now = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    left = [name for name, (each, version) in before.items() if now.get(name) is each and each._version == version]
    if left:
        raise CheckpointError(
            f"{type(model).__name__} has tensors that are not in the checkpoint and that its _init_weights does not "
            f"compute: {', '.join(left)}. What to do: make them on a real device, or save them in the checkpoint"
        )
