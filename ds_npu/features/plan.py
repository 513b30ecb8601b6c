"""``ds_npu.plan``: what is wrong with the globs is said, whether anything needs the plan or not."""

from __future__ import annotations

from ds_npu.config.plan import Plan
from ds_npu.features.build import Build
from ds_npu.features.feature import Feature


def _apply(plan: Plan, build: Build) -> None:
    if plan:
        # Whether anything needs it or not, what is wrong with it is said.
        build.partial_plan  # noqa: B018


PLAN: Feature[Plan] = Feature("plan", apply=_apply)
