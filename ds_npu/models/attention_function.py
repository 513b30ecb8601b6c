"""ds_npu's attention in Hugging Face models: the function their attention modules call, and how a model is switched."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ds_npu.models import attention_mask as masks
from ds_npu.models.attention_mask import PackedMask
from ds_npu.models.attributes import attribute, has_attribute, set_attribute
from ds_npu.models.hugging_face_model import (
    config_of,
    is_hugging_face,
    is_pretrained_config,
    transformers_module,
)
from ds_npu.ops.attention import CAUSAL, FULL, Layout, Mask, Options, attention, sliding
from ds_npu.parallel.runtime.calls import Keywords
from ds_npu.parallel.runtime.forward_wraps import disable_tracing

NAME = "ds_npu"
"""The implementation's name in transformers' registries and in ``config._attn_implementation``."""

REFUSED_ARGUMENTS = {
    "position_bias": "a bias of the scores",
    "indices": "sparse attention to chosen keys",
    "block_indices": "sparse attention to chosen blocks",
    "cache": "a paged cache",
    "block_table": "a paged cache",
}
"""Arguments of transformers' attention functions that ask for what no kernel here computes."""

Given = torch.Tensor | Mask | PackedMask | None


class Implementation(NamedTuple):
    """An entry of transformers' registries of attention functions and of mask functions."""

    name: str
    attention: Callable[..., Any]
    mask: Callable[..., Any]


def use_attention(model: nn.Module, implementation: Implementation | None = None) -> None:
    """Make ``model``, which is or holds models of transformers, compute its attention with ``implementation``.

    None: ds_npu's, whose functions (``attention_function``, ``attention_mask``) show the signatures. The config is
    copied, since another model may have the same one. Before anything is changed, raises TypeError for a model that
    holds none of transformers, ValueError where transformers cannot exchange the attention or ds_npu not compute it.
    """
    check_exchangeable(model)
    register(model, implementation or Implementation(NAME, attention_function, masks.attention_mask))


def register(model: nn.Module, implementation: Implementation) -> None:
    """Make ``model`` compute its attention with ``implementation``, unchecked."""
    name, attend, mask = implementation
    transformers_module("modeling_utils").ALL_ATTENTION_FUNCTIONS.register(name, attend)
    transformers_module("masking_utils").ALL_MASK_ATTENTION_FUNCTIONS.register(name, mask)
    copied: dict[int, object] = {}
    for _, module in modules_with_config(model):
        config: Any = copy.deepcopy(config_of(module), copied)
        config._attn_implementation = name
        set_attribute(module, "config", config)


