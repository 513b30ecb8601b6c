"""The weights of a checkpoint, put together in one process and written as a Hugging Face model."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import save_torch_state_dict

from ds_npu.capability.named_classes import named_classes
from ds_npu.checkpoint.files import CheckpointError
from ds_npu.checkpoint.megatron_weights import MegatronModel, differences_of_run, megatron_weights
from ds_npu.checkpoint.saving import save_pretrained
from ds_npu.checkpoint.written import Plain, WrittenCheckpoint, differences
from ds_npu.engine.checkpoints.written_files import CLASSES


def empty_model(folder: Path) -> Any:
    """The model of the config.json in ``folder``, without values; code of the folder is not run. Raises ValueError."""
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    names = config.architectures or []
    try:
        kind = pkgutil.resolve_name(f"transformers:{names[0]}")
    except (LookupError, AttributeError, ValueError) as error:
        what = f"architectures names no model of transformers, found {names}"
        raise ValueError(f"{folder / 'config.json'}: {what}") from error
    with torch.device("meta"):
        return kind(config)


def write_weights(folder: Path, model: Any, out: Path, allowed: Sequence[str]) -> int:
    """Write the weights of the checkpoint in ``folder`` to ``out``, in their own dtypes; returns their number.

    ``allowed``: names of classes that its files may hold. Raises CheckpointError where the weights are not those of
    ``model``, OSError where they cannot be written.
    """
    written = known_checkpoint(folder, allowed)
    held = written.plain_weights()
    _check(folder, model, held)
    weights = {name: written.value(name).to(_dtype(plain)) for name, plain in held.items()}
    written.close()
    save_pretrained(model, out, weights)
    return len(weights)


def write_megatron_weights(folder: Path, model: Any, out: Path) -> tuple[int, bool]:
    """Write the weights of Megatron-Core's distributed checkpoint in ``folder`` to ``out``, in their own dtypes.

    Returns their number, and whether the folder has the arguments of the run, which are then those of the config.
    Raises CheckpointError where the weights or the arguments are not those of ``model``, OSError where they cannot be
    written.
    """
    other = differences_of_run(folder, model.config)
    if other:
        raise CheckpointError(
            f"{folder}: the run that wrote it has {', '.join(other)}. What to do: give the config.json of this model"
        )
    weights = dict(megatron_weights(folder, MegatronModel.of(model.config)))
    _check(folder, model, {name: Plain(tuple(each.shape), str(each.dtype)) for name, each in weights.items()})
    if model.config.tie_word_embeddings:
        head, embedding = (weights.get(name) for name in ("lm_head.weight", "model.embed_tokens.weight"))
        if head is not None and embedding is not None and not head.equal(embedding):
            raise CheckpointError(
                f"{folder}: output_layer.weight is another one than embedding.word_embeddings.weight. What to do: "
                "tie_word_embeddings false in config.json"
            )
    save_pretrained(model, out, weights)
    return len(weights), other is not None


def _check(folder: Path, model: Any, held: Mapping[str, Plain]) -> None:
    """Raise CheckpointError where the weights ``held`` are not those of ``model``."""
    wanted = {name: Plain(tuple(each.shape), str(each.dtype)) for name, each in model.state_dict().items()}
    tied = set(model.all_tied_weights_keys or ())
    found = differences(held, wanted)
    if found.other or found.unexpected or set(found.missing) - tied:
        raise CheckpointError(f"{folder} does not fit {type(model).__name__}: {found.told()}")


def write_float32(folder: Path, out: Path, allowed: Sequence[str]) -> int:
    """Write the weights of the checkpoint in ``folder`` in float32 to ``out``, under their names in the plain model.

    DeepSpeed's zero_to_fp32.py does the same. Integer and boolean buffers keep their dtype. Returns the number of
    weights.
    """
    written = known_checkpoint(folder, allowed)
    weights = {}
    for name in written.plain_weights():
        value = written.value(name)
        weights[name] = value.float() if value.is_floating_point() else value
    written.close()
    out.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(weights, out)
    return len(weights)


def known_checkpoint(folder: Path, allowed: Sequence[str]) -> WrittenCheckpoint:
    """The checkpoint in ``folder``; raises CheckpointError where its manifests do not say where each weight is."""
    written = WrittenCheckpoint(folder, (*CLASSES, *named_classes(allowed)))
    if not written.is_known:
        raise CheckpointError(
            f"{folder}: its manifests do not say what is where ({written.layout}). What to do: load it in a run of "
            "that layout, and engine.save_pretrained there"
        )
    return written


def _dtype(plain: Plain) -> torch.dtype:
    found: torch.dtype = pkgutil.resolve_name((plain.dtype or "torch.float32").replace(".", ":", 1))
    return found
