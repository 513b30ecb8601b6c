"""The supported releases of the packages around ds_npu: one table, which errors, warnings and tests read.

Their oldest and newest releases are tested; ``tests/clients/test_versions.py`` runs with the oldest. The oldest
transformers, accelerate, PEFT and TRL are those that pip takes for LLaMA-Factory 0.9.5, whose pins are the tightest.
transformers below 5.0 has another way to load checkpoints (no ``core_model_loading``), and cannot be supported.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from ds_npu.capability.releases import installed_version


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
            found, newest = Version(version), Version(self.newest)
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
