"""A PipelineModule's grid with a context axis.

DeepSpeed's grid has the axes pipe, data and model, and PipelineModule ties weights and writes layers over ``data``.
Here ``data`` is dp x cp, so that all of that remains right, and what DeepSpeed asks of an mpu is answered with dp and
cp apart.
"""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.pipe.topology import PipelineParallelGrid

from ds_npu.engine.mpu import CUT_INTO_STAGES, mpu_of
from ds_npu.engine.session import open_session, use_own_device


class ContextGrid(PipelineParallelGrid):  # type: ignore[misc]
    """DeepSpeed's grid for the announced config; raises ConfigError where its axes and the section disagree."""

    def __init__(self, config: dict[str, Any], topology: Any, process_group: Any) -> None:
        use_own_device()
        super().__init__(topology=topology, process_group=process_group)
        opened = open_session(config, stages=self.pipe_parallel_size)
        self.__dict__.update(vars(mpu_of(opened.topology, CUT_INTO_STAGES)))
