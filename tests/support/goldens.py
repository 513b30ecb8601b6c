"""Records, bit for bit, what runs of ds_npu compute, send and say, and compares two records.

    python tests/support/goldens.py record FILE [--cpu | --npu] [--only NAME_PART] [--write FOLDER | --read FOLDER]
    python tests/support/goldens.py compare A B

This is for changes that must change nothing. Record at the commit before and at the one after, on one machine with one
torch, and compare: anything that differs is said, and the exit code is 1. Bits differ between machines, so no record is
committed. The number of Python calls of a step is a figure: it is compared, and may differ.

A refactoring records its base once, and compares after each of its steps:

    git worktree add ../base BASE
    PYTHONPATH=../base python tests/support/goldens.py record base.json --write checkpoints
    python tests/support/goldens.py record now.json --read checkpoints
    python tests/support/goldens.py compare base.json now.json

``PYTHONPATH`` names the checkout whose ds_npu is recorded; of tests/support the scripts beside this one are used, which
import nothing of ds_npu but what both checkouts have. ``--write`` keeps the checkpoints of a record, ``--read`` loads
them in place of its own, so that the later commit loads what the earlier one wrote. ``golden_axis_cases.py`` and
``golden_memory_cases.py`` have the cases on the CPU, ``golden_npu_cases.py`` those on simulated NPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import golden_npu
import golden_worlds
from golden_axis_cases import axis_cases
from golden_compare import calls_of_steps, differences
from golden_memory_cases import memory_cases
from golden_worlds import Records


def record_cpu(only: list[str], checkpoints: str, reads: bool) -> Records:
    """Record the cases on the CPU."""
    chosen = [replace(each, checkpoints=checkpoints, reads=reads) for each in [*axis_cases(), *memory_cases()]]
    chosen = [each for each in chosen if not only or any(part in each.name for part in only)]
    golden_worlds.settle("cpu")
    return golden_worlds.record(chosen, "gloo")


def record(options: argparse.Namespace) -> int:
    began = time.monotonic()
    file, found = Path(options.file).resolve(), {}
    checkpoints = str(Path(options.write or options.read).resolve()) if options.write or options.read else ""
    print(f"recording {golden_worlds.package()}", flush=True)
    with tempfile.TemporaryDirectory() as neutral:
        os.chdir(neutral)
        if not options.npu:
            found |= record_cpu(options.only, checkpoints, bool(options.read))
        if not options.cpu:
            found |= golden_npu.record(options.only)
        os.chdir(file.parent)
    file.write_text(json.dumps(found, indent=1))
    refused = {name: run["refused"] for name, run in found.items() if "refused" in run}
    print(f"{len(found)} records of ranks in {time.monotonic() - began:.0f} s, {len(refused)} refused:")
    for name, words in refused.items():
        print(f"{name}: {words}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(required=True)
    recording = actions.add_parser("record")
    recording.add_argument("file")
    where = recording.add_mutually_exclusive_group()
    where.add_argument("--cpu", action="store_true", help="only the cases on the CPU")
    where.add_argument("--npu", action="store_true", help="only the cases on simulated NPUs")
    recording.add_argument("--only", action="append", default=[], help="cases with this in their name; may be repeated")
    kept = recording.add_mutually_exclusive_group()
    kept.add_argument("--write", metavar="FOLDER", help="keep the checkpoints there")
    kept.add_argument("--read", metavar="FOLDER", help="load the checkpoints that an earlier record kept there")
    recording.set_defaults(act=record)
    comparing = actions.add_parser("compare")
    comparing.add_argument("files", nargs=2)
    comparing.set_defaults(act=compare)
    options = parser.parse_args()
    return int(options.act(options))


def compare(options: argparse.Namespace) -> int:
    before, after = (json.loads(Path(file).read_text()) for file in options.files)
    said = differences(before, after)
    print("\n".join(said) or "the same, bit for bit")
    print(calls_of_steps(before, after))
    return bool(said)


if __name__ == "__main__":
    raise SystemExit(main())
