"""Whether the files that DeepSpeed is to read on this rank are there, in a checkpoint without manifests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ds_npu.checkpoint.files import CheckpointError
from ds_npu.engine.written_files import layout_in_words


def missing_files(engine: Any, folder: Path, with_states: bool) -> None:
    """Raise CheckpointError where ``folder``, without manifests, was not written at the layout of ``engine``.

    DeepSpeed (0.19.8) fails there with a bare assertion, or after it has written to the model.
    """
    where = str(folder.parent), folder.name
    models = {path.name for path in folder.glob("*mp_rank_*_model_states.pt")}
    states = {path.name for path in folder.glob("*zero_pp_rank_*_optim_states.pt")}
    if not models:
        raise CheckpointError(
            f"{folder} has no checkpoint: expected files *_model_states.pt, found none. What to do: name the folder "
            "and the tag that engine.save_checkpoint was given, on a disk that all ranks see"
        )
    own = Path(engine._get_ckpt_name(*where)).name
    alike = {Path(name).name for name in engine._get_all_ckpt_names(*where)}
    problem = None
    if own not in alike or len(alike) != engine.mp_world_size:
        problem = f"this rank reads {own}, one of {engine.mp_world_size}, and {len(alike)} of that kind are there"
    elif with_states and engine.zero_optimization() and not engine.zero_elastic_checkpoint():
        mine = Path(engine._get_zero_ckpt_name(*where)).name
        rank, model_rank = mine.split("zero_pp_rank_")[0], mine.split("_mp_rank_")[1]
        of_group = [name for name in states if name.startswith(f"{rank}zero_pp_rank_") and name.endswith(model_rank)]
        if mine not in states or len(of_group) != engine.seq_dp_world_size:
            problem = f"this rank reads {mine}, one of {engine.seq_dp_world_size}, and {len(of_group)} are there"
    if problem is not None:
        raise CheckpointError(
            f"{folder} has no manifests (ds_npu_layout_rank_*.json) and was written at another layout "
            f"({_layout(models, states)}; this run: {layout_in_words(engine)}): {problem}. What to do: load it with "
            "the layout that wrote it, or weights only: engine.save_pretrained in a run with that layout, "
            "from_pretrained in this one"
        )


def _layout(models: set[str], states: set[str]) -> str:
    """The layout that wrote files of these names, as far as names tell it."""
    if any(name.startswith("zero_pp_rank_") for name in models):
        return f"{len(models)} ranks, ZeRO 3"
    zero = f"ZeRO 1 or 2 over {len(states)} ranks" if states else "no ZeRO"
    return f"{len(models)} model-parallel ranks, {zero}"
