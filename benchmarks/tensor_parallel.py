"""Tensor parallelism: what a block sends, the memory that loading takes, step time against DeepSpeed's AutoTP.

    python benchmarks/tensor_parallel.py

Each variant has processes of its own, which take turns (turns.py); `AutoTP again / AutoTP`, which is 1 but for chance,
shows what is left of their differences. Ranks on the CPU (gloo), one thread each. Bytes are counted at torch's own
collectives, in a forward and a backward of two models that differ by one block. Loading is loading_memory.py's.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
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


def elements_held(model: Any) -> int:
    """Elements of one weight that this rank holds; the attribute ``up_proj.weight`` shows the whole weight."""
    held: int = dict(model.named_parameters())["model.layers.0.mlp.up_proj.weight"].numel()
    return held


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
    whole = elements_held(model)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=ds_config(args.train, args)
    )
    held = elements_held(model)
    if held * 2 != whole or (type(engine).__name__ == "NpuEngine") != ours:
        raise RuntimeError(f"{args.train}: {type(engine).__name__} holds {held} of {whole} elements; half is expected")
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


# ---- bytes ----


def count(args: argparse.Namespace) -> None:
    """One rank of a world that trains nothing: rank 0 prints what a block sends."""
    torch: Any = importlib.import_module("torch")
    tree: Any = importlib.import_module("torch.utils._pytree")
    dispatch: Any = importlib.import_module("torch.utils._python_dispatch")
    transformers: Any = importlib.import_module("transformers")
    plan_for = importlib.import_module("ds_npu.models.globs").plan_for
    shard_model = importlib.import_module("ds_npu.features.tensor_parallel.sharded_model").shard_model
    topology: Any = importlib.import_module("ds_npu.topology.topology")
    degrees: Any = importlib.import_module("ds_npu.topology.degrees")

    class Wire(dispatch.TorchDispatchMode):  # type: ignore[misc]
        """Bytes of the whole that every collective makes or takes."""

        whole = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "c10d":
                leaves = [leaf for leaf in tree.tree_leaves(args[:2]) if isinstance(leaf, torch.Tensor)]
                self.whole += max(leaf.nbytes for leaf in leaves) * (2 if "allreduce" in func._opname else 1)
            return func(*args, **(kwargs or {}))

    def sent(layers: int, sequence_parallel: bool) -> int:
        values = json.loads((MODELS / f"{args.model}.json").read_text()) | {"num_hidden_layers": layers}
        config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
        model = transformers.AutoModelForCausalLM.from_config(config)
        shard_model(model, plan_for(model, {}), world, sequence_parallel)
        tokens = torch.randint(0, 256, (args.batch, args.sequence))
        with Wire() as wire:
            model(input_ids=tokens, labels=tokens).loss.backward()
        return int(wire.whole)

    torch.distributed.init_process_group("gloo")
    world = topology.Topology(degrees.Degrees(tp=2))
    hidden = json.loads((MODELS / f"{args.model}.json").read_text())["hidden_size"]
    states, norms = args.batch * args.sequence * hidden * 4, 2 * hidden * 4
    for sequence_parallel, least in ((False, 8 * states), (True, 10 * states + 2 * norms)):
        found = sent(3, sequence_parallel) - sent(2, sequence_parallel)
        if torch.distributed.get_rank() == 0:
            name = SEQUENCE if sequence_parallel else DS_NPU
            print(
                f"  {name}: a block sends {found:,} bytes a step, at least {least:,}: {found / least:.4f}", flush=True
            )
    torch.distributed.destroy_process_group()
    # PyTorch 2.13's gloo may abort an interpreter that ends by itself.
    sys.stdout.flush()
    os._exit(0)


def print_bytes(args: argparse.Namespace) -> None:
    """Bytes of the tensors that are gathered and scattered; an all-reduce does both, and counts twice."""
    print(f"{args.model}, {args.batch} x {args.sequence} tokens, fp32, 2 ranks: bytes of the tensors sent")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__]
    command += ["--count", "--model", args.model, "--batch", str(args.batch), "--sequence", str(args.sequence)]
    quiet = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    path = os.pathsep.join([str(turns.ROOT), os.environ.get("PYTHONPATH", "")])
    subprocess.run(command, check=True, env=os.environ | quiet | {"PYTHONPATH": path})


def print_loading() -> None:
    """Against the budget of a loaded rank: one rank's shard and the largest single weight."""
    # Not at the top: it imports what the ranks above must not have.
    loading_memory: Any = importlib.import_module("loading_memory")
    for model_type in loading_memory.MODELS:
        found = loading_memory.measure(model_type, 4)
        extra = (found["peak"] - found["shard"]) / found["largest"]
        print(
            f"loading rank 1 of 4 of a {model_type} takes its shard and {extra:.3f} of the largest weight", flush=True
        )


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
    parser.add_argument("--count", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--model", default="llama-small", help="a file of examples/configs (default llama-small)")
    parser.add_argument("--batch", type=int, default=2, metavar="N", help="samples of a step (default 2)")
    parser.add_argument("--sequence", type=int, default=256, metavar="N", help="tokens of a sample (default 256)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="AutoTP first")
    args = parser.parse_args()
    if args.train:
        train(args)
        return
    if args.count:
        count(args)
        return
    turns.begin(args)
    print_bytes(args)
    print_loading()
    print(f"{args.model}, {args.batch} x {args.sequence} tokens, fp32, one thread a rank", flush=True)
    turns.measure(f"ZeRO {args.stages[0]}", variants(args), 2, args)


if __name__ == "__main__":
    main()
