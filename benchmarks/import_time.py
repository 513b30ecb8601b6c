"""What ds_npu adds to the start of an interpreter, to ``import torch`` and to ``import deepspeed``.

    python benchmarks/import_time.py [--pairs 15]

Each pair is two new interpreters, one with ds_npu as pip installs it (its entry point and its ds_npu.pth), one
without, in alternating order. Times are CPU time (user + system) in ms, which other programs on the machine disturb
less than the clock. Whatever disturbs it adds to it, so what ds_npu adds is the difference of the smallest times; the
median of the differences is printed beside it. Exits with 1 above a limit.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMITS_MS = {"pass": 5.0, "import torch": 5.0, "import deepspeed": 50.0}
"""What each may add; ``pass`` is the start alone."""


def others(folder: Path) -> Path:
    """``folder``, filled with what is installed here beside ds_npu and torch_npu, as links."""
    folder.mkdir()
    installed = Path(sysconfig.get_path("purelib"))
    for entry in installed.iterdir():
        if "ds_npu" not in entry.name and not entry.name.startswith("torch_npu"):
            (folder / entry.name).symlink_to(entry)
    return folder


def make_installation(folder: Path) -> Path:
    """A folder that is to Python what site-packages is after ``pip install .``."""
    others(folder)
    (folder / "ds_npu").symlink_to(ROOT / "ds_npu")
    (folder / "ds_npu.pth").write_text((ROOT / "ds_npu" / "ds_npu.pth").read_text())
    info = folder / "ds_npu-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ds_npu\nVersion: 0.1.0\n")
    declared = re.search(
        r'^\[project\.entry-points\."torch\.backends"\]\n(.+)$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    if declared is None:
        raise SystemExit("pyproject.toml declares no torch.backends entry point")
    (info / "entry_points.txt").write_text("[torch.backends]\n" + declared.group(1).replace('"', "") + "\n")
    return folder


def cpu_ms(code: str, site: Path) -> float:
    """The CPU time of a new interpreter that runs ``code``, with ``site`` as its site-packages."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "DS_NPU_AUTOLOAD")}
    environ = {**inherited, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
    start = f"import site; site.addsitedir({str(site)!r}); {code}"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    # -S: ds_npu may be installed in the environment that runs this.
    command = [sys.executable, "-S", "-c", start]
    subprocess.run(command, env=environ, cwd="/", check=True, capture_output=True, timeout=300)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def measure(code: str, plain: Path, site: Path, pairs: int) -> tuple[float, float, float]:
    """Over ``pairs``: the smallest time without ds_npu and with it, and the median of the differences, in ms."""
    without, with_it = [], []
    for folder in (plain, site):
        cpu_ms(code, folder)
    for number in range(pairs):
        turns = ((without, plain), (with_it, site))
        for times, folder in turns if number % 2 else reversed(turns):
            times.append(cpu_ms(code, folder))
    differences = [b - a for a, b in zip(without, with_it, strict=True)]
    return min(without), min(with_it), statistics.median(differences)


def main() -> int:
    parser = argparse.ArgumentParser(description="What ds_npu adds to imports.")
    parser.add_argument("--pairs", type=int, default=15, help="pairs of interpreters per line (default: 15)")
    pairs = parser.parse_args().pairs
    too_slow = []
    print(f"{'':18}{'without':>10}{'with':>10}{'added':>10}{'limit':>10}{'median':>10}   ms of CPU time, {pairs} pairs")
    with tempfile.TemporaryDirectory() as folder:
        plain, site = others(Path(folder) / "without"), make_installation(Path(folder) / "with")
        for code, limit in LIMITS_MS.items():
            without, with_it, median = measure(code, plain, site, pairs)
            added = with_it - without
            print(f"{code:18}{without:10.1f}{with_it:10.1f}{added:10.1f}{limit:10.1f}{median:10.1f}", flush=True)
            too_slow += [code] if added > limit else []
    if too_slow:
        print("above the limit: " + ", ".join(too_slow))
    return 1 if too_slow else 0


if __name__ == "__main__":
    sys.exit(main())
