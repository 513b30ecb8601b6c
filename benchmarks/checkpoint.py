"""Saving and loading checkpoints: what a call blocks on a slow disk, how fast files are written, how much is read.

    python benchmarks/checkpoint.py

Two ranks on the CPU over gloo, a Llama in float32, ZeRO 1. The slow disk is the disk behind a brake: each rank's writes
are held to a speed. `plain` writes the bytes of the same files in pieces of 4 MiB, and flushes them, as saving does.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

RANKS, MIB = 2, 2**20
PARTS = ("call", "speed", "bytes")
"""What a call blocks on a slow disk; the speed of saving; the bytes that loads at other layouts read."""
PIECE_BYTES = 4 * MIB
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 6,
    "vocab_size": 8192,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
LAYOUTS: tuple[dict[str, Any], ...] = ({"parallel": {"tensor": 2}}, {"parallel": {"pipeline": 2}})


def engine_of(is_narrow: bool = False, **section: Any) -> Any:
    deepspeed: Any = importlib.import_module("deepspeed")
    transformers: Any = importlib.import_module("transformers")
    importlib.import_module("torch").manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    config = {
        "train_micro_batch_size_per_gpu": RANKS,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": is_narrow},
        "ds_npu": section,
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train(engine: Any) -> None:
    ids = importlib.import_module("torch").arange(64).view(RANKS, 32) % 100
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()


@contextmanager
def brake(mib_per_s: float) -> Iterator[None]:
    """Hold this process's writes to a speed."""
    write = os.write

    def slowly(descriptor: int, data: Any) -> int:
        count = write(descriptor, data)
        if count > 2**16:
            time.sleep(count / MIB / mib_per_s)
        return count

    os.write = slowly
    try:
        yield
    finally:
        os.write = write


@contextmanager
def seconds_in(module: str, owner: str, name: str) -> Iterator[list[float]]:
    """The seconds that calls of a class's method take in the block, or of a function that a module has (no owner)."""
    kind: Any = importlib.import_module(module)
    kind = getattr(kind, owner) if owner else kind
    call, found, depth = getattr(kind, name), [0.0], [0]

    def counted(*given: Any, **named: Any) -> Any:
        depth[0] += 1
        begun = time.perf_counter()
        made = call(*given, **named)
        depth[0] -= 1
        found[0] += 0.0 if depth[0] else time.perf_counter() - begun
        return made

    setattr(kind, name, counted)
    try:
        yield found
    finally:
        setattr(kind, name, call)


SNAPSHOT = ("ds_npu.memory.host_snapshot", "HostSnapshot", "of")
EXCHANGE = ("ds_npu.zero_ext.bucketed_state", "", "to_plain")
"""What brings ZeRO's partitions from the order of buckets to DeepSpeed's, by collectives; here over gloo."""


def timed(call: Callable[[], object]) -> float:
    """Seconds of a call that all ranks begin at once."""
    importlib.import_module("torch.distributed").barrier()
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def plain_writes(folder: Path, files: list[bytes]) -> None:
    """Write new files with these bytes, as plainly as can be; all ranks end together, as a save does."""
    folder.mkdir(parents=True)
    for index, data in enumerate(map(memoryview, files)):
        descriptor = os.open(folder / f"{index}", os.O_WRONLY | os.O_CREAT)
        for start in range(0, len(data), PIECE_BYTES):
            os.write(descriptor, data[start : start + PIECE_BYTES])
        os.fsync(descriptor)
        os.close(descriptor)
    importlib.import_module("torch.distributed").barrier()


