"""A checkpoint as DeepSpeed's universal one: whole weights and states, in one process, one weight after the other."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.checkpoint.constants import (
    CAT_DIM,
    DS_VERSION,
    PARAM,
    PARAM_GROUPS,
    PARAM_SHAPES,
    UNIVERSAL_CHECKPOINT_INFO,
    UNIVERSAL_CHECKPOINT_VERSION_KEY,
    UNIVERSAL_CHECKPOINT_VERSION_VALUE,
)

from ds_npu.checkpoint.digests import DigestedWriter, flush_folder
from ds_npu.checkpoint.files import CheckpointError, why_not_written
from ds_npu.checkpoint.universal import INNER, OPTIMIZER, STEP, WEIGHT, ZERO
from ds_npu.checkpoint.wholeness import UNFINISHED
from ds_npu.checkpoint.written import WrittenCheckpoint
from ds_npu.cli.converted_weights import known_checkpoint
from ds_npu.engine.checkpoints.reassembly import OF_PRECISION
from ds_npu.zero_ext.optimizer_layout import PLAIN
from ds_npu.zero_ext.optimizer_layout import ZERO as OF_ZERO

LATEST = "latest_universal"
MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
"""The file that DeepSpeed reads below ZeRO 3, and the one that it reads with it."""


def write_universal(folder: Path, out: Path, allowed: Sequence[str]) -> int:
    """Write the checkpoint in ``folder`` to ``out`` under its tag, and the tag to LATEST; returns the weights' number.

    ``allowed``: names of classes that its files may hold. Raises CheckpointError where it cannot be read, or is at
    ``out`` already, OSError where ``out`` cannot be written.
    """
    written = known_checkpoint(folder, allowed)
    target = out / folder.name
    if target.exists():
        raise CheckpointError(f"{target} is there already. What to do: another --out, or remove it")
    unfinished = target.with_name(f".{target.name}{UNFINISHED}")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        count = 0
        for path, content in _contents(written):
            count += path.stem == WEIGHT
            (unfinished / path).parent.mkdir(parents=True, exist_ok=True)
            _save(content, unfinished / path)
        unfinished.rename(target)
        flush_folder(out)
        with DigestedWriter(out / LATEST) as writer:
            writer.write(folder.name.encode())
    except OSError as error:
        raise OSError(f"{out} was not written: {why_not_written(error, unfinished, 0)}") from error
    finally:
        written.close()
        shutil.rmtree(unfinished, ignore_errors=True)
    return count


def _contents(written: WrittenCheckpoint) -> Iterator[tuple[Path, Any]]:
    """The files of a universal checkpoint, by their path in it."""
    groups: dict[int, dict[str, Any]] = {}
    shapes: dict[int, dict[str, torch.Size]] = {}
    step: Any = None
    for name, plain in written.plain_weights().items():
        value = written.value(name)
        tensors = {WEIGHT: value.float() if value.is_floating_point() else value}
        index, settings = written.group(name)
        if index is not None:
            groups.setdefault(index, {**settings, "params": []})
            shapes.setdefault(index, {})[name] = torch.Size(plain.shape)
            for key, each in written.state(name).items():
                if isinstance(each, torch.Tensor) and each.numel() == math.prod(plain.shape) and each.dim():
                    tensors[key] = each.view(plain.shape)
                elif key == STEP:
                    step = each
                    yield Path(ZERO, name, f"{STEP}.pt"), each
        for key, tensor in tensors.items():
            yield Path(ZERO, name, f"{key}.pt"), {PARAM: tensor, CAT_DIM: 0}
    ordered = [groups[index] for index in sorted(groups)]
    settings_of_run = {
        **written.of_optimizer((OF_ZERO, PLAIN), OF_PRECISION),
        DS_VERSION: deepspeed.__version__,
        PARAM_GROUPS: ordered,
        INNER: {"state": {0: {STEP: step}}, PARAM_GROUPS: ordered},
    }
    yield Path(OPTIMIZER), settings_of_run
    info = {UNIVERSAL_CHECKPOINT_VERSION_KEY: UNIVERSAL_CHECKPOINT_VERSION_VALUE}
    model = written.model_state() | {
        "module": {},
        "optimizer": None,
        "mp_world_size": 1,
        PARAM_SHAPES: [shapes[index] for index in sorted(shapes)],
        UNIVERSAL_CHECKPOINT_INFO: info,
    }
    for file in MODEL_FILES:
        yield Path(file), model


def _save(content: Any, path: Path) -> None:
    with DigestedWriter(path) as writer:
        file: Any = writer
        torch.save(content, file)
