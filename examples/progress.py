"""What the user sees while it trains: a progress bar or plain lines, and a file of exact numbers."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import psutil
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from tqdm import tqdm


def memory_in_use() -> str:
    """The device memory's peak so far; on CPU, what the process holds in RAM now. Of this rank."""
    if get_accelerator().device_name() == "cpu":
        return f"RAM {psutil.Process().memory_info().rss / 2**30:.2f} GiB"
    return f"device peak {get_accelerator().max_memory_allocated() / 2**30:.2f} GiB"


class Screen:
    """Rank 0's lines: beside a progress bar on a terminal, plain otherwise. Other ranks print nothing."""

    def __init__(self, enabled: bool, first_step: int, last_step: int) -> None:
        self._enabled = enabled
        self._bar: tqdm | None = None
        if enabled and sys.stdout.isatty():
            # miniters=1, because steps can be slow to begin with.
            self._bar = tqdm(total=last_step, initial=first_step, unit="step", file=sys.stdout, miniters=1)

    def line(self, text: str) -> None:
        """A line that stays."""
        if self._enabled and self._bar is not None:
            self._bar.write(text, file=sys.stdout)
        elif self._enabled:
            print(text, flush=True)

    def step(self, count: int = 1) -> None:
        """Move the bar on."""
        if self._bar is not None:
            self._bar.update(count)

    def status(self, short: str, line: str) -> None:
        """The newest numbers: at the bar's end, or a line of their own."""
        if self._bar is not None:
            self._bar.set_postfix_str(short)
        else:
            self.line(line)

    def close(self) -> None:
        """Leave the bar where it is."""
        if self._bar is not None:
            self._bar.close()


@dataclass
class Report:
    """What one reading of the meter found."""

    step: int
    loss: float
    learning_rate: float
    grad_norm: float | None
    tokens_per_second: float
    step_seconds: float
    """The mean of the steps since the last report."""
    mfu: float | None = None
    """The share of the machines' peak that the model's arithmetic reaches, where the engine has counted it."""
    hfu: float | None = None
    """The same of all arithmetic, recomputation too."""


class Meter:
    """Sums losses on the device and reads them only when asked: a reading makes the host wait for the device."""

    def __init__(self, engine: DeepSpeedEngine, tokens_per_step: int, numbers: Path | None) -> None:
        self._engine = engine
        self._tokens_per_step = tokens_per_step
        self._numbers = numbers
        self._loss_sum = torch.zeros((), dtype=torch.float32, device=engine.device)
        self._losses = 0
        self._steps_timed = 0
        self._began = time.perf_counter()
        self.first: Report | None = None
        self.last: Report | None = None
        self.total_tokens = 0
        self.total_seconds = 0.0

    def add(self, loss: torch.Tensor) -> None:
        """Count one micro-batch's loss."""
        self._loss_sum += loss.detach().float()
        self._losses += 1

    def end_step(self) -> None:
        """Count one optimizer step."""
        self._steps_timed += 1

    def read(self, step: int) -> Report:
        """The mean loss since the last reading, over ranks and micro-batches. Every rank must call it."""
        dist.all_reduce(self._loss_sum, group=self._engine.data_parallel_group)
        loss = self._loss_sum.item() / (self._losses * self._engine.dp_world_size)
        seconds = time.perf_counter() - self._began
        tokens = self._steps_timed * self._tokens_per_step
        norm = self._engine.get_global_grad_norm()
        step_seconds = seconds / max(1, self._steps_timed)
        # An engine of ds_npu has it with "watch": {"mfu": true}, from the third step on.
        flop = getattr(self._engine, "step_flop", None)
        report = Report(
            step=step,
            loss=loss,
            learning_rate=self._engine.get_lr()[0],
            grad_norm=None if norm is None else float(norm),
            tokens_per_second=tokens / seconds,
            step_seconds=step_seconds,
            mfu=None if flop is None else flop.mfu(step_seconds),
            hfu=None if flop is None else flop.hfu(step_seconds),
        )
        self.total_tokens += tokens
        self.total_seconds += seconds
        self.first, self.last = self.first or report, report
        self._loss_sum.zero_()
        self._losses = 0
        self.restart_clock()
        return report

    def restart_clock(self) -> None:
        """Leave what went before (validation, a checkpoint) out of tokens per second."""
        self._steps_timed = 0
        self._began = time.perf_counter()

    def write(self, **numbers: Any) -> None:
        """Add a line to the file of numbers; as JSON a float keeps every bit."""
        if self._numbers is not None:
            with self._numbers.open("a") as stream:
                stream.write(json.dumps(numbers) + "\n")

    def state(self) -> dict[str, Any]:
        """What has been counted and not read yet, so that a resumed run reads the same mean."""
        return {"loss_sum": self._loss_sum.cpu(), "losses": self._losses}

    def set_state(self, state: dict[str, Any]) -> None:
        """Undo what was counted since ``state``."""
        self._loss_sum.copy_(state["loss_sum"])
        self._losses = state["losses"]


def show(screen: Screen, report: Report) -> None:
    """Put a report on the screen."""
    norm = "" if report.grad_norm is None else f"  grad norm {report.grad_norm:.3f}"
    rest = f"lr {report.learning_rate:.2e}{norm}  {report.tokens_per_second:,.0f} tokens/s"
    rest += f"  {1000 * report.step_seconds:,.0f} ms/step"
    if report.mfu is not None and report.hfu is not None:
        rest += f"  MFU {100 * report.mfu:.3g} %  HFU {100 * report.hfu:.3g} %"
    rest += f"  {memory_in_use()}"
    screen.status(f"loss {report.loss:.4f}  {rest}", f"step {report.step:>6}  loss {report.loss:.4f}  {rest}")


def show_summary(screen: Screen, meter: Meter, validation_loss: float | None) -> None:
    """The run in a few lines."""
    if meter.first is None or meter.last is None:
        return
    speed = f"{meter.total_tokens / meter.total_seconds:,.0f} tokens/s" if meter.total_seconds else "not timed"
    held_out = "not measured" if validation_loss is None else f"{validation_loss:.4f}"
    screen.line("")
    screen.line(f"first loss       {meter.first.loss:.4f}  (step {meter.first.step})")
    screen.line(f"last loss        {meter.last.loss:.4f}  (step {meter.last.step})")
    screen.line(f"validation loss  {held_out}")
    screen.line(f"speed            {speed}, all ranks together")
