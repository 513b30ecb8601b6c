"""The base of every part of the ``"ds_npu"`` section, and the types of its numbers."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MOST_RANKS = 2**20

Ranks = Annotated[int, Field(ge=1, le=MOST_RANKS)]
ContextRanks = Annotated[int, Field(ge=1, le=2**10)]
"""Ranks along the context axis: estimating every algorithm for more takes many seconds."""
AtLeastOne = Annotated[int, Field(ge=1)]
AtLeastZero = Annotated[int, Field(ge=0)]
AboveZero = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """A part of the section: typed, frozen, and closed (it refuses keys it does not know)."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
