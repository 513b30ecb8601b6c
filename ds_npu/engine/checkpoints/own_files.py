"""Whether DeepSpeed finds on this rank the files that it reads, in a checkpoint that does not say what is where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ds_npu.checkpoint.files import CheckpointError
from ds_npu.checkpoint.written import WrittenCheckpoint
from ds_npu.engine.checkpoints.written_files import layout_description, manifest_of


def check_files(engine: Any, folder: Path, with_states: bool, written: WrittenCheckpoint | None = None) -> None:
    """Raise CheckpointError where DeepSpeed cannot read ``folder`` with the layout of ``engine``.

    DeepSpeed (0.19.8) fails there with a bare assertion, or after it has written to the model. ``with_states``: it
    reads the optimizer's, too. ``written``: the checkpoint by its manifests, if it has any.
    """
    models = {path.name for path in folder.glob("*mp_rank_*_model_states.pt")}
    states = {path.name for path in folder.glob("*zero_pp_rank_*_optim_states.pt")}
    if not models and written is None:
        raise CheckpointError(
            f"{folder} has no checkpoint: expected files *_model_states.pt, found none. What to do: name the folder "
            "and the tag that engine.save_checkpoint was given, on a disk that all ranks see"
        )
    problem = _other_files(engine, folder, states if with_states else None)
    if written is not None and problem is None:
        mine = manifest_of(engine, folder)
        if not any(mine.has_parts_like(each) for each in written.manifests):
            problem = "none of its ranks held the parts of the model that this rank holds"
    if problem is not None:
        wrote, mine_is = written.layout if written else _layout(models, states), layout_description(engine)
        raise CheckpointError(
            f"{folder} was written at another layout ({wrote}; this run: {mine_is}), and it is not known what its "
            f"files hold where: {problem}. What to do: load it with the layout that wrote it, or weights only: "
            "engine.save_pretrained in a run with that layout, from_pretrained in this one"
        )


def _other_files(engine: Any, folder: Path, states: set[str] | None) -> str | None:
    """How the files that DeepSpeed reads on this rank differ from those in ``folder``; None where they do not."""
    where = str(folder.parent), folder.name
    own = Path(engine._get_ckpt_name(*where)).name
    alike = {Path(name).name for name in engine._get_all_ckpt_names(*where)}
    if own not in alike or len(alike) != engine.mp_world_size:
        return f"this rank reads {own}, one of {engine.mp_world_size}, and {len(alike)} of that kind are there"
    has_states = states is not None and engine.optimizer is not None and engine.zero_optimization()
    if states is None or not has_states or engine.zero_elastic_checkpoint():
        return None
    mine = Path(engine._get_zero_ckpt_name(*where)).name
    before, after = mine.split("zero_pp_rank_")[0], mine.split("_mp_rank_")[1]
    of_group = [each for each in states if each.startswith(f"{before}zero_pp_rank_") and each.endswith(after)]
    if mine not in states or len(of_group) != engine.seq_dp_world_size:
        return f"this rank reads {mine}, one of {engine.seq_dp_world_size}, and {len(of_group)} of that kind are there"
    return None


def _layout(models: set[str], states: set[str]) -> str:
    """The layout that wrote files of these names, as far as names tell it."""
    if any(name.startswith("zero_pp_rank_") for name in models):
        return f"{len(models)} ranks, ZeRO 3"
    zero = f"ZeRO 1 or 2 over {len(states)} ranks" if states else "no ZeRO"
    return f"{len(models)} model-parallel ranks, {zero}"