def one_file(folder: Path, has_digests: bool) -> float:
    """Seconds of writing tensors of 256 MiB as a save does, or as many bytes as plainly as can be."""
    torch: Any = importlib.import_module("torch")
    state = {f"{index}": torch.randn(2**24) for index in range(4)}
    data = [memoryview(each.numpy()).cast("B") for each in state.values()]
    begun = time.perf_counter()
    if has_digests:
        digests: Any = importlib.import_module("ds_npu.checkpoint.digests")
        files: Any = importlib.import_module("ds_npu.checkpoint.files")
        with digests.DigestedWriter(folder / "one", files.host_memory(state)) as writer:
            torch.save(state, writer)
    else:
        with (folder / "plain").open("wb", buffering=0) as opened:
            for each in data:
                for start in range(0, len(each), PIECE_BYTES):
                    opened.write(each[start : start + PIECE_BYTES])
            os.fsync(opened.fileno())
    return time.perf_counter() - begun


def on_a_slow_disk(folder: Path, engines: tuple[Any, Any], arguments: argparse.Namespace) -> Iterator[str]:
    blocking, behind = engines
    behind.save_checkpoint(str(folder / "first"))  # it allocates the snapshot's memory
    behind.finish_saving()
    yield f"a disk of {arguments.mib_per_s:.0f} MiB/s a rank, rank 0:"
    for _ in range(arguments.rounds):
        with brake(arguments.mib_per_s), seconds_in(*SNAPSHOT) as copied:
            blocked = timed(lambda: blocking.save_checkpoint(str(folder / "blocking")))
            with seconds_in(*EXCHANGE) as exchanged:
                call = timed(lambda: behind.save_checkpoint(str(folder / "behind")))
            behind.finish_saving()
        rest = call - copied[0]
        yield (
            f"  a save that blocks: {blocked:.2f} s; behind training: {call:.3f} s, of which the snapshot "
            f"{copied[0]:.3f} s; the rest is {rest / blocked:.4f} of the save that blocks, without the exchange of "
            f"partitions ({exchanged[0]:.3f} s) {(rest - exchanged[0]) / blocked:.4f}"
        )


def against_plain_writes(folder: Path, rank: int, engine: Any, arguments: argparse.Namespace) -> Iterator[str]:
    """Both write to new folders, as training does; they are removed outside of the times."""
    engine.save_checkpoint(str(folder / "fast"))
    tag = folder / "fast" / (folder / "fast" / "latest").read_text()
    files = [
        path.read_bytes()
        for path in tag.glob("*.pt")
        if (f"pp_rank_{rank}_" in path.name) or (rank == 0 and "pp_rank" not in path.name)
    ]
    yield f"rank 0 writes {sum(map(len, files)) / MIB:,.0f} MiB; the seconds of plain writes / those of a save:"
    for speed, _ in itertools.product((arguments.mib_per_s, 2 * arguments.mib_per_s, None), range(arguments.rounds)):
        with brake(speed) if speed else nullcontext():
            plain = timed(lambda: plain_writes(folder / f"plain_{rank}", files))
            with seconds_in(*EXCHANGE) as exchanged:
                saved = timed(lambda: engine.save_checkpoint(str(folder / "new")))
        shutil.rmtree(folder / f"plain_{rank}")
        if rank == 0:
            shutil.rmtree(folder / "new")
        disk = f"a disk of {speed:.0f} MiB/s a rank" if speed else "this disk"
        ratio = f"{plain:.2f} / {saved:.2f} = {plain / saved:.2f}"
        yield f"  {disk}: {ratio}, of which the exchange of partitions {exchanged[0]:.2f}"
    yield "one rank alone, without an engine, 256 MiB: the seconds of plain writes / those of a file with digests:"
    for _ in range(arguments.rounds):
        plain, saved = (one_file(folder, has_digests) if rank == 0 else 0.0 for has_digests in (False, True))
        importlib.import_module("torch.distributed").barrier()
        yield f"  {plain:.2f} / {saved:.2f} = {plain / max(saved, 1e-9):.2f}"


class BytesRead(logging.Handler):
    """The bytes that the log says were read."""

    found = 0

    def emit(self, record: logging.LogRecord) -> None:
        told = re.search(r": ([\d,]+) bytes of files were read", record.getMessage())
        self.found = int(told[1].replace(",", "")) if told else self.found


