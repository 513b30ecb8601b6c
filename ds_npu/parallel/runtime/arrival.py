"""The values of a weight on their way, which whoever computes with the weight waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ds_npu.comm.pending import Work
from ds_npu.parallel.runtime.tensor_attribute import TensorAttribute


@dataclass(frozen=True)
class Arrival:
    """The messages that one weight waits for, and what it is without them."""

    works: Sequence[Work]
    """The messages that write its values."""
    values: torch.Tensor
    """Its memory."""
    kind: type[nn.Parameter]
    """Its class at other times."""


ARRIVAL = TensorAttribute[Arrival]("ds_npu_arrival")


def arrive(weight: torch.Tensor) -> None:
    """Let the current stream wait for the values of ``weight``, which it has from then on; others have them."""
    arrival = ARRIVAL.get(weight)
    if arrival is None:
        return
    # Each weight of a message waits by itself: the stream of its first reader may be another one.
    for work in arrival.works:
        work.wait()
    with torch._C.DisableTorchFunctionSubclass():
        weight.data = arrival.values
    object.__setattr__(weight, "__class__", arrival.kind)
    # Last, for another thread that reads the weight now.
    ARRIVAL.remove(weight)
