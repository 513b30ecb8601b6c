"""The dump of one run: what all its ranks have written, by step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from safetensors import safe_open

from ds_npu.dump_hooks import VERSION, Record


class DumpReadError(ValueError):
    """A folder that is no whole dump: which file, and what is wrong with it."""


@dataclass
class RankRecords:
    """The records of one step and rank."""

    rank: int
    coordinates: dict[str, int]
    """The rank along each axis of its run."""
    records: list[Record] = field(default_factory=list)
    batches: dict[str, Record] = field(default_factory=dict)
    """Records of samples and tokens, by the name with which other records refer to them."""


class DumpedRun:
    """The dump in ``folder``; raises DumpReadError where a file is missing, cut off or of another version."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        paths = sorted(folder.glob("rank-*.jsonl"))
        if not paths:
            raise DumpReadError(f"{folder}: it has no rank-*.jsonl, which ds_npu.dump and dump_hooks.py write")
        self.header: Record = {}
        self.steps: dict[int, list[RankRecords]] = {}
        for path in paths:
            self._read(path)
        world = self.header["world"]
        if len(paths) != world:
            raise DumpReadError(f"{folder}: the files of {len(paths)} ranks are there, and its run had {world}")
        for step, ranks in list(self.steps.items()):
            if len(ranks) < world:
                there = [each.rank for each in ranks]
                missing = next(rank for rank in range(world) if rank not in there)
                raise DumpReadError(f"{folder}: step {step} of rank {missing} is missing or not whole")

    def _read(self, path: Path) -> None:
        by_step: dict[int, RankRecords] = {}
        whole: set[int] = set()
        try:
            with path.open(encoding="utf-8") as file:
                header = json.loads(file.readline())
                if header.get("ds_npu dump") != VERSION:
                    raise DumpReadError(f"{path}: it is no dump of version {VERSION}")
                for line in file:
                    record = json.loads(line)
                    step = record["step"]
                    if step in whole:  # The step was dumped again, by a run that went on from a checkpoint.
                        whole.discard(step)
                        by_step.pop(step)
                    own = by_step.setdefault(step, RankRecords(header["rank"], header["ranks"]))
                    if record["kind"] == "end":
                        whole.add(step)
                    elif record["kind"] == "batch":
                        own.batches[record["batch"]] = record
                    else:
                        own.records.append(record)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
            raise DumpReadError(f"{path}: it is no whole file of a dump ({type(error).__name__}: {error})") from error
        self.header = self.header or header
        for step in sorted(whole):
            self.steps.setdefault(step, []).append(by_step[step])

    def __str__(self) -> str:
        sizes = ", ".join(f"{axis} {size}" for axis, size in self.header["layout"].items() if axis != "edp")
        world = self.header["world"]
        ranks = "1 rank" if world == 1 else f"{world} ranks ({sizes})"
        steps = ", ".join(map(str, sorted(self.steps))) or "none"
        return f"{self.folder}: {ranks}, {', '.join(self.dtypes)}, {self.header['what']} of steps {steps}"

    @cached_property
    def dtypes(self) -> list[str]:
        """The dtypes of its weights."""
        weights = (each for ranks in self.steps.values() for rank in ranks for each in rank.records)
        return sorted({each["dtype"] for each in weights if each["kind"] == "weight"})

    def parts(self, step: int) -> Iterator[tuple[RankRecords, Record]]:
        """Each record of ``step``, with the RankRecords that it is in."""
        for rank in self.steps[step]:
            for record in rank.records:
                yield rank, record

    def tensor(self, step: int, rank: int, record: Record) -> torch.Tensor | None:
        """The values of ``record``, on the host; None where statistics alone were dumped."""
        if "tensor" not in record:
            return None
        path = self.folder / f"rank-{rank:05d}-step-{step}.safetensors"
        if path.exists():
            with safe_open(path, "pt") as file:
                found: torch.Tensor = file.get_tensor(record["tensor"])
                return found
        return self._saved(step, rank)[record["tensor"]]

    def _saved(self, step: int, rank: int) -> dict[str, torch.Tensor]:
        path = self.folder / f"rank-{rank:05d}-step-{step}.pt"
        if not path.exists():
            raise DumpReadError(f"{path.with_suffix('.safetensors')}: the tensors of this step are not there")
        found: dict[str, torch.Tensor] = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
        return found
