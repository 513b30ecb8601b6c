"""``ds_npu.plan``: roles that the user gives modules, checked also where no feature needs the plan."""

from __future__ import annotations

from collections.abc import Iterable

from ds_npu.config.sections import Plan
from ds_npu.features.build import Build, Feature
from ds_npu.features.declaration import Change


def _declare(plan: Plan, build: Build) -> Iterable[Change]:
    if plan:
        # Raises PlanError for wrong globs.
        build.partial_plan  # noqa: B018
    return ()


PLAN: Feature[Plan] = Feature("plan", declare=_declare)
