"""Whether torch_npu can be imported and sees a device, and if not, why. Only here may an import fail quietly."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from packaging.requirements import Requirement
from packaging.version import Version

from ds_npu.capability.releases import SOURCE_CANN, Unavailable, installed_version

DEV = Path("/dev")
BUFFER_SIZE = "hccl_buffer_size"
"""The key of torch_npu's ``hccl_config`` for the size of a communicator's buffers, in MiB."""
VISIBLE_DEVICES = "ASCEND_RT_VISIBLE_DEVICES"
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


@dataclass(frozen=True)
class TorchNpuState:
    """Whether torch_npu can be used here. ``reason`` and ``advice`` are empty when ``usable``."""

    installed: bool
    version: str | None
    usable: bool
    reason: str = ""
    advice: str = ""


DRY_RUN = "DS_NPU_SIM_DRY"
"""The variable that ``ds_npu sim --dry`` sets."""


def try_import(name: str) -> tuple[ModuleType | None, Exception | None]:
    """The module ``name``, or the error its import ended in."""
    try:
        return importlib.import_module(name), None
    except Exception as error:
        return None, error


@functools.lru_cache(maxsize=1)
def _torch_npu() -> tuple[Any, Exception | None]:
    # The answer is kept: importing torch_npu again after a failure ends in a different, misleading error.
    module, error = try_import("torch_npu")
    return module, _failures[0] if error and _failures else error


_failures: list[Exception] = []


def remember_failure(error: Exception) -> None:
    """Report ``error`` as the reason why torch_npu cannot be imported, whatever a later import fails with."""
    _failures.append(error)


def torch_npu_path() -> Path | None:
    """The folder of torch_npu's files, None where it cannot be imported."""
    module, _ = _torch_npu()
    return Path(str(module.__file__)).parent if module and module.__file__ else None


def torch_npu_importable() -> Unavailable | None:
    """None if ``import torch_npu`` succeeds, else why it does not; whether there is a device is not asked."""
    if "torch_npu" not in sys.modules and importlib.util.find_spec("torch_npu") is None:
        return Unavailable(
            "torch_npu is not installed", "install the torch_npu that matches torch, as pip install torch_npu"
        )
    module, error = _torch_npu()
    return None if module else _import_failure(error or ImportError("torch_npu"))


def torch_npu_state() -> TorchNpuState:
    """Import torch_npu and ask it for devices, which starts the Ascend runtime of this process."""
    version = installed_version("torch_npu")
    why = torch_npu_importable()
    if why:
        installed = version is not None or why.reason != "torch_npu is not installed"
        return TorchNpuState(installed, version, False, why.reason, why.advice)
    module, _ = _torch_npu()
    version = version or str(module.__version__)
    why = None if module.npu.device_count() > 0 else (hidden_devices() or _SILENT_DRIVER)
    return TorchNpuState(True, version, not why, why.reason if why else "", why.advice if why else "")


def missing_functions(names: Sequence[str]) -> Unavailable | None:
    """Why torch_npu, which can be imported, has not all of the functions ``names``; None if it has."""
    module, _ = _torch_npu()
    absent = [name for name in names if not hasattr(module, name)]
    if not absent:
        return None
    version = installed_version("torch_npu")
    return Unavailable(f"torch_npu {version} has no {', '.join(absent)}", "install the newest torch_npu for this torch")


def use_cpu() -> str:
    """Advice for running on the CPU on purpose.

    To set ``DS_ACCELERATOR``, and to let ds_npu's start-up line see to it that an unusable torch_npu counts as not
    installed; where both are done already, to uninstall torch_npu.
    """
    ways = ["set DS_ACCELERATOR=cpu"] if os.environ.get("DS_ACCELERATOR") != "cpu" else []
    ways += [f"unset {AUTOLOAD}"] if os.environ.get(AUTOLOAD) == "0" else []
    if ways:
        return f"{' and '.join(ways)} to run on the CPU on purpose"
    return (
        "uninstall torch_npu to run on the CPU on purpose: DS_ACCELERATOR=cpu is set, and keeps DeepSpeed from "
        "importing it, but the script or a library does so itself"
    )


