"""``ds_npu.watch``: checks that a run makes of itself."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ds_npu.config.section import AtLeastZero, Section


class WatchSection(Section):
    """Checks that a run makes of itself while it trains."""

    stall_factor: AtLeastZero = 10
    """Each rank says where it stands when no step ends for so many median steps, at least a minute; 0: never."""
    finite: bool | Annotated[str, Field(pattern="/", description="a folder, with a /, as ./not_finite")] = False
    """Stop at what is not finite, name the first wrong module, write its call to a folder (true: ./not_finite)."""
    mfu: bool = False
    """Count the FLOP of the second step; print MFU and HFU of the others, and write them to DeepSpeed's monitor."""
