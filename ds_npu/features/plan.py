"""``ds_npu.plan``: which module of the user's model plays which part."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ds_npu.features.feature import Feature

Name = Annotated[str, Field(min_length=1, description="a non-empty string")]
Plan = dict[Name, Name]
"""From a glob over module names to a role."""

PLAN: Feature[Plan] = Feature("plan", planned=("plan",))
