"""``ds_npu.pipeline``: the order of a pipeline's forwards and backwards, and the layers of its stages."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ds_npu.config.section import AtLeastOne, AtLeastZero, Section

Schedule = Literal["gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v", "v_half", "v_min", "dualpipe_v"]
ScheduleFile = Annotated[str, Field(pattern=r"^.+\.csv$", description="a file name that ends in .csv")]

ONE_STAGE = ("gpipe", "1f1b", "zb_h1", "zb_h2")
PAIRED = ("1f1b", "interleaved", "dualpipe_v")
"""Schedules in which a forward and a backward of a rank may run together."""
MOST_STAGES = dict.fromkeys(ONE_STAGE, 1) | dict.fromkeys(("zb_v", "v_half", "v_min", "dualpipe_v"), 2)
"""Model chunks of a rank, for the schedules that fix their number."""


class PipelineSection(Section):
    """How a pipeline of ``parallel.pipeline`` ranks works."""

    schedule: Schedule | ScheduleFile | None = None
    """A schedule by its name, or a file with one row of actions a rank; left out: 1f1b, or interleaved."""
    micro_batches: AtLeastOne | None = None
    """Into how many micro-batches a batch that the engine is given is cut; left out: one for each of its samples."""
    virtual_stages: AtLeastOne = 1
    """Parts of the model that each rank holds (interleaved schedules)."""
    split: list[AtLeastZero] = Field(default=[])
    """Layers of each stage, first to last; empty: so that the slowest stage is the fastest, its matrices counted."""
    noop_layers: list[AtLeastZero] = Field(default=[])
    """Positions at which a layer that does nothing is counted, to make a division even."""
    recompute: Literal["inline", "bubble"] | None = None
    """Keep each stage's inputs only, and run its forward again just before the backward, or where the rank waits."""
    overlap_experts: bool = False
    """Run a forward during the backward of another micro-batch: one's tokens travel while the other computes."""
