"""The HCCL communicators of a rank and the size of their buffers: arithmetic only, for the engine and ``ds_npu check``.

HCCL takes two buffers of ``hccl_buffer_size`` MiB of device memory for each communicator, at its first message, and
cuts longer messages into pieces of that size. Sources: CANN's HCCL user guide, HCCL_BUFFSIZE; Ascend/pytorch,
docs/zh/developer_notes/distributed/parameter_setting/setting_HCCL_communicator_parameter.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ds_npu.capability import SETTINGS
from ds_npu.config.context_algorithm import ContextAlgorithm
from ds_npu.config.deepspeed_keys import value_at
from ds_npu.topology.degrees import NAMES, Axis, Box, Degrees

MIB = 2**20
BUCKETS = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")
GROUP_BUFFER, PAIR_BUFFER = "HCCL_BUFFSIZE", "P2P_HCCL_BUFFSIZE"


@dataclass(frozen=True)
class Traffic:
    """Messages among the ranks along ``axes``, where one of the axes in ``needs`` has more than one rank."""

    axes: tuple[Axis, ...]
    needs: tuple[Axis, ...]
    messages: str
    size: Literal["buckets", "scalars", "hidden states", "unknown"]
    only_pipeline_module: bool = False
    """Whether a model that ds_npu cuts into stages sends nothing of the kind, unless it has experts on other ranks."""


TRAFFIC = (
    Traffic(("dp", "cp"), ("dp", "cp"), "buckets of gradients and weights", "buckets"),
    Traffic(("dp",), ("pp",), "the loss of the last stage", "scalars", only_pipeline_module=True),
    Traffic(("cp",), ("cp",), "shares of sequences and losses", "unknown"),
    Traffic(("tp",), ("tp",), "hidden states", "hidden states"),
    Traffic(("pp",), ("pp",), "the loss, for all stages", "scalars"),
    Traffic(("pp", "tp"), ("pp",), "norms", "scalars"),
    Traffic(("edp",), ("ep", "etp"), "buckets of experts' gradients and weights", "buckets"),
    Traffic(("ep", "etp"), ("ep", "etp"), "experts' norms", "scalars"),
    Traffic(("ep",), ("ep",), "tokens for experts", "unknown"),
    Traffic(("etp",), ("etp",), "experts' hidden states", "unknown"),
    Traffic(("pp", "ep", "etp"), ("ep", "etp"), "experts' weights, to be saved", "unknown"),
)
"""The traffic of each of the topology's groups (``GROUPS``, ``EXPERT_GROUPS``)."""


@dataclass(frozen=True)
class Communicator:
    """``count`` communicators of a rank for the same ``messages``, each with two buffers of ``mib`` MiB."""

    name: str
    messages: str
    mib: int
    count: int = 1

    @property
    def device_mib(self) -> int:
        return 2 * self.mib * self.count


def default_mib(variable: str) -> int:
    """The value of GROUP_BUFFER or PAIR_BUFFER in the environment, else its default, in MiB."""
    text = os.environ.get(variable, "")
    return int(text if text.isdecimal() else next(default for name, default, _ in SETTINGS if name == variable))


