"""States that ZeRO 3 keeps on a disk (``offload_optimizer`` "nvme"), in checkpoints as if they were in memory.

DeepSpeed (0.19.8 runtime/engine.py:4456, :4937) copies the swapped files to the checkpoint and back, and loads
nothing else of the optimizer: neither Adam's steps and the loss scale, nor the masters and states of sub-groups that
are too small to be swapped, nor the 16-bit weights. The first step behind a load makes new moments. Here a rank's own
file holds all that it holds under ``offload_optimizer`` "cpu", and each layout loads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS, LOSS_SCALER, OPTIMIZER_STATE_DICT

from ds_npu.zero_ext.method_wraps import MethodLevel, replace_method, wrap_method

OF_LOSS_SCALING = (LOSS_SCALER, "dynamic_loss_scale", "overflow")
"""Attributes of ZeRO 3's optimizer that its state dict has under the same keys."""


def swapped_masters(optimizer: Any) -> dict[int, int]:
    """The elements of each sub-group of ``optimizer``, ZeRO 3's, whose masters are on the disk, by its index.

    Sub-groups that are smaller than what DeepSpeed swaps are in memory.
    """
    numels = enumerate(optimizer.fp16_partitioned_groups_flat_numel)
    return {index: int(numel) for index, numel in numels if optimizer._swappable_optimizer_subgroup(index)}


def keep_in_checkpoints(optimizer: Any) -> None:
    """Let the state dict of ``optimizer``, ZeRO 3's, hold what is on the disk; loading one writes it there.

    Changes this instance only, and only where it keeps states on a disk, or weights, to which DeepSpeed loads nothing.
    To load needs host memory for all states; to save needs none, as files are read while the checkpoint is written.
    """
    if optimizer.swap_optimizer or optimizer.params_in_nvme_and_cpu:
        on_disk = _StatesOnDisk(optimizer)
        wrap_method(optimizer, "_rigid_state_dict", on_disk.state_dict, MethodLevel.CORRECTION)
        replace_method(optimizer, "_rigid_load_state_dict", on_disk.load, MethodLevel.CORRECTION)
        replace_method(optimizer, "_restore_from_bit16_weights", on_disk.restore, MethodLevel.CORRECTION)


class _StatesOnDisk:
    """The masters and moments of ``optimizer``, whose tensors have elements only during a step."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.swapper = optimizer, optimizer.optimizer_swapper

    def state_dict(self, plain: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The optimizer's state dict, with tensors that are read from the disk when they are used."""
        found = plain()
        inner = found[OPTIMIZER_STATE_DICT]
        masters = [*found[FP32_FLAT_GROUPS]]
        states = dict(inner["state"])
        for index, numel in swapped_masters(self.optimizer).items():
            held = self.swapper._get_param_swap_info(masters[index]).tensors
            dtype = masters[index].dtype
            read = {id(each.compute_tensor): torch.from_file(each.swap_path, size=numel, dtype=dtype) for each in held}
            masters[index] = read[id(masters[index])]
            # The inner optimizer steps the masters of all sub-groups in this order.
            if index in states:
                states[index] = {key: read.get(id(each), each) for key, each in states[index].items()}
        return found | {FP32_FLAT_GROUPS: masters, OPTIMIZER_STATE_DICT: inner | {"state": states}}

    def load(self, state: Mapping[str, Any], load_optimizer_states: bool = True) -> None:
        """Load ``state``, and copy the masters into the model's weights."""
        optimizer = self.optimizer
        vars(optimizer).update({key: state[key] for key in OF_LOSS_SCALING})
        if load_optimizer_states:
            if self.swapper is not None:
                self.swapper.purge_state()
            optimizer._set_fp32_optimizer_param_groups()
            optimizer.optimizer.load_state_dict(state[OPTIMIZER_STATE_DICT])
            optimizer._clear_fp32_optimizer_param_groups()
        for index, values in enumerate(state[FP32_FLAT_GROUPS]):
            self._put(index, values, with_weights=True, with_moments=load_optimizer_states)

    def restore(self) -> None:
        """Copy the model's weights, which are in memory, into the masters."""
        for index, values in enumerate(self.optimizer.fp16_partitioned_groups_flat):
            self._put(index, values, with_weights=False, with_moments=False)

    def _put(self, index: int, values: torch.Tensor, with_weights: bool, with_moments: bool) -> None:
        """Write ``values`` to the master of a sub-group, on the disk if it is swapped.

        ``with_weights``: to its weights, too; ``with_moments``: its moments, in memory, go to the disk, too.
        """
        master = self.optimizer.fp32_partitioned_groups_flat[index]
        is_swapped = self.optimizer._swappable_optimizer_subgroup(index)
        if is_swapped:
            master.data = values.to("cpu", master.dtype)
        else:
            master.data.copy_(values)
        if with_weights:
            self.optimizer._reassign_or_swap_out_partitioned_parameters(index)
        if is_swapped:
            info = self.swapper._get_param_swap_info(master)
            for each in info.tensors if with_moments else info.tensors[:1]:
                self._write(each.compute_tensor.detach(), Path(each.swap_path))
            info.release_memory()

    def _write(self, values: torch.Tensor, path: Path) -> None:
        """Raises RuntimeError where the disk does not take ``values``."""
        # DeepSpeed reads whole blocks.
        size = self.swapper._io_aligned_numel(values.numel()) * values.element_size()
        try:
            with path.open("wb") as file:
                file.write(values.contiguous().view(torch.uint8).numpy().data)
                file.truncate(size)
        except OSError as error:
            raise RuntimeError(
                f"a state of the optimizer was not written to {path} ({size:,} bytes): {error.strerror}. What to do: "
                "make room under zero_optimization.offload_optimizer.nvme_path, and load the checkpoint again"
            ) from error
