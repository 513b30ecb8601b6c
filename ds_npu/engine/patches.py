"""The one table of what ds_npu changes in DeepSpeed, and around it, each with its reason and its way out.

A patch names what it replaces and a factory ``(original) -> replacement``. It is applied when the module it names
has been executed. Where what it replaces has not the parameters it expects, nothing is replaced; ``FAILED`` says
so, and a config that asks for ds_npu is then refused (``ds_npu.engine.hooks.initialize``).
"""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType
from typing import Any

from ds_npu.capability import SUPPORTED, installed_release
from ds_npu.engine.clients.client_patches import CLIENT_PATCHES, Patch
from ds_npu.log import warn_once

FULL_VALUES = {
    "safe_get_full_fp32_param": ("getting_full", ("param",)),
    "safe_get_full_optimizer_state": ("getting_full", ("param", "optim_state_key")),
    "safe_get_full_grad": ("getting_full", ("param",)),
    "safe_set_full_fp32_param": ("setting_full", ("param", "value")),
    "safe_set_full_optimizer_state": ("setting_full", ("param", "value", "optim_state_key")),
    "safe_set_full_grad": ("setting_full", ("param", "value")),
    "safe_update_full_grad_vectorized": ("updating_full", ("param_list", "update_func")),
}
"""Functions of deepspeed.utils, each with the factory of its replacement and its parameters."""

PATCHES: tuple[Patch, ...] = (
    Patch(
        module="deepspeed.accelerator.npu_accelerator",
        name="NPU_Accelerator",
        factory="ds_npu.engine.hooks:npu_accelerator",
        parameters=(),
        what="the accelerator that DeepSpeed makes where torch_npu is installed is ds_npu's",
        why="op builders are bound while deepspeed is imported, so set_accelerator() always comes too late",
        upstream="accelerator/real_accelerator.py:233 and :23, a closed list of names without entry points",
        until="DeepSpeed takes accelerators from an entry point",
    ),
    Patch(
        module="deepspeed.comm.comm",
        name="init_distributed",
        factory="ds_npu.engine.hooks:init_distributed",
        parameters=("dist_backend",),
        what="a config announced on the command line is checked before a process group is opened; without a launcher "
        "this process becomes the only rank",
        why="a script that opens the group itself would learn of a mistake only after every rank has connected; "
        "without a launcher and mpi4py it ends in a ModuleNotFoundError",
        upstream="comm/comm.py:init_distributed takes no config that reaches third parties",
        until="DeepSpeed validates its config before init_distributed",
        also=("deepspeed:init_distributed", "deepspeed.comm:init_distributed"),
    ),
    Patch(
        module="deepspeed.comm.torch",
        name="TorchBackend.__init__",
        factory="ds_npu.engine.shared_memory:remove_names",
        parameters=("self", "backend", "timeout", "init_method"),
        what="the files of DeepSpeed's shared memory (CPU only) lose their names once every rank has mapped them",
        why="it leaves 69 MB in /dev/shm for each rank and run, until nothing more fits",
        upstream="comm/torch.py:220; ops/csrc/cpu/comm/shm.cpp opens them and never calls its shared_close",
        until="DeepSpeed unlinks what it has mapped",
    ),
    Patch(
        module="deepspeed",
        name="initialize",
        factory="ds_npu.engine.hooks:initialize",
        parameters=("args", "model"),
        what="the config given to initialize() is checked before a process group is opened",
        why="unknown top-level keys, ds_npu's section among them, are ignored by DeepSpeed",
        upstream="runtime/config.py: no hook for a third party's section",
        until="DeepSpeed lets a plugin own a config section",
    ),
    Patch(
        module="deepspeed.runtime.config",
        name="DeepSpeedConfig.__init__",
        factory="ds_npu.engine.hooks:deepspeed_config_init",
        parameters=("self", "config", "mpu", "mesh_device"),
        what="a config with the section gets the topology's mpu",
        why="batch arithmetic and ZeRO sharding are derived here, before an engine exists",
        upstream="runtime/config.py:456 takes the world size from the mpu or from the whole world",
        until="DeepSpeedConfig accepts a topology provider",
    ),
    Patch(
        module="deepspeed.runtime.engine",
        name="DeepSpeedEngine.__new__",
        factory="ds_npu.engine.hooks:engine_new",
        parameters=("args", "kwargs"),  # object's: one of DeepSpeed's own would have cls first
        what="making an engine from a config with the section makes ds_npu's subclass of it",
        why="initialize() names the engine classes itself; rebinding the names breaks their super() calls",
        upstream="deepspeed/__init__.py:560 and runtime/engine.py:527",
        until="initialize() accepts an engine class",
    ),
    Patch(
        module="deepspeed.runtime.pipe.module",
        name="PipelineParallelGrid",
        factory="ds_npu.engine.hooks:pipeline_grid",
        parameters=("topology", "process_group"),
        what="a PipelineModule's grid knows the context axis",
        why="PipelineModule makes its groups in its constructor and accepts no mpu",
        upstream="runtime/pipe/module.py:183; deepspeed/__init__.py:582 asserts mpu is None",
        until="PipelineModule accepts a grid",
    ),
    Patch(
        module="deepspeed.runtime.zero.partition_parameters",
        name="Init.__init__",
        factory="ds_npu.engine.hooks:zero_init",
        parameters=("self", "module", "data_parallel_group"),
        what="zero.Init with the section shards over dp x cp",
        why="left alone it shards over the whole world, tensor and pipeline peers included",
        upstream="runtime/zero/partition_parameters.py, data_parallel_group=None",
        until="zero.Init takes its group from the mpu",
    ),
    Patch(
        module="deepspeed.runtime.zero.partition_parameters",
        name="InsertPostInitMethodToModuleSubClasses.__init__",
        factory="ds_npu.engine.hooks:zero_init_dtype",
        parameters=("self", "enabled", "mem_efficient_linear", "ds_config", "dtype"),
        what="zero.Init has the dtype it is given, float64 too, whatever the accelerator supports",
        why="with fp16 support (NPUs, some CPUs) it refuses float64; without, it holds weights on NVMe in bf16",
        upstream="runtime/zero/partition_parameters.py:409, an `or` that binds before its `if`",
        until="fixed upstream",
    ),
    Patch(
        module="deepspeed.env_report",
        name="installed_cann_path",
        factory="ds_npu.engine.hooks:installed_cann_path",
        parameters=(),
        what="ds_report survives a shell without ASCEND_HOME_PATH",
        why="an `or` where `and` is meant raises KeyError",
        upstream="env_report.py:79",
        until="fixed upstream",
    ),
    Patch(
        module="deepspeed.env_report",
        name="main",
        factory="ds_npu.engine.hooks:report_main",
        parameters=("hide_operator_status", "hide_errors_and_warnings"),
        what="ds_report ends with ds_npu's part, and its column `installed` is right on an NPU",
        why="it has no hook for plugins, and a wheel of DeepSpeed says that it was built for the CPU",
        upstream="env_report.py:main, :53",
        until="ds_report calls plugins",
    ),
    Patch(
        module="deepspeed.runtime.utils",
        name="mask_nan_or_inf_with_val_inplace",
        factory="ds_npu.engine.hooks:mask_nan_or_inf_with_val_inplace",
        parameters=("input", "device", "val"),
        what="-1 in place of a norm that is not finite is filled in by the device",
        why="it is copied there from the host, which waits for the device in each step",
        upstream="runtime/utils.py:883",
        until="it fills in the number",
        also=tuple(
            f"deepspeed.runtime.zero.{each}:mask_nan_or_inf_with_val_inplace" for each in ("stage3", "stage_1_and_2")
        ),
    ),
    Patch(
        module="deepspeed.runtime.utils",
        name="all_gather_dp_groups",
        factory="ds_npu.engine.hooks:all_gather_dp_groups",
        parameters=("groups_flat", "partitioned_param_groups", "dp_process_group"),
        what="partitions that are parts of buckets are gathered bucket by bucket",
        why="a partition is gathered as one contiguous part of the weights, and the step waits for it",
        upstream="runtime/utils.py:1019, called by runtime/zero/stage_1_and_2.py:3157",
        until="DeepSpeed's partitions are parts of buckets",
        also=("deepspeed.runtime.zero.stage_1_and_2:all_gather_dp_groups",),
    ),
    *(
        Patch(
            module="deepspeed.utils.tensor_fragment",
            name=name,
            factory=f"ds_npu.engine.checkpoints.full_values:{factory}",
            parameters=parameters,
            what="of a weight over tensor or expert ranks the whole is read and written",
            why="it would be one rank's shard, under a name that says full",
            upstream="utils/tensor_fragment.py gathers what ZeRO has partitioned and knows no other axis",
            until="its readers ask a weight for its placement",
            also=(f"deepspeed.utils:{name}",),
        )
        for name, (factory, parameters) in FULL_VALUES.items()
    ),
    *CLIENT_PATCHES,
)

