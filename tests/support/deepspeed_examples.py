"""Runs DeepSpeed's example scripts, unchanged, with ds_npu and compares their losses with runs without it.

    python tests/support/deepspeed_examples.py EXAMPLES [CASE ...]

EXAMPLES is a clone of DeepSpeedExamples, or its git directory; what is run of it is copied, and nothing is kept. The
pictures are random (``stand_ins/torchvision.py``). Each case is trained on the CPU by plain DeepSpeed, in an
environment without ds_npu, and by ds_npu's engine with a section. Ends with 1 where losses differ.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from deepspeed_unit_tests import KEPT, extensions_of, plain_python

SUPPORT = Path(__file__).resolve().parent
LAUNCHER = SUPPORT / "deepspeed_example.py"
DEADLINE_S = 600
FLOAT32 = 2e-5
"""Relative. The scripts train in float32 or bf16 for a few steps; ranks add gradients up in another order."""
BF16 = 2e-2


@dataclass(frozen=True)
class Run:
    """One start of a script."""

    script: str
    ranks: int
    arguments: tuple[str, ...]
    section: str = "none"
    """JSON; "none" is plain DeepSpeed."""


@dataclass(frozen=True)
class Case:
    """Runs with ds_npu whose losses must be those of one without."""

    plain: Run
    ours: tuple[Run, ...]
    tolerance: float = FLOAT32


def with_sections(plain: Run, *changes: tuple[int, str]) -> tuple[Run, ...]:
    return tuple(replace(plain, ranks=ranks, section=section) for ranks, section in changes)


REPLICAS = '{"parallel": {"tensor": 2}, "plan": {"**": "replicated"}}'
CIFAR = "training/cifar/cifar10_deepspeed.py"
PIPELINE = "training/pipeline_parallelism/train.py"


def cifar(*arguments: str, ranks: int = 1) -> Run:
    return Run(CIFAR, ranks, ("--epochs", "2", "--log-interval", "1", *arguments))


def pipeline(stages: int, ranks: int) -> Run:
    steps = ("--backend", "gloo", "--steps", "3", "-p", str(stages))
    return Run(PIPELINE, ranks, (*steps, "--deepspeed", "--deepspeed_config", "ds_config.json"))


def cases() -> dict[str, Case]:
    found = {}
    for stage in "0123":
        run = cifar("--dtype", "fp32", "--stage", stage)
        found[f"cifar, ZeRO {stage}"] = Case(run, with_sections(run, (1, "{}"), (2, "{}"), (2, REPLICAS)))
    run = cifar("--dtype", "bf16", "--stage", "2")
    found["cifar, bf16"] = Case(run, with_sections(run, (1, "{}"), (2, "{}")), BF16)
    moe = ("--dtype", "fp32", "--moe", "--num-experts", "2", "--top-k", "1")
    for stage, more in (("0", ()), ("2", ("--moe-param-group",))):
        for ep in ("1", "2"):
            run = cifar(*moe, *more, "--stage", stage, "--ep-world-size", ep, ranks=2)
            found[f"cifar, experts over {ep}, ZeRO {stage}"] = Case(run, with_sections(run, (2, "{}")))
    found["pipeline tutorial"] = Case(
        pipeline(2, 2), with_sections(pipeline(2, 2), (2, '{"parallel": {"pipeline": 2}}'))
    )
    found["pipeline tutorial, data ranks"] = Case(
        pipeline(2, 2), with_sections(pipeline(2, 4), (4, '{"parallel": {"pipeline": 2}}'))
    )
    found["pipeline tutorial, no pipeline"] = Case(pipeline(0, 1), with_sections(pipeline(0, 2), (2, "{}")))
    return found


def copied(examples: Path, script: str, to: Path) -> Path:
    """The script in a copy of its folder."""
    folder = str(Path(script).parent)
    archive = subprocess.run(["git", "-C", examples, "archive", "HEAD", folder], check=True, capture_output=True)
    subprocess.run(["tar", "-x", "-C", to], input=archive.stdout, check=True)
    return to / script


def losses(run: Run, script: Path, python: Path) -> list[float]:
    """The mean of the ranks' losses of each micro-batch. Raises RuntimeError with the end of what a failed run said."""
    with tempfile.TemporaryDirectory() as record:
        command = [
            *(python, "-m", "torch.distributed.run", "--nproc_per_node", str(run.ranks), "--master_port", "29617"),
            *(LAUNCHER, record, run.section, script, *run.arguments),
        ]
        environment = os.environ | {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(run.ranks), "OMP_NUM_THREADS": "1"}
        environment["TORCH_EXTENSIONS_DIR"] = extensions_of(python)
        done = subprocess.run(
            command, cwd=script.parent, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        found = [json.loads(path.read_text()) for path in sorted(Path(record).glob("rank*.json"))]
    if done.returncode or len(found) != run.ranks:
        raise RuntimeError(f"{run}: {done.returncode}\n{done.stderr[-2000:]}")
    return [sum(each) / len(each) for each in zip(*found, strict=True)]


def in_parts(values: list[float], count: int) -> list[float]:
    """The means of ``count`` parts of ``values``, one after the other."""
    size = len(values) // count
    assert size * count == len(values)
    return [sum(values[first : first + size]) / size for first in range(0, len(values), size)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("examples", type=Path)
    parser.add_argument("cases", nargs="*")
    given = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="deepspeed_examples_") as folder:
        plain = plain_python(KEPT / "environment")
        for name, case in cases().items():
            if given.cases and name not in given.cases:
                continue
            script = copied(given.examples, case.plain.script, Path(folder))
            expected = losses(case.plain, script, plain)
            for run in case.ours:
                found = losses(run, script, Path(sys.executable))
                # With fewer data ranks a step has more micro-batches.
                count = min(len(found), len(expected))
                pairs = zip(in_parts(found, count), in_parts(expected, count), strict=True)
                error = max(abs(a - b) / abs(b) for a, b in pairs)
                is_right = error <= case.tolerance
                wrong += not is_right
                print(
                    f"{name}: {run.ranks} ranks, {run.section}: {len(found)} losses, {expected[0]:.4f} to "
                    f"{expected[-1]:.4f}, at most {error:.1e} from plain DeepSpeed on {case.plain.ranks}"
                    f"{'' if is_right else ': WRONG'}",
                    flush=True,
                )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
