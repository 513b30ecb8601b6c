"""Pipelines of a Llama on 2 ranks: the executor's own time, and a step against DeepSpeed's PipelineEngine.

    python benchmarks/pipeline_engines.py

The same blocks, embedding and head in two stages on the CPU (gloo), one thread a rank, ZeRO 1, the same micro-batches
by 1F1B: as a Hugging Face model that ds_npu's config cuts, and as a deepspeed.PipelineModule without ds_npu. Both call
``engine.train_batch``. Variants have processes of their own, which take turns (turns.py).

The executor's own time is taken in runs of ds_npu: CPU time in a run of the schedule (waiting takes none) over that
which the main thread spends inside of the actions; once of the main thread, and once of the whole process, so that all
that gloo's threads do beside the actions counts, too.

``ds_npu 1f1b, no meeting`` leaves out the meeting of all ranks at the end of a batch
(engine/failures/batch_failures.py), to show what it costs: compare it with ``ds_npu 1f1b``, on small layers. It is not
among the variants by default.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import turns

DEEPSPEED, AGAIN, DS_NPU, ZERO_BUBBLE = "PipelineEngine", "PipelineEngine again", "ds_npu 1f1b", "ds_npu zb_h1"
NO_MEETING = "ds_npu 1f1b, no meeting"
VARIANTS = (DEEPSPEED, AGAIN, DS_NPU, ZERO_BUBBLE)
SCHEDULE = {DS_NPU: "1f1b", ZERO_BUBBLE: "zb_h1", NO_MEETING: "1f1b"}
VOCABULARY = 1024


def llama(args: argparse.Namespace) -> Any:
    """The model, the same in every variant."""
    transformers: Any = importlib.import_module("transformers")
    torch: Any = importlib.import_module("torch")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=args.hidden,
        intermediate_size=2 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=args.hidden // 64,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    return transformers.LlamaForCausalLM(config)


def layers_of(model: Any) -> list[Any]:
    """The layers of ``model`` for a PipelineModule: from tokens [B, S] to logits [B, S, V]."""
    torch: Any = importlib.import_module("torch")

    class Block(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, block: Any, rotary: Any) -> None:
            super().__init__()
            self.block, self.rotary = block, rotary

        def forward(self, x: Any) -> Any:
            positions = torch.arange(x.shape[1]).unsqueeze(0)
            return self.block(x, position_ids=positions, position_embeddings=self.rotary(x, positions))

    inner = model.model
    return [
        inner.embed_tokens,
        *(Block(each, inner.rotary_emb) for each in inner.layers),
        torch.nn.Sequential(inner.norm, model.lm_head),
    ]


def config_of(args: argparse.Namespace) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": args.micro_batches,
        "steps_per_print": 10**9,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1},
    }
    if args.run not in SCHEDULE:
        return config
    pipeline = {"schedule": SCHEDULE[args.run], "split": [args.layers // 2] * 2}
    return config | {"ds_npu": {"parallel": {"pipeline": 2}, "pipeline": pipeline}}


def make_step(args: argparse.Namespace) -> tuple[Any, Callable[[], None]]:
    """The engine of the variant, and its step on one batch."""
    torch: Any = importlib.import_module("torch")
    sys.modules["torch_npu"] = None  # type: ignore[assignment]  # as if it were not installed
    is_ours = args.run in SCHEDULE
    if is_ours:
        importlib.import_module("ds_npu")
    deepspeed: Any = importlib.import_module("deepspeed")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    model = llama(args)
    tokens = torch.randint(0, VOCABULARY, (args.micro_batches, 1, args.length + 1))
    if is_ours:
        # A Hugging Face model shifts the labels itself.
        batches: list[Any] = [{"input_ids": each[:, :-1], "labels": each[:, :-1]} for each in tokens]
    else:
        functional = torch.nn.functional
        module: Any = importlib.import_module("deepspeed.pipe").PipelineModule
        batches = [(each[:, :-1], each[:, :-1]) for each in tokens]

        def loss(logits: Any, labels: Any) -> Any:
            return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())

        model = module(layers_of(model), num_stages=2, loss_fn=loss, partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config_of(args))
    if args.run == NO_MEETING:
        importlib.import_module("ds_npu.engine.failures.batch_failures").BatchInStages.end = lambda batch: None

    def step() -> None:
        engine.train_batch(iter(batches))

    return engine, step


def run(args: argparse.Namespace) -> None:
    """One rank."""
    torch: Any = importlib.import_module("torch")
    engine, step = make_step(args)
    expected = sum(each.numel() for each in llama(args).parameters())
    held = torch.tensor(sum(each.numel() for each in engine.module.parameters()))
    torch.distributed.all_reduce(held)
    if held != expected:
        raise RuntimeError(f"{args.run}: both stages hold {held} numbers; the model has {expected}")
    if args.own_time:
        for _ in range(3):
            step()
        ratios = [own_time(step) for _ in range(args.steps)]
        print("own time:", json.dumps(ratios), flush=True)
    else:
        turns.serve(step)
    torch.distributed.destroy_process_group()


def own_time(step: Callable[[], None]) -> tuple[float, float, float]:
    """CPU time of one ``step`` in s: of the main thread, and of the process, in the executor; in actions alone."""
    executor: Any = importlib.import_module("ds_npu.parallel.pipeline.executor")
    pipeline: Any = importlib.import_module("ds_npu.engine.pipeline.engine_pipeline")
    queued: Any = importlib.import_module("ds_npu.parallel.tensor.weight_gradient").QueuedGradients
    spent, thread, process = [0.0], [0.0], [0.0]

    def timed(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time()
            out = original(*args, **kwargs)
            spent[0] += time.thread_time() - begin
            return out

        return call

    def measured(self: Any, shapes: Any) -> None:
        begin, begin_process = time.thread_time(), time.process_time()
        run_all(self, shapes)
        thread[0] += time.thread_time() - begin
        process[0] += time.process_time() - begin_process

    changed = [(pipeline.StageOfEngine, "forward"), (pipeline.StageOfEngine, "backward"), (queued, "compute")]
    originals = [getattr(kind, name) for kind, name in changed]
    run_all = executor.PipelineRun.run
    try:
        for (kind, name), original in zip(changed, originals, strict=True):
            setattr(kind, name, timed(original))
        executor.PipelineRun.run = measured
        step()
    finally:
        for (kind, name), original in zip(changed, originals, strict=True):
            setattr(kind, name, original)
        executor.PipelineRun.run = run_all
    return thread[0], process[0], spent[0]


def variant(args: argparse.Namespace, name: str, *more: str) -> turns.Variant:
    command = [sys.executable, __file__, "--run", name, "--steps", str(args.steps), *more]
    for size in ("hidden", "layers", "length", "micro_batches"):
        command += [f"--{size.replace('_', '-')}", str(vars(args)[size])]
    return turns.Variant(name, command, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "DS_ACCELERATOR": "cpu"})


def measure_own_time(args: argparse.Namespace, name: str) -> None:
    """Print what the executor adds to its actions, on each rank."""
    with open("/dev/null", "w", encoding="utf-8") as log:
        world = turns.World(variant(args, name, "--own-time"), 2, log)
    outputs = [process.communicate()[0] for process in world.ranks]
    for rank, text in enumerate(outputs):
        line = next(each for each in text.splitlines() if each.startswith("own time:"))
        steps = json.loads(line.removeprefix("own time:"))
        ratios = [[each / alone - 1 for each in both] for *both, alone in steps]
        (low, thread, high), (_, process, _) = (statistics.quantiles(each, n=4) for each in zip(*ratios, strict=True))
        alone_ms = 1e3 * statistics.median(alone for *_, alone in steps)
        print(
            f"{name}, rank {rank}: executor and links {thread:.2%} of their actions ({alone_ms:.1f} ms of CPU time), "
            f"quartiles {low:.2%} to {high:.2%}; with gloo's threads {process:.2%}; {len(steps)} steps",
            flush=True,
        )


def main() -> None:
    """Read the command line and measure."""
    parser = turns.parser(__doc__, rounds=3, cycles=4)
    parser.add_argument("--run", choices=(*VARIANTS, NO_MEETING), help=argparse.SUPPRESS)
    parser.add_argument("--own-time", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--hidden", type=int, default=512, metavar="N", help="size of hidden states (default 512)")
    parser.add_argument("--layers", type=int, default=4, metavar="N", help="blocks (default 4)")
    parser.add_argument("--length", type=int, default=128, metavar="N", help="tokens of a micro-batch (default 128)")
    parser.add_argument("--micro-batches", type=int, default=8, metavar="N", help="of a step (default 8)")
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=(*VARIANTS, NO_MEETING),
        default=list(VARIANTS),
        help="the others are compared with the first",
    )
    args = parser.parse_args()
    if args.run:
        run(args)
        return
    turns.begin(args)
    print(f"Llama of {args.layers} blocks of {args.hidden}, {args.micro_batches} micro-batches of {args.length} tokens")
    for name in (DS_NPU, ZERO_BUBBLE):
        measure_own_time(args, name)
    turns.measure("a step", [variant(args, name) for name in args.variants], 2, args)


if __name__ == "__main__":
    main()
