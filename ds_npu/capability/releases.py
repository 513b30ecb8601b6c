"""The installed versions, whether they go together, and the supported releases of the packages around ds_npu.

The oldest and newest supported releases are tested; ``tests/clients/test_versions.py`` runs with the oldest. The oldest
transformers, accelerate, PEFT and TRL are those that pip takes for LLaMA-Factory 0.9.5, whose pins are the tightest.
transformers below 5.0 has another way to load checkpoints (no ``core_model_loading``), and cannot be supported.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

DRIVER_INFO = Path("/usr/local/Ascend/driver/version.info")
SOURCE_CANN = "source <CANN>/set_env.sh in this shell (/usr/local/Ascend/ascend-toolkit/set_env.sh by default)"


@dataclass(frozen=True)
class Unavailable:
    """Why something cannot be used, and what to do about it; neither ends in a full stop."""

    reason: str
    advice: str

    def __str__(self) -> str:
        return f"{self.reason}. What to do: {self.advice}."


@dataclass(frozen=True)
class Versions:
    """Versions as their owners write them; None where none was found."""

    torch: str | None
    torch_npu: str | None
    cann: str | None
    driver: str | None
    deepspeed: str | None
    python: str


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution by its metadata, without importing it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


# torch_npu version -> CANN version it is released for. Source: Ascend/pytorch, COMPATIBILITY.en.md ("TorchNPU version
# mapping table"), commit 9e73e708 of 2026-08-21; torch_npu 2.13 and later are in no row of it.
CANN_OF_TORCH_NPU: dict[str, str] = {
    **dict.fromkeys(("2.12.0", "2.11.0", "2.10.0.post4", "2.9.0.post6", "2.7.1.post8"), "9.1.0"),
    **dict.fromkeys(("2.9.0.post2", "2.8.0.post4", "2.7.1.post4"), "9.0.0"),
    **dict.fromkeys(("2.9.0", "2.8.0.post2", "2.7.1.post2", "2.6.0.post5"), "8.5.0"),
    **dict.fromkeys(("2.8.0", "2.7.1", "2.6.0.post3", "2.1.0.post17"), "8.3.RC1"),
    **dict.fromkeys(("2.6.0", "2.5.1.post1", "2.1.0.post13"), "8.2.RC1"),
    **dict.fromkeys(("2.5.1", "2.4.0.post4", "2.3.1.post6", "2.1.0.post12"), "8.1.RC1"),
    **dict.fromkeys(("2.4.0.post2", "2.3.1.post4", "2.1.0.post10"), "8.0.0"),
}

# torch's major.minor -> the Python minors (3.x) it is listed with. Same source, "PyTorch and Python versions".
PYTHON_OF_TORCH: dict[str, range] = {
    **dict.fromkeys(("2.13", "2.12", "2.11"), range(10, 15)),
    **dict.fromkeys(("2.10", "2.9"), range(10, 14)),
    **dict.fromkeys(("2.8", "2.7"), range(9, 14)),
    **dict.fromkeys(("2.6", "2.5"), range(9, 12)),
}

# Files with CANN's version, best first: (glob in ASCEND_HOME_PATH, line). An install.info says version=8.5.0,
# version.cfg says toolkit_running_version=[7.6.0.1.220:8.0.0], a version.info says version_dir=8.5.0 or Version=8.5.0.
_CANN_FILES: tuple[tuple[str, str], ...] = (
    ("ascend_toolkit_install.info", r"^version=(.+)$"),
    ("*/ascend_toolkit_install.info", r"^version=(.+)$"),
    ("ascend_*_install.info", r"^version=(.+)$"),
    ("*/ascend_*_install.info", r"^version=(.+)$"),
    ("version.cfg", r"^toolkit_running_version=\[[^\]:]*:([^\]]+)\]"),
    ("version.cfg", r"^\w+_running_version=\[[^\]:]*:([^\]]+)\]"),
    ("version.info", r"^version_dir=(.+)$"),
    ("version.info", r"^[Vv]ersion=(.+)$"),
)


def cann_home() -> Path | None:
    """The folder ASCEND_HOME_PATH names, None where it is unset or names no folder."""
    home = os.environ.get("ASCEND_HOME_PATH", "")
    return Path(home) if home and Path(home).is_dir() else None


def missing_cann() -> Unavailable | None:
    """Why CANN's files cannot be used for building, None if they can."""
    if cann_home():
        return None
    home = os.environ.get("ASCEND_HOME_PATH")
    found = f"ASCEND_HOME_PATH={home!r} is no folder" if home else "ASCEND_HOME_PATH is not set"
    return Unavailable(f"{found}, so CANN's headers and libraries cannot be found", SOURCE_CANN)


def _first_match(path: Path, pattern: str) -> str | None:
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return None
    found = re.search(pattern, text, re.MULTILINE)
    value = found.group(1).strip().strip("[]\"'") if found else ""
    return value if re.match(r"\d+\.\w", value) else None


