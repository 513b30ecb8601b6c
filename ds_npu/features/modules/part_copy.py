"""Copies of a part of a model for the probe: its classes and sizes, with random weights that take hardly any memory.

A large weight is a Hankel matrix, W[i, j] = r[i + j], as a view: no two of its rows or columns are equal, and it takes
the memory of one row and one column. Copies are float64 on the host, also of a model on the meta device, and making
them draws from no global random generator.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from ds_npu.config.roles import Role
from ds_npu.features.modules.thread_ranks import first_tensor
from ds_npu.models import kinds, names
from ds_npu.models.attributes import attribute, has_attribute, set_attribute
from ds_npu.models.hugging_face_model import (
    config_of,
    decoder_of,
    hugging_face_model,
    is_hugging_face,
    is_pretrained_config,
    settings,
)
from ds_npu.models.plan import ModelPlan
from ds_npu.models.zero3 import unpartitioned_shape

LARGE = 1 << 20
"""The most elements of a weight; a larger one is a view, and has no gradient."""
DROPOUT = "attention_dropout"
COLUMNS_KEPT = 64
"""The number of columns that a large MLP keeps, plus the remainder of its columns divided by it."""
COLUMN_PARTS = {Role.GATE: 1, Role.UP: 1, Role.GATE_UP: 2, Role.DOWN: 1, Role.EXPERTS: 2}
"""Roles of weights that hold an MLP's columns, and how many parts (gate and up) of that many columns each holds."""


