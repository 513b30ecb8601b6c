"""``ds_npu.profile``: a window of optimizer steps that a profiler records."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from ds_npu.config.section import AtLeastZero, Section

Recorded = Literal["shapes", "memory", "stacks"]


class ProfileSection(Section):
    """A window of optimizer steps that a profiler records, with a report of where their time goes."""

    model_config = ConfigDict(serialize_by_alias=True)

    steps: list[AtLeastZero] = Field(default=[])
    """The first and the last optimizer step of the window, both recorded; the first step of a run is 0."""
    ranks: list[AtLeastZero] | Literal["all"] = Field(default=[0])
    """Ranks that are recorded; the slowest rank of a collective is known among those alone."""
    folder: str = Field(default="ds_npu_profile", min_length=1)
    """The folder, a non-empty string, of traces and report; each rank writes files of its own."""
    recorded: list[Recorded] = Field(default=["shapes"], alias="with")
    """Details of the trace: shapes (by which operators are compared with the machine), memory, Python stacks."""
