"""Trains a small Llama under ZeRO on every accelerator DeepSpeed finds, and prints the losses: a program, not a test.

    python tests/support/zero_losses.py RANKS STEPS [STAGE-DTYPE-OVERLAP ...]

The tests run it on the CPU with gloo and on simulated NPUs with HCCL and compare what it prints, a line of JSON:
{"1-bf16-true": [losses of the ranks' mean, one a step], ...}.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from pathlib import Path

import deepspeed
import ranks
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from transformers import LlamaConfig, LlamaForCausalLM

SETTINGS = tuple("-".join(setting) for setting in itertools.product("0123", ("fp32", "bf16"), ("true", "false")))
MICRO_BATCH, LENGTH, VOCABULARY = 2, 16, 64


def ds_config(setting: str) -> dict[str, object]:
    """Small buckets, so that overlap has something to overlap; Adam as torch computes it, the same on every device."""
    stage, dtype, overlap = setting.split("-")
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "steps_per_print": 10**9,
        "bf16": {"enabled": dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {
            "stage": int(stage),
            "overlap_comm": overlap == "true",
            "reduce_bucket_size": 4096,
            "allgather_bucket_size": 4096,
            "stage3_prefetch_bucket_size": 4096,
            "stage3_param_persistence_threshold": 64,
        },
    }


def losses(setting: str, steps: int) -> list[float]:
    """The mean of the ranks' losses in each of ``steps`` optimizer steps."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=ds_config(setting), dist_init_required=False
    )
    found = []
    for _ in range(steps):
        numbers = torch.Generator().manual_seed(dist.get_rank())  # the same batch in each step: the loss falls
        total = torch.zeros((), device=engine.device)
        for _ in range(engine.gradient_accumulation_steps()):
            ids = torch.randint(0, VOCABULARY, (MICRO_BATCH, LENGTH), generator=numbers).to(engine.device)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            total += loss.detach().float()
        dist.all_reduce(total)
        found.append(total.item() / engine.gradient_accumulation_steps() / dist.get_world_size())
    engine.destroy()
    return found


def train(settings: list[str], steps: int, answer: str) -> None:
    """One rank."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    found = {setting: losses(setting, steps) for setting in settings}
    if dist.get_rank() == 0:
        Path(answer).write_text(json.dumps(found))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        answer = f"{folder}/losses.json"
        settings, steps = sys.argv[3:] or list(SETTINGS), int(sys.argv[2])
        backend = "gloo" if get_accelerator().device_name() == "cpu" else "hccl"
        ranks.run_on_ranks(int(sys.argv[1]), train, settings, steps, answer, backend=backend)
        print(Path(answer).read_text())
