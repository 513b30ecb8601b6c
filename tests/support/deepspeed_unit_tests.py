"""Runs DeepSpeed's own unit tests without ds_npu and with it, and compares every outcome.

    python tests/support/deepspeed_unit_tests.py [--section] [--write] CHECKOUT [FILE ...]

CHECKOUT is a clone of DeepSpeed, or its git directory; its folder ``tests`` is copied, and nothing of it is kept. The
installed DeepSpeed is what runs. Without FILEs the list in ``tests/clients/deepspeed_unit_tests.json`` is run, which
also has what each file gave; ``--write`` brings it up to date. With ``--section`` every config that a test hands to
``deepspeed.initialize`` has an empty "ds_npu" section, so that ds_npu's engine runs the test. Ends with 1 where an
outcome differs and the list does not say why. Some tests open port 29500, and are skipped where it is taken.

``unit/v1/zero/test_zero.py`` is not in the list, since its 99 tests take longer than a file may. Its classes were run
one by one on 2026-11-23, without ds_npu, with it, and with a section: 81 tests pass each time, 14 are skipped, and 4
fail without it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from importlib.metadata import version
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
RESULTS = SUPPORT.parent / "clients" / "deepspeed_unit_tests.json"
LEFT_OUT = ("ds_npu", "__editable__", "torch_npu", "checkout.pth")
"""What begins so is not in the environment without ds_npu. Without torch_npu, since torch cannot load it there."""
KEPT = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions") / "unit_tests"
"""The environment without ds_npu and what DeepSpeed compiles, for the next run."""
RANKS = 2
"""Tests for more ranks are skipped by DeepSpeed: it takes this number for that of devices."""
DEADLINE_S = 1800
"""Of a file."""
SECTION, DIFFER = "section", "differ"
"""Keys of a file's entry: tests whose outcomes may differ with a section, or without one, and why."""
TOGETHER = 40
"""Files that one pytest runs: starting it takes longer than most of them."""
KINDS = ("passed", "failed", "skipped")

Outcomes = dict[str, str]
"""By test, one of KINDS."""


def extensions_of(python: Path) -> str:
    """The folder of what DeepSpeed compiles: one for each environment, as the paths of headers differ."""
    return str(KEPT / ("ours" if python == Path(sys.executable) else "plain"))


def copy_tests(checkout: Path, to: Path) -> Path:
    """The folder ``tests`` of ``checkout``, a work tree or a git directory, copied into ``to``."""
    if (checkout / "tests" / "unit").is_dir():
        shutil.copytree(checkout / "tests", to / "tests")
    else:
        archive = subprocess.run(
            ["git", "-C", checkout, "archive", "--format=tar", "HEAD", "tests"], check=True, capture_output=True
        )
        subprocess.run(["tar", "-x", "-C", to], input=archive.stdout, check=True)
    return to / "tests"


def plain_python(folder: Path) -> Path:
    """The python of a new environment in ``folder`` with all that this one has, but for ds_npu and torch_npu."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
    (to,) = folder.glob("lib/python*/site-packages")
    for each in map(Path, sys.path):
        for entry in each.iterdir() if each.name == "site-packages" else ():
            if not entry.name.startswith(LEFT_OUT) and not (to / entry.name).exists():
                (to / entry.name).symlink_to(entry)
    # Programs, as the launcher, name the python that runs them in their first line.
    for program in Path(sys.executable).parent.iterdir():
        made = folder / "bin" / program.name
        if program.is_file() and not made.exists() and program.read_bytes().startswith(b"#!"):
            first, _, rest = program.read_text().partition("\n")
            made.write_text(f"#!{folder / 'bin' / 'python'}\n{rest}" if "python" in first else f"{first}\n{rest}")
            made.chmod(0o755)
        elif program.is_file() and not made.exists():
            made.symlink_to(program)
    return folder / "bin" / "python"


def outcomes(python: Path, tests: Path, files: list[str], section: bool = False) -> dict[str, Outcomes]:
    """What each test of each file gives; nothing for a file of which pytest reports nothing."""
    report = tests / "report.xml"
    report.unlink(missing_ok=True)
    environment = os.environ | {
        "DS_ACCELERATOR": "cpu",
        "LOCAL_SIZE": str(RANKS),
        "DS_UNITTEST_TIMEOUT": "600",
        "HF_HUB_OFFLINE": "1",
        "PATH": os.pathsep.join([str(python.parent), os.environ["PATH"]]),
        "PYTHONPATH": str(SUPPORT) if section else "",
        "TORCH_EXTENSIONS_DIR": extensions_of(python),
        **({"DS_NPU_TEST_SECTION": "{}"} if section else {}),
    }
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tests}", f"--junitxml={report}"]
    command += ["--continue-on-collection-errors", *files]
    process = subprocess.Popen(
        command,
        cwd=tests,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        process.wait(DEADLINE_S * len(files))
        cases = [*ElementTree.parse(report).getroot().iter("testcase")]
    except (subprocess.TimeoutExpired, OSError, ElementTree.ParseError):
        cases = []
    finally:
        # The ranks of its tests, too.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    found: dict[str, Outcomes] = {file: {} for file in files}
    modules = {file.removesuffix(".py").replace("/", "."): file for file in files}
    for case in cases:
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        # Of a file that cannot be imported the name is the module's.
        name = f"{case.get('classname')}.{case.get('name')}".strip(".")
        file = next(file for module, file in modules.items() if f"{name}.".startswith(f"{module}."))
        found[file][name] = outcome
    return found


def differing(plain: Outcomes, ours: Outcomes) -> dict[str, str]:
    """The tests whose outcomes differ, and how."""
    return {
        name: f"{plain.get(name, 'absent')} without ds_npu, {ours.get(name, 'absent')} with it"
        for name in sorted({*plain, *ours})
        if plain.get(name) != ours.get(name)
    }


QUICK = """
import multiprocessing
import os
import deepspeed.ops
multiprocessing.set_forkserver_preload(["deepspeed", "pytest", "torch._dynamo", "unit.common", "unit.simple_model"])
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
if "DS_NPU_TEST_SECTION" in os.environ:
    import deepspeed_section