def ascend_hardware_present() -> bool:
    """Whether the Ascend driver has made device nodes here; asks the file system only."""
    return (DEV / "davinci_manager").exists() or any(DEV.glob("davinci[0-9]*"))


def is_dry_run() -> bool:
    """Whether this is a dry run on simulated NPUs (``ds_npu sim --dry``), which computes no floating-point numbers."""
    return bool(os.environ.get(DRY_RUN))


def hidden_devices() -> Unavailable | None:
    """Why no device can be seen, as far as /dev and the environment tell; the Ascend runtime is not started."""
    visible = os.environ.get(VISIBLE_DEVICES)
    if visible is not None and not re.match(r"\d", visible):
        return Unavailable(
            f"{VISIBLE_DEVICES}={visible!r} names no device, which hides every NPU from this process",
            f"unset it, or list device numbers, as {VISIBLE_DEVICES}=0,1",
        )
    if not ascend_hardware_present():
        return Unavailable(
            "no NPU: there is neither /dev/davinci* nor /dev/davinci_manager, so the Ascend driver is not loaded, or "
            "this container was started without its devices",
            f"install the driver (npu-smi info must list NPUs), pass --device=/dev/davinci0 to docker, or {use_cpu()}",
        )
    present = {int(node.name[7:]) for node in DEV.glob("davinci[0-9]*") if node.name[7:].isdigit()}
    unknown = sorted({int(number) for number in re.findall(r"\d+", visible or "")} - present)
    if present and unknown:
        return Unavailable(
            f"{VISIBLE_DEVICES}={visible!r} names device {unknown[0]}, and this machine has {sorted(present)}",
            f"list numbers out of {sorted(present)} in {VISIBLE_DEVICES}, ascending",
        )
    return None


def missing_devices() -> Unavailable | None:
    """``hidden_devices``, unless the runtime sees a device all the same (a simulated one has no node in /dev).

    Where there are nodes the runtime is left alone: started here, it could not be used after a fork.
    """
    why = hidden_devices()
    module, _ = _torch_npu() if why else (None, None)
    return None if module and module.npu.device_count() > 0 else why


def current_npu() -> int | None:
    """The NPU that this process has made current, by set_device or by using one; None before that. Opens none."""
    index = int(_torch_npu()[0]._C._npu_getDeviceWithoutSet())
    return None if index < 0 else index


_SILENT_DRIVER = Unavailable(
    "torch_npu sees no NPU although the driver's nodes are in /dev",
    "run npu-smi info: the NPUs may be taken by another container, unhealthy, or closed to this user",
)

