"""The training loop: batches in, losses out, validation and checkpoints when they are due."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import numpy as np
import torch
from byte_data import TrainingBatches, ValidationBatches
from checkpoints import Checkpoints
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from progress import Meter, Screen, show, show_summary
from rank_group import Ranks, RunError, StopRequest

IGNORED_LABEL = -100
"""Hugging Face models leave such labels out of the loss."""


@dataclass
class Run:
    """Everything one run is made of."""

    engine: DeepSpeedEngine
    ranks: Ranks
    dp_rank: int
    parameters: int
    training: TrainingBatches
    validation: ValidationBatches | None
    meter: Meter
    checkpoints: Checkpoints | None
    identity: Mapping[str, Any]

    def train(self, args: argparse.Namespace, first_step: int, screen: Screen) -> None:
        """Train from ``first_step`` to ``args.steps``, or until somebody asks to stop."""
        if first_step >= args.steps:
            screen.line(f"nothing to do: {first_step} steps are done, --steps asks for {args.steps}")
            return
        stop = StopRequest(self.ranks)
        stop.install()
        self.engine.train()
        self.meter.restart_clock()
        step, stopping, validation_loss = first_step, False, None
        while step < args.steps and not stopping:
            stopping = self._step(step, stop)
            step += 1
            screen.step()
            last = step == args.steps
            if step % args.log_every == 0 or step == 1 or last:
                self._report(step, screen)
            if self.validation and not stopping and (step % args.eval_every == 0 or last):
                validation_loss = self._validate(step, screen)
            due = last or stopping or (args.save_every and step % args.save_every == 0)
            if self.checkpoints and due:
                where = self.checkpoints.save(self.engine, step, self.identity, self.meter.state())
                self.meter.restart_clock()
                screen.line(f"step {step:>6}  saved {where}")
        screen.close()
        show_summary(screen, self.meter, validation_loss)
        if stopping and step < args.steps:
            kept = "Resume: the same command with --resume" if self.checkpoints else "Nothing was saved (no --save)"
            screen.line(f"Stopped at step {step} of {args.steps} by a signal. {kept}.")

    def _step(self, step: int, stop: StopRequest) -> bool:
        """One optimizer step; returns whether all ranks stop after it."""
        accumulation = self.training.shape.accumulation
        for micro in range(accumulation):
            ids = self._to_device(self._read(step, micro))
            if micro == accumulation - 1:
                stop.ask()
            loss = self.engine(input_ids=ids, labels=ids).loss
            self.engine.backward(loss)
            self.engine.step()
            self.meter.add(loss)
        self.meter.end_step()
        return stop.agreed()

    def _read(self, step: int, micro: int) -> np.ndarray:
        return self.training.batch(step, micro, self.dp_rank)

    def _to_device(self, rows: np.ndarray) -> torch.Tensor:
        # Pinned memory lets the copy run while the host goes on.
        host = get_accelerator().pin_memory(torch.from_numpy(rows).long())
        return host.to(self.engine.device, non_blocking=True)

    def _report(self, step: int, screen: Screen) -> None:
        report = self.meter.read(step)
        if not math.isfinite(report.loss):
            raise RunError(f"the loss is {report.loss} at step {step}: a smaller learning rate or clipping may help")
        show(screen, report)
        self.meter.write(step=step, loss=report.loss, grad_norm=report.grad_norm, lr=report.learning_rate)

    def _validate(self, step: int, screen: Screen) -> float:
        """The mean loss per predicted byte over the held-out windows, of all ranks."""
        self.engine.eval()
        sums = torch.zeros(2, dtype=torch.float32, device=self.engine.device)
        with torch.no_grad():
            for round_number in range(self.validation.rounds):
                rows, valid = self.validation.batch(round_number, self.dp_rank)
                ids = self._to_device(rows)
                labels = ids.clone()
                labels[valid:] = IGNORED_LABEL
                loss = self.engine(input_ids=ids, labels=labels).loss.float()
                if valid:  # without one, the mean is 0/0
                    sums += torch.stack([loss * valid, torch.full_like(loss, valid)])
        dist.all_reduce(sums, group=self.engine.data_parallel_group)
        value = (sums[0] / sums[1]).item()
        self.engine.train()
        self.meter.restart_clock()
        screen.line(f"step {step:>6}  validation loss {value:.4f}")
        self.meter.write(step=step, validation_loss=value)
        return value

    def resume(self, checkpoint: Path) -> int:
        """Go back to where ``checkpoint`` was made; returns the number of steps done then."""
        self.meter.set_state(self.checkpoints.load(self.engine, checkpoint))
        return self.engine.global_steps
