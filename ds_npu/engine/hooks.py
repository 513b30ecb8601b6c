"""Replacements for DeepSpeed's names (the factories of ``ds_npu.engine.patches``).

Each takes the original and returns its replacement, which calls the original; without the section in the config, or
without an NPU, the replacement does what the original does.

DeepSpeed's scripts that have no section load this module and nothing else of the engine: what a section needs is
imported where it is needed.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import socket
import sys
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
import torch.distributed as dist

from ds_npu.capability import SUPPORTED, ascend_hardware_present, torch_npu_importable, unsupported
from ds_npu.engine.announcement import announced, with_section
from ds_npu.engine.mpu import WHOLE_ON_EACH_STAGE, mpu_of
from ds_npu.engine.patches import FAILED
from ds_npu.log import logger, warn_once
from ds_npu.plain_engines import note_plain_engine

Function = Callable[..., Any]
OF_A_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Variables of which every launcher sets at least one: deepspeed, torchrun, accelerate."""
OF_OTHERS = (
    *("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "MV2_COMM_WORLD_SIZE", "HYDI_CONTROL_FD"),
    *("AZUREML_EXPERIMENT_ID", "SM_TRAINING_ENV", "DLTS_JOB_ID"),
)
"""Variables of MPI's launchers and of the services that DeepSpeed knows, which it reads itself."""
HOST = "127.0.0.1"


def npu_accelerator(original: type) -> type:
    """Put ds_npu's accelerator over DeepSpeed's, which DeepSpeed imports only where it has chosen NPUs."""
    from ds_npu.accelerator.npu_accelerator import over

    accelerator = over(original)
    _take_over(original, accelerator)
    return accelerator


def _take_over(built_in: type, ours: type) -> None:
    """Replace DeepSpeed's accelerator, if it is a ``built_in``, by an ``ours``, and builders that modules have bound.

    Both are there already where ``import ds_npu`` comes after ``import deepspeed`` on an NPU.
    """
    real: Any = sys.modules.get("deepspeed.accelerator.real_accelerator")
    if real is None or type(real.ds_accelerator) is not built_in:
        return
    chosen: Any = vars(real)["ds_accelerator"]
    accelerator = ours()
    replaced: dict[Any, Any] = {
        chosen.get_op_builder(name): accelerator.get_op_builder(name) for name in chosen.class_dict
    }
    real.set_accelerator(accelerator)
    for name, module in list(sys.modules.items()):
        # Not where DeepSpeed's builders are defined: they are the bases of ours.
        if name.startswith("deepspeed.") and not name.startswith("deepspeed.ops.op_builder.npu"):
            bound = {key: value for key, value in vars(module).items() if key.endswith("Builder") and value in replaced}
            vars(module).update({key: replaced[value] for key, value in bound.items()})
    listed: Any = sys.modules.get("deepspeed.ops.op_builder.all_ops")
    made: dict[str, Any] = listed.ALL_OPS if listed else {}
    made.update({name: replaced[type(each)]() for name, each in made.items() if type(each) in replaced})


def init_distributed(original: Function) -> Function:
    @functools.wraps(original)
    def checked_init_distributed(*args: Any, **kwargs: Any) -> Any:
        config = announced()
        if config is not None and not dist.is_initialized():
            from ds_npu.engine.session import validate

            validate(config)
        if kwargs.get("auto_mpi_discovery", True):
            _be_the_only_rank(config is not None)
        return original(*args, **kwargs)

    return checked_init_distributed


def initialize(original: Function) -> Function:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def checked_initialize(*args: Any, **kwargs: Any) -> Any:
        _refuse_idle_npus()
        given = signature.bind(*args, **kwargs).arguments
        config = with_section(_config_in(given))
        if config is not None:
            if FAILED:
                raise RuntimeError("the config asks for ds_npu, which cannot run here:\n  " + "\n  ".join(FAILED))
            if given.get("mpu") is not None:
                raise ValueError("initialize(mpu=...): found one, and a ds_npu section, which makes its own; pass none")
            warn_of_unsupported_releases()
            from ds_npu.engine.session import validate

            validate(config, _stages(given.get("model")))
        _be_the_only_rank(config is not None)
        return original(*args, **kwargs)

    return checked_initialize


def _be_the_only_rank(has_section: bool) -> None:
    """Make this process a world of one rank, if ds_npu has a part in this run and no launcher has started it."""
    from deepspeed.accelerator import get_accelerator

    if has_section or get_accelerator().device_name() == "npu":
        be_the_only_rank(os.environ)


def be_the_only_rank(environ: MutableMapping[str, str]) -> None:
    """Set in ``environ`` what a launcher of one rank would set, and say so, where no launcher has started this process.

    Nothing is set where a process group is open, or where mpi4py is installed: DeepSpeed (0.19.8, comm/comm.py) asks it
    which rank this process is, and else ends in a ModuleNotFoundError.
    """
    is_started = any(name in environ for name in (*OF_A_LAUNCHER, *OF_OTHERS))
    if dist.is_initialized() or is_started or importlib.util.find_spec("mpi4py") is not None:
        return
    environ.update(dict.fromkeys(("RANK", "LOCAL_RANK"), "0"), WORLD_SIZE="1")
    environ.setdefault("MASTER_ADDR", HOST)
    environ.setdefault("MASTER_PORT", str(_free_port()))
    logger().warning(
        "no launcher has started this process, so it trains alone, as one rank on one device. What to do for more "
        "ranks: deepspeed --num_gpus RANKS SCRIPT, or torchrun --nproc_per_node RANKS SCRIPT"
    )


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])


