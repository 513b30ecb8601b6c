"""Records of the tensors of a training step, for ``ds_npu compare``; this one file needs nothing but torch.

ds_npu writes its own dumps with it. A run without ds_npu (on a GPU, on a CPU) copies the file next to its script:

    from dump_hooks import Dump
    dump = Dump(model, optimizer, "gpu_dump", steps=[0])

Nothing else changes. A step begins with the first forward that trains and ends with ``optimizer.step()``. Recorded are
the weights before it, outputs of blocks, attention, MLPs, norms and embeddings with their gradients, the weights'
gradients, and the optimizer's state behind it. Each record says which samples and tokens it is of, or which elements of
which weight. Files are JSON lines, and with ``what="tensors"`` safetensors (else torch.save of plain tensors).

Shape letters: B samples, S tokens of a sample, s those of them that a rank holds, R rows.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

VERSION = 1
CHUNK = 2**18
"""Elements of a weight whose fingerprint is computed at a time."""
WRAPPERS = re.compile(
    r"\.(?:base_layer|original_module|modules_to_save\.[^.]+|_orig_mod)(?=\.|$)|^(?:_orig_mod(?:\.|$))+"
)
"""Parts that PEFT and torch.compile add to names."""
NORMS = re.compile("(RMSNorm|LayerNorm)$|^LayerNorm")
SUBLAYERS = re.compile("Attention$|MLP$|Mlp$|FeedForward$|FFN$|M[oO][eE]$|M[oO][eE]Block$|SparseMoeBlock$")
"""Ends of the class names of norms, and of attention, MLPs and mixtures of experts."""
OUTPUT = "output"
GRADIENT_OF_OUTPUT = "output gradient"
WEIGHT = "weight"
GRADIENT = "gradient"
STATE = "optimizer state"
Record = dict[str, Any]
Indices = Callable[[int, int], torch.Tensor]
MIXERS = (-7046029254386353131, -4417276706812531889)
"""Odd numbers of 64 bits: 2 ** 64 over the golden ratio, and one of xxHash's primes."""


def unwrapped_name(name: str) -> str:
    """The name that a module or parameter has in the model without PEFT's and torch.compile's wrappers."""
    return f"{WRAPPERS.sub('', name)}.".removeprefix("base_model.model.")[:-1]


def position_of(model: nn.Module, name: str) -> list[int]:
    """The position of a parameter in the model: the index of each module around it, and its own."""
    *path, leaf = name.split(".")
    indices, module = [], model
    for part in path:
        indices.append(list(module._modules).index(part) + 1)
        module = module.get_submodule(part)
    return [*indices, 0, list(module._parameters).index(leaf)]


def statistics(x_RN: torch.Tensor, keep_RN: torch.Tensor | None = None) -> torch.Tensor:
    """Sum, sum of squares, least and largest value of each row: [4, R], float64 (on NPUs float32).

    ``keep_RN``: False for elements that do not count; in a row without any the least value is inf, the largest -inf.
    """
    wide = torch.float32 if x_RN.device.type == "npu" else torch.float64
    x_RN = x_RN.detach()
    if x_RN.shape[1] == 0:
        return torch.tensor([0, 0, torch.inf, -torch.inf], dtype=wide, device=x_RN.device)[:, None].expand(4, len(x_RN))
    least = largest = x_RN
    if keep_RN is not None:
        least = x_RN.masked_fill(~keep_RN, torch.inf)
        largest = x_RN.masked_fill(~keep_RN, -torch.inf)
        x_RN = x_RN.masked_fill(~keep_RN, 0)
    squares = torch.linalg.vector_norm(x_RN, dim=1, dtype=wide).square()
    return torch.stack([x_RN.sum(1, dtype=wide), squares, least.amin(1).to(wide), largest.amax(1).to(wide)])