def cann_version() -> str | None:
    """The version of the CANN at ASCEND_HOME_PATH, None where no readable file tells it."""
    home = cann_home()
    if home is None:
        return None
    found = (_first_match(path, pattern) for files, pattern in _CANN_FILES for path in sorted(home.glob(files)))
    return next(filter(None, found), None)


def versions() -> Versions:
    """The installed versions, by metadata and version files; nothing is imported."""
    return Versions(
        torch=installed_version("torch"),
        torch_npu=installed_version("torch_npu"),
        cann=cann_version(),
        driver=_first_match(DRIVER_INFO, r"^[Vv]ersion=(.+)$"),
        deepspeed=installed_version("deepspeed"),
        python=platform.python_version(),
    )


def mismatches(found: Versions) -> list[str]:
    """A sentence for each mismatch in ``found``; a pair that no table lists is called unknown."""
    if found.torch_npu is None:
        return ["torch_npu is not installed: which torch and CANN would go with it is unknown."]
    try:
        npu = Version(found.torch_npu)
        torch = Version(found.torch) if found.torch else None
    except InvalidVersion as error:
        return [f"{error}: whether these versions go together is unknown."]
    return [*_torch_mismatch(torch, npu), *_cann_mismatch(npu, found.cann), *_python_mismatch(npu, found.python)]


def _torch_mismatch(torch: Version | None, npu: Version) -> Iterator[str]:
    if torch is None:
        yield f"torch is not installed: torch_npu {npu} needs torch {npu.major}.{npu.minor}."
    elif torch.release[:2] != npu.release[:2]:
        yield f"torch_npu {npu} needs torch {npu.major}.{npu.minor} and found torch {torch}: install matching versions."


def _cann_mismatch(npu: Version, cann: str | None) -> Iterator[str]:
    listed = CANN_OF_TORCH_NPU.get(npu.public)
    pair = f"torch_npu {npu} with CANN {cann}"
    if cann is None:
        wanted = f"it is listed with CANN {listed}" if listed else "no table known to ds_npu lists it"
        yield f"CANN's version was not found: whether torch_npu {npu} goes with it is unknown; {wanted}."
    elif listed is None:
        yield f"{pair} is unknown: Ascend's version table has no row for torch_npu {npu}."
    elif cann.upper() != listed.upper():
        yield f"{pair} is not a listed pair: Ascend's version table gives CANN {listed} for torch_npu {npu}."


def _python_mismatch(npu: Version, python: str) -> Iterator[str]:
    minors = PYTHON_OF_TORCH.get(f"{npu.major}.{npu.minor}")
    if minors is None:
        yield f"torch_npu {npu} with Python {python} is unknown: Ascend's version table does not list it."
    elif Version(python).release[0] != 3 or Version(python).release[1] not in minors:
        yield f"torch_npu {npu} is listed with Python 3.{minors[0]} to 3.{minors[-1]} and found Python {python}."


@dataclass(frozen=True)
class Releases:
    """The supported releases of a package."""

    oldest: str
    newest: str
    """The newest tested release; later ones with its major and minor number are supported, too."""
    distribution: str | None = None
    """The package's name in pip, if it is another one."""

    def __str__(self) -> str:
        return f"{self.oldest} to {self.newest}"

    def hold(self, version: str) -> bool:
        """Whether ``version`` is supported; one that cannot be read is not."""
        try:
            found = Version(version)
            newest = Version(self.newest)
        except InvalidVersion:
            return False
        return Version(self.oldest) <= found and found.release[:2] <= newest.release[:2]


SUPPORTED: dict[str, Releases] = {
    "deepspeed": Releases("0.19.6", "0.19.8"),
    "transformers": Releases("5.6.0", "5.23.0"),
    "accelerate": Releases("1.11.0", "1.15.0"),
    "peft": Releases("0.18.1", "0.21.2"),
    "trl": Releases("0.24.0", "1.16.0"),
    "swift": Releases("4.6.0", "4.6.0", distribution="ms-swift"),
}
"""The supported releases by the name of the imported package."""


def installed_release(package: str) -> str | None:
    """The version of ``package``, one of the table, by its metadata; None where it is not installed."""
    return installed_version(SUPPORTED[package].distribution or package)


def unsupported(packages: Iterable[str]) -> list[str]:
    """A sentence for each of ``packages`` whose installed release is not supported.

    Packages that are not installed, or not in the table, are passed over. Reads metadata and imports nothing.
    """
    found = {name: installed_release(name) for name in SUPPORTED.keys() & set(packages)}
    return [
        f"{name} {version} is installed, and ds_npu supports {SUPPORTED[name]}"
        for name, version in sorted(found.items())
        if version is not None and not SUPPORTED[name].hold(version)
    ]
