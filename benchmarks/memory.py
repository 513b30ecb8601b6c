"""Features that save memory: time of a step and bytes of activations against the same model without them.

    python benchmarks/memory.py

Forward and backward of a Llama on the CPU, in float32, one thread. Every variant has processes of its own,
which take turns (turns.py); `plain again / plain`, which is 1 but for chance, shows what is left of their differences.
Bytes are those that PyTorch's allocator held at the peak of a step, beside the weights and their gradients.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import subprocess
import sys
from typing import Any

import turns

PLAIN, AGAIN = "plain", "plain again"
VARIANTS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    AGAIN: {},
    "chunked_loss 128": {"chunked_loss": 128},
    "norm": {"recompute": {"norm": True}},
    "activation_function": {"recompute": {"activation_function": True}},
    "both": {"recompute": {"norm": True, "activation_function": True}},
    "swap": {"swap": {"activations": True}},
    "layers all": {"recompute": {"layers": "all"}},
}
"""By name, the section."""
SIZES = ("words", "samples", "length", "hidden", "layers")
"""Options that every process is given."""


def make_step(args: argparse.Namespace) -> Any:
    """A function that does one step of the variant."""
    torch: Any = importlib.import_module("torch")
    sys.modules["torch_npu"] = None  # type: ignore[assignment]  # as if it were not installed
    torch.manual_seed(0)
    transformers: Any = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=args.words,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 11 // 4,
        num_attention_heads=args.hidden // 64,
        num_hidden_layers=args.layers,
        attn_implementation="sdpa",
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config).train()
    change(model, VARIANTS[args.run])
    ids = torch.randint(0, args.words, (args.samples, args.length))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    return step


def change(model: Any, section: dict[str, Any]) -> None:
    """Change ``model`` as ds_npu's engine does on one rank."""
    config: Any = importlib.import_module("ds_npu.config.sections").DsNpuConfig
    driver: Any = importlib.import_module("ds_npu.features.driver")
    build: Any = importlib.import_module("ds_npu.features.build").Build
    topology: Any = importlib.import_module("ds_npu.topology.topology").PlannedTopology
    degrees: Any = importlib.import_module("ds_npu.topology.degrees").Degrees
    driver.apply_features(driver.values_in(config.model_validate(section)), build(topology(degrees()), model))


def peak_bytes(step: Any) -> int:
    """The most bytes of tensors that ``step`` held at once, in addition to what there was before."""
    profiler: Any = importlib.import_module("torch.profiler")
    step()
    with profiler.profile(activities=[profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events = [each for each in profiled.profiler.kineto_results.events() if each.name() == "[memory]"]
    changes = [each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())]
    return max(itertools.accumulate(changes))


def parser() -> argparse.ArgumentParser:
    made = turns.parser(__doc__, rounds=3, cycles=4)
    made.add_argument("--words", type=int, default=8192, help="of the vocabulary (default 8192)")
    made.add_argument("--samples", type=int, default=1, help="of a step (default 1)")
    made.add_argument("--hidden", type=int, default=1024, help="size of hidden states (default 1024)")
    made.add_argument("--layers", type=int, default=2, help="blocks (default 2)")
    made.add_argument("--length", type=int, default=512, help="tokens of a sample (default 512)")
    made.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="the first is the base")
    made.add_argument("--run", choices=VARIANTS, help=argparse.SUPPRESS)
    made.add_argument("--bytes", action="store_true", help=argparse.SUPPRESS)
    made.set_defaults(steps=2, ranks=[1])
    return made


def main() -> None:
    args = parser().parse_args()
    if args.run and args.bytes:
        print(json.dumps(peak_bytes(make_step(args))))
        return
    if args.run:
        turns.serve(make_step(args))
        return
    turns.begin(args)
    common = [sys.executable, __file__]
    for name in SIZES:
        common += [f"--{name}", str(vars(args)[name])]
    held = {}
    for name in args.variants:
        told = subprocess.run([*common, "--run", name, "--bytes"], check=True, capture_output=True, text=True).stdout
        held[name] = json.loads(told.splitlines()[-1])
        print(f"{name:<24} {held[name]:>13,} bytes at the peak, {held[name] / held[args.variants[0]]:.3f}", flush=True)
    variants = [turns.Variant(name, [*common, "--run", name], {"DS_ACCELERATOR": "cpu"}) for name in args.variants]
    title = f"{args.layers} blocks of {args.hidden}, {args.samples} x {args.length} tokens, {args.words} words"
    turns.measure(title, variants, 1, args)


if __name__ == "__main__":
    main()
