"""The probe of ``ds_npu.parallel.context``: do blocks compute over sharded sequences what they compute whole?

Most modules are known to work on each token by itself by the names of their classes. So a copy of the decoder with one
block of each kind computes a few random hidden states at start, forward and backward: whole, and with the sequence
sharded over ranks that are threads of this process, which gather keys and values. Weights are random (``part_copy``).
The model is not changed, and no device and no communicator is used.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from ds_npu.comm.threads import ThreadGroup, run_in_threads
from ds_npu.config.context_algorithm import ContextAlgorithm
from ds_npu.features.context_parallel.sharded_sequences import shard_sequences, shardable_model
from ds_npu.features.modules.part_copy import LARGE, Unit, decoder_unit
from ds_npu.features.modules.thread_ranks import (
    ProbeResult,
    ThreadTopology,
    first_tensor,
    message_of,
    nothing_drawn,
)
from ds_npu.log import logger
from ds_npu.models import kinds, names
from ds_npu.models.hugging_face_model import FLOAT32_TOLERANCE
from ds_npu.models.plan import ModelPlan
from ds_npu.topology.topology import Topology

RANKS = 2
"""Two ranks are enough: to a rank, tokens are its own or another rank's."""
SAMPLES, LENGTH = 2, 4 * RANKS + 3
FLOOR = 0.1
"""A gradient below this fraction of the largest one is compared as if it had this size."""
GRADIENT_TOLERANCE = 1e-4
"""Difference of a gradient, relative to its largest value, that float32 explains; what is wrong differs by far more.

Copies are in float64, but models cast to float32 on their own, and recurrences in it differ most: gradients of Qwen3.5
by 3e-6 at its real size, and by 1e-5 in a tiny one with adapters.
"""
MISMATCH = """\
ds_npu.parallel.context: {model} does not compute over the tokens of {ranks} ranks what it does over all of them:
{faults}
What to do: ds_npu.parallel.context 1. (Found with random weights; ds_npu.parallel.probe false turns this check off.)"""
Results = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""An output, and the gradients of the hidden states (under "") and of the weights, by name."""


def check_context_blocks(model: nn.Module, plan: ModelPlan, topology: Topology) -> None:
    """Raise the same ValueError on all context ranks if ``model`` computes otherwise where sequences are sharded.

    Every context rank calls it at the same time. One line in the log tells what could not be tried. Raises ValueError
    first where the sequences of ``model`` cannot be sharded at all.
    """
    shardable_model(model, plan)
    size, group = topology.size("cp"), topology.group("cp")
    mine = probe_sequences(model, plan)
    found: list[tuple[list[str], list[str]]] = [([], [])] * size
    dist.all_gather_object(found, (mine.faults, mine.unseen), group=group)
    faults = next((faults for faults, _ in found if faults), [])
    if faults:
        raise ValueError(MISMATCH.format(model=plan.model, ranks=RANKS, faults="\n".join(faults)))
    unseen = list(dict.fromkeys(each for _, rank in found for each in rank))
    if unseen and topology.global_rank == 0:
        logger().info("parallel.probe: not tried over context ranks: %s", "; ".join(unseen))


def probe_sequences(model: nn.Module, plan: ModelPlan, large: int = LARGE) -> ProbeResult:
    """Compare a copy of the decoder, with one block of each kind, over sharded and over whole sequences.

    Weights of more than ``large`` numbers take hardly any memory, and their gradients are not compared.
    """
    found = ProbeResult()
    unit = decoder_unit(model, plan, tuple(_one_of_each_kind(model, plan)), large)
    if unit is None:
        found.unseen.append(f"{plan.model}: nothing says which module of it is the decoder with its blocks")
        return found
    x_BSH = torch.randn(
        SAMPLES, LENGTH, unit.width, generator=torch.Generator().manual_seed(2), dtype=torch.float64, device="cpu"
    )
    where = ", ".join(map(names.generic, unit.part.blocks))
    try:
        with nothing_drawn():
            (whole,) = run_in_threads(1, partial(_computed, unit, x_BSH, None))
    except Exception as error:  # A user's code, called with arguments that it may not be made for.
        found.unseen.append(f"{where}: {message_of(error)}")
        return found
    algorithm = ContextAlgorithm(ring=RANKS, gather=True)
    try:
        sharded = run_in_threads(RANKS, partial(_computed, unit, x_BSH, algorithm))
    except Exception as error:
        found.faults.append(f"  {where}: cannot be computed: {message_of(error)}")
        return found
    found.faults.extend(f"  {where}: {what}" for what in _differences(whole, sharded))
    return found


def _one_of_each_kind(model: nn.Module, plan: ModelPlan) -> list[str]:
    """The first block of each kind; blocks of one kind have the same modules and sizes."""
    seen: dict[Hashable, str] = {}
    for block in plan.blocks:
        modules = model.get_submodule(block).named_modules()
        kind = tuple((name, type(each), tuple(kinds.own_shapes(each).items())) for name, each in modules)
        seen.setdefault(kind, block)
    return list(seen.values())


def _computed(unit: Unit, x_BSH: torch.Tensor, algorithm: ContextAlgorithm | None, group: ThreadGroup) -> Results:
    """Forward and backward of a copy: whole where ``algorithm`` is None, else of the tokens of this rank."""
    model = unit.part.copied()
    if algorithm is not None:
        shard_sequences(model, unit.part.own_plan, ThreadTopology(group, "cp"), algorithm)
    x_BSH = x_BSH.clone().requires_grad_()
    decoder = model.get_submodule(unit.part.name)
    given = {"inputs_embeds": x_BSH, "use_cache": False, "position_ids": torch.arange(LENGTH)[None]}
    taken = inspect.signature(decoder.forward).parameters
    output = first_tensor(decoder(**{name: each for name, each in given.items() if name in taken}))
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(3), dtype=output.dtype)
    # A decoder in a model multiplies gradients by the number of ranks, by which the model divides them.
    torch.autograd.backward(output, upstream / (1 if decoder is model else group.size()))
    weights = {"": x_BSH, **dict(model.named_parameters())}
    return output.detach(), {name: each.grad for name, each in weights.items() if each.grad is not None}


def _differences(whole: Results, sharded: list[Results]) -> list[str]:
    """The differences: of the output, or else of gradients, which add up over the ranks."""
    output, gradients = whole
    gap = max(float((found - output).abs().max()) for found, _ in sharded) / float(output.abs().max())
    if not gap <= FLOAT32_TOLERANCE:
        return [f"their output differs by {gap:.1g} of its largest value"]
    floor = FLOOR * max(float(each.abs().max()) for each in gradients.values())
    wrong = []
    for name, expected in gradients.items():
        found = sum(rank[name] for _, rank in sharded if name in rank)
        if not float((found - expected).abs().max()) <= GRADIENT_TOLERANCE * max(float(expected.abs().max()), floor):
            wrong.append(names.generic(name) or "the hidden states")
    return [f"the gradient of {', '.join(wrong[:4])} differs"] if wrong else []
