"""Images in the batches of a model in stages: the first stage holds the vision tower, and merges its output.

Pixels are concatenated over the samples of a batch. The tokens that they are merged into say how many images belong to
a sample. Positions of tokens depend on the sizes of images alone, and every stage computes them.

DeepStack's visual features, which a text model adds to the hidden states behind each of its first blocks, are all
computed in the first stage. Those of the blocks of later stages travel with the hidden states, and so does the mask
that says to which tokens they belong. Source: Meng et al. 2024 (arXiv 2406.04334); Qwen3-VL.
"""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from ds_npu.features.pipeline.micro_batches import REMEDY, sizes_of_parts
from ds_npu.models.hugging_face_model import HuggingFaceModel, hugging_face_model, setting, settings
from ds_npu.parallel.pipeline.pass_through import BORDER_STATES
from ds_npu.parallel.runtime.calls import Arguments, Keywords
from ds_npu.parallel.runtime.micro_batch import running

Pieces = dict[str, Sequence[Any]]
"""Pieces of arguments by name, one for each micro-batch."""


@dataclass(frozen=True)
class Pictures:
    """One kind of pictures: images or videos."""

    pixels: str
    """The argument with the pixels of all samples: [rows, ...]."""
    token: str
    """The setting with the id of the token for a piece of a picture."""
    grid: str | None = None
    """The argument with the sizes in rows of pixels [count, 3]; None: one row each, and equally many tokens."""
    of_each: tuple[str, ...] = ()
    """More arguments [count, ...], with an entry for each picture."""

    @property
    def arguments(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.pixels, self.grid))) + self.of_each


QWEN = (
    Pictures("pixel_values", "image_token_id", "image_grid_thw"),
    Pictures("pixel_values_videos", "video_token_id", "video_grid_thw", ("second_per_grid_ts",)),
)
ONE_SIZE = (Pictures("pixel_values", "image_token_id"),)
SERVED: dict[str, tuple[Pictures, ...]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), QWEN),
    **dict.fromkeys(("llava", "gemma3"), ONE_SIZE),
}
"""The pictures of each served type of model: their pixels become only token embeddings and DeepStack features."""
INPUTS = (
    *("pixel_values", "pixel_values_videos", "pixel_attention_mask", "image_sizes", "image_embeds", "video_embeds"),
    *("input_features", "input_values", "audio_values", "mm_encoder_outputs"),
)
"""Arguments of transformers' models for the modules that stand before their text model."""
FEATURES, MASK = "deepstack_visual_embeds", "visual_pos_masks"
"""Arguments of transformers' text models: for each block in order [visual tokens, H], or None; bool [B, S]."""


def pictures_of(model: nn.Module) -> tuple[Pictures, ...]:
    """The kinds of pictures that stages of ``model`` can be given."""
    found = hugging_face_model(model)
    return () if found is None else SERVED.get(found.config.model_type, ())


def check_images(model: nn.Module, given: Keywords) -> None:
    """Raise ValueError for inputs other than tokens that stages of ``model`` cannot be given."""
    served = [each.pixels for each in pictures_of(model)]
    refused = [name for name in INPUTS if given.get(name) is not None and name not in served]
    if refused:
        raise ValueError(
            f"{type(model).__name__} is cut into stages, and is given {', '.join(refused)}: only the first stage has "
            "what they are for, and it is not known what the other stages need of them. Accepted are "
            f"{', '.join(served) or 'tokens'}; pixels in models of the types {', '.join(SERVED)}. What to do: "
            "ds_npu.parallel.pipeline 1"
        )


def check_no_pixels(model: nn.Module, given: Keywords) -> None:
    """Raise ValueError for pixels in a model whose sequences are sharded."""
    found = [each.pixels for each in pictures_of(model) if given.get(each.pixels) is not None]
    if found:
        raise ValueError(
            f"{type(model).__name__} is given {', '.join(found)}, and ds_npu.parallel.context shards its sequences: "
            "each of its ranks has a part of the tokens that images are merged into. What to do: leave "
            "ds_npu.parallel.context out"
        )