def modules_with_config(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules, by name, that hold one of transformers' configs themselves."""
    return ((name, module) for name, module in model.named_modules() if is_pretrained_config(config_of(module)))


def implementation_of(model: nn.Module) -> str:
    """The name of the implementation of ``model``'s attention; raises ValueError where its parts have several."""
    configs: list[Any] = [config_of(module) for _, module in modules_with_config(model)]
    found = sorted({str(config._attn_implementation) for config in configs})
    if len(found) != 1:
        raise ValueError(f"{type(model).__name__} computes attention in several ways: {', '.join(found)}")
    return found[0]


def check_interface(model: nn.Module) -> None:
    """Raise TypeError for a model that holds none of transformers, ValueError where it does not use the registries."""
    found = list(filter(is_hugging_face, model.modules()))
    if not found:
        raise TypeError(f"{type(model).__name__} holds no model of transformers, so its attention is its own")
    for each in found:
        if not each._can_set_attn_implementation():
            raise ValueError(f"{type(each).__name__} computes its attention itself: transformers cannot exchange it")


def check_exchangeable(model: nn.Module) -> None:
    """Raise TypeError and ValueError as ``use_attention`` does."""
    check_interface(model)


_ADVICE = 'which ds_npu\'s attention cannot do; leave it with attn_implementation="eager", and sequences whole'


@disable_tracing
def attention_function(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Given = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [B, N, S, D], key and value with fewer heads; out [B, S, N, D].

    ``attention_mask``: what ``attention_mask.attention_mask`` made, or a tensor of the user's: boolean, True where a
    key is seen, or added to the scores, 0 or (nearly) -inf. The result of a row that sees no key is 0 (as with
    transformers' "sdpa"; its "eager" gives the mean of all values). Raises ValueError for arguments it cannot honour.
    """
    refuse_unknown(module, arguments)
    query, key, value = in_autocast_dtype(query, key, value)
    mask = _mask_of(module, query, key, attention_mask, arguments)
    # No copy: projections write [B, S, N, D].
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if isinstance(mask, Mask):
        return attention(q, k, v, options_of(arguments, "BSND", mask))[0], None
    q_TND, k_TND, v_TND = (x.flatten(0, 1) for x in (q, k, v))
    if mask.rows is not None:
        q_TND = q_TND.index_select(0, mask.rows)
    if mask.keys is not None:
        k_TND, v_TND = (x.index_select(0, mask.keys) for x in (k_TND, v_TND))
    out, _ = attention(q_TND, k_TND, v_TND, options_of(arguments, "TND", mask.mask))
    if mask.rows is not None:
        out = out.new_zeros(q.shape[0] * q.shape[1], *out.shape[1:]).index_copy(0, mask.rows, out)
    return out.view(*q.shape[:2], *out.shape[1:]), None


def refuse_unknown(module: nn.Module, arguments: Keywords) -> None:
    """Raise ValueError where ``module`` calls attention with ``arguments`` that no kernel here computes."""
    for name, meaning in REFUSED_ARGUMENTS.items():
        if arguments.get(name) is not None:
            raise ValueError(f"{type(module).__name__} asks for {name}, {meaning}, {_ADVICE}")
    if arguments.get("output_attentions"):
        raise ValueError(f"{type(module).__name__} asks for output_attentions: its weights are never there, {_ADVICE}")


def options_of(arguments: Keywords, layout: Layout, mask: Mask) -> Options:
    """The options of a call with the ``arguments`` of transformers' interface, which has two names for sinks."""
    sinks = next((arguments[name] for name in ("s_aux", "sinks") if arguments.get(name) is not None), None)
    dropout_p = arguments.get("dropout") or 0.0
    softcap = arguments.get("softcap")
    return Options(layout, mask, arguments.get("scaling"), dropout_p, softcap=softcap, sinks=sinks)


def in_autocast_dtype(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Cast to autocast's dtype, as torch's own attention does: norms leave queries and keys in float32."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device) or tensors[0].dtype == torch.float64:
        return list(tensors)
    return [x.to(torch.get_autocast_dtype(device)) for x in tensors]


def _mask_of(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, given: Given, arguments: Keywords
) -> Mask | PackedMask:
    ends = [arguments.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k")]
    if isinstance(given, PackedMask):
        return given
    if isinstance(given, torch.Tensor):
        if ends[0] is not None:
            raise ValueError(
                f"{type(module).__name__} is given a mask and cu_seq_lens_q: either says which keys are seen"
            )
        return Mask(dense=hidden_of(given))
    mask = given or mask_of_module(module, arguments)
    if ends[0] is None:
        return mask
    if query.shape[0] != 1 or ends[1] is None:
        raise ValueError(
            f"{type(module).__name__} is given cu_seq_lens_q with a batch of {query.shape[0]}: packed documents come "
            "in a batch of 1, with cu_seq_lens_k"
        )
    return PackedMask(mask.packed(ends_of(ends[0]), ends_of(ends[1])))


def mask_of_module(module: nn.Module, arguments: Keywords) -> Mask:
    """The Mask of a call that has none.

    It is causal, with the rows at the last keys, unless the module or the call says otherwise.
    """
    causal = arguments.get("is_causal")
    if causal is None:
        causal = attribute(module, "is_causal", bool) if has_attribute(module, "is_causal") else True
    window = arguments.get("sliding_window")
    if window is None:
        return CAUSAL if causal else FULL
    if not causal:
        raise ValueError(f"{type(module).__name__} asks for a sliding_window, is not causal and has no mask of it")
    return sliding(window)


class _Once:
    """Caches ``make(tensor)`` until the tensor changes or is gone: all layers of a model are given the same tensor."""

    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        self.make = make
        self.made: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __call__(self, tensor: torch.Tensor) -> Any:
        if tensor.is_inference():  # An inference tensor does not tell whether it was changed.
            return self.make(tensor)
        if tensor not in self.made or self.made[tensor][0] != tensor._version:
            self.made[tensor] = tensor._version, self.make(tensor)
        return self.made[tensor][1]


def _hidden(seen: torch.Tensor) -> torch.Tensor:
    """Return True where a user's or transformers' mask hides a key."""
    if seen.dtype == torch.bool:
        return ~seen
    hidden = seen <= torch.finfo(seen.dtype).min / 2
    # The host waits for the device once for each mask: a bias taken for a mask would be silently wrong.
    if bool((seen.masked_fill(hidden, 0) != 0).any()):
        raise ValueError(
            f"a mask of {seen.dtype} with more than 0 and (nearly) -inf is a bias of the scores, {_ADVICE}"
        )
    return hidden


hidden_of = _Once(_hidden)
ends_of = _Once(lambda cumulative: cumulative.tolist()[1:])
"""The ends of the documents without the leading 0, on the host, where the kernel takes them."""
