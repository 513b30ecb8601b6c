"""A script that no launcher has started: one process is a world of one rank.

DeepSpeed (0.19.8, comm/comm.py) then asks mpi4py which rank this process is, and ends in a ModuleNotFoundError where
that is not installed.
"""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Mapping, MutableMapping

import torch.distributed as dist

from ds_npu.log import logger

OF_A_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Variables of which every launcher sets at least one: deepspeed, torchrun, accelerate."""
OF_OTHERS = (
    *("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "MV2_COMM_WORLD_SIZE", "HYDI_CONTROL_FD"),
    *("AZUREML_EXPERIMENT_ID", "SM_TRAINING_ENV", "DLTS_JOB_ID"),
)
"""Variables of MPI's launchers and of the services that DeepSpeed knows, which it reads itself."""
HOST = "127.0.0.1"


def no_launcher_started(environ: Mapping[str, str]) -> bool:
    """Whether neither a launcher nor MPI has said in ``environ`` which rank this process is."""
    return not any(name in environ for name in (*OF_A_LAUNCHER, *OF_OTHERS))


def be_the_only_rank(environ: MutableMapping[str, str]) -> None:
    """Set in ``environ`` what a launcher of one rank would set, and say so, where no launcher has started this process.

    Nothing is set where a process group is open, or where mpi4py is installed, which DeepSpeed asks.
    """
    has_mpi = importlib.util.find_spec("mpi4py") is not None
    if dist.is_initialized() or not no_launcher_started(environ) or has_mpi:
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