FAILED: list[str] = []
"""Why patches were not applied in this process."""


def apply(module: ModuleType) -> None:
    """Apply the patches of ``module``, which has just been executed (or was, before ds_npu came). Never raises."""
    for patch in PATCHES:
        if patch.module == module.__name__:
            _apply(patch, module)


def _apply(patch: Patch, module: ModuleType) -> None:
    package = patch.module.partition(".")[0]
    here = installed_release(package) or "of an unknown release"
    *classes, leaf = patch.name.split(".")
    owner = _attribute(module, classes)
    default = object.__new__ if leaf == "__new__" and owner is not None else None
    original = _attribute(module, [*classes, leaf]) or default
    function = _attribute(module, [*classes, leaf, patch.parameters_of]) if patch.parameters_of else original
    found = None if function is None else tuple(inspect.signature(function).parameters)
    if found is None or found[: len(patch.parameters)] != patch.parameters:
        reason = (
            f"{patch.target} begins with the parameters {patch.parameters} in the releases that ds_npu supports "
            f"({package} {SUPPORTED[package]}); in {package} {here} it "
            f"{'does not exist' if found is None else f'has {found}'}"
        )
        if patch.optional:
            return
        FAILED.append(reason)
        warn_once(f"a change that ds_npu needs was not made: {reason}. Install a supported one.")
        return
    module_name, _, factory = patch.factory.partition(":")
    replacement = vars(importlib.import_module(module_name))[factory](original)
    setattr(owner, leaf, replacement)
    for copy in patch.also:
        copy_module, _, name = copy.partition(":")
        holder = sys.modules.get(copy_module)
        if holder is not None and vars(holder).get(name) is original:
            setattr(holder, name, replacement)


def _attribute(module: ModuleType, path: list[str]) -> Any:
    """The attribute at ``path`` in ``module``, through classes; None if there is none."""
    found: Any = module
    for part in path:
        found = None if found is None else vars(found).get(part)
    return found
