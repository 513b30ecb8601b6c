"""``import ds_npu`` after ``import deepspeed`` on an NPU: DeepSpeed has made its accelerator and bound its builders."""

from __future__ import annotations

import sys
from typing import Any

DEFINITIONS = "deepspeed.ops.op_builder.npu"
"""Where DeepSpeed's builders are defined, and ours find their bases."""


def take_over(built_in: type, ours: type) -> None:
    """Make an ``ours`` DeepSpeed's accelerator if it is a ``built_in`` now, and its builders the ones bound so far."""
    real: Any = sys.modules.get("deepspeed.accelerator.real_accelerator")
    if real is None or type(real.ds_accelerator) is not built_in:
        return
    chosen: Any = vars(real)["ds_accelerator"]
    accelerator = ours()
    replaced: dict[Any, Any] = {
        chosen.get_op_builder(name): accelerator.get_op_builder(name) for name in chosen.class_dict
    }
    real.set_accelerator(accelerator)
    for name, module in list(sys.modules.items()):
        if name.startswith("deepspeed.") and not name.startswith(DEFINITIONS):
            bound = {key: value for key, value in vars(module).items() if key.endswith("Builder") and value in replaced}
            vars(module).update({key: replaced[value] for key, value in bound.items()})
    listed: Any = sys.modules.get("deepspeed.ops.op_builder.all_ops")
    made: dict[str, Any] = listed.ALL_OPS if listed else {}
    made.update({name: replaced[type(each)]() for name, each in made.items() if type(each) in replaced})
