"""One run of a golden case on one rank: what it computes, sends, says and calls, as text that is compared bit for bit.

The forkserver imports this module for the ranks of ``goldens.py``, for which it names only what every checkout has.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import golden_internals
import golden_models
import gradient_rule
import tiny_models
import torch
import torch.distributed as dist
from golden_calls import Calls
from golden_cases import Case
from golden_trace import size_of, streams_of, trace_file
from gradient_rule import CLIP, LR
from torch.utils._pytree import tree_leaves
from wire import Wire

STEPS = 3
COUNTED = 2
"""The step, from 0, whose Python calls are counted: what is made once is there by then."""
ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}}
BUCKETS = {"reduce_bucket_size": 8000, "allgather_bucket_size": 8000}
"""Elements, so that the gradients of a tiny model are several."""
GIB = 1 << 30
OBJECT = -1
"""The size of a message of pickled bytes."""
MEASURED = re.compile(r"[\d.e-]+ ms")
"""Times that a message of ``swap`` tells, which differ from run to run."""

Record = dict[str, Any]


class Said(logging.Handler):
    """The messages of ds_npu's logger."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._folder = folder

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage().replace(self._folder, "FOLDER")
        text = MEASURED.sub("T ms", text) if text.startswith("swap.activations") else text
        self.lines.append(f"{record.levelname} {text}")


class Messages(Wire):
    """A wire that does not tell the bytes of pickled objects, in which names of modules are."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = len(self.sent)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        tensors = [leaf for leaf in tree_leaves(args[:1]) if isinstance(leaf, torch.Tensor)]
        if len(self.sent) > before and {each.dtype for each in tensors} == {torch.uint8}:
            self.sent[-1] = self.sent[-1][0], OBJECT
        return out

    @property
    def lines(self) -> list[str]:
        return [f"{name} {'of an object' if size == OBJECT else size}" for name, size in self.sent]


def config_of(case: Case, folder: str) -> dict[str, Any]:
    """The whole config of DeepSpeed; FOLDER in the case's text becomes ``folder``."""
    dtype = getattr(torch, case.dtype)
    config = gradient_rule.config(case.stage, dtype, {}, stage3_param_persistence_threshold=0)
    # Overlapped reductions are in the order in which they end.
    config["zero_optimization"] |= {"overlap_comm": False, **BUCKETS} | case.zero
    config |= {"ds_npu": case.section}
    config |= {"optimizer": ADAM} if case.adam else {"optimizer": {"type": "SGD", "params": {"lr": LR}}}
    config |= {"gradient_clipping": CLIP, "train_micro_batch_size_per_gpu": golden_models.samples(case)} | case.config
    if case.budget is not None:
        config["ds_npu"] = case.section | {"recompute": {"budget_gib": case.budget / GIB}}
    return json.loads(json.dumps(config).replace("FOLDER", folder))


def engine_of(case: Case, folder: str) -> Any:
    model = golden_models.model_of(case)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=trained, config=config_of(case, folder))[0]


def load_all() -> None:
    """Make an engine, which loads every module of ds_npu and of DeepSpeed that engines have."""
    gradient_rule.without_extension()
    model = tiny_models.tiny("llama", torch.float32)
    config = gradient_rule.config(0, torch.float32, {})
    deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0].destroy()


