"""``ds_npu.memory_report``: what device memory is used for, of one step."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

SvgFile = Annotated[str, Field(pattern=r"\.svg$", description="the name of an .svg file")]

MemoryReport = bool | SvgFile
"""Whether a table is printed; a file's name: and a picture written."""
