"""``ds_npu check``: print what a config means for a number of ranks, or all its mistakes."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path

from ds_npu.capability import try_import
from ds_npu.cli.command import Command, argument, cli_module, refused
from ds_npu.cli.layout import axes_table, communicator_table, grid_picture, nodes_line, zero_line
from ds_npu.cli.picture import layout_svg
from ds_npu.config.batch import Batch
from ds_npu.config.check import Checked, check
from ds_npu.config.hccl_groups import TIED, Size
from ds_npu.config.loading import load
from ds_npu.config.problems import Config, printable, shown
from ds_npu.config.schema import leaves, section_schema
from ds_npu.config.sections import switched_on
from ds_npu.config.trainer_traps import trainer_traps
from ds_npu.config.zero_buckets import communication_line
from ds_npu.planner.communicators import MIB, CommunicatorPlan, MessageSizes, number_bytes
from ds_npu.planner.context_report import context_part, planned_algorithm
from ds_npu.planner.model_file import hidden_size_of, message_settings_of
from ds_npu.topology.machine import machine_named

MOST = 2**40
"""The largest accepted number of ranks or tokens; the config's check has a lower limit for ranks."""


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="a DeepSpeed config, JSON or Hjson")
    parser.add_argument("--world-size", type=at_least_one, metavar="N", help="ranks of the run, all nodes together")
    parser.add_argument("--sequence-length", type=at_least_one, metavar="N", help="tokens of each sample")
    parser.add_argument("--model", metavar="PATH", help="a Hugging Face config.json, or a folder with one")
    parser.add_argument("--changes", action="store_true", help="with --model: also what ds_npu changes of it")
    parser.add_argument("--parameters", action="store_true", help="with --model: also what rank 0 holds of each weight")
    parser.add_argument(
        "--machine",
        type=argument(machine_named),
        default="A2",
        metavar="NAME",
        help="whose speeds and nodes to take: a machine, or a file of ds_npu calibrate (A2)",
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a picture of the layout; needs --world-size")


def at_least_one(text: str) -> int:
    """The integer of an argument that counts ranks or tokens."""
    # Python reads no integers of thousands of digits.
    number = int(text) if text.isdecimal() and len(text) <= len(str(MOST)) else 0
    if not 1 <= number <= MOST:
        raise argparse.ArgumentTypeError(f"found {shown(text)}; an integer >= 1 and <= {MOST}")
    return number


def _run(arguments: Namespace) -> int:
    if arguments.svg is not None and arguments.world_size is None:
        return refused("check", "--svg draws the ranks of a world: say how many, --world-size N")
    try:
        ds_config = load(arguments.config)
        checked = check(ds_config, arguments.world_size)
        report = [*_report(ds_config, checked, arguments)]
    except ValueError as error:
        # A ConfigError, or a feature's refusal of the model.
        print(error, file=sys.stderr)
        return 1
    if arguments.svg is not None:
        text = layout_svg(checked.degrees, checked.zero_stage, arguments.machine)
        arguments.svg.write_text(text, encoding="utf-8")
        report += ["", f"The layout is drawn in {printable(str(arguments.svg))}"]
    print("\n".join(report))
    return 0


def _report(ds_config: Config, checked: Checked, arguments: Namespace) -> Iterator[str]:
    if "ds_npu" not in ds_config:
        yield f"{printable(arguments.config)}: no ds_npu section; DeepSpeed decides alone, and nothing was checked"
    elif arguments.world_size is None:
        yield f"{printable(arguments.config)}: no mistake found; for the layout, say --world-size N"
        yield f"The smallest world that fits has {checked.degrees.world_size} ranks."
        yield from context_part(ds_config, checked, arguments)
    else:
        yield f"{printable(arguments.config)}: no mistake found for {arguments.world_size} ranks"
        yield from ("", *axes_table(checked.degrees))
        yield from ("", *grid_picture(checked.degrees))
        yield from ("", nodes_line(checked.degrees, arguments.machine))
        yield zero_line(checked.degrees, checked.zero_stage)
        if line := communication_line(ds_config, checked.degrees.dp * checked.degrees.cp, checked.degrees.pp):
            yield line
        yield _batch(checked.batch, checked.degrees.dp, arguments.sequence_length)
        yield from context_part(ds_config, checked, arguments)
        yield from ("", *_communicators(ds_config, checked, arguments))
        yield from (_watch(checked), *_model(ds_config, checked, arguments), "", *_features(checked))
    if checked.warnings:
        yield from ("", "Warnings", *(f"  {warning}" for warning in checked.warnings))
    if traps := trainer_traps(ds_config) if "ds_npu" in ds_config else []:
        yield from ("", 'With the Hugging Face Trainer or accelerate, which fill in "auto"')
        for trap in traps:
            yield from textwrap.wrap(trap, 118, initial_indent="  ", subsequent_indent="    ", break_long_words=False)


def _communicators(ds_config: Config, checked: Checked, arguments: Namespace) -> Iterator[str]:
    degrees = checked.degrees
    algorithm = planned_algorithm(ds_config, checked, arguments)
    hidden_mib, sizes = None, MessageSizes()
    if arguments.model is not None:
        sizes = MessageSizes.of(ds_config, degrees, message_settings_of(arguments.model))
    if arguments.model is not None and arguments.sequence_length is not None and checked.batch.micro:
        tokens = checked.batch.micro * -(-arguments.sequence_length // degrees.cp)
        hidden_mib = -(-tokens * hidden_size_of(arguments.model) * number_bytes(ds_config) // MIB)
    plan = CommunicatorPlan(degrees, ds_config, checked.config.hccl, sizes)
    shown: dict[Size, int] = {} if hidden_mib is None else {"hidden states": hidden_mib}
    yield from communicator_table(plan.communicators(algorithm, shown))
    if degrees.pp > 1:
        module = plan.communicators(None, in_stages=False)
        count = sum(each.count for each in module)
        mib = sum(each.device_mib for each in module)
        yield f"  That is of a model that ds_npu cuts into stages. A deepspeed.PipelineModule has {count}: {mib:,} MiB."
        if degrees.pp > 2:
            tied = f"the two ranks with them have one more, {TIED}: {2 * plan.tied_mib():,} MiB."
            yield f"  Where embedding and head share a weight, {tied}"
    if algorithm is None and degrees.cp > 1:
        yield "  The context algorithm is chosen with the first batch; its communicators come on top, too."


def _watch(checked: Checked) -> str:
    watch = checked.config.watch
    stalls = f"after {watch.stall_factor} median steps without one" if watch.stall_factor else "never"
    finite = "ends at" if watch.finite else "goes on, as DeepSpeed does, after"
    return f"Watch: each rank says where it stands {stalls}; the run {finite} a loss or gradient that is not finite"


def _batch(batch: Batch, dp: int, sequence_length: int | None) -> str:
    micro, steps, train = (size or "?" for size in (batch.micro, batch.steps, batch.train))
    line = f"Batch: {micro} micro * {steps} accumulation * {dp} data parallel = {train} samples a step"
    if batch.train and sequence_length:
        line += f" = {batch.train * sequence_length:,} tokens"
    return line + (" (the Hugging Face Trainer fills in ?)" if "?" in line else "")


def _model(ds_config: Config, checked: Checked, arguments: Namespace) -> Iterator[str]:
    """Lines about rank 0 of the world; none where no model is named. Raises ValueError for a model that is refused."""
    if arguments.model is None:
        return
    # It imports torch, which takes seconds; no device is used.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if try_import("transformers")[0] is None:
        yield from ("", "What ds_npu changes of a model is shown where transformers is installed")
    else:
        planned = cli_module("planned_model")
        shown = planned.Shown(arguments.changes, arguments.parameters, arguments.machine, arguments.sequence_length)
        yield from planned.lines(Path(arguments.model), ds_config, checked, shown)
        yield from planned.pipeline_lines(Path(arguments.model), checked, arguments.svg)


def _features(checked: Checked) -> Iterator[str]:
    keys = dict(leaves(section_schema()))
    on = [f"  {path} = {value!r}: {keys[path]['description']}" for path, value in switched_on(checked.config)]
    yield from ("What is on", *(on or ["  nothing: every key is at its default"]))


COMMAND = Command("check", "print the layout a config means for a world, or every mistake in it", _add_arguments, _run)
