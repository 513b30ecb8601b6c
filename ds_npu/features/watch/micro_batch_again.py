"""A micro-batch that runs again, to find the first wrong module and to write what computes it once more."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from ds_npu.features.recorded_calls.module_calls import ModuleCalls, as_written
from ds_npu.features.recorded_calls.module_file import write_module_file
from ds_npu.features.recorded_calls.tensor_statistics import is_float
from ds_npu.features.watch.captured_call import CapturedCall, Figures
from ds_npu.features.watch.wrong_operators import WrongOperator, WrongOperators
from ds_npu.parallel.pipeline.pass_through import stages_in
from ds_npu.parallel.runtime.calls import Arguments, Keywords
from ds_npu.parallel.tensor.randomness import States, generator_states, restore_generators
from ds_npu.zero_ext.skipped_steps import run_apart
from ds_npu.zero_ext.training_engine import TrainingEngine

KEPT_BYTES = 2**24
"""The most bytes of a micro-batch whose arguments are kept to find the module, until its step ends."""
SHOWN = 6


@dataclass
class KeptForward:
    """The arguments of a forward that trains, and what its backward began with."""

    args: Arguments
    kwargs: Keywords
    random: States
    output: int | None = None
    """The index, in its output's leaves, of the one that the script makes its loss of; None where not known."""
    gradient: torch.Tensor | None = None
    """The gradient that the script, and the loss scale, gave this leaf."""

    def watch_output(self, output: Any) -> None:
        """Keep the gradient that the script gives ``output``."""
        leaves = tree_leaves(output)
        floats = [index for index, leaf in enumerate(leaves) if is_float(leaf) and leaf.requires_grad]
        scalars = [index for index in floats if leaves[index].dim() == 0]
        chosen = scalars[:1] or (floats if len(floats) == 1 else [])
        if chosen and leaves[chosen[0]].nbytes <= KEPT_BYTES:
            self.output = chosen[0]
            leaves[chosen[0]].register_hook(self._keep_gradient)

    def _keep_gradient(self, gradient: torch.Tensor) -> None:
        self.gradient = gradient


