"""The one table of what ds_npu changes in DeepSpeed, and around it, each with its reason and its way out.

A patch names what it replaces and a factory ``(original) -> replacement``. It is applied when the module it names
has been executed. Where what it replaces has not the parameters it expects, nothing is replaced; ``FAILED`` says
so, and a config that asks for ds_npu is then refused (``ds_npu.engine.hooks.initialize``).
"""

from __future__ import annotations

import importlib
import inspect
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from packaging.version import Version

from ds_npu.capability import SUPPORTED, installed_version
from ds_npu.log import warn_once


@dataclass(frozen=True)
class Patch:
    """One name of DeepSpeed, accelerate or transformers that ds_npu replaces."""

    module: str
    name: str
    """Attribute path in ``module``, as ``DeepSpeedConfig.__init__``."""
    factory: str
    """``module:function`` of ds_npu, called with the original, returning what replaces it."""
    parameters: tuple[str, ...]
    """What the original's parameters must begin with."""
    what: str
    why: str
    upstream: str
    until: str
    since: str = ""
    """The first release of the package that has it ("": all that are supported); before, nothing is to be changed."""
    also: tuple[str, ...] = ()
    """``module:name`` of copies that ``from ... import`` made, for an ``import ds_npu`` after ``import deepspeed``."""

    @property
    def target(self) -> str:
        return f"{self.module}.{self.name}"


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
        what="a config announced on the command line is checked before a process group is opened",
        why="a script that opens the group itself would learn of a mistake only after every rank has connected",
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
        module="accelerate.data_loader",
        name="prepare_data_loader",
        factory="ds_npu.engine.accelerate:prepare_data_loader",
        parameters=("dataloader", "device", "num_processes", "process_index"),
        what="accelerate's loaders, the Hugging Face Trainer's too, give ranks that share samples the same ones",
        why="it counts every process as a data rank, but for those that DeepSpeed's own autotp_size names",
        upstream="accelerate/data_loader.py:1129 (1.15.0)",
        until="accelerate asks DeepSpeed's mpu for data ranks",
        also=("accelerate.accelerator:prepare_data_loader",),
    ),
    Patch(
        module="accelerate.accelerator",
        name="Accelerator._prepare_deepspeed",
        factory="ds_npu.engine.accelerate:count_data_ranks",
        parameters=("self", "args"),
        what="the batch size and the length of the schedule that accelerate fills in are those of the data ranks",
        why="it counts every process as a data rank",
        upstream="accelerate/accelerator.py, Accelerator._prepare_deepspeed (1.15.0)",
        until="accelerate asks DeepSpeed's mpu for data ranks",
    ),
    Patch(
        module="accelerate.scheduler",
        name="AcceleratedScheduler.step",
        factory="ds_npu.engine.accelerate:count_data_ranks",
        parameters=("self",),
        what="a script's own schedule goes on by as many steps as there are data ranks",
        why="it steps once for each process, as if each of them had had other samples",
        upstream="accelerate/scheduler.py, AcceleratedScheduler.step (1.15.0)",
        until="accelerate asks DeepSpeed's mpu for data ranks",
    ),
    Patch(
        module="accelerate.accelerator",
        name="Accelerator.gather_for_metrics",
        factory="ds_npu.engine.accelerate:gather_for_metrics",
        parameters=("self", "input_data"),
        what="what is gathered of evaluated samples has each of them once",
        why="it joins what every process has, and ranks that share samples have the same",
        upstream="accelerate/accelerator.py, Accelerator.gather_for_metrics (1.15.0)",
        until="accelerate asks DeepSpeed's mpu for data ranks",
    ),
    Patch(
        module="accelerate.accelerator",
        name="Accelerator.get_state_dict",
        factory="ds_npu.engine.accelerate:get_state_dict",
        parameters=("self", "model"),
        what="of a model sharded over tensor ranks accelerate and the Hugging Face Trainer save whole weights",
        why="it takes the module's own state dict, which is one rank's part, but for DeepSpeed's own autotp_size",
        upstream="accelerate/accelerator.py:4070 (1.15.0)",
        until="accelerate asks the engine for its weights",
    ),
    Patch(
        module="accelerate.parallelism_config",
        name="ParallelismConfig._validate_accelerator",
        factory="ds_npu.engine.accelerate:validate_parallelism",
        parameters=("self", "accelerator"),
        what="accelerate's own tensor and sequence parallelism beside the section's is refused by name",
        why="both would distribute one model; left alone it ends in an error about numbers of processes, or in none",
        upstream="accelerate/parallelism_config.py, ParallelismConfig._validate_accelerator (1.15.0)",
        until="accelerate asks DeepSpeed's mpu for the grid",
    ),
    Patch(
        module="transformers.integrations.deepspeed",
        name="HfTrainerDeepSpeedConfig.trainer_config_process",
        factory="ds_npu.engine.accelerate:fill_in_for_data_ranks",
        parameters=("self", "args"),
        what="the train_batch_size that the Hugging Face Trainer fills in, or compares, is that of the data ranks",
        why="it counts every process as a data rank",
        upstream="transformers/integrations/deepspeed.py, trainer_config_process (5.23.0)",
        until="transformers asks DeepSpeed's mpu for data ranks",
    ),
    Patch(
        module="transformers.trainer",
        name="Trainer.get_total_train_batch_size",
        factory="ds_npu.engine.accelerate:count_data_ranks",
        parameters=("self", "args"),
        what="the Trainer logs the batch size, and the samples per second, of the data ranks",
        why="it counts every process as a data rank, but for those that DeepSpeed's own autotp_size names",
        upstream="transformers/trainer.py, Trainer.get_total_train_batch_size (5.23.0)",
        until="transformers asks DeepSpeed's mpu for data ranks",
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
)