# Known error texts, in the order of the search: (pattern, reason, advice); {0} is the first group, {cpu} tells how to
# run without NPUs, {other} how to use another accelerator.
_IMPORT_FAILURES: tuple[tuple[str, str, str], ...] = (
    (
        r"Two accelerators cannot be used.*?npu and (\w+)",
        "torch was built for another accelerator ({0}), and one process cannot use two",
        "install the CPU build of torch next to torch_npu, or {other} to stay with {0}",
    ),
    (
        r"(lib(?:ascend_hal|drv\w*|dcmi)\.so[\w.]*): cannot open shared object",
        "{0} belongs to the Ascend driver, which is not installed or not on LD_LIBRARY_PATH",
        "install the driver, or mount /usr/local/Ascend/driver into the container and "
        "add its lib64/driver and lib64/common to LD_LIBRARY_PATH",
    ),
    (
        r"(lib(?:torch|c10)\w*\.so[\w.]*): cannot open shared object",
        "{0} belongs to torch, and the torch installed here does not have it",
        "install the torch that this torch_npu was built for (pip install torch_npu picks it)",
    ),
    (
        r"(lib[\w+-]+\.so[\w.]*): cannot open shared object",
        "{0} was not found; it comes with CANN, which is not installed or whose environment is not set",
        SOURCE_CANN + ", or {cpu}",
    ),
    (
        r"undefined symbol: (\w*(?:c10|2at|5torch|torch)\w*)",
        "torch_npu needs a function ({0}) that the installed torch does not have: it was built for another torch",
        "install torch and torch_npu of the same version, as pip install torch==2.12.0 torch_npu==2.12.0",
    ),
    (
        r"undefined symbol: (\w+)",
        "torch_npu needs a function ({0}) that the installed CANN or driver does not have: they are of another release",
        "install the CANN that this torch_npu is listed with (ds_report prints the pair), then " + SOURCE_CANN,
    ),
    (
        r"version [`'](GLIBC\w*_[\d.]+)' not found",
        "this system's C or C++ library is older than torch_npu needs ({0})",
        "use the container image of CANN, or a newer system",
    ),
    (
        r"No module named '([\w.]+)'",
        "the Python module {0}, which torch_npu imports, is not installed",
        "install it with pip; where it is CANN's own (tbe, te, acl), " + SOURCE_CANN,
    ),
)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    # torch wraps what an autoloaded backend raised, so the telling error is often the cause.
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _import_failure(error: BaseException) -> Unavailable:
    torch = installed_version("torch")
    wanted = _wanted_torch()
    if torch and wanted and not wanted.specifier.contains(Version(torch).public, prereleases=True):
        return Unavailable(
            f"torch_npu {installed_version('torch_npu')} was built for {wanted} and found torch {torch}",
            f'install the matching torch, as pip install "{wanted}", or the torch_npu of torch {torch}',
        )
    texts = [str(link) for link in _chain(error)]
    for pattern, reason, advice in _IMPORT_FAILURES:
        for match in filter(None, (re.search(pattern, text, re.DOTALL) for text in texts)):
            off = os.environ.get(AUTOLOAD) == "0"
            ways = {"cpu": use_cpu(), "other": "uninstall it" if off else f"set {AUTOLOAD}=0"}
            return Unavailable(reason.format(*match.groups()), advice.format(*match.groups(), **ways))
    return Unavailable(
        f"importing torch_npu ended in {type(error).__name__}: {texts[-1].strip() or 'no message'}",
        f"run python -c 'import torch, torch_npu' to see all of it; {SOURCE_CANN}, or {use_cpu()}",
    )


def _wanted_torch() -> Requirement | None:
    if installed_version("torch_npu") is None:
        return None
    wanted = [Requirement(line) for line in importlib.metadata.requires("torch_npu") or ()]
    return next((each for each in wanted if each.name == "torch"), None)


def explain(error: BaseException) -> str:
    """One paragraph about an ``error`` of importing torch_npu: what, why, what to do. Nothing is imported."""
    version = installed_version("torch_npu")
    message = str(list(_chain(error))[-1]).strip().split("\n")[0]
    return f"torch_npu {version or '(no version)'} cannot be imported ({message}): {_import_failure(error)}"


def hccl_options(config: Mapping[str, int]) -> object | None:
    """Options of a process group with ``config`` as its ``hccl_config``; None where torch_npu cannot be used.

    HCCL holds two buffers of ``hccl_buffer_size`` MiB per communicator, one for sending and one for receiving. Pass the
    result as ``pg_options`` of ``torch.distributed.new_group``. Source: Ascend/pytorch,
    docs/zh/developer_notes/distributed/parameter_setting/setting_HCCL_communicator_parameter.md.
    Raises ValueError for a size below 1 MiB.
    """
    mib = config.get(BUFFER_SIZE, 1)
    if mib < 1:
        raise ValueError(f"an HCCL buffer of {mib} MiB was asked for; it needs at least 1 MiB")
    if not torch_npu_state().usable:
        return None
    options = _torch_npu()[0]._C._distributed_c10d.ProcessGroupHCCL.Options()
    options.hccl_config = {**config}
    return cast(object, options)


def npu_profiler() -> Any | None:
    """The module ``torch_npu.profiler``; None where torch_npu cannot be imported."""
    return None if torch_npu_importable() else _torch_npu()[0].profiler


def range_marker() -> Any | None:
    """torch_npu's ``mstx`` (named ranges in a profile), None where torch_npu cannot be imported."""
    return None if torch_npu_importable() else getattr(_torch_npu()[0].npu, "mstx", None)
