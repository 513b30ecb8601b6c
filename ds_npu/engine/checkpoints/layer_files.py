"""Weights of a ``deepspeed.PipelineModule`` in its checkpoints: a file for each layer, written by the first data rank.

Read from DeepSpeed 0.19.8 (runtime/pipe/module.py, save_state_dict). Names of weights begin with the layer's index in
the whole module, or with the key of tied layers, so that they are the same at every division into stages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from deepspeed.runtime.pipe.module import PipelineModule


def has_known_files(module: Any) -> bool:
    """Whether it is known where the weights of ``module`` are in its files: if each rank writes one run of layers."""
    return not isinstance(module, DualPipeVModule) and not getattr(module, "checkpoint_parallel_write_pipeline", False)


def states_of(engine: Any) -> dict[str, Any]:
    """This rank's weights and persistent buffers by name; module_state_dict() of a PipelineEngine would save them."""
    is_pipeline = isinstance(engine.module, PipelineModule)
    found: dict[str, Any] = engine.module.state_dict(keep_vars=True) if is_pipeline else engine.module_state_dict()
    return found


def layer_positions(engine: Any, folder: Path) -> dict[str, tuple[str, str]]:
    """The file in ``folder`` and the key in it of each weight that this rank writes, by name."""
    module: Any = engine.module
    found: dict[str, tuple[str, str]] = {}
    if module._grid.data_parallel_id != 0:
        return {}
    prefixes = {id(each): name for name, each in reversed(list(module.named_modules()))}
    for index, layer in enumerate(module.forward_funcs):
        if hasattr(layer, "state_dict"):
            file = Path(module.ckpt_layer_path(str(folder), index)).name
            found |= {f"{prefixes[id(layer)]}.{key}": (file, key) for key in layer.state_dict()}
    return found
