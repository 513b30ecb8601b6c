"""Experts over ranks: time of a mixture-of-experts block against DeepSpeed's AutoEP and transformers' own experts.

    python benchmarks/experts.py

Forward and backward of the block (router, experts) of a Qwen3-MoE of 64 experts, 8 of each token, on its own tokens on
each of 2 ranks on the CPU (gloo), one thread each. ds_npu and AutoEP share the experts over the ranks, and their times
include what they send; transformers' loop and its grouped products have all experts on each rank and send nothing.
Every variant has processes of its own, which take turns (turns.py); `AutoEP again / AutoEP`, which is 1 but for chance,
shows what is left of their differences.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from typing import Any

import turns

AUTOEP, AGAIN, LOOP, GROUPED = "AutoEP", "AutoEP again", "transformers' loop", "transformers, grouped"
DS_NPU: dict[str, dict[str, Any]] = {
    "ds_npu": {},
    "ds_npu, level1": {"zero_memory": "level1"},
    "ds_npu, allgather": {"dispatcher": "allgather"},
}
VARIANTS = (AUTOEP, AGAIN, *DS_NPU, LOOP, GROUPED)
EXPERTS, CHOICES = 64, 8


def make_model(args: argparse.Namespace) -> Any:
    """One layer of Qwen3-MoE with the experts that are measured."""
    transformers: Any = importlib.import_module("transformers")
    implementation = "grouped_mm" if args.run == GROUPED else "eager"
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=args.hidden,
        moe_intermediate_size=args.columns,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOICES,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        experts_implementation=implementation,
    )
    return transformers.Qwen3MoeForCausalLM(config)


def ds_config(args: argparse.Namespace) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 10**9,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1},
    }
    if args.run in DS_NPU:
        return config | {"ds_npu": {"parallel": {"expert": 2}, "moe": DS_NPU[args.run]}}
    experts = {"enabled": True, "autoep_size": 2, "preset_model": "qwen3_moe"}
    return config | {"expert_parallel": experts}


def make_block(args: argparse.Namespace) -> Any:
    """The block of the variant, sure to be what its name says."""
    torch: Any = importlib.import_module("torch")
    torch.manual_seed(0)
    sys.modules["torch_npu"] = None  # type: ignore[assignment]  # as if it were not installed
    if args.run in (LOOP, GROUPED):
        torch.distributed.init_process_group("gloo")
        return make_model(args).model.layers[0].mlp
    if args.run in DS_NPU:
        importlib.import_module("ds_npu")
    deepspeed: Any = importlib.import_module("deepspeed")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    presets: Any = importlib.import_module("deepspeed.module_inject.auto_ep_presets.base")
    # It looks router logits up, which the block does not need, with a call that transformers 5.23 does not have.
    presets._install_instance_transformers_output_recorders = lambda *_: True
    model = make_model(args)
    deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config(args))
    block = model.model.layers[0].mlp
    held = max(parameter.shape[0] for parameter in block.experts.parameters())
    if held != EXPERTS // 2 or (type(block).__name__ == "AutoEPMoELayer") != (args.run not in DS_NPU):
        raise RuntimeError(f"{args.run}: {type(block).__name__} holds {held} experts; {EXPERTS // 2} are expected")
    return block


def reading_shards(args: argparse.Namespace) -> Any:
    """A context in which this rank's part of a gradient may be asked for."""
    if args.run not in DS_NPU:
        return contextlib.nullcontext()
    return importlib.import_module("ds_npu.parallel.tensor.shard_access").allow_shard_access()


def run(args: argparse.Namespace) -> None:
    """One rank."""
    torch: Any = importlib.import_module("torch")
    block = make_block(args)
    torch.manual_seed(torch.distributed.get_rank())
    x = torch.randn(1, args.tokens, args.hidden, requires_grad=True)
    dy = torch.randn(1, args.tokens, args.hidden)
    parameters = list(block.parameters())

    def step() -> None:
        out = block(x)
        out = out[0] if isinstance(out, tuple) else out
        # Neither hooks nor an optimizer: what is measured is the block.
        torch.autograd.grad(out, [x, *parameters], dy)

    with reading_shards(args):
        turns.serve(step)
    torch.distributed.destroy_process_group()


def variants(args: argparse.Namespace) -> list[turns.Variant]:
    """AutoEP first: the others are compared with it."""
    made = []
    for name in args.variants:
        command = [sys.executable, __file__, "--run", name]
        for size in ("tokens", "hidden", "columns"):
            command += [f"--{size}", str(vars(args)[size])]
        made.append(turns.Variant(name, command, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "DS_ACCELERATOR": "cpu"}))
    return made


def main() -> None:
    """Read the command line and measure."""
    parser = turns.parser(__doc__, rounds=3, cycles=4)
    parser.add_argument("--run", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, default=1024, metavar="N", help="of each rank (default 1024)")
    parser.add_argument("--hidden", type=int, default=512, metavar="N", help="size of hidden states (default 512)")
    parser.add_argument("--columns", type=int, default=192, metavar="N", help="of each expert (default 192)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="AutoEP first")
    args = parser.parse_args()
    if args.run:
        run(args)
        return
    turns.begin(args)
    print(f"{EXPERTS} experts of {args.hidden} x {args.columns}, {CHOICES} for each of {args.tokens} tokens, fp32")
    turns.measure("forward and backward of a block", variants(args), 2, args)


if __name__ == "__main__":
    main()
