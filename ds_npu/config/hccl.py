"""``ds_npu.hccl``: how HCCL's communicators are opened.

Sources: Ascend/pytorch, docs/zh/developer_notes/distributed/parameter_setting/setting_HCCL_communicator_parameter.md;
CANN 9.0, HcclCommConfig, HCCL_OP_EXPANSION_MODE and HCCL_RDMA_TC.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from ds_npu.capability import BUFFER_SIZE
from ds_npu.config.context_parallel import ContextParallelSection, algorithms
from ds_npu.config.hccl_groups import names_to_set
from ds_npu.config.problems import Problem
from ds_npu.config.section import Section
from ds_npu.topology.degrees import Degrees

MOST_MIB = 2**16
Mib = Annotated[int, Field(ge=1, le=MOST_MIB)]
OpExpansionMode = Literal["host", "ai_cpu", "aiv"]
MODES: dict[OpExpansionMode, int] = {"host": 1, "ai_cpu": 2, "aiv": 3}
"""The number of each mode in HcclCommConfig."""
PAIRS = (
    "communicators of two ranks that send to each other, as in pipelines and rings, take P2P_HCCL_BUFFSIZE and HCCL's "
    "variables from the environment"
)


class QosSection(Section):
    """The priority of messages between nodes, over RDMA."""

    service_level: Annotated[int, Field(ge=0, le=7)] | None = None
    """Service level of messages between nodes, over RDMA; left out: HCCL_RDMA_SL of the environment."""
    traffic_class: Annotated[int, Field(ge=0, le=252, multiple_of=4)] | None = None
    """Traffic class of messages between nodes, over RDMA: 4 times the DSCP; left out: HCCL_RDMA_TC."""


class HcclSection(Section):
    """How HCCL's communicators are opened."""

    buffer_mib: dict[str, Mib] = Field(default={})
    """MiB of each of the two buffers of a communicator, by its name in ds_npu check; left out: its largest message."""
    op_expansion_mode: dict[str, OpExpansionMode] = Field(default={})
    """Unit that runs a communicator's algorithms, by its name in ds_npu check; aiv: one only; left out: by device."""
    qos: QosSection = QosSection()

    def options(self, name: str, buffer_mib: int | None) -> dict[str, int]:
        """The ``hccl_config`` of torch_npu of the communicator ``name``, with buffers of ``buffer_mib`` unless set.

        None leaves the size to the environment.
        """
        mode = self.op_expansion_mode.get(name)
        found = {
            BUFFER_SIZE: self.buffer_mib.get(name, buffer_mib),
            "hccl_op_expansion_mode": None if mode is None else MODES[mode],
            "qos_service_level": self.qos.service_level,
            "qos_traffic_class": self.qos.traffic_class,
        }
        return {key: value for key, value in found.items() if value is not None}


def wrong_names(
    hccl: HcclSection, degrees: Degrees, context: ContextParallelSection, has_matrices: bool
) -> Iterator[Problem]:
    """The names in ``hccl`` that no communicator of the world of ``degrees`` has, key by key.

    ``has_matrices``: the optimizer is Muon.
    """
    known = names_to_set(degrees, algorithms(context, degrees.cp) if degrees.cp > 1 else [], has_matrices)
    by_key: dict[str, dict[str, Any]] = {
        "buffer_mib": {**hccl.buffer_mib},
        "op_expansion_mode": {**hccl.op_expansion_mode},
    }
    for key, values in by_key.items():
        if unknown := {name: value for name, value in values.items() if name not in known}:
            names = f"names of the communicators of {degrees.world_size} ranks: {', '.join(known)}; {PAIRS}"
            accepted = names if known else "left out: one rank has no communicator"
            yield Problem(f"ds_npu.hccl.{key}", unknown, accepted)
