"""What ds_report says about this machine's NPUs, below DeepSpeed's own report and in its style."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TextIO

from ds_npu import capability
from ds_npu.config.sections import PLANNED, DsNpuConfig
from ds_npu.features.driver import FEATURES
from ds_npu.ops.all import report as operator_report

# ds_report's own colours and columns (deepspeed/env_report.py).
GREEN, YELLOW, END = "\033[92m", "\033[93m", "\033[0m"
OKAY, NO = f"{GREEN}[OKAY]{END}", f"{YELLOW}[NO]{END}"
NAME_COLUMNS = 33
RULE = "-" * 74

FeatureRow = tuple[str, list[str]]
"""A feature's name, and why it cannot be used on this machine; nothing where it can."""


def report(file: TextIO | None = None, features: Iterable[FeatureRow] = ()) -> None:
    """Writes the part about NPUs to ``file`` (stdout by default).

    Starts the Ascend runtime where there is one; on any other machine it says why there is none.
    """
    parts = (
        ("ds_npu versions", _version_lines()),
        ("NPU devices", _device_lines()),
        ("HCCL and torch_npu variables (value, who set it, what it does)", _variable_lines()),
        ("ds_npu operators of DeepSpeed", _operator_lines()),
        ("ds_npu kernels on NPUs (fused_ops)", _kernel_lines()),
        ("ds_npu features", _feature_lines(features)),
    )
    lines = [line for title, body in parts for line in (RULE, title, RULE, *body)]
    (file or sys.stdout).write("\n".join([*lines, RULE]) + "\n")


def installed_cann_path() -> str | None:
    """ASCEND_HOME_PATH where it names a folder, else None.

    A replacement for deepspeed.env_report.installed_cann_path, which raises KeyError where the variable is unset
    (0.19.8, ``or`` in place of ``and``).
    """
    home = capability.cann_home()
    return str(home) if home else None


def installed_operators(installed: Mapping[str, bool], built_for: str) -> dict[str, bool]:
    """What ``deepspeed.git_version_info.installed_ops`` has to say for ds_report's column "installed" to be right.

    ``built_for`` is the accelerator DeepSpeed was built for (its ``accelerator_name``): a wheel says cpu, and ds_report
    then answers NO to all. An operator that has nothing to compile is installed.
    """
    built = dict(installed) if built_for == "npu" else dict.fromkeys(installed, False)
    return {**built, **{builder.name: True for builder in _builders() if not builder.sources()}}


def show_installed_operators() -> None:
    """Put ``installed_operators`` where ds_report reads it, which counts them for the accelerator it names only."""
    # Not at the top: this module is imported while DeepSpeed's report is.
    from deepspeed import env_report as report
    from deepspeed import git_version_info as versions

    report.installed_ops.update(installed_operators(report.installed_ops, report.accelerator_name))
    report.accelerator_name = versions.accelerator_name = "npu"


def feature_report() -> list[FeatureRow]:
    """Each key of the section, and why it cannot be used: not built in this version, or missing on this machine."""
    features = {feature.key: feature for feature in FEATURES}
    return [
        (key, ["not built in this version of ds_npu"] if key in PLANNED else features[key].unmet(default))
        for key, default in DsNpuConfig()
    ]


def _builders() -> list[Any]:
    package: Any = capability.try_import("ds_npu.ops.builders")[0]
    if package is None:
        return []
    classes = [each for name, each in inspect.getmembers(package, inspect.isclass) if name.endswith("Builder")]
    return [
        each()
        for each in classes
        if each is not package.ModuleBuilder and not issubclass(each, package.NotImplementedBuilder)
    ]


def _line(name: str, value: object) -> str:
    return f"{name} {'.' * (NAME_COLUMNS - len(name))} {value}"


def _answer(name: str, reasons: list[str]) -> Iterator[str]:
    yield _line(name, f"{NO} {reasons[0]}" if reasons else OKAY)
    for reason in reasons[1:]:
        yield f"{' ' * (NAME_COLUMNS + 7)}{reason}"


def _version_lines() -> Iterator[str]:
    found = capability.versions()
    yield _line("torch version", found.torch or "not installed")
    yield _line("torch_npu version", found.torch_npu or "not installed")
    yield _line("CANN version", found.cann or _unknown_cann())
    yield _line("Ascend driver version", found.driver or "not found in /usr/local/Ascend/driver/version.info")
    yield _line("deepspeed version", found.deepspeed or "not installed")
    yield _line("python version", found.python)
    yield from _answer("versions go together", capability.mismatches(found))


def _unknown_cann() -> str:
    unavailable = capability.missing_cann()
    return unavailable.reason if unavailable else f"no file that tells it under {capability.cann_home()}"


def _device_lines() -> Iterator[str]:
    state = capability.torch_npu_state()
    if not state.usable:
        yield from _answer("NPUs", [f"{state.reason}.", f"What to do: {state.advice}."])
        return
    torch_npu: Any = capability.try_import("torch_npu")[0]
    count = torch_npu.npu.device_count()
    simulated = ", simulated by ds_npu sim" if "DS_NPU_SIM_DEVICES" in os.environ else ""
    yield _line("NPUs", f"{OKAY} {count}{simulated}")
    for index in range(count):
        yield _line(f"npu:{index}", _device(torch_npu.npu, index))


def _device(npu: Any, index: int) -> str:
    try:
        properties = npu.get_device_properties(index)
    except RuntimeError as error:
        return f"{NO} it does not answer: {error}"
    return f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB"


def _variable_lines() -> Iterator[str]:
    for setting in capability.hccl_environment():
        value = setting.default if setting.value is None else setting.value
        yield _line(setting.name, f"{value} ({setting.origin}; {setting.note})")


def _operator_lines() -> Iterator[str]:
    # The builders import deepspeed's, which import torch_npu: where that is broken, the rest is still to be printed.
    package, error = capability.try_import("ds_npu.ops.builders")
    if package is None:
        yield from _answer("all operators", [f"DeepSpeed's NPU builders cannot be imported: {error}"])
        return
    said = str(capability.torch_npu_importable() or "")
    for builder in _builders():
        reason = builder.why_not()
        yield from _answer(builder.name, ["see NPUs above" if reason == said else reason] if reason else [])


def _kernel_lines() -> Iterator[str]:
    said = capability.torch_npu_importable()
    for name, reason in operator_report():
        yield from _answer(name, ["see NPUs above" if said and reason == str(said) else reason] if reason else [])


def _feature_lines(features: Iterable[FeatureRow]) -> Iterator[str]:
    rows = list(features)
    if not rows:
        yield "none"
    for name, reasons in rows:
        yield from _answer(name, reasons)