"""
"""At the end of files that every process of the tests imports: without collectives that take minutes to compile, and
with ranks that are forked from a process that has imported DeepSpeed."""


def prepare(tests: Path) -> None:
    """Make the copied tests run QUICK in every process, with and without ds_npu."""
    for name in ("conftest.py", "unit/common.py"):
        with (tests / name).open("a") as file:
            file.write(QUICK)


def compare(plain: Path, tests: Path, files: list[str], section: bool) -> dict[str, tuple[Outcomes, dict[str, str]]]:
    """Of each file the outcomes without ds_npu, and those that differ with it in two runs."""

    def once(chosen: list[str]) -> dict[str, tuple[Outcomes, dict[str, str]]]:
        without = outcomes(plain, tests, chosen)
        with_it = outcomes(Path(sys.executable), tests, chosen, section)
        return {
            file: (without[file], differing(without[file], with_it[file]) if without[file] else {file: "no report"})
            for file in chosen
        }

    found = once(files)
    for file in [file for file, (_, differ) in found.items() if differ]:
        without, differ = found[file]
        again = once([file])[file][1]
        found[file] = without, {name: why for name, why in differ.items() if again.get(name) == why}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", action="store_true", help="with an empty section in every config")
    parser.add_argument("--write", action="store_true", help="bring the list up to date")
    parser.add_argument("checkout", type=Path)
    parser.add_argument("files", nargs="*", metavar="FILE", help="as unit/pipe/test_pipe_module.py")
    given = parser.parse_args()
    recorded = json.loads(RESULTS.read_text())
    known, wrong = recorded["files"], 0
    files = given.files or sorted(known)
    with tempfile.TemporaryDirectory(prefix="deepspeed_tests_") as folder:
        tests = copy_tests(given.checkout, Path(folder))
        plain = plain_python(KEPT / "environment")
        prepare(tests)
        for batch in (files[first : first + TOGETHER] for first in range(0, len(files), TOGETHER)):
            for file, (without, differ) in compare(plain, tests, batch, given.section).items():
                counts = Counter(without.values())
                explained = known.get(file, {}).get(SECTION if given.section else DIFFER, {})
                unexplained = {name: why for name, why in differ.items() if name not in explained}
                wrong += len(unexplained)
                sums = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)
                print(f"{file}: {sums}; {len(differ)} differ", flush=True)
                for name, why in unexplained.items():
                    print(f"  {name}: {why}", flush=True)
                if given.write and not given.section:
                    known.setdefault(file, {}).update({kind: counts[kind] for kind in KINDS})
            if given.write:
                recorded |= {"deepspeed": version("deepspeed"), "ranks": RANKS, "files": dict(sorted(known.items()))}
                RESULTS.write_text(json.dumps(recorded, indent=1) + "\n")
    print(f"{wrong} outcomes differ and are not explained in {RESULTS.name}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
