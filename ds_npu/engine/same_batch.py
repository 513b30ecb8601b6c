"""Agreement of all ranks before the first forward: on equal batches of peers, and on a context algorithm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from ds_npu.features.context_parallel.forward import OF_TOKENS, generates
from ds_npu.features.context_parallel.sharded_sequences import algorithm_choice_of, has_sharded_sequences
from ds_npu.parallel.runtime.forward_wraps import disable_tracing
from ds_npu.topology.degrees import Axis
from ds_npu.topology.topology import Topology

KEYS: dict[Axis, str] = {"tp": "tensor", "cp": "context", "pp": "pipeline"}


def agree_on_first_batch(model: nn.Module, topology: Topology, chosen: Callable[[], None]) -> None:
    """Let the first forward of ``model``, which all ranks call together, compare batches and choose an algorithm.

    It raises RuntimeError where ranks that share samples were given other tensors. Context ranks share them if ds_npu
    divides the sequences; else the script gives each of them other tokens. A context algorithm that is still open is
    chosen before the first forward that divides sequences, which generation with a cache does not do; then ``chosen``
    is called.
    """
    axes = [axis for axis in shared_axes(model, topology) if axis != "pp"]
    if not axes:
        return
    choice = algorithm_choice_of(model)

    @disable_tracing
    def agree(module: nn.Module, args: Any, kwargs: Any) -> None:
        if axes:
            mine = [_described(leaf) for leaf in _tensors((args, kwargs))]
            compared = axes.copy()
            axes.clear()  # Once, also where it raises.
            for axis in compared:
                _compare(mine, axis, topology)
        if choice is not None and choice.is_open and not generates(kwargs):
            choice.choose(*_sizes(args, kwargs))
            chosen()
        if choice is None or not choice.is_open:
            handle.remove()

    handle = model.register_forward_pre_hook(agree, with_kwargs=True)


def _tensors(arguments: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]


def _sizes(args: Any, kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """The samples and the tokens of each in a batch; 0 where no argument tells them."""
    named = [kwargs[name] for name in OF_TOKENS if kwargs.get(name) is not None]
    found = next((each for each in _tensors((named, args, kwargs)) if each.dim() > 1), None)
    return (0, 0) if found is None else (found.shape[0], found.shape[1])


def agree_before_stages(
    model: nn.Module, topology: Topology, batch: Any, micro_batch: Mapping[str, Any], chosen: Callable[[], None]
) -> None:
    """Do the same before the first batch of a model in pipeline stages, whose forwards do not begin together."""
    mine = [_described(leaf) for leaf in _tensors(batch)]
    for axis in shared_axes(model, topology):
        _compare(mine, axis, topology)
    choice = algorithm_choice_of(model)
    if choice is not None and choice.is_open:
        choice.choose(*_sizes((), micro_batch))
        chosen()


def shared_axes(model: nn.Module, topology: Topology) -> list[Axis]:
    """The axes whose ranks share samples."""
    return [axis for axis in KEYS if topology.size(axis) > 1 and (axis != "cp" or has_sharded_sequences(model))]


def _compare(mine: list[Any], axis: Axis, topology: Topology) -> None:
    ranks = topology.ranks(axis)
    all_of_them: list[Any] = [None] * len(ranks)
    dist.all_gather_object(all_of_them, mine, group=topology.group(axis))
    for rank, theirs in zip(ranks, all_of_them, strict=True):
        if theirs != all_of_them[0]:
            raise RuntimeError(
                f"ds_npu.parallel.{KEYS[axis]} is {len(ranks)}, and its ranks were given different batches: rank "
                f"{rank} has {theirs} and rank {ranks[0]} has {all_of_them[0]} (shape, sum). Tensor, context and "
                "pipeline ranks share each sample. What to do: draw it by engine.topology.rank('dp') of "
                "engine.topology.size('dp'), not by the global rank, or let "
                "deepspeed.initialize(training_data=...), accelerate or the Hugging Face Trainer make the loader"
            )


def _described(tensor: torch.Tensor) -> tuple[tuple[int, ...], float]:
    # Waits for the device, once in a run.
    return tuple(tensor.shape), tensor.detach().cpu().double().sum().item()
