"""``ds_npu predict``: how fast a training step will be, and how much memory it needs, on NPUs that nobody has here."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds_npu.cli.check import at_least_one
from ds_npu.cli.command import Command, argument, refused
from ds_npu.cli.prediction.deepspeed_axes import with_own_axes
from ds_npu.cli.prediction.dry_run import PredictionError, Request, dry_run
from ds_npu.cli.prediction.figures import Prediction, as_json, predicted
from ds_npu.cli.prediction.picture import step_svg, write_trace
from ds_npu.cli.prediction.sensitivity import sensitivities
from ds_npu.cli.prediction.text import comparison, prediction_text
from ds_npu.config.batch import MICRO
from ds_npu.config.check import Checked, check
from ds_npu.config.loading import load
from ds_npu.config.problems import Config, ConfigError, Problem, printable
from ds_npu.planner.model_file import attention_of
from ds_npu.simulator.build import built
from ds_npu.simulator.cache import BuildError
from ds_npu.simulator.environment import Simulation, routing_of
from ds_npu.topology.machine import Machine, machine_named

ADAMW = {"type": "AdamW", "params": {"lr": 1e-4}}
"""The optimizer of a config that leaves it to the script."""
A3_NODE = 16
"""Nodes with more ranks are super nodes of A3 chips."""


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", metavar="CONFIG", help="a DeepSpeed config, JSON or Hjson")
    parser.add_argument("--model", metavar="PATH", help="a Hugging Face config.json, or a folder with one")
    parser.add_argument("--world-size", type=at_least_one, metavar="N", help="ranks of the run, all nodes together")
    parser.add_argument("--sequence-length", type=at_least_one, metavar="N", help="tokens of each sample")
    parser.add_argument(
        "--machine",
        type=argument(machine_named),
        default="A2",
        metavar="NAME",
        help="a machine, or a file of ds_npu calibrate (A2)",
    )
    parser.add_argument(
        "--routing",
        type=argument(routing_of),
        metavar="uniform|zipf:EXPONENT[@SEED]",
        help="how tokens choose experts (uniform)",
    )
    parser.add_argument(
        "--gradient-checkpointing",
        action="store_true",
        help="as the Trainer's gradient_checkpointing: each block is computed again in backward",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the step there for ui.perfetto.dev")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the step there")
    parser.add_argument(
        "--sensitivity", action="store_true", help="show by how much the step depends on each number of the machine"
    )
    parser.add_argument(
        "--compare",
        nargs=2,
        type=Path,
        metavar=("A.json", "B.json"),
        help="compare two files of --json, and run nothing",
    )


def _run(arguments: Namespace) -> int:
    if arguments.compare is not None:
        return _compare(arguments.compare)
    missing = [
        name for name in ("config", "model", "world_size", "sequence_length") if getattr(arguments, name) is None
    ]
    if missing:
        flags = ", ".join("CONFIG" if name == "config" else f"--{name.replace('_', '-')}" for name in missing)
        return refused("predict", f"it also needs {flags}")
    for file in filter(None, (arguments.json, arguments.trace, arguments.svg)):
        if not file.parent.is_dir() or file.is_dir():
            return refused("predict", f"{printable(str(file))} cannot be written: its folder has to be there")
    try:
        request, checked = requested(arguments)
        prediction = _predicted(request, checked, arguments)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    except (PredictionError, BuildError, OSError) as error:
        return refused("predict", str(error), 1)
    print("\n".join(prediction_text(prediction)))
    return _write(prediction, arguments)


def requested(arguments: Namespace) -> tuple[Request, Checked]:
    """The run that is asked for, without a folder yet. Raises ConfigError where config, world and model do not fit."""
    ds_config = load(arguments.config)
    checked = check(ds_config, arguments.world_size)
    problems = [*_offloads(ds_config)]
    if "ds_npu" not in ds_config:
        checked, wrong = with_own_axes(ds_config, arguments.world_size, arguments.sequence_length, checked)
        problems += wrong
    degrees, batch = checked.degrees, checked.batch
    if not problems and batch.micro is None:
        problems.append(Problem(MICRO, ds_config.get(MICRO), "an integer >= 1"))
    if problems:
        raise ConfigError(problems, str(arguments.config))
    attention_of(arguments.model)
    present = [stage * arguments.world_size // degrees.pp for stage in range(degrees.pp)]
    config = {"optimizer": ADAMW, **ds_config}
    assert batch.micro is not None
    return (
        Request(
            "",
            config,
            str(Path(arguments.model).resolve()),
            arguments.sequence_length,
            batch.micro,
            batch.steps or 1,
            arguments.world_size,
            present,
            arguments.gradient_checkpointing,
        ),
        checked,
    )


def _offloads(ds_config: Config) -> Iterator[Problem]:
    """Keys by which the host computes or disks are read, whose times are not predicted."""
    zero = ds_config.get("zero_optimization")
    for key in ("offload_optimizer", "offload_param"):
        offload = zero.get(key) if isinstance(zero, dict) else None
        device = offload.get("device", "none") if isinstance(offload, dict) else "none"
        if device not in ("none", None):
            path = f"zero_optimization.{key}.device"
            yield Problem(path, device, "none: work of the host's processors and disks is not predicted")


def _predicted(request: Request, checked: Checked, arguments: Namespace) -> Prediction:
    machine: Machine = arguments.machine
    soc = "910_9391" if machine.node > A3_NODE else "910B2"
    simulation = Simulation(
        request.world_size,
        soc,
        machine.hbm,
        dry=True,
        routing=arguments.routing or "",
        machine=machine,
        present=tuple(request.present),
    )
    home = built()
    folder = tempfile.mkdtemp(prefix="ds_npu_predict_")
    run = dry_run(replace(request, folder=folder), simulation, home, _tell)
    # A run that has failed leaves its output there.
    shutil.rmtree(folder, ignore_errors=True)
    found = predicted(run, request, checked.degrees, machine)
    if not arguments.sensitivity:
        return found
    return replace(found, sensitivity=sensitivities(run.recording, machine, found.step_seconds, _tell))


def _tell(line: str) -> None:
    print(f"ds_npu predict: {line}", file=sys.stderr, flush=True)


def _write(prediction: Prediction, arguments: Namespace) -> int:
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(as_json(prediction), indent=1) + "\n")
    if arguments.trace is not None:
        write_trace(prediction, arguments.trace)
    if arguments.svg is not None:
        arguments.svg.write_text(step_svg(prediction), encoding="utf-8")
    return 0


def _compare(files: list[Path]) -> int:
    found: list[dict[str, Any]] = []
    for file in files:
        try:
            content = json.loads(file.read_text())
            if "ds_npu predict" not in content or not isinstance(content["figures"], dict):
                raise ValueError("no figures of ds_npu predict")
        except (OSError, ValueError, TypeError, KeyError) as error:
            return refused("predict", f"{printable(str(file))}: it is no file of ds_npu predict --json ({error})", 1)
        found.append(content)
    print("\n".join(comparison((files[0].stem, files[1].stem), (found[0], found[1]))))
    return 0


COMMAND = Command("predict", "predict time and memory of a training step by simulation", _add_arguments, _run)
