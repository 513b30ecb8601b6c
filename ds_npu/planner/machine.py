"""Speeds of NPUs and their links, for estimates; none of them is measured by ds_npu."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ds_npu.topology.degrees import Degrees

EFFICIENCY = 0.7
"""The part of a link's bandwidth that is reached, as Ascend/msmodeling assumes (``tensor_cast/device.py``)."""


@dataclass(frozen=True)
class Machine:
    """Reached speeds of one rank, in one direction: bytes, FLOPs and seconds."""

    name: str
    node: int
    """Ranks that HCCS connects."""
    port: float
    """Bytes/s to all other ranks of the node together."""
    link: float
    """Bytes/s to one other rank of the node."""
    network: float
    """Bytes/s to ranks of other nodes."""
    attention: float
    """FLOP/s of the attention kernel, forward and backward."""
    memory: float
    """Bytes/s that copies and sums read and write."""
    call: float
    """Seconds that a call of the attention kernel costs however small it is."""
    message: float
    """Seconds that a message or collective costs however small it is."""

    def near(self, degrees: Degrees) -> int:
        """How many consecutive context ranks share a node in every context group; a divisor of their number."""
        if degrees.world_size <= self.node:
            return degrees.cp
        block = math.gcd(degrees.cp * degrees.tp, self.node)
        return block // degrees.tp if block % degrees.tp == 0 else 1

    def seconds(self, near_bytes: float, near_peers: int, far_bytes: float) -> float:
        """Seconds to send to ``near_peers`` ranks of the node and, at the same time, to other nodes."""
        within = near_bytes / min(self.port, self.link * near_peers) if near_peers else 0.0
        return max(within, far_bytes / self.network)


# Sources. Links, HBM and their efficiencies, message: Ascend/msmodeling (Huawei's MindStudio Modeling),
# tensor_cast/device.py at 1e5a50b: A2 196 GB/s one way to the 7 others of a server (a full mesh, so a seventh to each)
# and 25 GB/s to other servers; A3 196 GB/s a die within a super node of 48 * 8 * 2 dies; HBM 1.6 TiB/s, of which 0.6 is
# reached; 10 us a collective. A3's network: Zuo et al. 2025, CloudMatrix384, arXiv:2506.12708: 400 Gbit/s a package of
# two dies. Call: pto-isa's demos/torch_jit/flash_atten, where npu_fusion_attention on a 910B2 took 70 us for any small
# input. Attention: assumed, from the 174 to 190 TFLOP/s that the same page has for its own kernel, forward only, with
# 8192 keys; backward kernels reach less.
A2 = Machine(
    name="A2",
    node=8,
    port=196e9 * EFFICIENCY,
    link=28e9 * EFFICIENCY,
    network=25e9 * EFFICIENCY,
    attention=150e12,
    memory=1.6 * 2**40 * 0.6,
    call=70e-6,
    message=10e-6,
)
A3 = Machine(
    name="A3",
    node=768,
    port=196e9 * EFFICIENCY,
    link=196e9 * EFFICIENCY,
    network=25e9 * EFFICIENCY,
    attention=150e12,
    memory=1.6 * 2**40 * 0.6,
    call=70e-6,
    message=10e-6,
)
MACHINES = {machine.name: machine for machine in (A2, A3)}


def machine_of(device_name: str) -> Machine:
    """The Machine of an NPU by its name in torch_npu; A2 for an unknown one. Source: CANN, names of A3 chips."""
    return A3 if device_name.startswith("Ascend910_93") else A2
