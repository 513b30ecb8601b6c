"""Token mixing: where sequences are sharded, only attention may take anything from one token to another.

Modules are judged by what they are, not by their roles: context parallelism shards no weights, so it needs no plan of
them. A module that is not known to compute each token by itself is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from types import FunctionType

from torch import nn

from ds_npu.config.roles import Role
from ds_npu.models import kinds, names
from ds_npu.models.attributes import attribute, has_attribute
from ds_npu.models.hugging_face_model import HuggingFaceModel, decoder_of, settings
from ds_npu.models.linear_attention import linear_attentions, misfits
from ds_npu.parallel.pipeline.pass_through import PassThrough

WITHIN_TOKENS = {"full_attention", "sliding_attention", "chunked_attention", "mlp", "moe"}
"""Kinds of layers (a config's ``layer_types``) in which only attention mixes tokens."""
LINEAR = {"linear_attention", "mamba2", "mamba", "conv", "hybrid"}
"""Kinds of layers that may be linear attention of a kind that ds_npu can shard."""
INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""transformers' registry, from which an attention whose function can be exchanged takes its function."""
BY_HEAD = {"sinks", "gate_bias"}
"""Parameters of an attention that are alike for all tokens: one number for each head."""
NOISE = "neftune_noise_alpha"
"""The attribute of an embedding that transformers' NEFTune adds noise to (integrations/neftune.py)."""
WAY_OUT = "What to do: ds_npu.parallel.context 1"
MAY_MIX = (Role.REPLICATED, Role.BLOCK, Role.ATTENTION)
"""Roles that do not say that a module computes each token by itself."""


def check_settings(inner: HuggingFaceModel) -> None:
    """Raise ValueError where the class or config of ``inner`` says that more than attention mixes tokens."""
    mixing = list(_configured(inner))
    if mixing:
        raise ValueError(
            f"ds_npu.parallel.context: {type(inner).__name__} has {', '.join(mixing)}; a sequence can be sharded only "
            "where nothing but full, sliding-window or chunked attention, or linear attention of a known kind, goes "
            f"from token to token. {WAY_OUT}"
        )


def check_noise(inner: HuggingFaceModel) -> None:
    """Raise ValueError where ``inner`` adds NEFTune's noise to its embeddings, whose size is that of the sequence."""
    for name, module in inner.named_modules():
        if has_attribute(module, NOISE):
            raise ValueError(
                f"ds_npu.parallel.context: {type(inner).__name__}.{name} adds noise ({NOISE} "
                f"{attribute(module, NOISE, float)}), the smaller the longer the sequence is, and each context rank "
                f"has a part of it. What to do: leave {NOISE} out, or ds_npu.parallel.context = 1"
            )


def check_mixing(inner: HuggingFaceModel, roles: Mapping[nn.Module, Role]) -> None:
    """Raise ValueError, naming it, for a module of ``inner`` other than attention that may mix tokens.

    ``roles``: those that are known of its modules, or that the user gave them.
    """
    who = f"ds_npu.parallel.context: {type(inner).__name__}"
    decoder = decoder_of(inner)
    linear = linear_attentions(decoder)
    for name, layer in linear.items():
        for why in misfits(layer):
            raise ValueError(f"{who} has {name} ({type(layer).__name__}), which {why}. {WAY_OUT}")
    attentions = attentions_of(inner) | linear
    blocks = _blocks(decoder, attentions)
    if not blocks:
        raise ValueError(
            f"{who} has no stack of blocks with an attention in each that transformers can exchange. {WAY_OUT}"
        )
    around = {outer for block in blocks for outer in names.ancestors(block)}
    for name, module in decoder.named_modules():
        inside = any(names.is_inside(name, layer) for layer in linear)
        known = inside or name in {*around, *blocks, *attentions} or kinds.works_on_tokens(module)
        if not known and roles.get(module, Role.REPLICATED) in MAY_MIX:
            raise ValueError(
                f"{who} has {name} ({kinds.described(module)}), and nothing says that it works on each token by "
                "itself; a sequence can be sharded only where nothing but attention goes from token to token. What to "
                "do: if this does not either, give it a role that says so (column, mlp, norm ...) in ds_npu.plan"
            )


def attentions_of(inner: HuggingFaceModel) -> dict[str, nn.Module]:
    """The attentions whose function transformers can exchange, by their names in the decoder of ``inner``."""
    return {name: each for name, each in decoder_of(inner).named_modules() if is_exchangeable(each)}


def is_exchangeable(module: nn.Module) -> bool:
    """Whether ``module`` is an attention of transformers that takes its function from the registry."""
    forward = inspect.unwrap(type(module).forward)
    takes = isinstance(forward, FunctionType) and INTERFACE in forward.__code__.co_names
    return takes and kinds.is_attention(module) and kinds.own_shapes(module).keys() <= BY_HEAD


def _configured(inner: HuggingFaceModel) -> Iterator[str]:
    """Yield reasons against sharding that the model's class and config give, in words that its users know."""
    found_settings = settings(inner.config.get_text_config())
    linear = linear_attentions(inner)
    within = WITHIN_TOKENS | (LINEAR if linear else set())
    found = sorted(set(found_settings.get("layer_types") or ()) - within)
    if inner.config.is_encoder_decoder:
        found.append("an encoder and a decoder")
    if not found and inner._is_stateful and not linear:
        found.append("layers with a state")
    convolutions = (name for name, each in inner.named_modules() if isinstance(each, nn.Conv1d))
    found += [name for name in convolutions if names.parent(name) not in linear][:1]
    yield from found
    for key in ("layerdrop", "decoder_layerdrop"):
        if found_settings.get(key):
            yield f"{key} {found_settings[key]} (each rank would leave out other layers)"


def _blocks(decoder: nn.Module, attentions: Mapping[str, nn.Module]) -> set[str]:
    """The blocks of the one stack that holds all attentions; empty where a block is of a class without attention."""
    blocks = {_block_around(name) for name in attentions}
    stacks = {names.parent(name) for name in blocks}
    lists = {name: each for name, each in decoder.named_modules() if isinstance(each, nn.ModuleList)}
    held = {f"{name}.{index}": each for name in stacks & lists.keys() for index, each in lists[name].named_children()}
    every = {name: type(each) for name, each in held.items() if not isinstance(each, PassThrough)}
    # Blocks of one class have their MLPs in the place of attention (Nemotron-H).
    with_attention = {every[name] for name in blocks & every.keys()}
    is_one = len(stacks) == 1 and blocks <= every.keys() and set(every.values()) <= with_attention
    return set(every) if is_one else set()


def _block_around(name: str) -> str:
    """The outermost module around ``name`` that is one of a list."""
    around = [name, *names.ancestors(name)]
    return next((each for each in reversed(around) if each.rpartition(".")[2].isdecimal()), name)
