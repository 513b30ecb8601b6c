"""The groups of ranks that have an HCCL communicator, with their names and traffic: arithmetic only, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ds_npu.config.context_algorithm import ContextAlgorithm
from ds_npu.topology.degrees import NAMES, Axis, Box, Degrees

WORLD, TIED, MATRICES = "world", "tied weights", "matrices"
Size = Literal["buckets", "scalars", "hidden states", "tokens", "unknown"]


@dataclass(frozen=True)
class Traffic:
    """Messages among the ranks along ``axes``.

    There are none unless an axis in ``needs`` has several ranks.
    """

    axes: tuple[Axis, ...]
    needs: tuple[Axis, ...]
    messages: str
    size: Size
    only_pipeline_module: bool = False
    """Whether a model that ds_npu cuts into stages sends such messages only with expert ranks."""
    only_checkpoints: bool = False
    """Whether only checkpoints send such messages, steps none."""


TRAFFIC = (
    Traffic(("dp", "cp"), ("dp", "cp"), "buckets of gradients and weights", "buckets"),
    Traffic(("dp",), ("pp",), "the loss of the last stage", "scalars", only_pipeline_module=True),
    Traffic(("cp",), ("cp",), "shares of sequences and losses", "unknown"),
    Traffic(("tp",), ("tp",), "hidden states", "hidden states"),
    Traffic(("pp",), ("pp",), "the loss, for all stages", "scalars"),
    Traffic(("pp", "tp"), ("pp",), "norms", "scalars"),
    Traffic(("edp",), ("ep", "etp"), "buckets of experts' gradients and weights", "buckets"),
    Traffic(("ep", "etp"), ("ep", "etp"), "experts' norms", "scalars"),
    Traffic(("ep",), ("ep",), "tokens for experts", "tokens"),
    Traffic(("etp",), ("etp",), "experts' hidden states", "unknown"),
    Traffic(("pp", "ep", "etp"), ("ep", "etp"), "experts' weights, to be saved", "unknown", only_checkpoints=True),
)
"""The traffic of each of the topology's groups (``GROUPS``, ``EXPERT_GROUPS``)."""


def traffic_of(degrees: Degrees, in_stages: bool = True) -> Iterator[tuple[Box, str, Traffic]]:
    """The layout, the axes in words and the traffic of each group of more than one rank.

    ``in_stages``: with pipeline ranks, whether ds_npu cuts the model; it is a PipelineModule otherwise.
    """
    for each in TRAFFIC:
        box = degrees.box(*each.axes)
        is_there = any(degrees.size(axis) > 1 for axis in each.needs)
        if box and is_there and not (in_stages and each.only_pipeline_module and degrees.ep == 1):
            yield box, " * ".join(NAMES[axis] for axis in each.axes if degrees.size(axis) > 1), each


def names_of_grid(degrees: Degrees, in_stages: bool = True) -> dict[Box, str]:
    """The name of each communicator along axes by the layout of its ranks; axes with the same ranks have one."""
    found: dict[Box, str] = {}
    if degrees.world_size > 1:
        found[degrees.box("pp", "dp", "cp", "tp")] = WORLD
    for box, name, _ in traffic_of(degrees, in_stages):
        found.setdefault(box, name)
    return found


@dataclass(frozen=True)
class ContextGroup:
    """A group of ranks that share a sequence, with the layout of its ranks."""

    name: str
    box: Box
    messages: str
    in_pairs: bool = False
    """Whether ranks send to their neighbours, for which torch_npu has a communicator for each pair of ranks."""


def context_groups(degrees: Degrees, algorithm: ContextAlgorithm | None) -> Iterator[ContextGroup]:
    """The groups of a context algorithm (``ds_npu.parallel.context.axis``), of which ``cp`` itself is one."""
    if algorithm is None:
        return
    if algorithm.ulysses > 1:
        yield ContextGroup("Ulysses", ((degrees.tp, algorithm.ulysses),), "heads and tokens")
    stride = degrees.tp * algorithm.ulysses
    if algorithm.gather:
        yield ContextGroup("ring", ((stride, algorithm.ring),), "keys and values")
        return
    outer = algorithm.ring // algorithm.inner
    for name, distance, size in (("ring", stride, algorithm.inner), ("outer ring", stride * algorithm.inner, outer)):
        if size > 1:
            yield ContextGroup(name, ((distance, size),), "keys and values", in_pairs=True)


def names_to_set(degrees: Degrees, algorithms: list[ContextAlgorithm], has_matrices: bool) -> list[str]:
    """The names of the communicators that a user may set, of a world in which one of ``algorithms`` shards sequences.

    ``has_matrices``: Muon steps. Pairs of ranks are not among them: torch_npu gives their communicators the settings of
    the environment.
    """
    grid = {**names_of_grid(degrees, in_stages=False), **names_of_grid(degrees)}
    names = [*names_of_grid(degrees).values(), *names_of_grid(degrees, in_stages=False).values()]
    if degrees.pp > 2:
        names.append(TIED)
    if has_matrices and degrees.box("dp", "cp", "tp") not in {(), *grid}:
        names.append(MATRICES)
    for algorithm in algorithms:
        groups = context_groups(degrees, algorithm)
        names += [each.name for each in groups if not each.in_pairs and each.box not in grid]
    return list(dict.fromkeys(names))
