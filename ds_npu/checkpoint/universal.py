"""DeepSpeed's universal checkpoints as one more layout: a folder for each weight, with a file for each of its tensors.

Read from DeepSpeed 0.19.8 (checkpoint/ds_to_universal.py, universal_checkpoint.py). ``zero/NAME/fp32.pt`` has the whole
weight, other files of the folder its state; ``zero/optimizer_state.pt`` has the settings of the optimizer. Files of
models have counters, and the names of each parameter group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ds_npu.capability.named_classes import AllowedClass
from ds_npu.checkpoint.contents import CheckpointFiles
from ds_npu.checkpoint.files import CheckpointError
from ds_npu.checkpoint.manifest import MODULE, Manifest, WrittenPart, WrittenRun
from ds_npu.checkpoint.selection import Selection
from ds_npu.checkpoint.written import WrittenCheckpoint

ZERO, OPTIMIZER = "zero", "zero/optimizer_state.pt"
PARAM, SHAPES, GROUPS, STEP, WEIGHT = "param", "param_shapes", "param_groups", "step", "fp32"
"""Keys and names of files."""
INNER = "optimizer_state_dict"
"""The key, in the optimizer's file, under which ZeRO 3 keeps the step and the groups."""


class UniversalFiles(CheckpointFiles):
    """The files of a universal checkpoint, of which some hold a tensor and no dict."""

    def _lazily_loaded(self, name: str) -> object:
        found = super()._lazily_loaded(name)
        return found if isinstance(found, dict) else {PARAM: found}


class UniversalCheckpoint(WrittenCheckpoint):
    """The universal checkpoint in ``folder``; ``same``: for each name of a shared weight all of its names."""

    def __init__(
        self, folder: Path, classes: Sequence[AllowedClass] = (), same: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        super().__init__(folder, classes)
        self._files = UniversalFiles(folder, classes)
        self._same = same or {}

    @cached_property
    def manifests(self) -> list[Manifest]:
        """The manifest that one rank with all weights would have written."""
        with self.damage_named():
            parts = dict(self._written_parts())
        for name, names in self._same.items():
            # Converters write the state under one name of a weight, and maybe its 16-bit values under another one.
            known = [each for each in names if each in parts]
            if known:
                parts[name] = parts[max(known, key=lambda each: parts[each].state is not None)]
        if not parts:
            raise CheckpointError(
                f"{self.folder} is no universal checkpoint: {ZERO}/ has no folders with {WEIGHT}.pt. What to do: name "
                "the folder that ds_npu convert --to universal, or DeepSpeed's ds_to_universal, has written"
            )
        return [Manifest(parts, 1, self._settings, self._model_file, "DeepSpeed universal")]

    def of_optimizer(self, keys: Sequence[str], names: Sequence[str]) -> Mapping[str, Any]:
        return {name: self._optimizer[name] for name in names if name in self._optimizer}

    def _state(self, name: str, wanted: Selection | None) -> dict[str, Any]:
        run = self._parts[name][0].state
        if run is None:
            return {}
        found: dict[str, Any] = {}
        for path in sorted((self.folder / run.file).glob("*.pt")):
            file = f"{run.file}/{path.name}"
            if path.stem == STEP:
                found[STEP] = self._files.with_values(file, self._files.named(file)[PARAM])
            elif path.stem != WEIGHT:
                found[path.stem] = self._read(name, lambda part, file=file: _in(file, part), self._tensor, wanted)  # type: ignore[misc]
        if STEP not in found and self._last_step is not None:
            found[STEP] = self._last_step
        return found

    def _tensor(self, run: WrittenRun) -> torch.Tensor:
        return self._files.tensor(run)

    def _written_parts(self) -> Iterator[tuple[str, WrittenPart]]:
        groups = {name: index for index, names in enumerate(self._shapes) for name in names}
        for path in sorted((self.folder / ZERO).glob(f"*/{WEIGHT}.pt")):
            name = path.parent.name
            file = str(path.relative_to(self.folder))
            tensor = self._files.named(file).get(PARAM)
            if not isinstance(tensor, torch.Tensor):
                raise CheckpointError(f"{path} has no tensor {PARAM}. What to do: convert the checkpoint again")
            shape = tuple(tensor.shape)
            if len(shape) == 1 and name in groups:  # ZeRO 3's weights are flat.
                known = tuple(self._shapes[groups[name]][name])
                shape = known if math.prod(known) == tensor.numel() else shape
            value = WrittenRun(file, (PARAM,), 0, 0, tensor.numel())
            has_state = any(each.stem not in (WEIGHT, STEP) for each in path.parent.glob("*.pt"))
            state = WrittenRun(str(Path(file).parent), (), 0, 0, tensor.numel()) if has_state else None
            group = min(groups.get(name, 0), len(self._settings) - 1) if has_state and self._settings else None
            yield name, WrittenPart(shape, value=value, state=state, group=group)
        for name, tensor in (self._model.get(MODULE) or {}).items():
            if isinstance(tensor, torch.Tensor) and not (self.folder / ZERO / name).is_dir():
                run = WrittenRun(self._model_file, (MODULE, name), 0, 0, tensor.numel())
                yield name, WrittenPart(tuple(tensor.shape), value=run)

    @cached_property
    def _model_file(self) -> str:
        found = sorted(path.name for path in self.folder.glob("*mp_rank_*_model_states.pt"))
        if not found:
            raise CheckpointError(f"{self.folder} has no *_model_states.pt. What to do: copy the whole folder")
        return found[0]

    @cached_property
    def _model(self) -> dict[str, Any]:
        return self._files.named(self._model_file)

    @cached_property
    def _shapes(self) -> Sequence[Mapping[str, Sequence[int]]]:
        """Names and shapes of the weights in each parameter group."""
        found = self._model.get(SHAPES) or []
        return found if isinstance(found, list) else [found]

    @cached_property
    def _optimizer(self) -> dict[str, Any]:
        if not (self.folder / OPTIMIZER).is_file():
            return {}
        found: dict[str, Any] = self._files.with_values(OPTIMIZER, self._files.named(OPTIMIZER))
        return found

    @property
    def _settings(self) -> list[dict[str, Any]]:
        groups = self._optimizer.get(GROUPS) or []
        return [{key: value for key, value in group.items() if key != "params"} for group in groups]

    @property
    def _last_step(self) -> Any:
        """The step of ZeRO 3's optimizer, whose weights have none of their own."""
        states = self._optimizer.get(INNER, {}).get("state", {})
        return next((each[STEP] for each in states.values() if STEP in each), None)


def _in(file: str, part: WrittenPart) -> WrittenRun | None:
    """The run of a weight's elements in ``file``, another one in the weight's folder."""
    return None if part.value is None else replace(part.value, file=file)
