"""``ds_npu.memory_report``: a table of what one step uses device memory for."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

SvgFile = Annotated[str, Field(pattern=r"\.svg$", description="the name of an .svg file")]

MemoryReport = bool | SvgFile
"""Whether a table is printed; a file's name: a picture is written, too."""