@contextmanager
def chunks_read() -> Iterator[set[tuple[str, int]]]:
    """The chunks that are read in the block, each once: what is read beyond them is read twice."""
    kind: Any = importlib.import_module("ds_npu.checkpoint.digests").VerifiedReader
    fill, found = kind._fill, set[tuple[str, int]]()

    def noted(self: Any, start: int, view: memoryview) -> None:
        last = (start + len(view) - 1) // PIECE_BYTES
        found.update((str(self.path), chunk) for chunk in range(start // PIECE_BYTES, last + 1))
        fill(self, start, view)

    kind._fill = noted
    try:
        yield found
    finally:
        kind._fill = fill


def at_other_layouts(folder: Path, wide: Any) -> Iterator[str]:
    """Bytes that each rank reads, and keeps: of its weights, their masters and both moments, in float32 and in bf16."""
    log: Any = importlib.import_module("ds_npu.log")
    dist: Any = importlib.import_module("torch.distributed")
    first = engine_of(is_narrow=True)
    train(first)
    first.save_checkpoint(str(folder / "narrow"))
    wide.save_checkpoint(str(folder / "wide"))
    for is_narrow, section in itertools.product((False, True), LAYOUTS):
        engine, handler = engine_of(is_narrow, **section), BytesRead()
        level = log.logger().level
        log.logger().setLevel(logging.INFO)
        log.logger().addHandler(handler)
        with chunks_read() as chunks:
            engine.load_checkpoint(str(folder / ("narrow" if is_narrow else "wide")))
        once = sum(min(PIECE_BYTES, os.path.getsize(path) - chunk * PIECE_BYTES) for path, chunk in chunks)
        log.logger().removeHandler(handler)
        log.logger().setLevel(level)
        stepped = sum(run.numel for run in engine.optimizer_layout.runs.values())
        # Masters of float32 weights are not read again.
        own = (2, 12) if is_narrow else (4, 8)
        kept = own[0] * sum(each.numel() for each in engine.module.parameters()) + own[1] * stepped
        found: list[Any] = [None] * RANKS
        dist.all_gather_object(found, (handler.found, once, kept))
        for rank, (read, once, held) in enumerate(found):
            sizes = (
                f"keeps {held / MIB:.1f} MiB, which {once / MIB:.1f} MiB of whole chunks hold, and reads "
                f"{read / MIB:.1f} MiB: {read / once:.3f} of the chunks"
            )
            kind = "bf16" if is_narrow else "float32"
            yield f"{kind}, ZeRO 1 of 2 ranks, loaded with {section['parallel']}: rank {rank} {sizes}"


def measure(rank: int, folder: Path, arguments: argparse.Namespace) -> None:
    importlib.import_module("ds_npu")
    deepspeed: Any = importlib.import_module("deepspeed")
    dist: Any = importlib.import_module("torch.distributed")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), RANKS), rank=rank, world_size=RANKS)
    blocking, behind = engine_of(), engine_of(checkpoint={"asynchronous": True})
    train(blocking)
    train(behind)
    parts = {
        "call": lambda: on_a_slow_disk(folder, (blocking, behind), arguments),
        "speed": lambda: against_plain_writes(folder, rank, blocking, arguments),
        "bytes": lambda: at_other_layouts(folder, blocking),
    }
    for line in itertools.chain.from_iterable(parts[each]() for each in arguments.parts):
        if rank == 0:
            print(line, flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mib-per-s", type=float, default=100.0)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        measure(arguments.rank, arguments.folder, arguments)
        return
    environ = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", *sys.argv, "--folder", folder, "--rank"]
        ranks = [
            subprocess.Popen(
                [*command, str(rank)], env=environ | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "2"}
            )
            for rank in range(RANKS)
        ]
        codes = [each.wait() for each in ranks]
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
