"""Spreads the sequences of a Hugging Face model over the context ranks, in place: its script stays as it is.

The model takes whole batches, the same on every context rank, and works on this rank's tokens of them; what it returns
is whole again. No class is changed: the attention functions of this one model are exchanged, and some of its modules
get a forward of their own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

from ds_npu.config.context_algorithm import ContextAlgorithm
from ds_npu.features.context_parallel.attention import SplitAttention
from ds_npu.features.context_parallel.batch import Running
from ds_npu.features.context_parallel.forward import SplitForward
from ds_npu.features.context_parallel.layers import depends_on_length, join_router_logits, show_last_position
from ds_npu.features.context_parallel.loss import LossShare, shifts
from ds_npu.features.context_parallel.mixing import attentions_of, check_mixing, check_settings
from ds_npu.features.context_parallel.values import EarlyValues
from ds_npu.features.tensor_parallel.refusal import refuse_copies
from ds_npu.models import names
from ds_npu.models.attention_function import check_exchangeable, use_attention
from ds_npu.models.compiled import check_not_compiled, refuse_compiling
from ds_npu.models.hugging_face import POSITIONS, is_hugging_face
from ds_npu.models.plan import ModelPlan
from ds_npu.parallel.context.axis import ContextAxis, context_axis
from ds_npu.parallel.forward_wraps import wrap_forward
from ds_npu.parallel.tensor.randomness import RegionRandomness, drops
from ds_npu.topology.topology import Topology

SPREAD = "ds_npu_spread"
Choice = Callable[[int, int], ContextAlgorithm]
"""The algorithm for a batch of (samples, tokens of each)."""


def is_spread(model: nn.Module) -> bool:
    """Whether the sequences of ``model``, with all that is around them, are spread already."""
    return vars(model).get(SPREAD) is model


def spread_sequence(
    model: nn.Module,
    plan: ModelPlan,
    topology: Topology,
    algorithm: ContextAlgorithm | Choice,
    device_type: str = "cpu",
) -> None:
    """Let the model of transformers that ``model`` is, or holds, work on parts of its sequences.

    ``algorithm`` is one, or chooses one at the first forward, in which all ranks of the world then take part. Raises
    ValueError, before anything is changed, for a model that does not only go from token to token by attention.
    """
    inner = spreadable(model, plan)
    shifted = shifts(inner)
    running = Running()
    values = EarlyValues(model, plan, topology, running)
    attention = SplitAttention(running, values)
    attention.waiting = {module: name for name, module in attentions_of(inner).items()}
    use_attention(model, attention.implementation)
    axis_of = _axis(topology, algorithm)
    randomness = RegionRandomness(topology, device_type, "cp")
    loss = None if shifted is None else LossShare(inner.loss_function, running, shifted)
    if loss is not None:
        inner.loss_function = loss
    numbers = randomness.region if any(map(drops, inner.modules())) else nullcontext
    join_router_logits(inner.get_decoder(), running)
    wrap_forward(inner, SplitForward(inner, running, axis_of, numbers, loss, _owns_positions(inner)))
    wrap_forward(inner, partial(_checked, attention))
    for rotary in list(filter(depends_on_length, inner.modules())):
        show_last_position(rotary, running)
    if inner is not model:
        _share_gradients(model, inner, topology.size("cp"))
    vars(inner)[SPREAD] = vars(model)[SPREAD] = model
    refuse_copies(model)
    refuse_compiling(model, "context")


def spreadable(model: nn.Module, plan: ModelPlan) -> Any:
    """The model of transformers that ``model`` is, or holds, whose sequences can be spread; raises ValueError."""
    found, who = outermost(model), type(model).__name__
    if len(found) != 1:
        raise ValueError(f"{who} holds {len(found)} models of transformers; ds_npu.parallel.context spreads one")
    (inner,) = found
    if SPREAD in vars(inner):
        raise ValueError(
            f"the {type(inner).__name__} in {who} was spread as it stood in another model, and cannot be spread "
            "again: make it anew, from its weights"
        )
    check_not_compiled(model, "context")
    shifts(inner)
    check_settings(inner)
    check_exchangeable(inner)
    check_mixing(inner, {module: plan.roles[name] for name, module in model.named_modules() if name in plan.roles})
    _check_forward(inner)
    return inner


def _checked(attention: SplitAttention, forward: Any, *args: Any, **kwargs: Any) -> Any:
    out = forward(*args, **kwargs)
    attention.check_all_called()
    return out


def outermost(model: nn.Module) -> list[Any]:
    """The models of transformers in ``model`` that are in no other one."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        if is_hugging_face(module) and not any(names.is_inside(name, other) for other in found):
            found[name] = module
    return list(found.values())


def _axis(topology: Topology, algorithm: ContextAlgorithm | Choice) -> Callable[[int, int], ContextAxis]:
    if isinstance(algorithm, ContextAlgorithm):
        axis = context_axis(topology, algorithm)
        return lambda *_: axis
    chosen: list[ContextAxis] = []

    def choose(samples: int, length: int) -> ContextAxis:
        if not chosen:
            # Once in a run. Ranks with other batches must open the same groups.
            sizes: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(sizes, (samples, length))
            chosen.append(context_axis(topology, algorithm(*map(max, zip(*sizes, strict=True)))))
        return chosen[0]

    return choose


def _check_forward(inner: Any) -> None:
    if "position_ids" not in inspect.signature(inner.forward).parameters:
        raise ValueError(
            f"ds_npu.parallel.context: the forward of {type(inner).__name__} takes no position_ids, so it cannot be "
            "told which tokens of the sequence it has"
        )


def _share_gradients(model: nn.Module, inner: nn.Module, size: int) -> None:
    """What ``model`` computes of what ``inner`` returns is the same on ``size`` ranks, whose gradients are added up.

    So each has its share of them, until they come back to ``inner``, which wants the whole.
    """

    def sharing(forward: Any, *args: Any, **kwargs: Any) -> Any:
        return _with_gradients(forward(*args, **kwargs), 1 / size, type(model).__name__)

    def collecting(forward: Any, *args: Any, **kwargs: Any) -> Any:
        return _with_gradients(forward(*args, **kwargs), size, type(inner).__name__)

    wrap_forward(model, sharing)
    wrap_forward(inner, collecting)


def _with_gradients(out: Any, factor: float, who: str) -> Any:
    """``out``, its gradients multiplied by ``factor``; raises TypeError for what may hold tensors out of sight."""

    def scaled(x: Any) -> Any:
        if isinstance(x, torch.Tensor) and x.requires_grad:
            x = x.view_as(x)
            x.register_hook(lambda gradient: gradient * factor)
        elif not isinstance(x, torch.Tensor | int | float | str | NoneType):
            raise TypeError(f"{who} returns a {type(x).__name__}: tensors, lists, tuples and dicts are accepted")
        return x

    return tree_map(scaled, out) if torch.is_grad_enabled() else out


def _owns_positions(inner: nn.Module) -> bool:
    """Whether a table of positions is not looked up by plain numbers from 0 (OPT's, RoBERTa's)."""
    modules = ((name.rpartition(".")[2], each) for name, each in inner.named_modules())
    tables = [each for name, each in modules if name in POSITIONS and isinstance(each, nn.Embedding)]
    return any(type(table) is not nn.Embedding or table.padding_idx is not None for table in tables)