def bucket_mib(ds_config: dict[str, Any]) -> int | None:
    """The largest of ZeRO's buckets in MiB, None unless the config states them all.

    Elements are counted as float32, the widest that DeepSpeed reduces.
    """
    elements = [value_at(ds_config, f"zero_optimization.{key}") for key in BUCKETS]
    if not all(isinstance(value, int | float) for value in elements):
        return None
    return -(-int(max(elements)) * 4 // MIB)


def buffer_mib(degrees: Degrees, axes: tuple[Axis, ...], ds_config: dict[str, Any]) -> int:
    """MiB of each buffer of the communicator along ``axes``: its largest message, at most HCCL_BUFFSIZE.

    A communicator serves all axes with the same ranks. Where the size of a message is not known before the first
    batch, HCCL_BUFFSIZE is taken.
    """
    most = default_mib(GROUP_BUFFER)
    known = {"buckets": bucket_mib(ds_config), "scalars": 1}
    box, there = degrees.box(*axes), [each for each in TRAFFIC if any(degrees.size(axis) > 1 for axis in each.needs)]
    sizes = [known.get(each.size) for each in there if degrees.box(*each.axes) == box]
    return max([1, *(most if size is None else min(most, size) for size in sizes)])


def planned_communicators(
    degrees: Degrees,
    ds_config: dict[str, Any],
    algorithm: ContextAlgorithm | None,
    hidden_mib: int | None = None,
    in_stages: bool = True,
) -> list[Communicator]:
    """The communicators that a rank opens by the end of a step and a checkpoint, the most of all ranks.

    ``algorithm`` shards the sequences of a Hugging Face model; None: nothing does, or it is not known yet. With
    pipeline ranks the model is cut ``in_stages`` by ds_npu, or is a PipelineModule. Experts' communicators are counted
    where ``degrees`` have them, although only a model with weights on the expert view opens them. ``hidden_mib`` is
    what the hidden states of a micro-batch take, where that is known; it is shown with the buffer, which is made
    before the first batch.
    """
    stated = {"buckets": bucket_mib(ds_config), "hidden states": hidden_mib}
    # Box -> name, messages, MiB of each buffer.
    found: dict[Box, tuple[str, list[str], int]] = {
        degrees.box("pp", "dp", "cp", "tp"): ("world", ["barriers, checkpoints"], default_mib(GROUP_BUFFER))
    }
    for each in TRAFFIC:
        box = degrees.box(*each.axes)
        is_there = any(degrees.size(axis) > 1 for axis in each.needs)
        if box and is_there and not (in_stages and each.only_pipeline_module and degrees.ep == 1):
            name = " * ".join(NAMES[axis] for axis in each.axes if degrees.size(axis) > 1)
            size = stated.get(each.size)
            text = each.messages if size is None else f"{each.messages} ({size:,} MiB)"
            found.setdefault(box, (name, [], buffer_mib(degrees, each.axes, ds_config)))[1].append(text)
    more: list[Communicator] = []
    for group in _context_groups(degrees, algorithm):
        if group.in_pairs and default_mib(PAIR_BUFFER):
            # A rank's links to the next and from the previous one have a communicator each.
            more.append(Communicator(f"{group.name}, pairs", group.messages, default_mib(PAIR_BUFFER), 2))
            continue
        found.setdefault(group.box, (group.name, [], default_mib(GROUP_BUFFER)))[1].append(group.messages)
        if group.in_pairs and group.box[0][1] % 2 == 0:
            more.append(Communicator(f"{group.name}, second", group.messages, default_mib(GROUP_BUFFER)))
    return [
        *(Communicator(name, "; ".join(sent), mib) for name, sent, mib in found.values()),
        *more,
        *_between_stages(degrees, ds_config, in_stages),
    ]


def _between_stages(degrees: Degrees, ds_config: dict[str, Any], in_stages: bool) -> Iterator[Communicator]:
    """Communicators of hidden states and their gradients, on a rank between two other stages."""
    pairs, mib = min(degrees.pp - 1, 2), default_mib(PAIR_BUFFER)
    if pairs and mib:
        # In stages, messages to higher and to lower ranks have a group each, with a communicator for each pair;
        # DeepSpeed's pipelines send over the world's group (runtime/pipe/p2p.py).
        yield Communicator("neighbouring stages", "hidden states and gradients", mib, (1 + in_stages) * pairs)
    elif pairs and in_stages:
        mib = buffer_mib(degrees, ("pp",), ds_config)
        yield Communicator("stages, up and down", "hidden states and gradients", mib, 2)


@dataclass(frozen=True)
class _ContextGroup:
    name: str
    box: Box
    messages: str
    in_pairs: bool = False
    """Whether ranks send to their neighbours, for which torch_npu has a communicator for each pair of ranks."""


def _context_groups(degrees: Degrees, algorithm: ContextAlgorithm | None) -> Iterator[_ContextGroup]:
    """The groups of a context algorithm (``ds_npu.parallel.context.axis``), of which ``cp`` itself is one."""
    if algorithm is None:
        return
    if algorithm.ulysses > 1:
        yield _ContextGroup("Ulysses", ((degrees.tp, algorithm.ulysses),), "heads and tokens")
    stride = degrees.tp * algorithm.ulysses
    if algorithm.gather:
        yield _ContextGroup("ring", ((stride, algorithm.ring),), "keys and values")
        return
    outer = algorithm.ring // algorithm.inner
    for name, distance, size in (("ring", stride, algorithm.inner), ("outer ring", stride * algorithm.inner, outer)):
        if size > 1:
            yield _ContextGroup(name, ((distance, size),), "keys and values", in_pairs=True)
