"""``ds_npu sim``: run a command, and all that it starts, on simulated NPUs."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from ds_npu.cli.command import Command, argument, cli_module, refused
from ds_npu.config.problems import printable
from ds_npu.simulator.build import built
from ds_npu.simulator.cache import ELSEWHERE, BuildError
from ds_npu.simulator.contents import markdown
from ds_npu.simulator.environment import MOST_DEVICES, SOCS, Simulation, bytes_of, integer_of, routing_of
from ds_npu.simulator.fault import fault_of, run, unknown_function


def _add_arguments(parser: ArgumentParser) -> None:
    standard = Simulation()
    parser.add_argument(
        "--devices",
        type=argument(partial(integer_of, 1, MOST_DEVICES)),
        default=standard.devices,
        metavar="N",
        help="NPUs (8)",
    )
    parser.add_argument("--soc", choices=SOCS, default=standard.soc, metavar="NAME", help=f"{', '.join(SOCS)} (910B2)")
    parser.add_argument(
        "--memory",
        type=argument(bytes_of),
        default=standard.memory_bytes,
        metavar="SIZE",
        help=f"memory of each NPU ({standard.memory_bytes >> 30}GiB)",
    )
    parser.add_argument(
        "--chaos",
        type=argument(partial(integer_of, 0, 2**64 - 1)),
        metavar="SEED",
        help="run streams in a random order that the seed decides",
    )
    parser.add_argument(
        "--fault",
        type=argument(fault_of),
        action="append",
        default=[],
        metavar="SPEC",
        help="NAME[:CALL][@RANK]=CODE or =exit: that call of an ACL, HCCL or aclnn function fails, or its process dies",
    )
    parser.add_argument("--trace", default="", metavar="FOLDER", help="record there what each stream does and when")
    parser.add_argument(
        "--routing",
        type=argument(routing_of),
        metavar="uniform|zipf:EXPONENT[@SEED]",
        help="draw the experts that tokens choose (--dry does: uniform@0)",
    )
    parser.add_argument(
        "--dry", action="store_true", help="do not compute floating-point numbers: times and memory only"
    )
    parser.add_argument(
        "--races", action="store_true", help="report touches of the same memory that nothing orders (docs/simulator.md)"
    )
    parser.add_argument("--list", action="store_true", help="print a table of what is simulated, in Markdown, and end")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what to run")


def _run(arguments: Namespace) -> int:
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    program = shutil.which(command[0]) if command else None
    if program is None and not arguments.list:
        wrong = f"there is no command {command[0]!r}" if command else "no command to run"
        return refused("sim", f"{wrong}; as in: ds_npu sim --devices 2 -- deepspeed train.py", 127 if command else 2)
    faults = tuple(arguments.fault)
    simulation = Simulation(arguments.devices, arguments.soc, arguments.memory, arguments.chaos, faults)
    if (why := simulation.excess() or _misused(arguments)) is not None:
        return refused("sim", why)
    try:
        home = built()
        if unknown := next(filter(None, (unknown_function(fault, home) for fault in faults)), None):
            return refused("sim", unknown)
        trace = _made(arguments.trace) if arguments.trace else ""
        trace = trace or (tempfile.mkdtemp(prefix="ds_npu_races_") if arguments.races else "")
        options = {"dry": arguments.dry, "routing": arguments.routing or "", "races": arguments.races}
        simulation = replace(simulation, trace=trace, **options)
    except BuildError as error:
        return refused("sim", str(error), 1)
    except OSError as error:
        return refused("sim", f"{error}{'' if arguments.trace else f'; {ELSEWHERE}'}", 1)
    if program is None:
        print(markdown(home))
        return 0
    # A folder's name may hold control characters.
    print(f"ds_npu sim: {printable(str(simulation))}", file=sys.stderr, flush=True)
    try:
        return _start(program, command, simulation, home, keeps_trace=bool(arguments.trace))
    except OSError as error:
        return refused("sim", f"{program} cannot be run: {error}", 126)


def _start(program: str, command: list[str], simulation: Simulation, home: Path, keeps_trace: bool) -> int:
    """Become the command, or run it where its end is waited for."""
    environment = simulation.environment(home, os.environ)
    if simulation.races:
        # It imports numpy, for which other runs do not wait.
        raced: Callable[..., int] = cli_module("raced_run").raced_run
        return raced(program, command, environment, Path(simulation.trace), keeps_trace)
    if not simulation.faults:
        os.execve(program, command, environment)
    return run(program, command, environment, simulation.faults)


def _misused(arguments: Namespace) -> str | None:
    if arguments.races and (arguments.chaos is not None or arguments.fault):
        return "--races looks at a run as it is: without --chaos and --fault"
    return None


def _made(folder: str) -> str:
    """Create ``folder`` and return its absolute path, since the command may change the working folder."""
    path = Path(folder).resolve()
    path.mkdir(parents=True, exist_ok=True)
    return str(path)


COMMAND = Command("sim", "run a command, and all it starts, on simulated NPUs", _add_arguments, _run)
