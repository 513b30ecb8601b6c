"""A tag that several runs save to: other layouts, layouts that are not known, fewer ranks."""

from __future__ import annotations

import json
from pathlib import Path

import deepspeed
import layout_lives as lives
import pytest
import torch
import torch.distributed as dist

from ds_npu.checkpoint.files import CheckpointError
from ds_npu.checkpoint.manifest import manifest_path
from ds_npu.engine.checkpoints import checkpoint_files

OFFLOADED = {"zero": {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}}
"""Under ZeRO 3, where it is not known what the optimizer holds where."""
TENSOR = {"parallel": {"tensor": 2}}
TAG = "same"


def saved(stage: int, section: dict, folder: str, step: int) -> list[float]:
    """Save after a step; the losses of the two steps that follow."""
    engine = lives.engine_of("llama", stage, section, torch.float32)
    lives.step_of(engine, step, torch.float32)
    engine.save_checkpoint(folder, tag=TAG)
    return [lives.step_of(engine, each, torch.float32) for each in (8, 9)]


def resumed(stage: int, section: dict, folder: str) -> list[float]:
    engine = lives.engine_of("llama", stage, section, torch.float32)
    assert engine.load_checkpoint(folder, tag=TAG)[0] is not None
    return [lives.step_of(engine, each, torch.float32) for each in (8, 9)]


def refused(stage: int, section: dict, folder: str, said: str) -> None:
    engine = lives.engine_of("llama", stage, section, torch.float32)
    with pytest.raises(CheckpointError, match=said) as caught:
        engine.load_checkpoint(folder, tag=TAG)
    every: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(every, str(caught.value))
    assert len({each.partition("this rank reads")[0] for each in every}) == 1
    lives.step_of(engine, 1, torch.float32)


def known_and_unknown_layouts(folder: str) -> None:
    saved(1, TENSOR, folder, 0)
    expected = saved(3, OFFLOADED, folder, 1)
    assert resumed(3, OFFLOADED, folder) == expected
    unknown = r"another layout \(2 ranks, ZeRO 3, offload_param cpu.*this run: 2 ranks.*What to do: load it with"
    refused(1, {}, folder, unknown)
    refused(3, TENSOR, folder, unknown)
    close(resumed(3, {}, folder), expected)
    expected = saved(2, TENSOR, folder, 2)
    assert resumed(2, TENSOR, folder) == expected
    as_version_1(folder)
    assert resumed(2, TENSOR, folder) == expected
    close(resumed(0, {}, folder), expected)
    refused(3, OFFLOADED, folder, "not known what .*Stage3 holds where")
    names = files(folder)
    assert not [name for name in names if "zero_pp_rank" in name and "model_states" in name], names
    without_manifests(folder)
    engine = lives.engine_of("llama", 1, {}, torch.float32)
    with pytest.raises(
        CheckpointError, match=r"rank 0 is to load same, and rank 1 None .*on a disk that all ranks see"
    ):
        engine.load_checkpoint(folder if dist.get_rank() == 0 else f"{folder}/elsewhere")


def as_version_1(folder: str) -> None:
    """Rewrite this rank's manifest as earlier commits wrote it."""
    path = manifest_path(Path(folder, TAG), dist.get_rank())
    old = json.loads(path.read_text()) | {"version": 1}
    for key in ("layout", "is_known", "leaves_out_frozen", "digest", "digests"):
        del old[key]
    for part in old["parts"].values():
        del part["dtype"]
    path.write_text(json.dumps(old))
    dist.barrier()


def without_manifests(folder: str) -> None:
    """As DeepSpeed alone, or an earlier ds_npu, wrote them."""
    for stage, section in ((1, {}), (3, {})):
        expected = saved(stage, section, folder, 0)
        dist.barrier()
        if dist.get_rank() == 0:
            for path in Path(folder, TAG).glob("ds_npu_layout_rank_*.json"):
                path.unlink()
        dist.barrier()
        assert resumed(stage, section, folder) == expected
        said = rf"another layout \(.*ZeRO {'1 or 2' if stage == 1 else '3'}.*What to do: load it with"
        refused(4 - stage, {}, folder, said)
        refused(2 if stage == 1 else 0, TENSOR, folder, said)


def by_deepspeed_alone(folder: str) -> None:
    """A run without the section saves to a tag that has manifests: they say nothing of its files."""
    saved(1, {}, folder, 0)
    saved_by_deepspeed(folder)
    for stage, section in ((0, {}), (1, {}), (3, {}), (1, TENSOR)):
        refused(stage, section, folder, "is not the file that ds_npu_layout_rank_.* was saved with: another run")
    dist.barrier()
    if dist.get_rank() == 0:
        for path in Path(folder, TAG).glob("ds_npu_layout_rank_*.json"):
            path.unlink()
    dist.barrier()
    engine = lives.engine_of("llama", 0, {}, torch.float32)
    assert engine.load_checkpoint(folder, tag=TAG)[0] is not None
    assert engine.global_steps == 2


def saved_by_deepspeed(folder: str) -> None:
    config = lives.engine_of("llama", 0, {}, torch.float32)._config._param_dict
    model = lives.model_of("llama", torch.float32)
    plain = {key: each for key, each in config.items() if key != "ds_npu"}
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=plain)[0]
    assert not hasattr(engine, "topology")
    for step in range(2):
        ids = lives.tokens(step)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.save_checkpoint(folder, tag=TAG)


def files(folder: str) -> list[str]:
    dist.barrier()
    found = sorted(path.name for path in Path(folder, TAG).iterdir())
    dist.barrier()
    return found


def close(found: list[float], expected: list[float]) -> None:
    assert all(abs(one / other - 1) <= lives.BOUND for one, other in zip(found, expected, strict=True))


def by_more_ranks(folder: str) -> None:
    saved(3, {}, folder, 0)


def fails_to_save(folder: str) -> None:
    """A rank cannot write: all that was saved before is there."""
    engine, before = lives.engine_of("llama", 3, {}, torch.float32), files(folder)

    def full(*given: object) -> None:
        raise OSError("No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(checkpoint_files, "_write_text", full)
        with pytest.raises(RuntimeError, match="was not saved to"):
            engine.save_checkpoint(folder, tag=TAG)
    assert files(folder) == before and [name for name in before if "00003" in name]


def by_fewer_ranks(folder: str) -> None:
    """Files of ranks that this world does not have are gone, another's stay."""
    fails_to_save(folder)
    if dist.get_rank() == 0:
        Path(folder, TAG, "notes.txt").write_text("mine")
    expected = saved(3, {}, folder, 1)
    found = files(folder)
    assert "notes.txt" in found and not [name for name in found if "rank_3" in name or "00003" in name], found
    assert resumed(3, {}, folder) == expected
    close(resumed(1, TENSOR, folder), expected)
