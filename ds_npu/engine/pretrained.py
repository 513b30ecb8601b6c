"""Hugging Face checkpoints straight into a model that is sharded over tensor ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ds_npu.checkpoint.loading import load_checkpoint, make_empty, meta_model
from ds_npu.config.loading import load
from ds_npu.config.problems import Config
from ds_npu.engine.session import Session, open_session, use_own_device
from ds_npu.engine.shard_protection import protect_shards
from ds_npu.features.build import Build
from ds_npu.features.driver import apply_features, values_in
from ds_npu.topology.topology import Topology


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
    if not dist.is_initialized():
        deepspeed.init_distributed(get_accelerator().communication_backend_name())
    session = _session(load(config))
    model = meta_model(auto_class, Path(folder), **options)
    _take_part(model, session, lambda topology: load_checkpoint(model, Path(folder), topology.coordinates))
    return model


def with_empty_parts(model: Any, ds_config: Config) -> None:
    """Give ``model``, on the meta device, this rank's parts on its NPU, whose weights have no defined values.

    The process group has to exist. Every rank calls it at the same time.
    """
    device = get_accelerator().current_device_name()
    if "ds_npu" in ds_config:
        _take_part(model, _session(ds_config), lambda topology: make_empty(model, model.dtype, device))
    else:
        make_empty(model, model.dtype, device)


def _session(ds_config: Config) -> Session:
    use_own_device()
    return open_session(ds_config)


def _take_part(model: Any, session: Session, fill: Callable[[Topology], None]) -> None:
    """Change ``model`` as the section says, let ``fill`` allocate its weights, and protect those that are sharded."""
    device = get_accelerator().device_name()
    probes = session.config.parallel.probe
    build = Build(session.topology, model, session.config.plan, device, probes=probes)
    apply_features(values_in(session.config), build)
    fill(session.topology)
    protect_shards(model, session.topology)
