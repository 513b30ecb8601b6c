"""Pretrain a Hugging Face causal language model on the bytes of any files, with plain DeepSpeed.

    deepspeed --num_gpus 2 examples/pretrain.py --deepspeed --deepspeed_config examples/configs/demo.json

It also runs under torchrun, and as `python examples/pretrain.py` on one rank. The model starts from random weights;
nothing is downloaded. Without --data it reads the Python standard library's own sources.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

import deepspeed
import numpy as np
import torch
import torch.distributed
from byte_data import (
    BYTE_VALUES,
    BatchShape,
    ByteText,
    DataError,
    SourceFile,
    TrainingBatches,
    ValidationBatches,
    find_files,
    fingerprint,
    split_files,
)
from checkpoints import Checkpoints, check_identity, choose, complete_checkpoints
from deepspeed.accelerator import get_accelerator
from progress import Meter, Screen
from rank_group import Ranks, RunError, set_single_rank_environment
from training import Run
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

HERE = Path(__file__).resolve().parent
LENGTH_KEYS = ("max_position_embeddings", "n_positions")


# ---- the command line ----


class Parser(argparse.ArgumentParser):
    """Complains like the rest of the script: once, not once a rank."""

    def error(self, message: str) -> NoReturn:
        raise RunError(f"{message} (--help lists the options)")


def positive(text: str) -> int:
    """An integer above zero."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def count(text: str) -> int:
    """Zero or an integer above it."""
    return 0 if text == "0" else positive(text)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_argument_group("what is trained on what")
    model = HERE / "configs" / "llama-tiny.json"
    what.add_argument(
        "--model", type=Path, default=model, metavar="PATH", help="a model's config.json, or a folder with one in it"
    )
    what.add_argument(
        "--data", nargs="+", default=[], metavar="PATH", help="files and folders (default: Python's standard library)"
    )
    what.add_argument("--seq-len", type=positive, default=256, metavar="N", help="bytes in a sequence (default 256)")
    what.add_argument("--steps", type=positive, default=300, metavar="N", help="optimizer steps in all (default 300)")
    what.add_argument("--seed", type=count, default=0, metavar="N", help="of weights, dropout and data (default 0)")
    seen = parser.add_argument_group("what is shown")
    seen.add_argument("--log-every", type=positive, default=10, metavar="N", help="steps per report (default 10)")
    seen.add_argument(
        "--eval-every", type=count, default=100, metavar="N", help="steps per validation (default 100; 0: none)"
    )
    seen.add_argument("--eval-windows", type=positive, default=256, metavar="N", help="sequences a validation reads")
    seen.add_argument("--numbers", type=Path, metavar="FILE", help="add every report, exactly, to FILE as JSON lines")
    kept = parser.add_argument_group("what is kept")
    kept.add_argument("--save", type=Path, metavar="DIR", help="keep checkpoints in DIR, which all ranks must see")
    kept.add_argument(
        "--save-every", type=count, default=100, metavar="N", help="steps per checkpoint (default 100; 0: at the end)"
    )
    kept.add_argument(
        "--keep", type=count, default=2, metavar="N", help="newest checkpoints to keep (default 2; 0: all)"
    )
    kept.add_argument(
        "--resume",
        nargs="?",
        const="must",
        choices=["must", "auto"],
        help="continue from the newest complete checkpoint in DIR; with 'auto', start anew if there is none",
    )
    kept.add_argument("--inexact", action="store_true", help="resume even if changed settings change the losses")
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)
    deepspeed.add_config_arguments(parser)
    parser.set_defaults(deepspeed_config=str(HERE / "configs" / "demo.json"))
    chosen = parser.parse_args(arguments)
    if chosen.resume and not chosen.save:
        raise RunError("--resume needs --save DIR: the folder the checkpoints are in")
    if not os.path.exists(chosen.deepspeed_config):
        raise RunError(f"--deepspeed_config {chosen.deepspeed_config:.80}: No such file; base64 is not read here")
    return chosen


# ---- configs and model ----


