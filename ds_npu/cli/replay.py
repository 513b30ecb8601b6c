"""``ds_npu replay FILE``: computes the first wrong module of a run once more, in one process."""

from __future__ import annotations

import importlib.util
import os
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from ds_npu.cli.command import Command, refused
from ds_npu.config.problems import printable
from ds_npu.features.recorded_calls.module_file import ModuleFileError, read_module_file
from ds_npu.features.recorded_calls.plain_data import SCRIPT
from ds_npu.features.recorded_calls.replayed_call import replay_lines


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="the file that ds_npu.watch.finite wrote")
    parser.add_argument(
        "--script", type=Path, metavar="FILE", help="the training script, where the module's class stands there"
    )


def _run(arguments: Namespace) -> int:
    try:
        data = read_module_file(arguments.file)
    except (OSError, ModuleFileError) as error:
        why = os.strerror(error.errno or 0) if isinstance(error, OSError) else str(error)
        return refused("replay", f"{printable(str(arguments.file))}: {why}", 1)
    # Classes of modules stand in files of the folder that the run began in, as Python finds them for a script.
    sys.path.insert(0, "")
    if arguments.script is not None:
        if not arguments.script.is_file():
            return refused("replay", f"--script {printable(str(arguments.script))}: there is no such file")
        _load(arguments.script)
    for line in replay_lines(data):
        print(line)
    return 0


def _load(script: Path) -> None:
    """Import ``script`` under a name of its own, so that its ``if __name__ == "__main__"`` does not run."""
    sys.path.insert(0, str(script.parent))
    spec = importlib.util.spec_from_file_location(SCRIPT, script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[SCRIPT] = module
    spec.loader.exec_module(module)


COMMAND = Command("replay", "compute the first module of a run that was not finite again", _add_arguments, _run)