@dataclass
class WrongModule:
    """The first wrong module of a rank, as it is sent to all others."""

    rank: int
    stage: int
    wrong: WrongOperator
    micro_batch: int
    """The number of the forward in its optimizer step."""
    came: Figures = field(default_factory=dict)
    went: Figures = field(default_factory=dict)
    weights_used: Figures = field(default_factory=dict)
    file: str = ""
    """The written file; empty where there is none."""
    host: str = ""
    """The name of the machine that has the file, and the file's size."""
    trouble: str = ""
    """Why there is no file, or no whole one."""

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Sorts the first wrong module of all ranks first.

        In forward by stage and module from the first, in backward from the last.
        """
        sign = -1 if self.wrong.is_backward else 1
        return int(self.wrong.is_backward), sign * self.stage, sign * self.wrong.order, self.rank

    def lines(self) -> Iterator[str]:
        wrong = self.wrong
        piece = "" if wrong.micro_batch is None else f" (of the pipeline's pieces of it number {wrong.micro_batch})"
        which = f"{wrong.module}, on rank {self.rank}"
        if wrong.is_backward:
            yield f"first module in backward whose gradients are not finite: {which}"
        else:
            yield f"first module whose output is not finite: {which}"
        direction = "backward" if wrong.is_backward else "forward"
        yield f"there, in the {direction} of micro-batch {self.micro_batch}{piece}: {wrong}"
        yield from (f"then {each}" for each in wrong.others[:2])
        for title, figures in (("in", self.came), ("weight", self.weights_used), ("out", self.went)):
            for name, figure in list(figures.items())[:SHOWN]:
                yield f"{title}: {name}: {figure}"
            if len(figures) > SHOWN:
                yield f"{title}: and {len(figures) - SHOWN} more"
        if self.file:
            yield f"written on {self.host}, data of this batch and weights; compute it again: ds_npu replay {self.file}"
        if self.trouble:
            yield self.trouble


class MicroBatchAgain:
    """Runs micro-batches of ``engine`` again; every rank does the same."""

    def __init__(self, engine: TrainingEngine, folder: str) -> None:
        self._engine, self._folder = engine, folder
        self._device_type = torch.device(engine.device).type
        self.is_running = False

    def kept(self, args: Arguments, kwargs: Keywords) -> KeptForward | None:
        """The record of a forward; None where its arguments are too large, or belong to a graph."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(each.requires_grad for each in tensors) or sum(each.nbytes for each in tensors) > KEPT_BYTES:
            return None
        return KeptForward(args, kwargs, generator_states(self._device_type))

    def has_backward(self, kept: KeptForward | None) -> bool:
        """Whether the backward of a forward can run again.

        Its output's gradient was kept, or the model is in stages, which run it within the forward.
        """
        return kept is not None and (kept.gradient is not None or self._is_in_stages)

    @property
    def _is_in_stages(self) -> bool:
        return bool(stages_in(self._engine.module))

    def find(self, index: int, kept: KeptForward, step: int, *, backward: bool) -> WrongModule | None:
        """The first wrong module of all ranks in micro-batch ``index``; None where there is none."""
        located = self._located(index, kept, backward=backward)
        found = [each for each in _gathered(located) if each is not None]
        if not found:
            return None
        first = min(found, key=lambda each: each.order)
        mine = first if located is not None and first.rank == located.rank else None
        return _gathered(self._captured(kept, mine, step, backward=backward))[first.rank]

    def _located(self, index: int, kept: KeptForward, *, backward: bool) -> WrongModule | None:
        calls = ModuleCalls(self._engine.module)
        operators = WrongOperators(calls)
        with calls.recording(), operators:
            self._run(kept, backward=backward)
        wrong = operators.first(backward=backward)
        return None if wrong is None else WrongModule(dist.get_rank(), self._engine.topology.rank("pp"), wrong, index)

    def _captured(
        self, kept: KeptForward, mine: WrongModule | None, step: int, *, backward: bool
    ) -> WrongModule | None:
        """Run once more; the rank of the first wrong module captures its call and writes it."""
        if mine is None or mine.wrong.order < 0:
            self._run(kept, backward=backward)
            return mine
        captured = CapturedCall(mine.wrong, self._device_type)
        calls = ModuleCalls(self._engine.module)
        operators = WrongOperators(calls, kept=mine.wrong.number)
        with calls.recording(), captured.capturing(self._engine.module), operators:
            self._run(kept, backward=backward)
        captured.finish(operators.kept_call)
        mine.came = captured.came
        mine.went = captured.went
        mine.weights_used = captured.weights_used
        captured.data |= {
            "step": step,
            "rank": mine.rank,
            "micro_batch": mine.micro_batch,
            "backward": backward,
            "name": mine.wrong.module,
            "found": str(mine.wrong),
            "came": {name: str(each) for name, each in mine.came.items()},
            "went": {name: str(each) for name, each in mine.went.items()},
            "left_out": captured.left_out,
        }
        file = _unused(Path(self._folder).resolve() / f"step{step}_rank{mine.rank}.pt")
        try:
            size = write_module_file(file, captured.data)
            mine.file, mine.host = str(file), f"{socket.gethostname()} ({size / 2**10:,.0f} KiB)"
        except OSError as error:
            mine.trouble = (
                f"the file {file} to compute it again was not written: {os.strerror(error.errno or 0)}. What to do: "
                "name another folder in ds_npu.watch.finite"
            )
        return mine

    def _run(self, kept: KeptForward, *, backward: bool) -> None:
        restore_generators(self._device_type, kept.random)
        self.is_running = True
        try:
            with as_written(self._engine.module), torch.set_grad_enabled(backward or self._is_in_stages):
                if self._is_in_stages:
                    self._engine(*kept.args, **kept.kwargs)
                    return
                output = run_apart(self._engine, *kept.args, **kept.kwargs)
                if backward and kept.output is not None:
                    leaf = tree_leaves(output)[kept.output]
                    weights = [each for each in self._engine.module.parameters() if each.requires_grad]
                    # Unlike a backward this runs none of the hooks by which gradients are reduced.
                    torch.autograd.grad(leaf, weights, kept.gradient, allow_unused=True)
        finally:
            self.is_running = False


def _unused(file: Path) -> Path:
    """``file``, or that name with a number where an earlier run has written it."""
    numbered = (file.with_stem(f"{file.stem}_{number}") for number in count(2))
    return next(each for each in chain([file], numbered) if not each.exists())


def _gathered(mine: WrongModule | None) -> list[WrongModule | None]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found
