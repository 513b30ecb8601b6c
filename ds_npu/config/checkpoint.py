"""``ds_npu.checkpoint``: how checkpoints are saved, and the classes that they may hold when they are loaded."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ds_npu.config.section import Section

ClassName = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$", description="as my_package.state.Sampler")]


class CheckpointSection(Section):
    """How checkpoints are saved and loaded."""

    asynchronous: bool = False
    """Write checkpoints on a thread from a snapshot in (pinned) host memory, while training goes on."""
    allowed_classes: list[ClassName] = Field(default=[])
    """Classes, as package.module.Class, of objects in client_state that checkpoints may hold; others are refused."""
    peer_copies: Annotated[int, Field(ge=2)] | None = None
    """Most optimizer steps that are repeated when ranks die; copies of each rank's files go to a peer's memory."""
    peer_folder: Annotated[str, Field(min_length=1, description="a non-empty string")] | None = None
    """The folder, seen by all ranks, that copies in memory are written to when ranks die."""