def digest(tensors: Iterator[torch.Tensor] | list[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        plain = tensor.detach().cpu().contiguous().reshape(-1)
        found.update(f"{plain.dtype}{tuple(tensor.shape)}".encode())
        found.update(plain.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def tensors_in(state: object) -> Iterator[torch.Tensor]:
    """The tensors in an optimizer's state, in the order of its keys."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for key in sorted(state, key=str):
            yield from tensors_in(state[key])
    elif isinstance(state, list | tuple):
        for each in state:
            yield from tensors_in(each)


def state_of(engine: Any) -> Record:
    """Digests of the whole weights, which global rank 0 has, and of this rank's state of the optimizer."""
    whole = engine.whole_state_dict()
    found = {"weights": digest([each for _, each in sorted(whole.items())])}
    found["names"] = hashlib.sha256(" ".join(sorted(whole)).encode()).hexdigest()[:16]
    return found | {"optimizer": digest(tensors_in(engine.optimizer.state_dict()))}


class Life:
    """The life of an engine of ``case``, and the record of it."""

    def __init__(self, case: Case, folder: str, found: Record) -> None:
        self.case, self.folder, self.found = case, folder, found
        self.dtype = getattr(torch, case.dtype)
        self.engine = engine_of(case, folder)
        self.step = 0

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        wide = tiny_models.Float64() if self.dtype == torch.float64 else nullcontext()
        with wide:
            return self.engine(**{name: each.to(self.engine.device) for name, each in batch.items()}).loss

    def micro_batches(self) -> list[Any]:
        return golden_models.batches(self.case, self.step, self.engine.topology)

    def take_step(self, factor: float = 1.0) -> None:
        """One optimizer step; ``factor`` multiplies the last loss."""
        micro_batches = self.micro_batches()
        for index, batch in enumerate(micro_batches, 1):
            loss = self.loss(batch)
            self.found["losses"].append(loss.item().hex())
            self.engine.backward(loss * factor if index == len(micro_batches) and factor != 1 else loss)
            self.engine.step()
        self._after_step()

    def _after_step(self) -> None:
        self.step += 1
        norm = self.engine.get_global_grad_norm()
        self.found["norms"].append(float(norm or 0.0).hex())

    def steps(self) -> None:
        for step in range(STEPS):
            with self.measured(step):
                self.take_step()

    @contextmanager
    def measured(self, step: int) -> Iterator[None]:
        """Count the Python calls of one step."""
        with counted_calls(self.found) if step == COUNTED else nullcontext():
            yield

    def infinite(self) -> None:
        """The second step has a loss that is not finite."""
        for factor in (1.0, float("inf"), 1.0):
            self.take_step(factor)
            self.found.setdefault("skipped", []).append(self.engine.skipped_steps)

    def overflow(self) -> None:
        """The scale of an fp16 loss is too large at first."""
        for _ in range(STEPS):
            self.take_step()
            scale = getattr(self.engine.optimizer, "cur_scale", None) or self.engine.optimizer.loss_scale
            self.found.setdefault("skipped", []).append([self.engine.skipped_steps, float(scale)])

    def evaluated(self) -> None:
        """An evaluation between two steps."""
        self.take_step()
        self.engine.eval()
        with torch.no_grad():
            self.found["losses"] += [self.loss(batch).item().hex() for batch in self.micro_batches()]
        self.engine.train()
        self.take_step()

    def not_synchronised(self) -> None:
        """Two micro-batches more, whose gradients are not reduced, before those of a step."""
        with self.engine.no_sync():
            for batch in self.micro_batches():
                self.engine.backward(self.loss(batch))
        self.take_step()

    def train_batch(self) -> None:
        for step in range(STEPS):
            with self.measured(step):
                self.found["losses"].append(self.engine.train_batch(iter(self.micro_batches())).item().hex())
            self._after_step()

    def checkpoint(self) -> None:
        """Two steps, a checkpoint, an engine that loads it, and a further step of that engine."""
        name = self.case.name.replace(" ", "_")
        kept = Path(self.case.checkpoints or self.folder, name)
        written = Path(self.folder, name) if self.case.reads else kept
        self.take_step()
        self.take_step()
        self.engine.save_checkpoint(str(written), client_state={"golden": self.step})
        self.found["before"] = state_of(self.engine)
        self.engine.destroy()
        self.engine = engine_of(self.case.reader or self.case, self.folder)
        path, state = self.engine.load_checkpoint(str(kept))
        self.found["loaded"] = state_of(self.engine) | {"client": state.get("golden"), "found": path is not None}
        self.take_step()


class NpuLife(Life):
    """A life on NPUs: the peak of each step, and the tasks of one, in place of its Python calls.

    Calls are not counted, as backward runs on torch's threads.
    """

    @contextmanager
    def measured(self, step: int) -> Iterator[None]:
        torch.npu.synchronize()
        path, before = trace_file(), torch.npu.memory_allocated()
        begin = size_of(path)
        torch.npu.reset_peak_memory_stats()
        with without_garbage():
            yield
        torch.npu.synchronize()
        self.found.setdefault("peaks", []).append(torch.npu.max_memory_allocated() - before)
        if step == COUNTED and path is not None:
            self.found["tasks"] = streams_of(path, begin)


@contextmanager
def without_garbage() -> Iterator[None]:
    """Collect garbage before the block, not within it, where finalizers would be at work at odd times."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def counted_calls(found: Record) -> Iterator[None]:
    """Add the Python calls within the block."""
    with without_garbage(), Calls() as calls:
        yield
    found["calls"] = calls.counts()


LIVES: dict[str, Callable[[Life], None]] = {
    "steps": Life.steps,
    "infinite": Life.infinite,
    "overflow": Life.overflow,
    "evaluated": Life.evaluated,
    "not synchronised": Life.not_synchronised,
    "train_batch": Life.train_batch,
    "checkpoint": Life.checkpoint,
}


def run(case: Case, kind: type[Life] = Life) -> Record:
    """The record of ``case``; what is refused, at any time, is refused in the same words."""
    found: Record = {"losses": [], "norms": []}
    torch.manual_seed(7)
    golden_internals.say_warnings_again()
    with tempfile.TemporaryDirectory() as own, golden_internals.small_sizes(), Messages() as wire:
        box = [own]
        dist.broadcast_object_list(box, src=0)
        folder, said = box[0], Said(box[0])
        if dist.get_rank() == 0:
            Path(folder, "own.csv").write_text(golden_models.OWN_SCHEDULE)
        dist.barrier()
        logger = logging.getLogger("ds_npu")
        logger.addHandler(said)
        wire.sent.clear()
        lives: list[Life] = []
        try:
            with golden_internals.fused_kernels() if case.stand_in else nullcontext():
                lives.append(kind(case, folder, found))
                LIVES[case.life](lives[0])
            found |= state_of(lives[0].engine)
        except Exception as error:
            found["refused"] = f"{type(error).__name__}: {error}".replace(folder, "FOLDER")
        for life in lives:
            life.engine.destroy()
        logger.removeHandler(said)
        found["sent"] = wire.lines
        found["said"] = said.lines
        found["files"] = files_in(folder) if dist.get_rank() == 0 else {}
        dist.barrier()
    torch.use_deterministic_algorithms(False)
    return found


def files_in(folder: str) -> dict[str, str]:
    """Digests of the pictures that ds_npu wrote, and the names of all other files."""
    paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    pictures = {path for path in paths if path.suffix == ".svg"}
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path in pictures else ""
        for path in paths
    }


def record(cases: list[Case], folder: str, on_npus: bool) -> None:
    """Write what this rank records of the ``cases`` into ``folder``."""
    load_all()
    world, rank = dist.get_world_size(), dist.get_rank()
    found = {}
    for case in cases:
        began, used = time.monotonic(), time.process_time()
        found[case.name] = run(case, NpuLife if on_npus else Life)
        gc.collect()
        if rank == 0:
            took = f"{time.monotonic() - began:.1f} s, {time.process_time() - used:.1f} s of rank 0"
            print(f"{case.name}: {took}{' (refused)' if 'refused' in found[case.name] else ''}", flush=True)
        # A rank may end at any time: the file is whole at all times.
        part = Path(folder, f"{rank}.part")
        part.write_text(json.dumps(found))
        part.rename(Path(folder, f"{world}-{rank}.json"))
