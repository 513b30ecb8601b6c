"""``ds_npu.plan``: which module of the user's model plays which part."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ds_npu.config.roles import Role

Name = Annotated[str, Field(min_length=1, description="a non-empty string")]
# Strict mode would want a Role, which JSON does not have.
Plan = dict[Name, Annotated[Role, Field(strict=False)]]
"""Roles by globs over module names."""
