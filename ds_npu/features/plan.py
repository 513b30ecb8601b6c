"""``ds_npu.plan``: roles that the user gives modules, checked also where no feature needs the plan."""

from __future__ import annotations

from ds_npu.config.plan import Plan
from ds_npu.features.build import Build
from ds_npu.features.feature import Feature


def _apply(plan: Plan, build: Build) -> None:
    if plan:
        # Raises PlanError for wrong globs.
        build.partial_plan  # noqa: B018


PLAN: Feature[Plan] = Feature("plan", apply=_apply)
