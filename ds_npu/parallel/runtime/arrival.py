"""Pending messages that write the values of a weight; code that computes with the weight waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ds_npu.comm.pending import Work
from ds_npu.parallel.runtime.tensor_attribute import TensorAttribute


@dataclass(frozen=True)
class Arrival:
    """The pending messages of one weight, and the memory and class that ``arrive`` gives back to it."""

    works: Sequence[Work]
    """The messages that write ``values``."""
    values: torch.Tensor
    """The memory of the weight."""
    kind: type[nn.Parameter]
    """The weight's class while nothing is pending."""


ARRIVAL = TensorAttribute[Arrival]("ds_npu_arrival")


def arrive(weight: torch.Tensor) -> None:
    """Let the current stream wait for pending values of ``weight``.

    Then restore the weight's memory and class. A weight without an Arrival does not change.
    """
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
