"""Random states after the load of another layout's checkpoint: ranks that share samples draw the same numbers again.

The Trainer, accelerate and scripts restore a file of random states for each rank, after the load. At another layout
the files of ranks that share samples now are those of ranks that did not, or there are fewer files than ranks.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from ds_npu.engine.checkpoints.written_files import layout_description
from ds_npu.parallel.tensor.randomness import align_generators
from ds_npu.topology.degrees import Axis
from ds_npu.zero_ext.method_wraps import MethodLevel
from ds_npu.zero_ext.training_engine import TrainingEngine, Undo

SHARING: tuple[Axis, ...] = ("tp", "cp", "pp")
"""The axes whose ranks share samples, as engines align them at their start."""


def align_behind_load(engine: TrainingEngine, layout: str) -> None:
    """Give ranks along the SHARING axes the generator states of the first of them when ``engine`` is called next.

    ``layout``: that of the run which saved; where it is this run's, each rank keeps its own states. The files do not
    tell: context ranks write the same ones as data ranks. The call is a forward or a ``train_batch``, which all
    ranks make together.
    """
    undo: list[Undo] = []

    def align() -> AbstractContextManager[None]:
        while undo:
            undo.pop()()
        for axis in SHARING:
            align_generators(engine.topology, engine.device.type, axis)
        return nullcontext()

    if layout != layout_description(engine) and any(engine.topology.size(axis) > 1 for axis in SHARING):
        undo += engine.events.around_calls(MethodLevel.CORRECTION, align)
