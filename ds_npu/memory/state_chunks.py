"""The optimizer's state of a shard of weights, in chunks: how it is kept between steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ds_npu.comm.pinned import pinned
from ds_npu.memory.moment_forms import FP32, Form, Parts, form_of
from ds_npu.memory.weight_residual import Residual, master_of, residual_of

CHUNK = 1 << 22
"""Elements of a chunk. A power of two: kernels then compute a chunk as they compute it within the whole shard."""
MASTER = "master"
Values = dict[str, torch.Tensor]
"""By name (MASTER, or a key of the optimizer's state), flat float32 tensors of a chunk or of a shard."""


class MasterError(ValueError):
    """A master that cannot be shared with its weights; what was kept before is as it was."""


@dataclass(frozen=True)
class Keeping:
    """What is kept of the state: the keys of ``ds_npu.optimizer_memory``."""

    share_fp32: bool
    moments: str

    def form(self, name: str) -> Form:
        return FP32 if name == MASTER else form_of(self.moments, name)

    def bytes_per_weight(self) -> float:
        """Of the master and of Adam's two moments, without scales and ties."""
        return (2 if self.share_fp32 else 4) + 2 * {"fp32": 4, "bf16": 2, "int8": 1}[self.moments]


@dataclass
class StateChunk:
    """A chunk of a shard: what is kept of it between steps."""

    weight: torch.Tensor
    """The model's weights of the chunk, flat, on the device."""
    start: int
    """Its first element in the shard."""
    keeping: Keeping
    on_host: bool = False
    kept: dict[str, Parts] = field(default_factory=dict)
    """On the device, or in pinned memory of the host."""
    ties: torch.Tensor | None = None
    """Of a shared master: the elements that rounding made smaller by exactly half a unit, on the device."""
    sent: Any = None
    """The event of the device at which ``kept`` is complete in host memory; None: it is."""

    def unpack(self, parts: Mapping[str, Parts]) -> Values:
        """The values of what was kept; ``parts`` are ``kept``, or copies of it, all on one device."""
        values = {name: self.keeping.form(name).unpack(each) for name, each in parts.items()}
        if self.ties is not None:
            remainder = values[MASTER]
            weight, ties = self.weight.to(remainder.device), self.ties.to(remainder.device)
            values[MASTER] = master_of(weight, Residual(remainder, ties))
        return values

    def pack(self, values: Values, seed: int) -> dict[str, Parts]:
        """What is to be kept of ``values``, on the device; of a shared master, ``weight`` must be the rounding."""
        if self.keeping.share_fp32:
            # The host waits: the list of ties has another length after each step.
            remainder, self.ties = residual_of(values[MASTER], self.weight)
            values = {**values, MASTER: remainder}
        forms = ((name, each, self.keeping.form(name)) for name, each in values.items())
        return {name: form.pack(each, seed + index) for index, (name, each, form) in enumerate(forms)}

    def keep(self, parts: Mapping[str, Parts]) -> None:
        """Keep ``parts``, copied to where they are kept; the host waits where that is its memory."""
        for name, tensors in parts.items():
            if name not in self.kept:
                self.kept[name] = tuple(self._home(each) for each in tensors)
            for home, each in zip(self.kept[name], tensors, strict=True):
                if home is not each:
                    home.copy_(each)

    def device_bytes(self) -> int:
        """What the chunk keeps on the device, without the model's weights."""
        kept = [] if self.on_host else [each for parts in self.kept.values() for each in parts]
        return sum(each.nbytes for each in [*kept, *([] if self.ties is None else [self.ties])])

    def host_bytes(self) -> int:
        """What the chunk keeps in host memory."""
        return sum(each.nbytes for parts in self.kept.values() for each in parts) if self.on_host else 0

    def _home(self, like: torch.Tensor) -> torch.Tensor:
        if not self.on_host:
            return torch.empty_like(like)
        return pinned(torch.empty_like(like, device="cpu", pin_memory=self.weight.device.type != "cpu"))


class StateShard:
    """The state of one of DeepSpeed's float32 masters, which is a placeholder but while it is read."""

    def __init__(self, master: torch.Tensor, weight: torch.Tensor, keeping: Keeping, index: int) -> None:
        """Take the values of ``master``; ``weight`` has the model's weights of the same elements.

        Raises ValueError for weights that are not in one piece of memory.
        """
        if weight.shape != master.shape or not weight.is_contiguous():
            raise ValueError(f"weights of shape {tuple(weight.shape)}, strides {weight.stride()}; contiguous ones work")
        self.master, self.weight, self.keeping, self.index = master, weight, keeping, index
        nan = torch.full((), float("nan"), device=weight.device)
        self._nothing = nan.expand(weight.shape)
        flat = weight.view(-1)
        self.chunks = [
            StateChunk(flat[start : start + CHUNK], start, keeping) for start in range(0, flat.numel(), CHUNK)
        ]
        self.scalars: dict[str, object] = {}
        """What else the optimizer keeps of the master: its count of steps."""
        self.steps = 0
        self._pieces: deque[tuple[int, torch.Tensor]] | None = None

    def close(self) -> None:
        """Make the master a placeholder: it has its shape and type, reads as NaN, and cannot be written."""
        self.master.data = self._nothing

    def factor(self) -> torch.Tensor:
        """A placeholder for a flat gradient that is in pieces: ones, of which all are one number."""
        return torch.ones(1, device=self.weight.device).expand(self.weight.numel())

    def show_weights(self) -> None:
        """Make the master the weights, where DeepSpeed is about to copy its rounding into them."""
        self.master.data = self.weight

    def take(self, state: Mapping[str, object]) -> None:
        """Keep the values of the master, and ``state``, the optimizer's state of it; then ``close``.

        Raises MasterError, and keeps what it had, where a master is to be shared and the weights are not its rounding.
        """
        master, device = self.master.data, self.weight.device
        arrays = {MASTER: master, **elementwise(state, master)}
        self.close()
        rounded = master.to(device, torch.bfloat16).view(torch.int16) if self.keeping.share_fp32 else None
        if rounded is not None and not torch.equal(rounded, self.weight.view(torch.int16)):
            raise MasterError(
                "ds_npu.optimizer_memory.share_fp32: found float32 master weights of which the model's weights are not "
                "the rounding (of a checkpoint, or from safe_set_full_fp32_param); leave it out to train them"
            )
        self.scalars = {name: each for name, each in state.items() if name not in arrays}
        steps = self.scalars.get("step", 0)
        assert isinstance(steps, int | float | torch.Tensor)
        self.steps = int(steps)
        for chunk in self.chunks:
            chunk.kept = {name: parts for name, parts in chunk.kept.items() if name in arrays}
            part = slice(chunk.start, chunk.start + chunk.weight.numel())
            # A copy: what is kept must not keep the whole.
            values = {name: each.reshape(-1)[part].to(device, copy=True) for name, each in arrays.items()}
            chunk.keep(chunk.pack(values, self.seed()))

    def whole(self) -> tuple[torch.Tensor, Values]:
        """The master and the state's arrays, in host memory."""
        found: dict[str, list[torch.Tensor]] = {}
        for chunk in self.chunks:
            if chunk.sent is not None:
                chunk.sent.synchronize()
            for name, each in chunk.unpack(chunk.kept).items():
                found.setdefault(name, []).append(each.to("cpu"))
        shape = self.weight.shape
        arrays = {name: torch.cat(each).view(shape) for name, each in found.items()}
        return arrays.pop(MASTER), arrays

    def anew(self) -> tuple[torch.Tensor, Values]:
        """A master that is the weights, in host memory, and no state: in place of what is not whole any more."""
        self.scalars, self.steps = {}, 0
        return self.weight.to("cpu", torch.float32), {}

    def use_pieces(self, gradient: Iterable[torch.Tensor] | None) -> None:
        """The gradient of the coming step, in the pieces in which DeepSpeed has it, one after the other.

        Then the master's own is a placeholder, of which each element is the factor of scaling and clipping. None: the
        master's own is the gradient.
        """
        if gradient is None:
            self._pieces = None
            return
        self._pieces, first = deque(), 0
        for piece in gradient:
            self._pieces.append((first, piece))
            first += piece.numel()

    def gradient(self, chunk: StateChunk) -> torch.Tensor:
        """The gradient of a chunk, flat, in float32; pieces that end in it are given up."""
        start, stop = chunk.start, chunk.start + chunk.weight.numel()
        given = self.master.grad
        assert given is not None
        if self._pieces is None:
            return given.view(-1)[start:stop]
        found = torch.zeros(stop - start, device=chunk.weight.device)
        while self._pieces and self._pieces[0][0] < stop:
            first, piece = self._pieces[0]
            end = first + piece.numel()
            low, high = max(first, start), min(end, stop)
            found[low - start : high - start].copy_(piece.reshape(-1)[low - first : high - first])
            if end > stop:
                break
            self._pieces.popleft()
        return found.mul_(given.view(-1)[:1])

    def seed(self) -> int:
        """Of the roundings of this step; the same on ranks that hold the same values."""
        return self.steps * 0x9E3779B1 + 0x85EBCA6B


def elementwise(state: Mapping[str, object], of: torch.Tensor) -> Values:
    """The tensors of ``state`` that have an element for each one of ``of``."""
    found = {name: each for name, each in state.items() if isinstance(each, torch.Tensor)}
    return {name: each for name, each in found.items() if each.shape == of.shape}
