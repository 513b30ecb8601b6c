"""Host memory that loading a tensor-sharded model takes beyond its own weights, against the largest single weight.

    python benchmarks/loading_memory.py [--ranks 4]

One rank of each model is loaded in a process of its own, which asks the system every 0.2 ms for the memory that is
this process's alone (RssAnon of /proc/self/status). Pages of mapped checkpoint files are not in it: they are the
system's cache, the same for all ranks of a machine, and dropped when memory is short.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from ds_npu.checkpoint.loading import load_checkpoint, meta_model
from ds_npu.parallel.runtime.placement import mark_sharded
from ds_npu.parallel.tensor.sharding import shard_sections

H, F, V, EXPERTS = 1024, 2816, 16384, 4
SIZES = {
    "hidden_size": H,
    "intermediate_size": F,
    "vocab_size": V,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 4},
    "mixtral": {"num_hidden_layers": 1, "num_local_experts": EXPERTS},
}
SPLITS = {
    r"(embed_tokens|lm_head)\.weight$": (0, [V]),
    r"[qkv]_proj\.weight$": (0, [H]),
    r"o_proj\.weight$": (1, [H]),
    r"experts\.gate_up_proj$": (1, [F, F]),
    r"experts\.down_proj$": (2, [F]),
    r"(gate|up)_proj\.weight$": (0, [F]),
    r"down_proj\.weight$": (1, [F]),
}


def shard(model: nn.Module, ranks: int, rank: int) -> None:
    """Leave of each weight what one rank holds; the modules stay, and could not be run."""
    for name, old in list(model.named_parameters()):
        found = next(
            (shard_sections(dim, sizes, ranks) for end, (dim, sizes) in SPLITS.items() if re.search(end, name)), None
        )
        if found is None:
            continue
        shape = list(old.shape)
        shape[found.dim] = found.length(rank)
        new = nn.Parameter(torch.empty(shape, dtype=old.dtype, device="meta"))
        mark_sharded(new, found)
        path, leaf = name.rsplit(".", 1)
        setattr(model.get_submodule(path), leaf, new)


def anonymous_bytes() -> int:
    """Memory that is this process's alone."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def peak_anonymous_bytes(call: Callable[[], object]) -> int:
    """The most that ``call`` added to this process's own memory."""
    before = anonymous_bytes()
    seen = [before]
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.append(anonymous_bytes())
            time.sleep(0.0002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        call()
    finally:
        done.set()
        watcher.join()
    return max(*seen, anonymous_bytes()) - before


def load(folder: str, ranks: int, dtype: str | None) -> None:
    """What one rank does; prints its figures."""
    torch.set_num_threads(1)
    model = meta_model(AutoModelForCausalLM, folder, dtype=dtype)
    largest = max(each.numel() * each.element_size() for each in model.parameters())
    shard(model, ranks, 1)
    begun = time.perf_counter()
    peak = peak_anonymous_bytes(lambda: load_checkpoint(model, folder, {"tp": 1}))
    seconds = time.perf_counter() - begun
    held = sum(each.numel() * each.element_size() for each in model.parameters())
    print(json.dumps({"shard": held, "largest": largest, "peak": peak, "seconds": seconds}))


def measure(model_type: str, ranks: int, dtype: str | None = None) -> dict[str, float]:
    """``shard``, ``largest`` weight and ``peak`` in bytes of rank 1 of ``ranks``; ``seconds`` with files in the cache.

    The checkpoint is in bfloat16; it is loaded in ``dtype`` where one is given.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = AutoConfig.for_model(model_type, **SIZES, **MODELS[model_type])
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder, max_shard_size="64MB")
        command = [sys.executable, __file__, "--ranks", str(ranks), "--load", folder, "--dtype", dtype or "auto"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the rank that loads {model_type} failed:\n{done.stderr}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory that loading a tensor-sharded model takes.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.load:
        load(asked.load, asked.ranks, asked.dtype)
        return
    for model_type in MODELS:
        for dtype in (None, "float32"):
            found = measure(model_type, asked.ranks, dtype)
            extra = (found["peak"] - found["shard"]) / found["largest"]
            print(
                f"{model_type} as {dtype or 'saved'}: rank 1 of {asked.ranks} holds {found['shard'] / 2**20:.1f} MiB, "
                f"peak {found['peak'] / 2**20:.1f} MiB: {extra:+.3f} largest weights "
                f"({found['largest'] / 2**20:.1f} MiB) more; {found['seconds']:.2f} s"
            )


if __name__ == "__main__":
    main()