def without_pixels(model: nn.Module, given: Keywords) -> dict[str, Any]:
    """The arguments of the stages behind the first: ``given`` without pixels."""
    pixels = [each.pixels for each in pictures_of(model)]
    return {name: each for name, each in given.items() if name not in pixels}


def image_pieces(model: nn.Module, given: Keywords, count: int) -> Pieces:
    """Split each argument about images into ``count`` micro-batches; a micro-batch without images has no pixels.

    Raises ValueError where the tokens of the samples do not say to which of them an image belongs.
    """
    found: Pieces = {}
    for kind in pictures_of(model) if count > 1 else ():
        if any(given.get(name) is not None for name in kind.arguments):
            found |= _pieces(model, kind, given, count)
    return found


def _pieces(model: nn.Module, kind: Pictures, given: Keywords, count: int) -> Pieces:
    root = hugging_face_model(model)
    token = None if root is None else setting(root.config, kind.token, int)
    ids = given.get("input_ids")
    if token is None or ids is None:
        what = "no input_ids" if ids is None else f"no {kind.token} in its config"
        raise ValueError(f"{_named(model, kind, given)}, and {what}, which say to which sample each belongs. {REMEDY}")
    # The host waits for the device, once in a batch: sizes of tensors depend on these counts.
    of_samples: list[int] = (ids == token).sum(1).tolist()
    rows, tokens = _sizes(root, kind, given, sum(of_samples))
    ends = [0, *accumulate(tokens)]
    row_ends = [0, *accumulate(rows)]
    token_ends = [0, *accumulate(of_samples)]
    at = [0, *accumulate(sizes_of_parts(len(of_samples), count))]
    indices = [bisect_left(ends, token_ends[sample]) for sample in at]
    if [ends[index] if index < len(ends) else None for index in indices] != [token_ends[sample] for sample in at]:
        raise ValueError(
            f"{_named(model, kind, given)} of {', '.join(map(str, tokens))} tokens, and samples of "
            f"{', '.join(map(str, of_samples))} of them ({kind.token} {token}): it is not known which belong to a "
            f"sample. {REMEDY}"
        )
    parts = list(pairwise(indices))
    found: Pieces = {}
    for name in kind.arguments:
        whole = given.get(name)
        if whole is None:
            continue
        by = row_ends if name == kind.pixels else range(len(ends))
        # The grid is empty, not None: positions are then numbered as in batches with images.
        found[name] = [
            None if name == kind.pixels and first == last else whole[by[first] : by[last]] for first, last in parts
        ]
    return found


def _named(model: nn.Module, kind: Pictures, given: Keywords) -> str:
    shapes = {name: list(given[name].shape) for name in kind.arguments if isinstance(given.get(name), torch.Tensor)}
    return f"{type(model).__name__} is given " + ", ".join(f"{name} {shape}" for name, shape in shapes.items())


def _sizes(model: HuggingFaceModel | None, kind: Pictures, given: Keywords, total: int) -> tuple[list[int], list[int]]:
    """Rows of pixels, and tokens, of each picture; the batch has ``total`` tokens of pictures."""
    if kind.grid is None:
        count = len(given[kind.pixels])
        return [1] * count, [total // count if total % max(count, 1) == 0 else -1] * count
    grid = given.get(kind.grid)
    if grid is None:
        raise ValueError(f"{kind.pixels} are given without {kind.grid}, which says how large each of them is")
    assert model is not None
    merged = settings(model.config)["vision_config"].spatial_merge_size ** 2
    rows: list[int] = grid.prod(-1).tolist()
    return rows, [each // merged for each in rows]


def link_deep_stack(model: nn.Module) -> None:
    """Make the text models in a stage pass on the DeepStack features, and their mask, that later stages add."""
    for module in model.modules():
        if FEATURES in inspect.signature(module.forward).parameters:
            module.register_forward_pre_hook(_crossing, with_kwargs=True)


def _crossing(module: nn.Module, args: Arguments, kwargs: dict[str, Any]) -> tuple[Arguments, dict[str, Any]]:
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
