"""Versions and devices of this machine: torch_npu, CANN, the driver, NPUs, and whether they go together.

It imports neither torch nor torch_npu until asked. Every answer that is "no" is an Unavailable: a reason and an advice.
"""

from ds_npu.capability.releases import (
    SUPPORTED,
    Unavailable,
    Versions,
    cann_home,
    cann_version,
    installed_release,
    installed_version,
    mismatches,
    missing_cann,
    unsupported,
    versions,
)
from ds_npu.capability.runtime import (
    VISIBLE_DEVICES,
    TorchNpuState,
    ascend_hardware_present,
    current_npu,
    explain,
    hccl_options,
    hidden_devices,
    missing_devices,
    missing_functions,
    range_marker,
    remember_failure,
    torch_npu_importable,
    torch_npu_path,
    torch_npu_state,
    try_import,
)
from ds_npu.capability.settings import DEFAULTS_MARK, SETTINGS, Setting, hccl_environment

__all__ = [
    "DEFAULTS_MARK",
    "SETTINGS",
    "SUPPORTED",
    "VISIBLE_DEVICES",
    "Setting",
    "TorchNpuState",
    "Unavailable",
    "Versions",
    "ascend_hardware_present",
    "cann_home",
    "cann_version",
    "current_npu",
    "explain",
    "hccl_environment",
    "hccl_options",
    "hidden_devices",
    "installed_release",
    "installed_version",
    "mismatches",
    "missing_cann",
    "missing_devices",
    "missing_functions",
    "range_marker",
    "remember_failure",
    "torch_npu_importable",
    "torch_npu_path",
    "torch_npu_state",
    "try_import",
    "unsupported",
    "versions",
]
