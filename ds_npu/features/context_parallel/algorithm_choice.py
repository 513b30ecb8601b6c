"""The context algorithm of a model: given, or chosen for the first batch, before its forward begins."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from ds_npu.config.context_algorithm import ContextAlgorithm
from ds_npu.parallel.context.axis import ContextAxis, context_axis
from ds_npu.topology.topology import Topology

AlgorithmChooser = Callable[[int, int], ContextAlgorithm]
"""(samples, tokens of each) of the first batch -> the algorithm."""


class AlgorithmChoice:
    """The context axis of a model; its algorithm is given, or a chooser chooses it for the first batch."""

    def __init__(self, topology: Topology, algorithm: ContextAlgorithm | AlgorithmChooser) -> None:
        self.topology = topology
        self._chooser = None if isinstance(algorithm, ContextAlgorithm) else algorithm
        self._axis = context_axis(topology, algorithm) if isinstance(algorithm, ContextAlgorithm) else None

    @property
    def is_open(self) -> bool:
        """Whether nothing has been chosen yet."""
        return self._axis is None

    def choose(self, samples: int, length: int) -> None:
        """Choose for the largest of all ranks' batches; all ranks of the world call it at the same time.

        ``samples`` of ``length`` tokens are this rank's first batch; 0 where they are not known. Where no rank knows
        them, nothing is chosen.
        """
        sizes: list[tuple[int, int]] = [(0, 0)] * dist.get_world_size()
        dist.all_gather_object(sizes, (samples, length))
        most = tuple(map(max, zip(*sizes, strict=True)))
        if self._chooser is not None and all(most):
            self._axis = context_axis(self.topology, self._chooser(*most))

    @property
    def axis(self) -> ContextAxis:
        """The context axis; raises RuntimeError where no algorithm has been chosen."""
        if self._axis is None:
            raise RuntimeError(
                "ds_npu.context_parallel: no algorithm has been chosen, which all ranks of the world do together "
                "before the first forward of the engine's model. What to do: call the whole model, as engine(...), "
                "with input_ids or another tensor [samples, tokens, ...], or set ds_npu.context_parallel.algorithm"
            )
        return self._axis
