"""What ds_npu costs in a training step: the same script and config without it, with it, and with an empty section.

    python benchmarks/overhead.py

Which code a process runs is settled when it imports DeepSpeed, so each variant has processes of its own, which take
turns (turns.py); `plain again / plain`, which is 1 but for chance, shows what is left of their differences. Beside the
time of a step stands the CPU time that rank 0 spends in it, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import turns

MODEL = Path(__file__).resolve().parents[1] / "examples" / "configs" / "llama-tiny.json"
BATCH, SEQUENCE = 4, 64
PLAIN, AGAIN, ACTIVE, SECTION = "plain", "plain again", "active", "section"
VARIANTS = (PLAIN, AGAIN, ACTIVE, SECTION)


# ---- one rank of one variant: trains when it is told to ----


def ds_config(variant: str, stage: int) -> dict[str, Any]:
    """The config of all variants; one of them has the section, empty."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    return config | {"ds_npu": {}} if variant == SECTION else config


def make_engine(variant: str, stage: int) -> Any:
    """An engine of the variant, sure to be what its name says."""
    sys.modules["torch_npu"] = None  # type: ignore[assignment]  # as if it were not installed
    if variant in (ACTIVE, SECTION):
        importlib.import_module("ds_npu")
    deepspeed: Any = importlib.import_module("deepspeed")
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    torch.manual_seed(0)
    values = json.loads(MODEL.read_text())
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    )
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=ds_config(variant, stage)
    )
    expected = (variant in (ACTIVE, SECTION), "NpuEngine" if variant == SECTION else "DeepSpeedEngine")
    found = ("ds_npu.engine.patches" in sys.modules, type(engine).__name__)
    if found != expected:
        raise RuntimeError(f"{variant}: (DeepSpeed is patched, engine) is {found} and should be {expected}")
    return engine


def train(variant: str, stage: int) -> None:
    """One rank."""
    torch: Any = importlib.import_module("torch")
    engine = make_engine(variant, stage)
    tokens = torch.randint(0, 256, (BATCH, SEQUENCE))

    def step() -> None:
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()

    turns.serve(step)
    torch.distributed.destroy_process_group()


# ---- the variants ----


def variants(stage: int) -> list[turns.Variant]:
    """Plain first: the others are compared with it."""
    made = []
    for name in VARIANTS:
        command = [sys.executable, __file__, "--train", name, "--stages", str(stage)]
        # Nothing is loaded by itself: make_engine imports ds_npu where it is wanted.
        made.append(turns.Variant(name, command, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "DS_ACCELERATOR": "cpu"}))
    return made


def main() -> None:
    """Read the command line and measure every setting."""
    parser = turns.parser(__doc__, rounds=4, cycles=10)
    parser.add_argument("--train", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(args.train, args.stages[0])
        return
    turns.begin(args)
    print(f"{MODEL.stem}, {BATCH} x {SEQUENCE} tokens a rank, fp32, one thread a rank", flush=True)
    for stage in args.stages:
        for ranks in args.ranks:
            turns.measure(f"ZeRO {stage}", variants(stage), ranks, args)


if __name__ == "__main__":
    main()
