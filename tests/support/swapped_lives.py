"""Runs whose optimizer's states are on a disk, saved, loaded and gone on with, against one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import deepspeed
import gradient_rule as rule
import layout_lives as lives
import layout_pairs
import pytest
import python_aio
import tensor_parallel_rule as dense
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import safe_get_full_fp32_param

from ds_npu.checkpoint.files import CheckpointError

KIND = layout_pairs.Kind()


def swapped(folder: str, **more: object) -> dict:
    """The section and more keys of ZeRO 3 with states on a disk, and of some sub-groups, which are small, in memory."""
    device = {"device": "nvme", "nvme_path": f"{folder}/swap", "pin_memory": False, "buffer_count": 8}
    zero = {"offload_optimizer": device | more, "sub_group_size": 1400}
    return {"zero": zero, "more": python_aio.CONFIG}


def layouts_in(folder: str) -> list[tuple[int, dict]]:
    """Stages and sections: states on a disk in four forms first, then in memory."""
    tensor, waits = layout_pairs.over(tensor=2), {"checkpoint": {"asynchronous": False}}
    behind = {"checkpoint": {"asynchronous": True}}
    on_disk, pipelined = swapped(folder), swapped(folder, pipeline_read=True, pipeline_write=True, buffer_count=16)
    return [
        (3, on_disk | behind),
        (3, pipelined | waits),
        (3, tensor | on_disk | waits),
        (3, layout_pairs.over(context=2) | pipelined | behind),
        (1, tensor | waits),
        (3, waits),
        (2, layout_pairs.OFFLOADED | waits),
        *[(3, weights_on_disk(folder, device) | waits) for device in ("cpu", "nvme")],
    ]


def weights_on_disk(folder: str, device: str) -> dict:
    """The section and more keys of ZeRO 3 with weights on a disk, and its states on ``device``."""
    on_disk = swapped(folder)
    held = {"device": "nvme", "nvme_path": f"{folder}/swap", "buffer_count": 60, "buffer_size": 4096, "max_in_cpu": 0}
    states = on_disk["zero"]["offload_optimizer"] | {"device": device}
    return on_disk | {"zero": on_disk["zero"] | {"offload_param": held, "offload_optimizer": states}}


def hold(folder: str, pairs: Sequence[tuple[int, int]]) -> None:
    """Save at the first layout of each pair, go on at the second, and compare with one process."""
    rule.without_extension()
    with python_aio.python_files():
        layout_pairs.hold_layouts(KIND, layouts_in(folder), pairs, folder)
    # The test is of both.
    engine_files = list(Path(folder, "swap", "zero_stage_3", "optimizer", f"rank{dist.get_rank()}").iterdir())
    assert any(each.name.startswith("exp_avg_sq") for each in engine_files)


def weights_alone(folder: str) -> None:
    """Weights are loaded without states, into an engine that has trained, whose moments it keeps."""
    rule.without_extension()
    with python_aio.python_files():
        layout = layouts_in(folder)[0]
        engine = layout_pairs.engine_of(KIND, *layout)
        masters = engine.optimizer.fp32_partitioned_groups_flat
        are_swapped = {engine.optimizer._swappable_optimizer_subgroup(index) for index in range(len(masters))}
        assert are_swapped == {True, False}, "sub-groups on the disk and in memory"
        lives.step_of(engine, 0, torch.float32)
        saved = whole_masters(engine)
        for tag in ("first", "first", "second"):  # of one tag twice
            engine.save_checkpoint(folder, tag=tag)
            engine.finish_saving()
        assert not list(Path(folder).rglob("offloaded_tensors"))
        moments = digests(engine, "exp_avg")
        for step in (1, 2):
            lives.step_of(engine, step, torch.float32)
        later = digests(engine, "exp_avg")
        assert later != moments and not same(whole_masters(engine), saved)
        engine.load_checkpoint(folder, tag="first", load_optimizer_states=False)
        assert same(whole_masters(engine), saved) and digests(engine, "exp_avg") == later
        engine.load_checkpoint(folder, tag="second")
        assert same(whole_masters(engine), saved) and digests(engine, "exp_avg") == moments
        fill_disk(engine)
        with pytest.raises(RuntimeError, match=r"was not written to .*swp \([0-9,]+ bytes\): No space left on device"):
            engine.load_checkpoint(folder, tag="second")
        engine.destroy()


def fill_disk(engine) -> None:
    """Let each swapped file of this rank be on a disk that is full."""
    for each in Path(engine.optimizer.optimizer_swapper.swap_folder).iterdir():
        each.unlink()
        each.symlink_to("/dev/full")


def of_deepspeed_alone(folder: str) -> None:
    """A checkpoint of DeepSpeed without ds_npu, with the swapped files beside it, goes on as one process does."""
    rule.without_extension()
    expected = layout_pairs.expected_of(KIND)
    with python_aio.python_files():
        saved = Path(folder, "alone")
        train_alone(folder, saved)
        engine = layout_pairs.engine_of(KIND, *layouts_in(folder)[0])
        engine.load_checkpoint(str(saved))
        layout_pairs.go_on(engine, expected, "of DeepSpeed alone")
        in_memory = layout_pairs.engine_of(KIND, 3, {})
        with pytest.raises(CheckpointError, match=r"of .* sub-groups of ZeRO 3, which were on NVMe; this run has 0 of"):
            in_memory.load_checkpoint(str(saved))
        dist.barrier()
        # Of one rank alone; all of them say so.
        for each in saved.glob("*/offloaded_tensors/rank01/exp_avg_sq-*"):
            each.unlink(missing_ok=True)
        with pytest.raises(CheckpointError, match=r"rank01/exp_avg_sq-.*swp is not there, or shorter than"):
            engine.load_checkpoint(str(saved))
        engine.destroy()
        in_memory.destroy()


def train_alone(folder: str, saved: Path) -> None:
    stage, section = layouts_in(folder)[0]
    config = dense.config(stage, torch.float32, {}) | section["more"]
    del config["ds_npu"]
    config |= {"optimizer": {"type": "AdamW", "params": layout_pairs.ADAM | {"torch_adam": True}}}
    config |= {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
    config["zero_optimization"] = {**config["zero_optimization"], **section["zero"]}
    model = layout_pairs.model_of(KIND, torch.float32)
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    assert type(engine) is DeepSpeedEngine
    for step in range(layout_pairs.BEFORE):
        engine.backward(dense.loss_of(engine, lives.tokens(step)[4 * dist.get_rank() :][:4], torch.float32))
        engine.step()
    engine.save_checkpoint(str(saved), tag="last")
    engine.destroy()
    dist.barrier()


def whole_masters(engine) -> list[torch.Tensor]:
    return [safe_get_full_fp32_param(weight).clone() for weight in engine.module.parameters()]


def same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return all(map(torch.equal, found, expected))


def digests(engine, key: str) -> dict[str, str]:
    return {name: each for name, each in layout_pairs.digests_of(engine).items() if name.endswith(f"/{key}")}