def read_json(path: Path, what: str) -> dict[str, Any]:
    """A JSON object from a file."""
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise RunError(f"{what} {path}: {error.strerror}") from error
    except ValueError as error:
        raise RunError(f"{what} {path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise RunError(f"{what} {path} is not a JSON object")
    return value


def read_model_config(path: Path, seq_len: int) -> PretrainedConfig:
    """The model's config, checked against bytes and the sequence length."""
    values = read_json(path / "config.json" if path.is_dir() else path, "--model")
    model_type = values.pop("model_type", None)
    if model_type is None:
        raise RunError(f'--model {path} has no "model_type"')
    try:
        config = AutoConfig.for_model(model_type, **values)
    except ValueError as error:
        raise RunError(f"--model {path}: {str(error)[:300]}") from error
    if config.vocab_size < BYTE_VALUES:
        raise RunError(f"--model {path}: vocab_size is {config.vocab_size}; bytes need at least {BYTE_VALUES}")
    limits = [value for key, value in config.to_dict().items() if key in LENGTH_KEYS]
    if limits and seq_len > min(limits):
        raise RunError(f"--seq-len {seq_len} is longer than the {min(limits)} positions the model has")
    if seq_len < 2:
        raise RunError("--seq-len must be at least 2: one byte predicts the next")
    config.use_cache = False
    return config


def build_model(config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """The model with random weights, the same on every rank."""
    torch.manual_seed(seed)
    try:
        return AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise RunError(f"--model: {str(error)[:300]}") from error


def start_engine(args: argparse.Namespace, model: PreTrainedModel) -> deepspeed.DeepSpeedEngine:
    """DeepSpeed's engine; what it refuses in the config is said in its own words."""
    try:
        engine, *_rest = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    except (AssertionError, ValueError) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        raise RunError(f"DeepSpeed refuses {args.deepspeed_config} ({where}): {error or repr(error)}") from error
    return engine


def join_world() -> Ranks:
    """Open the process groups."""
    if get_accelerator().device_name() == "cpu":
        # DeepSpeed compiles this operator on CPU at first use, and without ds_npu it leaves files in /dev/shm. It only
        # serves inference_all_reduce, which training never calls.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed()
    return Ranks()


# ---- the run ----


def prepare_data(args: argparse.Namespace) -> tuple[list[SourceFile], list[SourceFile]]:
    """(training files, validation files), with the training files known to be long enough."""
    train, held_out = split_files(find_files(args.data))
    TrainingBatches(ByteText(train), args.seq_len, BatchShape(1, 1, 1), args.seed)
    return train, held_out


def check_writable(path: Path | None) -> None:
    """Find out now, not at the first report, that the file of numbers cannot be written."""
    if path is None:
        return
    try:
        path.open("a").close()
    except OSError as error:
        raise RunError(f"--numbers {path}: {error.strerror}") from error


def prepare_run(args: argparse.Namespace, ranks: Ranks, config: PretrainedConfig, files: tuple[list, list]) -> Run:
    """Engine, data and checkpoints, at the step where training starts."""
    model = build_model(config, args.seed)
    parameters = sum(parameter.numel() for parameter in model.parameters())  # before ZeRO-3 replaces them
    engine = start_engine(args, model)
    dp_rank = torch.distributed.get_rank(group=engine.data_parallel_group)
    # From here on each data-parallel rank draws its own dropout; ranks of other axes see its sample and draw alike.
    torch.manual_seed(args.seed + 1 + dp_rank)
    get_accelerator().manual_seed_all(args.seed + 1 + dp_rank)
    np.random.seed((args.seed + 1 + dp_rank) % 2**32)
    shape = BatchShape(
        engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps(), engine.dp_world_size
    )
    train, held_out = map(ByteText, files)
    validation = ValidationBatches(held_out, args.seq_len, args.eval_windows, shape)
    return Run(
        engine=engine,
        ranks=ranks,
        dp_rank=dp_rank,
        parameters=parameters,
        training=TrainingBatches(train, args.seq_len, shape, args.seed),
        validation=validation if args.eval_every and validation.count else None,
        meter=Meter(engine, shape.sequences_per_step * args.seq_len, args.numbers if ranks.rank == 0 else None),
        checkpoints=Checkpoints(args.save, args.keep, ranks) if args.save else None,
        identity={
            "model": config.to_dict(),
            "deepspeed_config": read_json(Path(args.deepspeed_config), "--deepspeed_config"),
            "ranks": ranks.size,
            "data-parallel ranks": engine.dp_world_size,
            "--data": fingerprint(train.files + held_out.files),
            "--seq-len": args.seq_len,
            "--seed": args.seed,
        },
    )


def describe(run: Run, args: argparse.Namespace, first_step: int) -> list[str]:
    """What is about to happen, in a few lines."""
    shape, train = run.training.shape, run.training.text
    lines = [
        f"model: {args.model}, {run.parameters:,} parameters",
        f"data: {len(train):,} bytes in {len(train.files):,} files",
        f"batch: {shape.micro_batch} sequences x {shape.accumulation} micro-batches x {shape.dp_size} data-parallel"
        f" ranks = {shape.sequences_per_step * args.seq_len:,} bytes a step",
        f"steps: {first_step} to {args.steps}",
    ]
    if run.validation:
        held_out = run.validation.text
        lines[1] += f"; validation on {run.validation.count} windows of {len(held_out.files):,} held-out files"
    elif args.eval_every:
        lines[1] += "; no validation, because no held-out file is as long as a sequence"
    return lines


def choose_start(args: argparse.Namespace, ranks: Ranks) -> Path | None:
    """The checkpoint to start from. Only rank 0 looks, so that all ranks start from the same."""
    found, failure = None, None
    try:
        if ranks.rank == 0 and args.resume:
            found = choose(args.save, required=args.resume == "must")
        elif ranks.rank == 0 and args.save and complete_checkpoints(args.save):
            raise RunError(f"--save {args.save} already holds checkpoints: add --resume, or choose another folder")
    except RunError as error:
        failure = error
    ranks.agree(failure)
    return ranks.gather(found)[0]


def main() -> int:
    """The whole job; returns the exit status."""
    set_single_rank_environment()
    failure: Exception | None = None
    try:
        args = parse_arguments()
        config = read_model_config(args.model, args.seq_len)
        if "optimizer" not in read_json(Path(args.deepspeed_config), "--deepspeed_config"):
            raise RunError(f'--deepspeed_config {args.deepspeed_config} has no "optimizer" section')
        files = prepare_data(args)
        check_writable(args.numbers)
    except (RunError, DataError) as error:
        if os.environ["LOCAL_RANK"] == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
            return 2
        failure = error  # for the ranks' vote, if the first rank of this machine did not meet it
    try:
        ranks = join_world()
    except ValueError as error:  # a backend refuses the config, on every rank alike
        if os.environ["LOCAL_RANK"] == "0":
            print(f"error: --deepspeed_config {args.deepspeed_config}: {error}", file=sys.stderr, flush=True)
        return 2
    try:
        ranks.agree(failure)
        ranks.agree_same(fingerprint(files[0] + files[1]), "the ranks do not see the same --data files")
        start = choose_start(args, ranks)
        run = prepare_run(args, ranks, config, files)
        changed = check_identity(start, run.identity, args.inexact) if start else []
        first_step = run.resume(start) if start else 0
        screen = Screen(ranks.rank == 0, first_step, args.steps)
        for line in describe(run, args, first_step) + [f"not as before: {line}" for line in changed]:
            screen.line(line)
        run.train(args, first_step, screen)
        status = 0
    except RunError as error:  # which all ranks have
        if ranks.rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        ranks.gather(None)  # nobody leaves, and has the launcher end the others, before rank 0 has spoken
        status = 2
    except DataError as error:  # which other ranks may not have
        ranks.leave(str(error))
    torch.distributed.destroy_process_group()
    # Threads of torch 2.13's gloo may still hold tensors; where the interpreter ends first, they abort it.
    time.sleep(0.1)
    return status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        # Before the first step there is nothing to save, and other ranks need not be waited for.
        os.write(2, b"Stopped before the first step.\n" if os.environ["LOCAL_RANK"] == "0" else b"")
        os._exit(130)
