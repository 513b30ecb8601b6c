"""The optimizer's state of a shard of weights between steps, in chunks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ds_npu.comm.host_copy import pinned
from ds_npu.memory.moment_forms import FP32, Form, Parts, form_of
from ds_npu.memory.weight_residual import Residual, master_of, residual_of

CHUNK = 1 << 22
"""Elements of a chunk: a power of two, so that kernels compute a chunk as they do within the whole shard."""
MASTER = "master"
Values = dict[str, torch.Tensor]
"""Flat float32 tensors of a chunk or of a shard, by name: MASTER, or a key of the optimizer's state."""


class MasterError(ValueError):
    """A master cannot be shared with its weights; the kept state is unchanged."""


@dataclass(frozen=True)
class Keeping:
    """How the state is kept: the keys of ``ds_npu.optimizer_memory``."""

    share_fp32: bool
    moments: str

    def form(self, name: str) -> Form:
        return FP32 if name == MASTER else form_of(self.moments, name)

    def bytes_per_weight(self) -> float:
        """Bytes of the master and of Adam's two moments, without scales and ties."""
        return (2 if self.share_fp32 else 4) + 2 * {"fp32": 4, "bf16": 2, "int8": 1}[self.moments]


@dataclass
class StateChunk:
    """The state of a chunk of a shard between steps."""

    weight: torch.Tensor
    """The model's weights of the chunk, flat, on the device."""
    start: int
    """Its first element in the shard."""
    keeping: Keeping
    on_host: bool = False
    kept: dict[str, Parts] = field(default_factory=dict)
    """Packed values by name, on the device or in pinned memory of the host."""
    ties: torch.Tensor | None = None
    """Elements of a shared master that rounding made smaller by exactly half a unit, on the device."""
    sent: torch.Event | None = None
    """Recorded when ``kept`` is complete in host memory; None: it is complete."""

    def unpack(self, parts: Mapping[str, Parts]) -> Values:
        """Unpack ``parts``, which are ``kept`` or copies of it, all on one device."""
        values = {name: self.keeping.form(name).unpack(each) for name, each in parts.items()}
        if self.ties is not None:
            remainder = values[MASTER]
            weight = self.weight.to(remainder.device)
            ties = self.ties.to(remainder.device)
            values[MASTER] = master_of(weight, Residual(remainder, ties))
        return values

    def pack(self, values: Values, seed: int) -> dict[str, Parts]:
        """Pack ``values`` on the device; ``weight`` must be the rounding of a shared master."""
        if self.keeping.share_fp32:
            # The host waits: the list of ties has another length after each step.
            remainder, self.ties = residual_of(values[MASTER], self.weight)
            values = {**values, MASTER: remainder}
        forms = ((name, each, self.keeping.form(name)) for name, each in values.items())
        return {name: form.pack(each, seed + index) for index, (name, each, form) in enumerate(forms)}

    def keep(self, parts: Mapping[str, Parts]) -> None:
        """Copy ``parts`` to where they are kept; the host waits for copies to its own memory."""
        for name, tensors in parts.items():
            if name not in self.kept:
                self.kept[name] = tuple(self._empty_like(each) for each in tensors)
            for home, each in zip(self.kept[name], tensors, strict=True):
                if home is not each:
                    home.copy_(each)

    def _empty_like(self, like: torch.Tensor) -> torch.Tensor:
        if not self.on_host:
            return torch.empty_like(like)
        return pinned(torch.empty_like(like, device="cpu", pin_memory=self.weight.device.type != "cpu"))


