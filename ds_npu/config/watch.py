"""``ds_npu.watch``: checks that a run makes of itself."""

from __future__ import annotations

from ds_npu.config.section import AtLeastZero, Section


class WatchSection(Section):
    """Checks that a run makes of itself while it trains."""

    stall_factor: AtLeastZero = 10
    """Each rank says where it stands when no step ends for so many median steps, at least a minute; 0: never."""
    finite: bool = False
    """Stop at a loss or gradient that is not finite, naming step, rank and layer; DeepSpeed skips such a step."""
