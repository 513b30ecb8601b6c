"""The buffers in which ZeRO collects gradients before it reduces them: their size does not depend on the model."""

from __future__ import annotations

import torch

from ds_npu.models.kinds import own_shapes
from ds_npu.planner.memory_plan_table import Buckets
from ds_npu.zero_ext.training_engine import TrainingEngine


def gradient_buckets(engine: TrainingEngine) -> Buckets | None:
    """The buckets of ``engine`` on this rank; None where its optimizer has none (without ZeRO, or not contiguous)."""
    stage, optimizer = engine.zero_optimization_stage(), engine.optimizer
    if stage == 0 or not engine.zero_contiguous_gradients():
        return None
    # DeepSpeed 0.19, stage_1_and_2.py setup_buckets and stage3.py _setup_for_real_optimizer.
    dtypes: list[torch.dtype] = list(optimizer.ipg_buckets)
    if stage < 3:
        dtypes = [optimizer._gradient_reduction_buffer_dtype()] * len(dtypes) * (2 if optimizer.overlap_comm else 1)
    elements = int(optimizer.reduce_bucket_size)
    largest = max(_elements(shape) for module in engine.module.modules() for shape in own_shapes(module).values())
    return Buckets(elements, sum(elements * each.itemsize for each in dtypes), largest)


def _elements(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