class StateShard:
    """The state of one of DeepSpeed's float32 masters, which is a placeholder except while it is read."""

    def __init__(self, master: torch.Tensor, weights: Sequence[torch.Tensor], keeping: Keeping, index: int) -> None:
        """``weights``, one after the other, are the model's weights of the elements of ``master``.

        Raises ValueError for weights that are not each in one piece of memory.
        """
        if sum(each.numel() for each in weights) != master.numel() or not all(each.is_contiguous() for each in weights):
            found = [(tuple(each.shape), each.stride()) for each in weights]
            raise ValueError(f"weights of these shapes and strides: {found}; contiguous ones work")
        self.master, self.keeping, self.index = master, keeping, index
        self._weights = weights
        self.device = weights[0].device
        self._nothing = torch.full((), float("nan"), device=self.device).expand(master.shape)
        self.chunks, first = list[StateChunk](), 0
        for flat in (each.view(-1) for each in weights):
            for start in range(0, flat.numel(), CHUNK):
                self.chunks.append(StateChunk(flat[start : start + CHUNK], first + start, keeping))
            first += flat.numel()
        self.scalars: dict[str, object] = {}
        """The optimizer's other state of the master: its count of steps."""
        self.steps = 0
        self._pieces: deque[tuple[int, torch.Tensor]] | None = None

    def weight(self) -> torch.Tensor:
        """Return the weights, of the shape of the master: themselves where they are one tensor, else a copy."""
        whole = self._weights[0] if len(self._weights) == 1 else torch.cat(list(self._weights))
        return whole.view(self.master.shape)

    def close(self) -> None:
        """Make the master a placeholder: it has its shape and type, reads as NaN, and cannot be written."""
        self.master.data = self._nothing

    def factor(self) -> torch.Tensor:
        """Return a placeholder for a flat gradient in pieces: ones, all of which are one number in memory."""
        return torch.ones(1, device=self.device).expand(self.master.numel())

    def take(self, state: Mapping[str, object]) -> None:
        """Keep the values of the master, and ``state``, the optimizer's state of it; then ``close``.

        Raises MasterError, and keeps what it had, where a master is to be shared and the weights are not its rounding.
        """
        master, device = self.master.data, self.device
        arrays = {MASTER: master, **elementwise(state, master)}
        self.close()
        rounded = master.to(device, torch.bfloat16).view(torch.int16) if self.keeping.share_fp32 else None
        if rounded is not None and not torch.equal(rounded, self.weight().view(torch.int16)):
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
            # A copy: a view would keep the whole.
            values = {name: each.reshape(-1)[part].to(device, copy=True) for name, each in arrays.items()}
            chunk.keep(chunk.pack(values, self.seed()))

    def whole(self) -> tuple[torch.Tensor, Values]:
        """Return the master and the state's arrays, in host memory."""
        found: dict[str, list[torch.Tensor]] = {}
        for chunk in self.chunks:
            if chunk.sent is not None:
                chunk.sent.synchronize()
            for name, each in chunk.unpack(chunk.kept).items():
                found.setdefault(name, []).append(each.to("cpu"))
        arrays = {name: torch.cat(each).view(self.master.shape) for name, each in found.items()}
        return arrays.pop(MASTER), arrays

    def anew(self) -> tuple[torch.Tensor, Values]:
        """Return the weights as a new master, in host memory, and no state: the old ones are incomplete."""
        self.scalars, self.steps = {}, 0
        return self.weight().to("cpu", torch.float32), {}

    def use_pieces(self, gradient: Iterable[torch.Tensor] | None) -> None:
        """Use the next step's gradient in DeepSpeed's pieces of it, in order.

        ``master.grad`` is then a placeholder, each element of which is the factor of scaling and clipping. None:
        ``master.grad`` is the gradient.
        """
        if gradient is None:
            self._pieces = None
            return
        self._pieces, first = deque(), 0
        for piece in gradient:
            self._pieces.append((first, piece))
            first += piece.numel()

    def gradient(self, chunk: StateChunk) -> torch.Tensor:
        """Return the gradient of a chunk, flat, in float32; pieces that end in it are dropped."""
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
        """The seed of this step's rounding; the same on ranks that hold the same values."""
        return self.steps * 0x9E3779B1 + 0x85EBCA6B


def elementwise(state: Mapping[str, object], of: torch.Tensor) -> Values:
    """The tensors of ``state`` that have the shape of ``of``."""
    found = {name: each for name, each in state.items() if isinstance(each, torch.Tensor)}
    return {name: each for name, each in found.items() if each.shape == of.shape}