@dataclass(frozen=True)
class ModelPart:
    """The module ``name`` of ``model``, with those of its blocks that are in ``blocks``."""

    model: nn.Module
    plan: ModelPlan
    name: str
    blocks: tuple[str, ...]
    large: int = LARGE

    @cached_property
    def own_plan(self) -> ModelPlan:
        """The plan of a copy: of its blocks only, or of all modules where it has no blocks."""
        roles = {name: role for name, role in self.plan.roles.items() if self._is_copied(name)}
        attentions = {name: shape for name, shape in self.plan.attentions.items() if name in roles}
        return replace(self.plan, roles=roles, blocks=self.blocks, attentions=attentions, tied=False)

    def _is_copied(self, name: str) -> bool:
        block = name if name in self.plan.blocks else self.plan.block(name)
        return names.is_inside(name, self.name) and (block in self.blocks or not self.blocks)

    @cached_property
    def _left_out(self) -> list[str]:
        return [each for each in self.plan.blocks if each not in self.blocks and names.is_inside(each, self.name)]

    @cached_property
    def weights(self) -> Mapping[int, torch.Tensor]:
        """Random numbers for each parameter and buffer, by its id in the model; copies share them."""
        generator = torch.Generator().manual_seed(1)
        module = self.model.get_submodule(self.name)
        outside = {id(each) for name in self._left_out for each in self.model.get_submodule(name).modules()}
        inside = [each for each in module.modules() if id(each) not in outside]
        shapes = {id(each): self._shape(name, each) for name, each in self.model.named_parameters()}
        parameters = {id(each): each for owner in inside for each in owner.parameters(recurse=False)}
        buffers = {id(each): each for owner in inside for each in owner.buffers(recurse=False)}
        drawn = {key: self._drawn(each, shapes[key], generator) for key, each in parameters.items()}
        return drawn | {key: _buffer(each, generator) for key, each in buffers.items()}

    def _shape(self, name: str, parameter: nn.Parameter) -> torch.Size:
        """The shape of the copy of ``parameter``: a large MLP gets fewer columns, since all are computed alike."""
        shape = list(unpartitioned_shape(parameter))
        column = self._columns(name, len(shape))
        if column is not None:
            dim, parts = column
            width = shape[dim] // parts
            shape[dim] = parts * min(width, COLUMNS_KEPT + width % COLUMNS_KEPT)
        return torch.Size(shape)

    def _columns(self, name: str, dims: int) -> tuple[int, int] | None:
        """The dim of a large MLP's weight ``name`` that holds its columns, and in how many parts; None for others."""
        owner, _, leaf = name.rpartition(".")
        layer = self.plan.adapted(owner) or owner
        role = self.plan.of(layer)
        module = self.model.get_submodule(layer)
        # A Conv1D stores its number of outputs; models with it are small.
        if role not in COLUMN_PARTS or kinds.output_dim(module) == 1:
            return None
        if role is Role.EXPERTS:
            return self._expert_columns(module, leaf, None if layer == owner else owner)
        is_down = role is Role.DOWN
        parts = COLUMN_PARTS[role]
        if torch.Size(kinds.own_shapes(module)["weight"]).numel() // parts <= self.large:
            return None
        # LoRA's B has the outputs of its layer, A the inputs; a bias runs along the outputs.
        factor = Role.LORA_A if is_down else Role.LORA_B
        if (layer != owner and self.plan.of(owner) is not factor) or (is_down and dims == 1):
            return None
        return int(is_down), parts

    def _expert_columns(self, experts: nn.Module, leaf: str, factor: str | None) -> tuple[int, int] | None:
        """``_columns`` of a weight or bias ``leaf`` of all experts, or of the ``factor`` of an adapter around them."""
        # PEFT's wrapper of one parameter holds its factors as lora_A.default and lora_B.default.
        wrapper = None if factor is None else self.model.get_submodule(names.parent(names.parent(factor)))
        adapted = leaf if wrapper is None else attribute(wrapper, names.PARAMETER, str)
        weight = (adapted or "").removesuffix("_bias")
        shape = kinds.own_shapes(experts).get(weight)
        is_down = weight == "down_proj"
        parts = COLUMN_PARTS[Role.EXPERTS] if weight == "gate_up_proj" else 1
        if shape is None or torch.Size(shape).numel() // parts <= self.large:
            return None
        dim = 2 if is_down != kinds.is_transposed(experts) else 1
        if factor is not None:
            # A [E * r, in] has the columns that are inputs, B [out, r * E] those that are outputs.
            is_out_in = bool(attribute(wrapper, names.IS_OUT_IN, bool))
            holder = Role.LORA_B if (dim == 1) == is_out_in else Role.LORA_A
            return (int(holder is Role.LORA_A), parts) if self.plan.of(factor) is holder else None
        if weight != leaf:
            return None if is_down else (1, parts)
        return dim, parts

    def _drawn(self, parameter: nn.Parameter, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
        """Random weights whose outputs are about as large as their inputs; norms and biases around 1."""
        if not parameter.is_floating_point():
            raise TypeError(f"it has weights of {parameter.dtype}")
        if shape.numel() <= self.large or len(shape) < 2:
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
            return drawn.div_(shape[-1] ** 0.5) if len(shape) > 1 else drawn.div_(3).add_(1)
        lines = torch.randn(shape[-2] + shape[-1] - 1, generator=generator, dtype=torch.float64).div_(shape[-1] ** 0.5)
        # All experts get the same weights.
        return lines.as_strided(shape[-2:], (1, 1)).expand(shape)

    def copied(self) -> nn.Module:
        """A copy in evaluation mode, inside of a module in which it has the name that it has in the model."""
        memory: dict[int, object] = {id(each): None for each in (*self.model.parameters(), *self.model.buffers())}
        memory |= {id(self.model.get_submodule(name)): None for name in self._left_out}
        wanted = {id(each) for each in self.model.parameters()}
        for key, numbers in self.weights.items():
            is_small = numbers.numel() <= self.large
            memory[key] = nn.Parameter(numbers, requires_grad=is_small) if key in wanted else numbers.clone()
        made = copy.deepcopy(self.model.get_submodule(self.name), memory)
        for name in self._left_out:
            path = name.removeprefix(f"{self.name}.")
            owner = made.get_submodule(names.parent(path))
            del owner._modules[path.rpartition(".")[2]]
        for module in made.modules():
            for hooks in (
                module._forward_hooks,
                module._forward_pre_hooks,
                module._backward_hooks,
                module._backward_pre_hooks,
            ):
                hooks.clear()
            # In evaluation nothing is dropped; a region that drops nothing draws no random numbers, either.
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if has_attribute(module, DROPOUT):
                set_attribute(module, DROPOUT, 0.0)
        self._settle(made)
        return _nested(self.name, made.eval())

    def _settle(self, made: nn.Module) -> None:
        """Reduce lists in Hugging Face configs to the blocks that are left; choose operators that do float64."""
        every = self.plan.blocks
        kept = [index for index, name in enumerate(every) if name in self.blocks]
        held = (config_of(each) for each in made.modules())
        configs = {id(config): config for config in held if config is not None and is_pretrained_config(config)}
        for own in map(settings, configs.values()):
            for key, value in own.items():
                if isinstance(value, list) and len(value) == len(every):
                    own[key] = [value[index] for index in kept]
            if "num_hidden_layers" in own:
                own["num_hidden_layers"] = len(kept)
            own.update(use_cache=False, _attn_implementation_internal="eager", _experts_implementation_internal="eager")


@dataclass(frozen=True)
class Unit:
    """A part of a model that is called with hidden states only."""

    part: ModelPart
    width: int
    argument: str | None = None
    """The name of the argument for hidden states; None: the first positional argument."""

    def call(self, model: nn.Module, x_BSH: torch.Tensor) -> torch.Tensor:
        module = model.get_submodule(self.part.name)
        out = module(x_BSH) if self.argument is None else module(**{self.argument: x_BSH})
        return first_tensor(out)


def decoder_unit(model: nn.Module, plan: ModelPlan, blocks: tuple[str, ...], large: int) -> Unit | None:
    """The decoder of a Hugging Face model with some of its blocks, which it calls with the right arguments."""
    root = hugging_face_model(model)
    if root is None:
        return None
    decoder = decoder_of(root)
    name = next((name for name, each in model.named_modules() if each is decoder), None)
    if decoder is root and name is not None:
        # Of Llama 4 and ModernBERT: the model inside, without the head, whose weight is one of the largest.
        inner = [f"{name}.{child}".removeprefix(".") for child, each in root.named_children() if is_hugging_face(each)]
        name = next((each for each in inner if all(names.is_inside(block, each) for block in plan.blocks)), name)
    embedding = plan.embedding
    if name is None or embedding is None or not blocks or not all(names.is_inside(each, name) for each in plan.blocks):
        return None
    width = kinds.own_shapes(model.get_submodule(embedding))["weight"][1]
    return Unit(ModelPart(model, plan, name, blocks, large), width, "inputs_embeds")


def _buffer(buffer: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A copy on the host; for a buffer on the meta device, random positive numbers like rotary frequencies."""
    if not buffer.is_meta:
        return buffer.detach().cpu().clone()
    if not buffer.is_floating_point():
        return torch.zeros_like(buffer, device="cpu")
    return torch.rand(buffer.shape, generator=generator, dtype=buffer.dtype).add_(0.1)


def _nested(name: str, module: nn.Module) -> nn.Module:
    """A module that holds only ``module``, under ``name``."""
    for part in reversed(name.split(".") if name else []):
        around = nn.Module()
        around.add_module(part, module)
        module = around
    return module
