"""The part of ds_report about this machine's NPUs, below DeepSpeed's own report and in its style."""

from __future__ import annotations

import inspect
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from ds_npu import capability
from ds_npu.config.moe import MoeSection
from ds_npu.config.sections import DsNpuConfig
from ds_npu.config.swap import SwapSection
from ds_npu.engine.patches import FAILED
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

    It begins with one line: whether NPUs can be used, and the one thing to do. What is right is counted, what is not
    has a row. Starts the Ascend runtime where there is one; on any other machine it says why there is none.
    """
    state = capability.torch_npu_state()
    devices = _devices() if state.usable else []
    lines = [
        RULE,
        *_answer("ds_npu", *_verdict(state, devices)),
        RULE,
        *_version_lines(),
        *_device_lines(devices),
        *_variable_lines(),
        *_operator_lines(),
        *_counted("kernels on NPUs (fused_ops)", list(operator_report())),
        *_feature_lines(features),
        RULE,
    ]
    (file or sys.stdout).write("\n".join(lines) + "\n")


def installed_cann_path() -> str | None:
    """ASCEND_HOME_PATH where it names a folder, else None.

    A replacement for deepspeed.env_report.installed_cann_path, which raises KeyError where the variable is unset
    (0.19.8, ``or`` in place of ``and``).
    """
    home = capability.cann_home()
    return str(home) if home else None


def installed_operators(installed: Mapping[str, bool], built_for: str) -> dict[str, bool]:
    """The value of ``deepspeed.git_version_info.installed_ops`` that makes ds_report's column "installed" right.

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
    """Each key of the section, and why this machine cannot do what it needs."""
    features = {feature.key: feature for feature in FEATURES}
    rows = [(key, features[key].unmet(default)) for key, default in DsNpuConfig()]
    if capability.torch_npu_state().usable:
        # Features of some NPUs only.
        rows.append(("moe.dispatcher fused", features["moe"].unmet(MoeSection(dispatcher="fused"))))
        rows.append(("swap.compress", features["swap"].unmet(SwapSection(activations=True, compress=True))))
    return rows


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


def _answer(name: str, reasons: Sequence[str], right: str = "") -> Iterator[str]:
    """A row that says NO and why, or OKAY and what is ``right``."""
    yield _line(name, f"{NO} {reasons[0]}" if reasons else f"{OKAY} {right}".rstrip())
    for reason in reasons[1:]:
        yield f"{' ' * (NAME_COLUMNS + 7)}{reason}"


def _verdict(state: capability.TorchNpuState, devices: list[str]) -> tuple[list[str], str]:
    """Why ds_npu cannot be used and the one thing to do, or, where it can, on what and what is left to do."""
    if FAILED:
        return [f"a config with a ds_npu section is refused: {FAILED[0]}"], ""
    if not state.usable:
        if os.environ.get("DS_ACCELERATOR") == "cpu":
            return [], f"on the CPU, as DS_ACCELERATOR=cpu asks; no NPU: {state.reason}. Nothing to do"
        return [f"no NPU can be used: {state.reason}. What to do: {state.advice}."], ""
    broken = [index for index, device in enumerate(devices) if device.startswith(NO)]
    if len(broken) == len(devices):
        return [f"no NPU answers: {devices[0].removeprefix(f'{NO} ')}. What to do: npu-smi info"], ""
    simulated = ", simulated by ds_npu sim" if "DS_NPU_SIM_DEVICES" in os.environ else ""
    working = len(devices) - len(broken)
    npus = f"{working} NPU{'s' * (working > 1)}{simulated}"
    if broken:
        return [], f"{npus}. What to do: npu-smi info, as {len(broken)} do not answer (npu:{broken[0]} below)"
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return [], f"{npus}. What to do: unset DS_ACCELERATOR, which chooses the CPU, to use them"
    doubts = capability.mismatches(capability.versions())
    return [], f"{npus}. {f'To be looked at: {doubts[0]}' if doubts else 'Nothing to do'}"


def _version_lines() -> Iterator[str]:
    found = capability.versions()
    named = {
        "torch": found.torch,
        "torch_npu": found.torch_npu,
        "CANN": found.cann,
        "driver": found.driver,
        "deepspeed": found.deepspeed,
        "python": found.python,
    }
    yield _line("versions", ", ".join(f"{name} {version or 'not found'}" for name, version in named.items()))
    unknown = capability.missing_cann()
    doubts = capability.mismatches(found)
    if found.torch_npu is not None and doubts:
        yield from _answer("versions go together", [*doubts, *([unknown.reason] if unknown else [])])


def _devices() -> list[str]:
    """Describe each NPU, or say why it does not answer."""
    torch_npu: Any = capability.try_import("torch_npu")[0]
    return [_device(torch_npu.npu, index) for index in range(torch_npu.npu.device_count())]


def _device(npu: Any, index: int) -> str:
    try:
        properties = npu.get_device_properties(index)
    except RuntimeError as error:
        return f"{NO} it does not answer: {error}"
    return f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB"


def _device_lines(devices: list[str]) -> Iterator[str]:
    """One row for devices next to each other that are alike."""
    for device, alike in itertools.groupby(enumerate(devices), key=lambda each: each[1]):
        indices = [index for index, _ in alike]
        last = f"..{indices[-1]}" if len(indices) > 1 else ""
        yield _line(f"npu:{indices[0]}{last}", device)


def _variable_lines() -> Iterator[str]:
    """Variables that are set; docs/environment.md lists them all."""
    for setting in capability.hccl_environment():
        if setting.value is not None:
            yield _line(setting.name, f"{setting.value} ({setting.origin}, default {setting.default}; {setting.note})")


def _operator_lines() -> Iterator[str]:
    # The builders import deepspeed's, which import torch_npu: where that is broken, the rest is still to be printed.
    package, error = capability.try_import("ds_npu.ops.builders")
    if package is None:
        yield from _answer("DeepSpeed's operators", [f"DeepSpeed's NPU builders cannot be imported: {error}"])
        return
    yield from _counted("DeepSpeed's operators", [(builder.name, builder.why_not()) for builder in _builders()])


def _counted(title: str, rows: list[tuple[str, str | None]]) -> Iterator[str]:
    """How many of ``rows`` can be used, and a row for each of the others with a reason of its own."""
    unavailable = capability.torch_npu_importable()
    wrong = [(name, reason) for name, reason in rows if reason]
    own = [(name, reason) for name, reason in wrong if not unavailable or reason != str(unavailable)]
    see = ", see ds_npu above" if len(own) < len(wrong) else ""
    yield _line(title, f"{NO if wrong else OKAY} {len(rows) - len(wrong)} of {len(rows)}{see}")
    for name, reason in own:
        yield from _answer(name, [reason])


def _feature_lines(features: Iterable[FeatureRow]) -> Iterator[str]:
    rows = list(features)
    usable = [name for name, reasons in rows if not reasons]
    if usable:
        yield from _answer("keys of the section", [], ", ".join(usable))
    for name, reasons in rows:
        if reasons:
            yield from _answer(name, reasons)
