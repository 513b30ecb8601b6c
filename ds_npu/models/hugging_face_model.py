"""The part of transformers' models and configs that ds_npu uses, with types; transformers need not be installed.

transformers comes without type information, and importing it takes seconds.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, Protocol, TypeGuard, TypeVar

import torch
from torch import nn

from ds_npu.models import names
from ds_npu.models.attributes import attribute

FLOAT32_TOLERANCE = 1e-5
"""Relative to the largest value: models of transformers compute some parts in float32 even in a float64 model."""

T = TypeVar("T")


class HuggingFaceConfig(Protocol):
    """transformers' PreTrainedConfig."""

    attribute_map: Mapping[str, str]
    """This config's name of a setting, by the usual name."""
    base_model_tp_plan: Mapping[str, str] | None
    """transformers' own tensor-parallel plan: the style of a module, by its name with * for indices."""
    is_encoder_decoder: bool
    model_type: str
    num_attention_heads: int
    _attn_implementation: str
    _experts_implementation: str | None
    num_key_value_heads: int
    get_text_config: Callable[[], HuggingFaceConfig]


class HuggingFaceModel(nn.Module):
    """transformers' PreTrainedModel, for annotations only: no model is an instance of this class."""

    config: HuggingFaceConfig
    loss_type: str | None
    loss_function: Callable[..., torch.Tensor]
    get_decoder: Callable[[], nn.Module]
    get_input_embeddings: Callable[[], nn.Module]
    get_output_embeddings: Callable[[], nn.Module | None]
    save_pretrained: Callable[..., None]
    can_generate: Callable[[], bool]
    _is_stateful: bool
    _can_set_attn_implementation: Callable[[], bool]


def settings(config: HuggingFaceConfig) -> dict[str, Any]:
    """Every setting of ``config`` itself by the name it has there; a change of the dict changes the config."""
    return vars(config)


def has_setting(config: HuggingFaceConfig, name: str) -> bool:
    """Whether ``config`` itself has a setting ``name``."""
    return name in settings(config)


def setting(config: HuggingFaceConfig, name: str, kind: type[T]) -> T | None:
    """The setting with the usual name ``name``, if ``config`` has it and it is a ``kind``; else None."""
    found = settings(config).get(config.attribute_map.get(name, name))
    return found if isinstance(found, kind) else None


def config_of(module: nn.Module) -> HuggingFaceConfig | None:
    """The config that ``module`` holds itself: transformers', or one that a user's own model keeps in its place."""
    config: Any = attribute(module, "config", object)
    held: HuggingFaceConfig | None = config
    return held


def is_pretrained_config(config: object) -> bool:
    """Whether ``config`` is one of transformers' configs."""
    return _has_base(config, "PreTrainedConfig")


def is_hugging_face(module: nn.Module) -> TypeGuard[HuggingFaceModel]:
    """Whether ``module`` is one of transformers' models."""
    return _has_base(module, "PreTrainedModel")


def _has_base(instance: object, name: str) -> bool:
    return any(base.__module__.startswith("transformers.") and base.__name__ == name for base in type(instance).__mro__)


def hugging_face_model(model: nn.Module) -> HuggingFaceModel | None:
    """The first model of transformers that ``model`` is or holds; None where there is none."""
    return next(filter(is_hugging_face, model.modules()), None)


def outermost_hugging_face_models(model: nn.Module) -> list[HuggingFaceModel]:
    """The models of transformers that ``model`` is or holds and that are inside of no other one."""
    found: dict[str, HuggingFaceModel] = {}
    for name, module in model.named_modules():
        if is_hugging_face(module) and not any(names.is_inside(name, other) for other in found):
            found[name] = module
    return list(found.values())


def decoder_of(inner: HuggingFaceModel) -> nn.Module:
    """The decoder of ``inner``.

    ``inner`` itself where its ``get_decoder`` returns no blocks (ModernBERT: its head).
    """
    stated = inner.get_decoder()
    return stated if any(isinstance(each, nn.ModuleList) for each in stated.modules()) else inner


def transformers_module(name: str) -> ModuleType:
    """The module ``transformers.<name>``, imported where a model of transformers shows that it is there."""
    return importlib.import_module(f"transformers.{name}")


def logits_recorders(module: nn.Module) -> Iterator[tuple[type[nn.Module], int]]:
    """Yield the classes of routers that ``module`` names, and which of their outputs are the logits."""
    # transformers 5 names both for each family, as what can be recorded of a model.
    recorded: Mapping[str, Any] = getattr(module, "_can_record_outputs", None) or {}
    recorders = recorded.get("router_logits")
    for each in recorders if isinstance(recorders, list) else [recorders]:
        match each:
            case object(target_class=type() as kind, index=int() as index):
                yield kind, index


def logits_index(model: nn.Module, router: nn.Module) -> int:
    """The index of the logits among the outputs of ``router``, as transformers tells; 0 where it tells nothing."""
    recorders = (each for module in model.modules() for each in logits_recorders(module))
    return next((index for kind, index in recorders if type(router) is kind), 0)