def mixed(bits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """A hash of each value and its index, int64; sums of it (mod 2 ** 64) do not depend on an order."""
    found = (index * MIXERS[0]).bitwise_xor_(bits).mul_(MIXERS[1])
    return found.bitwise_xor_(found >> 29)


def bits_of(x: torch.Tensor) -> torch.Tensor:
    """The bits of the values of ``x`` as float64, which holds all narrower ones; of integers they themselves."""
    return x.double().view(torch.int64) if x.is_floating_point() else x.long()


def hash_of_bits(values: torch.Tensor, indices: Indices = torch.arange) -> str:
    """A hash of ``values`` and of where they stand; those of the parts of a weight add up to that of the whole.

    ``indices(start, stop)``: int64, the flat indices in the whole weight of elements ``start`` to ``stop``.
    """
    flat, total = values.detach().reshape(-1).cpu(), 0
    for start in range(0, len(flat), CHUNK):
        stop = min(start + CHUNK, len(flat))
        total += int(mixed(bits_of(flat[start:stop]), indices(start, stop)).sum())
    return f"{total % 2**64:016x}"


class BatchTokens:
    """The samples of one forward by their content, and the numbers of the tokens of each that this rank holds.

    Tokens are numbered without padding: the same sample has the same numbers in a batch of any length.
    """

    def __init__(
        self, given: tuple[Any, Mapping[str, Any]], held: torch.Tensor | None = None, shard: tuple[int, int] = (0, 1)
    ) -> None:
        """``held``: int64 [1 or B, s], this rank's tokens; ``shard``: (rank, ranks) where ranks shard s once more."""
        args, kwargs = given
        named = (kwargs.get("input_ids"), embeds := kwargs.get("inputs_embeds"), *tree_leaves((args, kwargs)))
        tensors = [each for each in named if isinstance(each, torch.Tensor) and each.dim() > 0]
        ids = next((each for each in tensors if each.dim() > 1), tensors[0] if tensors else torch.empty(0, 1))
        is_text = ids.dim() == 2 and not ids.is_floating_point()
        ids = ids.detach().cpu()
        if embeds is not None and ids.dim() == 3 and not is_text:
            is_text = True
            ids = mixed(bits_of(ids), torch.arange(ids.shape[2]).expand_as(ids)).sum(2)
        self.rows, self.shard, self.numbers_Bs = len(ids), shard, None
        number_BS = torch.arange(ids[:1].numel()).expand(self.rows, -1)
        if is_text:
            mask = kwargs.get("attention_mask")
            keeps = isinstance(mask, torch.Tensor) and mask.shape == ids.shape
            seen = mask.cpu() != 0 if keeps else torch.ones_like(ids, dtype=torch.bool)  # type: ignore[union-attr]
            number_BS = torch.where(seen, seen.long().cumsum(1) - 1, -1)
            self.numbers_Bs = number_BS if held is None else number_BS.gather(1, held.cpu().expand(self.rows, -1))
        hashes = mixed(bits_of(ids).flatten(1), number_BS).masked_fill(number_BS < 0, 0).sum(1).tolist()
        self.samples = [f"{each % 2**64:016x}" for each in hashes]

    def of(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """``x`` as [B, n, ...] or [B, ...], and the numbers of its n tokens, int64 [B, n]; None for another shape."""
        if self.numbers_Bs is None:
            return (x, None) if x.dim() > 0 and x.shape[0] == self.rows else None
        count, (rank, ranks) = self.numbers_Bs.shape[1], self.shard
        if x.dim() == 2 and x.shape[0] == self.rows * count:
            x = x.view(self.rows, count, -1)
        if x.dim() < 3 or x.shape[0] != self.rows:
            return None
        if x.shape[1] == count:
            return x, self.numbers_Bs
        size = -(-count // ranks)
        if ranks > 1 and x.shape[1] == size:
            numbers = self.numbers_Bs[:, rank * size : (rank + 1) * size]
            return x[:, : numbers.shape[1]], numbers
        return None


def runs_of(numbers: torch.Tensor) -> list[list[int]]:
    """[first number, how many] of each run of ``numbers`` that ascend by one; a run of padding begins with -1."""
    step = torch.where(numbers[1:] < 0, numbers[1:] - numbers[:-1], numbers[1:] - numbers[:-1] - 1)
    starts = [0, *((step != 0).nonzero().flatten() + 1).tolist()] if len(numbers) else []
    stops = [*starts[1:], len(numbers)][: len(starts)]
    return [[int(numbers[start]), stop - start] for start, stop in zip(starts, stops, strict=True)]


class DumpError(OSError):
    """A dump that cannot be written: where, why, and what to do."""


class DumpFile:
    """The records of one rank: ``rank-00000.jsonl``, and the tensors of each step in a file of their own."""

    def __init__(self, folder: str | Path, header: Record) -> None:
        """Raises DumpError where ``folder`` cannot be written, or has the dump of another run."""
        self.folder = Path(folder)
        self.header = {"ds_npu dump": VERSION, **header}
        self.path = self.folder / f"rank-{self.header['rank']:05d}.jsonl"
        self.with_tensors = self.header["what"] == "tensors"
        self.lines: list[Record] = []
        self.numbers: list[tuple[Record, torch.Tensor]] = []
        self.tensors: dict[str, torch.Tensor] = {}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            found = self._header_in(self.folder / "rank-00000.jsonl") or self.header
            for key in ("world", "layout", "what"):
                if found.get(key) != self.header[key]:
                    raise ValueError(f"it has a dump of another run: {key} {found.get(key)}, here {self.header[key]}")
            if not self._header_in(self.path):
                self.path.write_text(json.dumps(self.header) + "\n", encoding="utf-8")
            self.path.open("a").close()
        except (OSError, ValueError) as error:
            raise DumpError(f"{self.folder}: no dump can be written there ({error}). Name another folder") from error

    def _header_in(self, path: Path) -> Record:
        text = path.read_text(encoding="utf-8").partition("\n")[0] if path.exists() else ""
        return dict(json.loads(text)) if text else {}

    def add(self, record: Record, numbers: torch.Tensor, values: torch.Tensor | None = None) -> None:
        """Keep a record with its ``statistics``, and its ``values`` where tensors are dumped, until ``write``."""
        self.lines.append(record)
        self.numbers.append((record, numbers))
        if self.with_tensors and values is not None:
            record["tensor"] = f"{len(self.tensors)}"
            self.tensors[record["tensor"]] = values.detach().to("cpu", copy=True).contiguous()

    def write(self, step: int) -> int:
        """Write what was added since the last call as ``step``; returns its bytes, or raises DumpError."""
        lines, held, tensors = self.lines, self.numbers, self.tensors
        self.lines, self.numbers, self.tensors = [], [], {}
        for device in {numbers.device for _, numbers in held}:  # One copy to the host for each.
            own = [(record, numbers) for record, numbers in held if numbers.device == device]
            flat = torch.cat([numbers.reshape(-1) for _, numbers in own]).cpu().tolist()
            end = 0
            for record, numbers in own:
                for name in ("sum", "squares", "min", "max"):
                    record[name] = flat[end : end + numbers.shape[1]]
                    end += numbers.shape[1]
        lines.append({"kind": "end", "records": len(lines)})
        text = "".join(json.dumps({"step": step, **record}) + "\n" for record in lines)
        needed = len(text) + sum(each.nbytes for each in tensors.values())
        size = self.path.stat().st_size if self.path.exists() else 0
        incomplete = self.folder / f"{self.path.stem}-step-{step}.incomplete"
        try:
            free = shutil.disk_usage(self.folder).free
            if free < needed:
                raise OSError(f"{needed / 2**20:,.1f} MiB are to be written, and {free / 2**20:,.1f} MiB are free")
            if tensors:
                _save_tensors(tensors, incomplete)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text)
        except Exception as error:  # safetensors has an exception of its own.
            incomplete.unlink(missing_ok=True)
            if self.path.exists() and self.path.stat().st_size > size:
                with self.path.open("r+") as file:
                    file.truncate(size)
            raise DumpError(
                f"{self.folder}: step {step} was not dumped ({error}). What to do: a disk with more space, fewer "
                "modules, or statistics in place of tensors"
            ) from error
        return needed


def _save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write ``tensors``, first under the name ``path``; without safetensors by torch.save."""
    has_safetensors = importlib.util.find_spec("safetensors") is not None
    save = importlib.import_module("safetensors.torch").save_file if has_safetensors else torch.save
    save(tensors, path)
    path.rename(path.with_suffix(".safetensors" if has_safetensors else ".pt"))


class ForwardRecords:
    """The records of one forward of a model and of its backward, on one rank."""

    def __init__(self, file: DumpFile, batch: BatchTokens, micro_batch: int, stage: int = 0) -> None:
        self.file, self.batch, self.micro_batch, self.stage = file, batch, micro_batch, stage
        self.orders: dict[str, int] = {}
        self.batches: dict[tuple[int, ...], Record] = {}
        self.hooked: set[str] = set()
        self.gradients: list[Record] = []
        self.unknown: dict[str, list[int]] = {}
        """Outputs whose shape does not say which samples they are of, by module."""

    def output(self, name: str, x: object, recomputes: bool = False) -> None:
        """Record the output of the module ``name``, unless it ``recomputes``, and in backward the output's gradient."""
        x = x[0] if isinstance(x, tuple | list) and x else x
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            return
        if not recomputes and name not in self.orders:
            self.orders[name] = len(self.orders)
            self.record(OUTPUT, name, x)
        if x.requires_grad and name in self.orders and name not in self.hooked:
            self.hooked.add(name)
            x.register_hook(partial(self.record, GRADIENT_OF_OUTPUT, name))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def record(self, kind: str, name: str, x: torch.Tensor) -> None:
        """Keep the statistics of each sample in ``x``; a shape that tells no samples is noted in ``unknown``."""
        found = self.batch.of(x)
        if found is None:
            self.unknown[name] = list(x.shape)
            return
        x, numbers = found
        rows = x.reshape(len(x), -1)
        keep, width = None, rows.shape[1]
        counts = [width] * len(x)
        if numbers is not None and bool((numbers < 0).any()):
            width //= numbers.shape[1]
            counts = ((numbers >= 0).sum(1) * width).tolist()
            keep = (numbers >= 0).to(x.device).repeat_interleave(width, 1)
        record = {
            **{"kind": kind, "name": name, "order": [self.stage, self.orders[name]], "dtype": str(x.dtype)[6:]},
            **{"batch": self._batch(numbers), "count": counts},
        }
        if kind == GRADIENT_OF_OUTPUT:
            self.gradients.append(record)
        self.file.add(record, statistics(rows, keep), x)

    def _batch(self, numbers: torch.Tensor | None) -> str:
        """The name of the batch record with the samples and the ``numbers`` of their tokens; adds a missing one."""
        key = () if numbers is None else (numbers.shape[1],)
        if key not in self.batches:
            tokens = None if numbers is None else [runs_of(each) for each in numbers]
            tokens = tokens[:1] if tokens and all(each == tokens[0] for each in tokens) else tokens
            own = f"{self.stage}.{self.micro_batch}.{len(self.batches)}"
            self.batches[key] = {"kind": "batch", "batch": own, "samples": self.batch.samples, "tokens": tokens}
            self.batches[key]["micro_batch"] = self.micro_batch
            self.file.lines.append(self.batches[key])
        return str(self.batches[key]["batch"])


def record_weight(file: DumpFile, record: Record, values: torch.Tensor, indices: Indices = torch.arange) -> None:
    """Record ``values`` of a weight, of its gradient or of its state; ``record``: kind, name, shape, order, parts."""
    if values.numel():
        own: Record = {"dtype": str(values.dtype)[6:], "count": [values.numel()]}
        if record["kind"] == WEIGHT:
            own["fingerprint"] = hash_of_bits(values, indices)
        file.add({**record, **own}, statistics(values.detach().reshape(1, -1)), values)


def border_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Blocks, attention, MLPs, norms and embeddings of ``model`` by their classes, under their plain names."""
    found: dict[str, nn.Module] = {}
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
    blocks = {id(block) for each in lists for block in each if list(block.children())}
    for name, module in model.named_modules():
        kind = type(module).__name__
        known = isinstance(module, nn.Embedding) or NORMS.search(kind) or SUBLAYERS.search(kind) or id(module) in blocks
        if known and ".experts." not in f".{name}.":
            found[unwrapped_name(name)] = module
    return found


class Dump:
    """Dumps steps of a model that trains in one process; see the head of this file."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        folder: str | Path,
        steps: Sequence[int] = (0,),
        what: str = "statistics",
    ) -> None:
        """Raises DumpError where ``folder`` cannot be written, ValueError in a world of several processes."""
        world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        if world > 1:
            raise ValueError(f"dump_hooks.Dump: found {world} processes, and it dumps one. What to do: run it in one")
        self.model, self.optimizer, self.steps, self.step = model, optimizer, set(steps), 0
        self.file = DumpFile(folder, {"rank": 0, "world": 1, "layout": {}, "ranks": {}, "what": what})
        self.micro_batches, self.hooks, self.forward = 0, list[Any](), list[ForwardRecords]()
        self.gradients: dict[str, torch.Tensor] = {}
        model.register_forward_pre_hook(self._begin_forward, with_kwargs=True)
        optimizer.register_step_post_hook(self._end_step)

    def _begin_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.step not in self.steps or not (module.training and torch.is_grad_enabled()):
            return
        if not self.hooks:
            self._begin_step()
        self.forward = [ForwardRecords(self.file, BatchTokens((args, kwargs)), self.micro_batches)]
        self.micro_batches += 1

    def _begin_step(self) -> None:
        for name, weight in self._weights():
            record_weight(self.file, self._described(WEIGHT, name, weight), weight)

            def accumulated(weight: torch.Tensor, name: str = name) -> None:
                assert weight.grad is not None
                self.gradients[name] = weight.grad.detach().to("cpu", copy=True)

            if weight.requires_grad:
                hook = weight.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]
                self.hooks.append(hook)
        for name, module in border_modules(self.model).items():

            def returned(_module: nn.Module, _args: Any, out: Any, name: str = name) -> None:
                self.forward[0].output(name, out, torch._C._current_graph_task_id() >= 0)

            self.hooks.append(module.register_forward_hook(returned))

    def _weights(self) -> list[tuple[str, nn.Parameter]]:
        return [each for each in self.model.named_parameters() if ".original_module." not in each[0]]

    def _described(self, kind: str, name: str, weight: torch.Tensor) -> Record:
        order = position_of(self.model, name)
        return {"kind": kind, "name": unwrapped_name(name), "shape": list(weight.shape), "order": order}

    def _end_step(self, *_: Any) -> None:
        if self.hooks:
            for name, weight in self._weights():
                if name in self.gradients:
                    record_weight(self.file, self._described(GRADIENT, name, weight), self.gradients[name])
                for key, value in self.optimizer.state.get(weight, {}).items():
                    if isinstance(value, torch.Tensor) and value.shape == weight.shape:
                        record_weight(self.file, {**self._described(STATE, name, weight), "state": key}, value)
            self.file.write(self.step)
            while self.hooks:
                self.hooks.pop().remove()
            self.gradients, self.micro_batches = {}, 0
        self.step += 1
