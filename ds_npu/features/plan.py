"""``ds_npu.plan``: which module of the user's model plays which part."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ds_npu.features.feature import Build, Feature
from ds_npu.models.roles import Role

Name = Annotated[str, Field(min_length=1, description="a non-empty string")]
# Strict would want a Role, which JSON does not have.
Plan = dict[Name, Annotated[Role, Field(strict=False)]]
"""From a glob over module names to a role."""


def _apply(plan: Plan, build: Build) -> None:
    if plan:
        # Whether anything needs it or not, what is wrong with it is said.
        build.sketch  # noqa: B018


PLAN: Feature[Plan] = Feature("plan", apply=_apply)
