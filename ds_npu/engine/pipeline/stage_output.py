"""The output of the last pipeline stage, made known to the ranks of the other stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ds_npu.models.logits import AbsentLogits

NOT_KEPT = (
    "these are the logits of a model in pipeline stages, which are not kept in training (each micro-batch frees its "
    "own). What to do: evaluate under torch.no_grad()."
)
LOSS, LOGITS = "loss", "logits"


@dataclass(frozen=True)
class OutputForm:
    """The type of an output, and its tensors: by name where it is a mapping, else by position."""

    kind: type
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]

    @staticmethod
    def of(output: Any) -> OutputForm:
        found = {name: (tuple(each.shape), each.dtype) for name, each in tensors_of(output).items()}
        return OutputForm(type(output), found)

    def filled(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        """An output of this form with ``tensors``, those of its names."""
        if issubclass(self.kind, torch.Tensor):
            return next(iter(tensors.values()))
        if issubclass(self.kind, Mapping):
            return self.kind(**tensors)
        return tuple(tensors.values())


def tensors_of(output: Any) -> dict[str, torch.Tensor]:
    """The tensors of a model's output, a tensor, tuple or mapping, by name or position; nested tensors are left out."""
    if isinstance(output, torch.Tensor):
        return {LOSS if output.dim() == 0 else LOGITS: output}
    named = output if isinstance(output, Mapping) else {f"{index}": each for index, each in enumerate(output)}
    found = {name: each for name, each in named.items() if isinstance(each, torch.Tensor)}
    begins_with_loss = not isinstance(output, Mapping) and "0" in found and found["0"].dim() == 0
    return {LOSS: found.pop("0"), **found} if begins_with_loss else found


def detached(output: Any) -> Any:
    """``output`` with only its tensors, detached from their graphs."""
    return OutputForm.of(output).filled({name: each.detach() for name, each in tensors_of(output).items()})


class StageOutputs:
    """The outputs of batches, on all ranks along pp: those of ``last_rank`` of ``group`` are given to the others."""

    def __init__(self, group: dist.ProcessGroup, last_rank: int, device: torch.device) -> None:
        self._group = group
        self._last = last_rank
        self._device = device
        self._is_last = dist.get_rank(group) == last_rank
        self._forms: dict[Any, OutputForm] = {}

    def of_training(
        self, found: OutputForm | None, losses: Sequence[torch.Tensor], key: Any
    ) -> tuple[OutputForm, torch.Tensor] | None:
        """The form of the output of a batch to whose loss this rank adds ``losses``, and the loss.

        ``found``: the form, on the last rank. ``key``: what it depends on. None where the last rank has failed before
        it knew the form.
        """
        if key not in self._forms:
            form = self._from_last(found)
            if form is None:
                return None
            self._forms[key] = form
        form = self._forms[key]
        dtype = form.tensors[LOSS][1]
        own = torch.stack(list(losses)).sum() if losses else torch.zeros((), device=self._device)
        loss = own.to(dtype)
        dist.all_reduce(loss, group=self._group)
        return form, loss

    def of_evaluation(self, outputs: Sequence[Any], averages: bool) -> Any:
        """The whole output of a batch: the ``outputs`` of its micro-batches, on the last rank, joined along dim 0.

        Scalars are added up, or averaged. None where the last rank has none of them, since it has failed.
        """
        has_outputs = self._is_last and len(outputs) > 0
        joined = _joined(outputs, averages) if has_outputs else {}
        shapes = {name: (tuple(each.shape), each.dtype) for name, each in joined.items()}
        form = self._from_last(OutputForm(type(outputs[0]), shapes) if has_outputs else None)
        if form is None:
            return None
        found = {}
        for name, (shape, dtype) in form.tensors.items():
            value = joined[name].contiguous() if self._is_last else torch.empty(shape, dtype=dtype, device=self._device)
            dist.broadcast(value, group=self._group, group_src=self._last)
            found[name] = value
        return form.filled(found)

    def _from_last(self, form: OutputForm | None) -> OutputForm | None:
        held = [form]
        dist.broadcast_object_list(held, group=self._group, group_src=self._last, device=self._device)
        return held[0]


def training_output(form: OutputForm, loss: torch.Tensor) -> Any:
    """The output of a batch in training: its loss, and AbsentLogits in place of logits."""
    tensors = {LOSS: loss}
    if issubclass(form.kind, Mapping) and LOGITS in form.tensors:
        _, dtype = form.tensors[LOGITS]
        tensors[LOGITS] = AbsentLogits.like((0,), dtype, loss.device, NOT_KEPT)
    return form.filled(tensors)


def _joined(outputs: Sequence[Any], averages: bool) -> dict[str, torch.Tensor]:
    every = [tensors_of(each) for each in outputs]
    found = {}
    for name, first in every[0].items():
        values = [each[name] for each in every]
        if first.dim() > 0:
            found[name] = torch.cat(values)
        else:
            total = torch.stack(values).sum()
            found[name] = total / len(values) if averages else total
    return found
