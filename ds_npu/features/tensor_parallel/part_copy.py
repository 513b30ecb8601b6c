"""Copies of a part of a model for probes: its classes and sizes, with random weights that take hardly any memory.

A large weight is a view in which each diagonal has one number, W[i, j] = r[i + j] (a Hankel matrix): no two of its rows
or columns are alike, and it takes the memory of one of each. All is float64 on the host, wherever the model is (on the
meta device, too), and no generator of random numbers is disturbed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ds_npu.config.roles import Role
from ds_npu.models import kinds, names
from ds_npu.models.plan import ModelPlan

LARGE = 1 << 20
"""Numbers in a weight from which on it is a view, and has no gradient."""
DROPOUT = "attention_dropout"
COLUMNS = 64
"""A large MLP is left with as many, and the rest of a division by it."""
WIDE = {Role.GATE: 1, Role.UP: 1, Role.GATE_UP: 2, Role.DOWN: 1, Role.EXPERTS: 2}
"""Roles of weights with columns, and how many parts with as many columns each one has."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class Part:
    """The module ``name`` of ``model``, and of the blocks in it those of ``blocks``."""

    model: nn.Module
    plan: ModelPlan
    name: str
    blocks: tuple[str, ...]
    large: int = LARGE

    @cached_property
    def own_plan(self) -> ModelPlan:
        """The plan of a copy: of its blocks only (of all, where it has none); what is beside them stays whole."""
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
        """The numbers of every parameter and buffer, by its id in the model; copies share them."""
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
        """The parameter's own, but for a large MLP's, which gets fewer columns: each is computed like the others."""
        shape = list(vars(parameter).get("ds_shape", parameter.shape))
        column = self._columns(name, len(shape))
        if column is not None:
            dim, parts = column
            width = shape[dim] // parts
            shape[dim] = parts * min(width, COLUMNS + width % COLUMNS)
        return torch.Size(shape)

    def _columns(self, name: str, dims: int) -> tuple[int, int] | None:
        """The dim of a large MLP's weight ``name`` along which its columns stand, and in how many parts; else None."""
        owner, leaf = names.parent(name), name.rpartition(".")[2]
        layer = self.plan.adapted(owner) or owner
        role, module = self.plan.of(layer), self.model.get_submodule(layer)
        # Conv1D keeps count of its outputs; models with it are small.
        if role not in WIDE or kinds.output_dim(module) == 1:
            return None
        weights, is_down = kinds.own_shapes(module), role is Role.DOWN or leaf == "down_proj"
        parts = 1 if is_down else WIDE[role]
        if torch.Size(weights[leaf if role is Role.EXPERTS else "weight"]).numel() // parts <= self.large:
            return None
        if role is Role.EXPERTS:
            return (2 if is_down else 1), parts
        # Of LoRA's factors, B has a layer's outputs, and A its inputs; a bias is of the outputs.
        factor = Role.LORA_A if is_down else Role.LORA_B
        if (layer != owner and self.plan.of(owner) is not factor) or (is_down and dims == 1):
            return None
        return int(is_down), parts

    def _drawn(self, parameter: nn.Parameter, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
        """Weights whose outputs are about as large as their inputs; norms and biases of numbers around 1."""
        if not parameter.is_floating_point():
            raise TypeError(f"it has weights of {parameter.dtype}")
        if shape.numel() <= self.large or len(shape) < 2:
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
            return drawn.div_(shape[-1] ** 0.5) if len(shape) > 1 else drawn.div_(3).add_(1)
        lines = torch.randn(shape[-2] + shape[-1] - 1, generator=generator, dtype=torch.float64).div_(shape[-1] ** 0.5)
        # Experts are alike.
        return lines.as_strided(shape[-2:], (1, 1)).expand(shape)

    def copied(self) -> nn.Module:
        """A copy, in evaluation: a module in which it has the name that it has in the model."""
        memory: dict[int, Any] = {id(each): None for each in (*self.model.parameters(), *self.model.buffers())}
        memory |= {id(self.model.get_submodule(name)): None for name in self._left_out}
        wanted = {id(each) for each in self.model.parameters()}
        for key, numbers in self.weights.items():
            memory[key] = numbers.clone() if key not in wanted else _parameter(numbers, self.large)
        made = copy.deepcopy(self.model.get_submodule(self.name), memory)
        for name in self._left_out:
            path = name.removeprefix(f"{self.name}.")
            owner = made.get_submodule(names.parent(path))
            del vars(owner)["_modules"][path.rpartition(".")[2]]
        for module in made.modules():
            for hooks in HOOKS:
                vars(module)[hooks].clear()
            # In evaluation nothing is dropped; a region that drops nothing draws no random numbers, either.
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if DROPOUT in vars(module):
                vars(module)[DROPOUT] = 0.0
        self._settle(made)
        return _placed(self.name, made.eval())

    def _settle(self, made: nn.Module) -> None:
        """Let a Hugging Face model's configs know of the blocks that are left, and choose operators for float64."""
        every = self.plan.blocks
        kept = [index for index, name in enumerate(every) if name in self.blocks]
        configs = {
            id(config): config for each in made.modules() if _is_configuration(config := vars(each).get("config"))
        }
        for config in configs.values():
            own = vars(config)
            for key, value in own.items():
                if isinstance(value, list) and len(value) == len(every):
                    own[key] = [value[index] for index in kept]
            if "num_hidden_layers" in own:
                own["num_hidden_layers"] = len(kept)
            own.update(use_cache=False, _attn_implementation_internal="eager", _experts_implementation_internal="eager")


def _is_configuration(config: object) -> bool:
    return any(base.__module__.startswith("transformers.") for base in type(config).__mro__)


def _buffer(buffer: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """On the host; of one on the meta device, any numbers of its kind (rotary frequencies are positive)."""
    if not buffer.is_meta:
        return buffer.detach().cpu().clone()
    if not buffer.is_floating_point():
        return torch.zeros_like(buffer, device="cpu")
    return torch.rand(buffer.shape, generator=generator, dtype=buffer.dtype).add_(0.1)


def _parameter(numbers: torch.Tensor, large: int) -> nn.Parameter:
    return nn.Parameter(numbers, requires_grad=numbers.numel() <= large)


def _placed(name: str, module: nn.Module) -> nn.Module:
    """A model that is nothing but ``module`` under ``name``."""
    for part in reversed(name.split(".") if name else []):
        around = nn.Module()
        around.add_module(part, module)
        module = around
    return module
