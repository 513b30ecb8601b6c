"""The topology as DeepSpeed's ``mpu``: the names under which DeepSpeed asks who works with whom."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

from ds_npu.topology.degrees import Axis
from ds_npu.topology.topology import Topology

AXES_OF: dict[str, tuple[Axis, ...]] = {
    "data_parallel": ("dp",),
    "sequence_parallel": ("cp",),
    "sequence_data_parallel": ("dp", "cp"),
    "tensor_model_parallel": ("tp",),
    "slice_parallel": ("tp",),
    "pipeline_model_parallel": ("pp",),
    "pipe_parallel": ("pp",),
}
"""DeepSpeed's word -> our axes. ZeRO shards over sequence_data_parallel.

An ``initialize_sequence_parallel`` must never join them: DeepSpeed takes its presence as "no model parallelism"
(DeepSpeed 0.19.8 utils/groups.py:774, runtime/zero/stage_1_and_2.py:309).
"""

CUT_INTO_STAGES: tuple[Axis, ...] = ("pp", "tp")
WHOLE_ON_EACH_STAGE: tuple[Axis, ...] = ("tp",)


def mpu_of(topology: Topology, model_axes: tuple[Axis, ...]) -> SimpleNamespace:
    """An mpu with ``get_<word>_world_size``, ``_rank``, ``_group`` and ``_group_ranks`` for each word, no arguments.

    ``model_axes`` are the axes that shard the model, over which DeepSpeed adds up norms and looks for overflow:
    CUT_INTO_STAGES where each rank along pp holds other layers, WHOLE_ON_EACH_STAGE where each has the whole model.
    """
    mpu = SimpleNamespace()
    for word, axes in {**AXES_OF, "model_parallel": model_axes}.items():
        setattr(mpu, f"get_{word}_world_size", partial(topology.size, *axes))
        setattr(mpu, f"get_{word}_rank", partial(topology.rank, *axes))
        setattr(mpu, f"get_{word}_group", partial(topology.group, *axes))
        setattr(mpu, f"get_{word}_group_ranks", partial(topology.ranks, *axes))
    mpu.get_tensor_model_parallel_src_rank = lambda: topology.ranks("tp")[0]
    return mpu
