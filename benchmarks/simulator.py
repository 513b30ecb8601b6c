"""What simulated NPUs cost: a training step on them against the same step on the CPU, and the start of a process.

    python benchmarks/simulator.py

`simulated` runs torch_npu and HCCL on simulated NPUs, `cpu` DeepSpeed's CPU accelerator and gloo: the same model,
batch, ranks and threads, in turns (turns.py). The start is that of `ds_npu sim -- python -c "import torch"` against the
plain command, in pairs, once the libraries are built. Exits with 1 above a limit.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import turns

from ds_npu.simulator.build import built
from ds_npu.simulator.environment import Simulation

CPU, SIMULATED = "cpu", "simulated"
BATCH, SEQUENCE = 4, 128
MODEL = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
         "num_attention_heads": 8, "num_key_value_heads": 4}  # fmt: skip
STEP_LIMIT, START_LIMIT_S = 1.5, 1.0


def train(expected: str, stage: int, dtype: str) -> None:
    """One rank."""
    torch: Any = importlib.import_module("torch")
    deepspeed: Any = importlib.import_module("deepspeed")
    transformers: Any = importlib.import_module("transformers")
    accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
    if (accelerator.device_name() == "npu") != (expected == SIMULATED):
        raise RuntimeError(f"{expected}: DeepSpeed has taken {accelerator.device_name()}")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    accelerator.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed("gloo" if expected == CPU else "hccl")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**MODEL))
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "bf16": {"enabled": dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    tokens = torch.randint(0, MODEL["vocab_size"], (BATCH, SEQUENCE)).to(engine.device)

    def step() -> None:
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        loss.item()  # a step ends when the device has done it

    turns.serve(step)
    torch.distributed.destroy_process_group()


def variants(ranks: int, stage: int, dtype: str) -> list[turns.Variant]:
    """The CPU first: the other is compared with it."""
    environments = {
        CPU: {"DS_ACCELERATOR": "cpu", "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"},
        SIMULATED: Simulation(devices=ranks).environment(built(), os.environ),
    }
    command = [sys.executable, __file__, "--stages", str(stage), "--dtypes", dtype, "--train"]
    return [turns.Variant(name, [*command, name], environment) for name, environment in environments.items()]


def start_s(*prefix: str) -> float:
    """How long a process that imports torch takes."""
    begun = time.perf_counter()
    subprocess.run([*prefix, sys.executable, "-c", "import torch"], check=True, capture_output=True, timeout=300)
    return time.perf_counter() - begun


def measure_start(pairs: int) -> float:
    """Print and return the median of the differences, in s."""
    sim = (sys.executable, "-m", "ds_npu.cli.main", "sim", "--")
    plain, simulated = zip(*((start_s(), start_s(*sim)) for _ in range(pairs)), strict=True)
    more = statistics.median(with_sim - without for without, with_sim in zip(plain, simulated, strict=True))
    print(
        f"start: plain {statistics.median(plain):.2f} s, simulated {statistics.median(simulated):.2f} s, +{more:.2f} s"
    )
    return more


def main() -> int:
    """Read the command line, measure every setting; 1 if one is above its limit."""
    parser = turns.parser(__doc__, rounds=2, cycles=4)
    parser.set_defaults(ranks=[1, 2], stages=[1, 3])
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], metavar="DTYPE")
    parser.add_argument("--train", choices=(CPU, SIMULATED), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(args.train, args.stages[0], args.dtypes[0])
        return 0
    turns.begin(args)
    print(f"Llama of {MODEL}, {BATCH} x {SEQUENCE} tokens a rank, one thread a rank", flush=True)
    above = measure_start(5) > START_LIMIT_S
    for ranks in args.ranks:
        for stage in args.stages:
            for dtype in args.dtypes:
                ratios = turns.measure(f"ZeRO {stage}, {dtype}", variants(ranks, stage, dtype), ranks, args)
                above = above or ratios[SIMULATED] > STEP_LIMIT
    return int(above)


if __name__ == "__main__":
    sys.exit(main())
