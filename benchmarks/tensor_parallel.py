"""Tensor parallelism: step time against DeepSpeed's AutoTP on the same Llama, bytes moved by a block, and loading.

    python benchmarks/tensor_parallel.py

Each variant has processes of its own, which take turns (turns.py); `AutoTP again / AutoTP`, which is 1 but for chance,
shows what is left of their differences. Ranks on the CPU (gloo), one thread each. Bytes are counted at torch's own
collectives, in a forward and a backward of two models that differ by one block.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import turns

MODELS = Path(__file__).resolve().parents[1] / "examples" / "configs"
AUTOTP, AGAIN, DS_NPU, SEQUENCE, PIPELINED = "AutoTP", "AutoTP again", "ds_npu", "sequence parallel", "pipelined"
SECTIONS: dict[str, dict[str, Any]] = {
    DS_NPU: {"parallel": {"tensor": 2}},
    SEQUENCE: {"parallel": {"tensor": 2, "sequence_parallel": True}},
    PIPELINED: {"parallel": {"tensor": 2, "sequence_parallel": True}, "tensor_overlap": "pipelined"},
}
VARIANTS = (AUTOTP, AGAIN, *SECTIONS)


# ---- one rank of one variant: trains when it is told to ----


def ds_config(variant: str, args: argparse.Namespace) -> dict[str, Any]:
    """The config of all variants, but for who splits the model."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": args.stages[0]},
    }
    if variant in SECTIONS:
        return config | {"ds_npu": SECTIONS[variant]}
    return config | {"tensor_parallel": {"autotp_size": 2}}


def make_engine(args: argparse.Namespace) -> Any:
    """An engine of the variant, sure to be what its name says."""
    sys.modules["torch_npu"] = None  # type: ignore[assignment]  # as if it were not installed
    ours = args.train in SECTIONS
    if ours:
        importlib.import_module("ds_npu")
    deepspeed: Any = importlib.import_module("deepspeed")
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    torch.manual_seed(0)
    values = json.loads((MODELS / f"{args.model}.json").read_text())
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    )
    whole = model.model.layers[0].mlp.up_proj.weight.numel()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=ds_config(args.train, args)
    )
    split = model.model.layers[0].mlp.up_proj.weight.numel()
    if split * 2 != whole or (type(engine).__name__ == "NpuEngine") != ours:
        raise RuntimeError(f"{args.train}: {type(engine).__name__} holds {split} of {whole} elements; half is expected")
    return engine


def train(args: argparse.Namespace) -> None:
    """One rank."""
    torch: Any = importlib.import_module("torch")
    engine = make_engine(args)
    tokens = torch.randint(0, 256, (args.batch, args.sequence))

    def step() -> None:
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()

    turns.serve(step)
    torch.distributed.destroy_process_group()


# ---- the variants ----


def variants(args: argparse.Namespace) -> list[turns.Variant]:
    """AutoTP first: the others are compared with it."""
    made = []
    for name in args.variants:
        command = [sys.executable, __file__, "--train", name, "--stages", str(args.stages[0]), "--model", args.model]
        command += ["--batch", str(args.batch), "--sequence", str(args.sequence)]
        # Nothing is loaded by itself: make_engine imports ds_npu where it is wanted.
        made.append(turns.Variant(name, command, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "DS_ACCELERATOR": "cpu"}))
    return made


def main() -> None:
    """Read the command line and measure."""
    parser = turns.parser(__doc__, rounds=4, cycles=4)
    parser.add_argument("--train", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--model", default="llama-small", help="a file of examples/configs (default llama-small)")
    parser.add_argument("--batch", type=int, default=2, metavar="N", help="samples of a step (default 2)")
    parser.add_argument("--sequence", type=int, default=256, metavar="N", help="tokens of a sample (default 256)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="AutoTP first")
    args = parser.parse_args()
    if args.train:
        train(args)
        return
    turns.begin(args)
    print(f"{args.model}, {args.batch} x {args.sequence} tokens, fp32, one thread a rank", flush=True)
    turns.measure(f"ZeRO {args.stages[0]}", variants(args), 2, args)


if __name__ == "__main__":
    main()
