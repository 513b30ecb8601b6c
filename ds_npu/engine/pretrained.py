"""Hugging Face checkpoints straight into a model that is sharded over tensor ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ds_npu.checkpoint.loading import load_checkpoint, meta_model
from ds_npu.config.loading import load
from ds_npu.engine.session import open_session, use_own_device
from ds_npu.engine.shard_protection import protect_shards
from ds_npu.features.build import Build
from ds_npu.features.driver import apply_features, values_in


def from_pretrained(auto_class: Any, folder: str | os.PathLike[str], config: Any, **options: Any) -> Any:
    """The model of the checkpoint in ``folder``, of which this rank reads and holds its part only.

    ``auto_class`` is one of transformers' Auto classes, or a model's class, ``config`` the DeepSpeed config (a file or
    a dict) with ``ds_npu.parallel.tensor``; ``options`` are those of its ``from_pretrained`` that change the config,
    and ``dtype``. Pass the model to ``deepspeed.initialize`` with the same config. Every rank calls it at the same
    time; the process group is made where there is none. On the host this takes the rank's part and, where a weight has
    to be converted, the largest single one.

    Raises ConfigError, PlanError or ValueError for a config or a model that cannot be sharded, and CheckpointError with
    every weight that is missing, left over or of another shape.
    """
    ds_config = load(config)
    if not dist.is_initialized():
        deepspeed.init_distributed(get_accelerator().communication_backend_name())
    use_own_device()
    session = open_session(ds_config)
    model = meta_model(auto_class, Path(folder), **options)
    build = Build(session.topology, model, session.config.plan, get_accelerator().device_name())
    apply_features(values_in(session.config), build)
    load_checkpoint(model, Path(folder), session.topology.coordinates)
    protect_shards(model, session.topology)
    return model