def warn_of_unsupported_releases() -> None:
    """Warn, once, of packages in this process whose releases were not tested with ds_npu."""
    imported = [name for name in SUPPORTED if name in sys.modules]
    for sentence in unsupported(imported):
        warn_once(
            f"{sentence}: what ds_npu reads of it, or changes in it, may be different there. Compare the first losses "
            "with those of one process, or install a supported release."
        )


def _refuse_idle_npus() -> None:
    """Raise RuntimeError where training would take the CPU although the machine has NPUs, which nobody asked for."""
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() != "cpu" or "DS_ACCELERATOR" in os.environ or not ascend_hardware_present():
        return
    unavailable = torch_npu_importable()
    if unavailable is not None:
        raise RuntimeError(
            f"this machine has Ascend NPUs, and DeepSpeed would train on the CPU: {unavailable} "
            f"DS_ACCELERATOR=cpu alone trains on the CPU on purpose."
        )


def _config_in(given: dict[str, Any]) -> Any:
    """The config where initialize() looks for it: its own arguments, else the parsed command line's."""
    config = given.get("config") or given.get("config_params")
    arguments = given.get("args")
    return config if config is not None or arguments is None else getattr(arguments, "deepspeed_config", None)


def _stages(model: Any) -> int | None:
    """The pipeline ranks of a PipelineModule (a DualPipeVModule has twice as many stages), None for another model."""
    from deepspeed.runtime.pipe.module import PipelineModule

    return int(model.topology().get_dim("pipe")) if isinstance(model, PipelineModule) else None


def deepspeed_config_init(original: Function) -> Function:
    @functools.wraps(original)
    def init(self: Any, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        found = with_section(config)
        self.ds_npu = None
        if found is not None and dist.is_initialized():
            from deepspeed import comm
            from deepspeed.runtime.pipe.topology import PipelineParallelGrid

            from ds_npu.engine.session import open_session

            # Where a script has opened torch's group itself, DeepSpeed would take this rank for the only one.
            if not comm.is_initialized():
                comm.init_distributed()
            stages = mpu.pipe_parallel_size if isinstance(mpu, PipelineParallelGrid) else None
            self.ds_npu = open_session(found, stages)
            # Which axes shard the model does not matter here: only the data axes are asked for.
            mpu = mpu_of(self.ds_npu.topology, WHOLE_ON_EACH_STAGE)
            mesh_device = None
        original(self, config, mpu, mesh_device)

    return init


def engine_new(original: Function) -> Function:
    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("config_class")
        if getattr(config, "ds_npu", None) is not None:
            from ds_npu.engine.engines import ENGINES

            return original(ENGINES.get(cls, cls))
        engine = original(cls)
        note_plain_engine(engine)
        return engine

    return new


def pipeline_grid(original: type) -> Function:
    """A class in DeepSpeed, a function here: it makes the grid that the announced config asks for."""

    @functools.wraps(original, updated=())
    def grid(topology: Any = None, process_group: Any = None) -> Any:
        config = announced()
        if config is None:
            return original(topology=topology, process_group=process_group)
        from ds_npu.engine.session import ContextGrid

        return ContextGrid(config, topology, process_group)

    return grid


def zero_init(original: Function) -> Function:
    @functools.wraps(original)
    def init(self: Any, module: Any = None, data_parallel_group: Any = None, *args: Any, **kwargs: Any) -> None:
        config = with_section(kwargs.get("config_dict_or_path") or kwargs.get("config"))
        _be_the_only_rank(config is not None)
        if config is not None and data_parallel_group is None and dist.is_initialized():
            from ds_npu.engine.session import open_session, use_own_device
            from ds_npu.engine.zero_init import is_transformers_config

            use_own_device()
            topology = open_session(config).topology
            # transformers reads a checkpoint, and draws weights, on global rank 0 alone. Its models are partitioned
            # over all ranks until the engine shards them over tensor ranks.
            if topology.size("tp") == 1 or not is_transformers_config(config):
                data_parallel_group = topology.group("dp", "cp")
        original(self, module, data_parallel_group, *args, **kwargs)

    return init


def zero_init_dtype(original: Function) -> Function:
    @functools.wraps(original)
    def init(
        self: Any,
        enabled: bool = True,
        mem_efficient_linear: bool = True,
        ds_config: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        # DeepSpeed accepts three dtypes here; what it does with them is right for float64, too.
        original(self, enabled, mem_efficient_linear, ds_config, torch.float32 if dtype == torch.float64 else dtype)
        if dtype is not None:
            self.dtype = dtype

    return init


def mask_nan_or_inf_with_val_inplace(original: Function) -> Function:
    @functools.wraps(original)
    def fill(input: torch.Tensor, device: object = None, val: float = -1.0) -> None:
        input.masked_fill_(~input.isfinite(), val)

    return fill


def all_gather_dp_groups(original: Function) -> Function:
    @functools.wraps(original)
    def gather(groups_flat: Any, partitioned_param_groups: Any, *args: Any, **kwargs: Any) -> None:
        from ds_npu.zero_ext.bucketed_zero import OwnParts

        if isinstance(partitioned_param_groups, OwnParts):
            partitioned_param_groups.gather()
        else:
            original(groups_flat, partitioned_param_groups, *args, **kwargs)

    return gather


def installed_cann_path(original: Function) -> Function:
    from ds_npu.engine.report import installed_cann_path as ours

    return functools.wraps(original)(ours)


def report_main(original: Function) -> Function:
    @functools.wraps(original)
    def main(*args: Any, **kwargs: Any) -> None:
        from deepspeed.accelerator import get_accelerator

        from ds_npu.engine.report import feature_report, report, show_installed_operators

        accelerator = get_accelerator()
        if accelerator.device_name() == "npu":
            show_installed_operators()
            with accelerator.describing():
                original(*args, **kwargs)
        else:
            original(*args, **kwargs)
        report(features=feature_report())

    return main
