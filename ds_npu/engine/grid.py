"""A PipelineModule's grid with a context axis.

DeepSpeed's grid has the axes pipe, data and model, and PipelineModule ties weights and writes layers over ``data``.
Here ``data`` is dp x cp, so all of that stays right; the questions DeepSpeed asks of an mpu are answered with dp and
cp apart, and ``narrowed`` is the same grid for the engine, which counts batches over ``data_parallel_size``.
"""

from __future__ import annotations

import copy
from typing import Any

from deepspeed.runtime.pipe.topology import PipelineParallelGrid

from ds_npu.engine import session
from ds_npu.engine.mpu import mpu_of


class ContextGrid(PipelineParallelGrid):  # type: ignore[misc]
    """DeepSpeed's grid for the announced config; raises ConfigError where its stages and the section disagree."""

    def __init__(self, config: dict[str, Any], topology: Any, process_group: Any) -> None:
        super().__init__(topology=topology, process_group=process_group)
        self.session = session.open_session(config, stages=self.pipe_parallel_size)
        for name, answer in vars(mpu_of(self.session.topology)).items():
            setattr(self, name, answer)

    def narrowed(self) -> ContextGrid:
        """A copy whose ``data_parallel_size`` and ``data_parallel_id`` count samples, not context peers."""
        narrow = copy.copy(self)
        narrow.data_parallel_size = self.session.topology.size("dp")
        narrow.data_parallel_id = self.session.topology.rank("dp")
        return narrow