UNKNOWN = "of an unknown release"
FAILED: list[str] = []
"""Why patches were not applied in this process."""


def apply(module: ModuleType) -> None:
    """Apply the patches of ``module``, which has just been executed (or was, before ds_npu came). Never raises."""
    for patch in PATCHES:
        if patch.module == module.__name__:
            _apply(patch, module)


def _apply(patch: Patch, module: ModuleType) -> None:
    package = patch.module.partition(".")[0]
    here = installed_version(package) or UNKNOWN
    if _comes_later(patch, here):
        return
    owner, leaf = _owner(module, patch.name)
    default = object.__new__ if leaf == "__new__" else None
    original = None if owner is None else vars(owner).get(leaf, default)
    found = None if original is None else tuple(inspect.signature(original).parameters)
    if found is None or found[: len(patch.parameters)] != patch.parameters:
        reason = (
            f"{patch.target} begins with the parameters {patch.parameters} in the releases that ds_npu supports "
            f"({package} {SUPPORTED[package]}); in {package} {here} it "
            f"{'does not exist' if found is None else f'has {found}'}"
        )
        FAILED.append(reason)
        warn_once(f"a change that ds_npu needs was not made: {reason}. Install a supported one.")
        return
    module_name, _, function = patch.factory.partition(":")
    replacement = vars(importlib.import_module(module_name))[function](original)
    setattr(owner, leaf, replacement)
    for copy in patch.also:
        copy_module, _, name = copy.partition(":")
        holder = sys.modules.get(copy_module)
        if holder is not None and vars(holder).get(name) is original:
            setattr(holder, name, replacement)


def _comes_later(patch: Patch, here: str) -> bool:
    """Whether what ``patch`` replaces is not yet in the installed release ``here``."""
    return patch.since != "" and here != UNKNOWN and Version(here) < Version(patch.since)


def _owner(module: ModuleType, name: str) -> tuple[Any, str]:
    """The module or class that holds ``name`` (None: there is none), and the last part of it."""
    *classes, leaf = name.split(".")
    owner: Any = module
    for part in classes:
        owner = None if owner is None else vars(owner).get(part)
    return owner, leaf
