"""Records the optimizer steps that are to be dumped, on one rank.

In such a step hooks of blocks, attention, MLPs and norms record the outputs of these modules and their gradients: they
are whole along the hidden dim on every rank, as no tensor-parallel region is open there. In other steps no module is
hooked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from ds_npu.comparison.weight_elements import WeightElements
from ds_npu.dump_hooks import (
    GRADIENT,
    STATE,
    WEIGHT,
    BatchTokens,
    DumpError,
    DumpFile,
    ForwardRecords,
    Record,
    position_of,
    record_weight,
    unwrapped_name,
)
from ds_npu.log import logger
from ds_npu.models import names
from ds_npu.models.guards import is_compiled
from ds_npu.models.zero3 import partition
from ds_npu.parallel.context.held_tokens import HELD_TOKENS
from ds_npu.parallel.pipeline.pass_through import BORDER_STATES, PassThrough, stages_in
from ds_npu.parallel.runtime.arrival import arrive
from ds_npu.parallel.runtime.forward_wraps import Forward, Level, unwrap_forward, wrap_forward
from ds_npu.parallel.runtime.micro_batch import Fact, carried_by, is_in_backward, new_forward, running
from ds_npu.parallel.tensor.shard_access import allow_shard_access
from ds_npu.zero_ext.training_engine import TrainingEngine
from ds_npu.zero_ext.weight_pieces import WeightPiece, gradient_pieces, state_pieces, why_unread


@dataclass
class DumpedForward:
    """One forward of the model in a step that is dumped."""

    given: tuple[Any, Mapping[str, Any]]
    """The arguments of the model."""
    micro_batch: int
    stage: int
    records: ForwardRecords | None = None
    """Made at the first output: only then is it known which tokens this rank holds."""


DUMPED: Fact[DumpedForward] = Fact()


class Removable(Protocol):
    """A hook of torch."""

    def remove(self) -> None: ...


class StepRecords:
    """The records of this rank's engine: ``begin`` and ``end`` around each step."""

    def __init__(self, engine: TrainingEngine, file: DumpFile, borders: Collection[str], sequence_shards: int) -> None:
        """``borders``: names of modules to record; ``sequence_shards``: the tensor ranks that divide the tokens."""
        self.engine, self.file, self.borders = engine, file, frozenset(map(unwrapped_name, borders))
        self.shard = (engine.topology.rank("tp"), sequence_shards) if sequence_shards > 1 else (0, 1)
        self.weights: Callable[[str], bool] = lambda name: True
        """Whether the weight of a plain name is recorded."""
        self.hooks: list[Removable] = []
        self.forwards: dict[int, int] = {}
        """The number of forwards of each stage in this step."""
        self.recorded: list[ForwardRecords] = []
        self.is_open = False
        self._wrapper = self._forward

    def begin(self) -> None:
        """Record the weights, and hook the modules. Raises ValueError for compiled modules."""
        model = self.engine.module
        compiled = [name or type(model).__name__ for name, module in model.named_modules() if is_compiled(module)]
        if compiled or self.engine.is_deepcompile_enabled():
            what = compiled[0] if compiled else "the engine (deepcompile)"
            raise ValueError(
                f"ds_npu.dump: found compiled: {what}, whose modules call no hooks. What to do: run the steps that are "
                "dumped without torch.compile"
            )
        self.is_open = True
        self._record_weights(WEIGHT, self._own_weights())
        wrap_forward(model, self._wrapper, Level.MODEL)
        found: dict[str, nn.Module] = {}
        for name, module in model.named_modules():
            if unwrapped_name(name) in self.borders and not isinstance(module, PassThrough):
                found.setdefault(unwrapped_name(name), module)
        for name, module in found.items():
            self.hooks.append(module.register_forward_hook(partial(self._returned, name)))

    def end(self, step: int) -> None:
        """Record the optimizer's state, write all of the step, and remove the hooks. Raises DumpError."""
        model = self.engine.module
        for name, shape in {name: shape for each in self.recorded for name, shape in each.unknown.items()}.items():
            logger().warning("dump: the output %s of %s is not recorded: its samples are not known", shape, name)
        self._record_weights(STATE, self._readable(state_pieces))
        self.close()
        size = self.file.write(step)
        logger().info(
            "dump: step %d of %s written to %s: %.1f MiB by rank %d",
            step,
            type(model).__name__,
            self.file.folder,
            size / 2**20,
            self.file.header["rank"],
        )

    def close(self) -> None:
        """Remove the hooks."""
        while self.hooks:
            self.hooks.pop().remove()
        if self.is_open:
            unwrap_forward(self.engine.module, self._wrapper)
        self.is_open = False
        self.forwards = {}
        self.recorded = []

    def record_gradients(self) -> None:
        """Record the reduced gradients, without a loss scale."""
        scale = loss_scale(self.engine.optimizer)
        self._record_weights(GRADIENT, self._readable(gradient_pieces), factor=1 / scale)

    def scale_outputs(self, scale: float) -> None:
        """Note in the records of outputs' gradients the factor ``scale`` that makes them those of the whole batch."""
        for each in self.recorded:
            for record in each.gradients:
                record.setdefault("factor", scale)

    def _forward(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        model = self.engine.module
        states = BORDER_STATES.of(running())
        stages = stages_in(model)
        if not (model.training and torch.is_grad_enabled()) or (stages and states is None):
            return forward(*args, **kwargs)
        stage = 0 if states is None else states.stage.index
        micro_batch = self.forwards.get(stage, 0)
        self.forwards[stage] = micro_batch + 1
        dumped = DumpedForward((args, kwargs), micro_batch, stage)
        kept = len(self.file.lines), len(self.file.numbers)
        try:
            with new_forward() as begun:
                DUMPED.set(begun, dumped)
                return forward(*args, **kwargs)
        except Exception:
            # A script that catches it goes on without this forward.
            self._forget(dumped, *kept)
            raise

    def _forget(self, dumped: DumpedForward, lines: int, numbers: int) -> None:
        """Drop the records of a forward that has failed: all behind the file's first ``lines`` and ``numbers``."""
        for record, _ in self.file.numbers[numbers:]:
            self.file.tensors.pop(record.get("tensor", ""), None)
        del self.file.lines[lines:], self.file.numbers[numbers:]
        self.forwards[dumped.stage] = dumped.micro_batch
        self.recorded = [each for each in self.recorded if each is not dumped.records]

    def _returned(self, name: str, module: nn.Module, args: object, out: Any) -> None:
        first = out[0] if isinstance(out, tuple) and out else out
        dumped = DUMPED.of(running()) or DUMPED.of(carried_by(first))
        if dumped is None:
            return
        if dumped.records is None:
            held = next(filter(None, map(HELD_TOKENS.get, self.engine.module.modules())), None)
            tokens = None if held is None else held()
            batch = BatchTokens(dumped.given, tokens, self.shard)
            dumped.records = ForwardRecords(self.file, batch, dumped.micro_batch, dumped.stage)
            self.recorded.append(dumped.records)
        dumped.records.output(name, first, is_in_backward())

    def _readable(self, pieces: Callable[[Any, list[nn.Parameter]], Iterator[WeightPiece]]) -> Iterable[WeightPiece]:
        weights = [weight for weight in self.engine.module.parameters() if weight.requires_grad]
        optimizer = self.engine.optimizer
        return () if why_unread(optimizer, weights) else pieces(optimizer, weights)

    def _own_weights(self) -> Iterator[WeightPiece]:
        for weight in self.engine.module.parameters():
            arrive(weight)
            shard = partition(weight)
            if shard is None:
                yield WeightPiece(weight, 0, weight)
            else:
                holder: Any = weight
                first = shard.numel() * holder.ds_process_group.rank()
                yield WeightPiece(
                    weight, first, shard.reshape(-1)[: max(min(shard.numel(), holder.ds_numel - first), 0)]
                )

    @torch.no_grad()
    def _record_weights(self, kind: str, pieces: Iterable[WeightPiece], factor: float = 1.0) -> None:
        model = self.engine.module
        known = {id(weight): name for name, weight in model.named_parameters()}
        positions: dict[str, list[int]] = {}
        with allow_shard_access():
            for piece in pieces:
                name = known.get(id(piece.weight))
                if name is None or f".{names.ORIGINAL}." in name:
                    continue
                if not self.weights(unwrapped_name(name)):
                    continue
                order = positions.setdefault(name, position_of(model, name))
                held = WeightElements.of(piece.weight, self.engine.topology, piece.first)
                record: Record = {"kind": kind, "name": unwrapped_name(name), "order": order}
                record |= held.described(piece.values.numel()) | ({"state": piece.state} if piece.state else {})
                values = piece.values if factor == 1 else piece.values * factor
                record_weight(self.file, record, values, held.indices)


def loss_scale(optimizer: Any) -> float:
    """The factor by which ``optimizer``, DeepSpeed's wrapper, has multiplied the loss; 1 without a scale."""
    for name in ("loss_scale", "cur_scale"):
        if isinstance(found := getattr(optimizer, name, None), int | float):
            return float(found)
    return 1.0


@contextmanager
def one_message(records: StepRecords, stop: Callable[[], None]) -> Iterator[None]:
    """A context in which a dump that cannot be written ends all dumping, with one warning."""
    try:
        yield
    except DumpError as error:
        records.close()
        stop()
        logger().error("dump: %s. The run goes on without it", error)
