"""The work of one rank in a window of steps, as a profiler has recorded it, whichever profiler that was."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, NamedTuple

from ds_npu.topology.degrees import Degrees

PRODUCTS, ATTENTION, ELEMENTWISE = "products", "attention", "element-wise and other"
KINDS = (ATTENTION, PRODUCTS, ELEMENTWISE)
"""Kinds of computing; of two at the same time the first one counts."""
ATTENTIONS = re.compile("attention", re.IGNORECASE)
"""Names of operators and kernels that compute attention, of ATen and of CANN."""
PRODUCT_OF_ATEN = re.compile(r"(add|b|badd|_grouped_|_scaled_)?(mm|bmm)|(add)?mv|dot|(mkldnn_)?convolution(_\w+)?")
PRODUCT_OF_CANN = re.compile("matmul|gemm|conv[23]d", re.IGNORECASE)
ENDS = ("send", "recv")
"""Names of the two ends of a message."""
VERSION = 1


class TraceError(ValueError):
    """A profile that cannot be read; the text names the file and what to do."""


class OperatorTensors(NamedTuple):
    """The tensors of one call of an operator: shapes, and the bytes of an element of each."""

    shapes: tuple[tuple[int, ...], ...]
    itemsizes: tuple[int, ...]
    outputs: int = 0
    """How many of them, the last ones, are results; 0: results are not known."""
    is_causal: bool = False


class Operation(NamedTuple):
    """One call of an operator or kernel, with the times in nanoseconds in which it runs itself."""

    name: str
    kind: str
    pieces: tuple[tuple[int, int], ...]
    work: OperatorTensors | None


class CommunicatorCall(NamedTuple):
    """One call of a communicator: a collective, or one end of a message."""

    name: str
    """As ``all_reduce``, or ``send`` and ``recv``."""
    ranks: tuple[int, ...]
    """Global ranks of the communicator; empty where the trace does not say."""
    begun: int
    ended: int


class Scheduled(NamedTuple):
    """The schedule of a pipeline, and the mean part of a batch in which its ranks would wait."""

    name: str
    micro_batches: int
    idle: float


@dataclass(frozen=True)
class Header:
    """A profiled rank: which one of which run, which steps, on what."""

    rank: int
    degrees: Degrees
    steps: tuple[int, int]
    """The first and the last optimizer step."""
    machine: str
    """The machine whose speeds operators are compared with, by its name in ``machines.json``."""
    device: str
    """``cpu`` or the name of the NPU."""
    communicators: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Global ranks of the process groups and of HCCL's communicators, by their names."""
    schedule: Scheduled | None = None
    trace: str = ""
    """The file or folder of the trace, in the folder of the profile."""
    run: str = ""
    """Equal in the files of one run."""
    notes: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """The number of steps."""
        return self.steps[1] - self.steps[0] + 1

    def as_json(self) -> dict[str, Any]:
        """The content of a header's file."""
        return {"ds_npu profile": VERSION, **asdict(self)}


def header_of(content: Mapping[str, Any]) -> Header:
    """The header in a file's content; raises KeyError, TypeError or ValueError where it is none."""
    known = dict(content)
    if known.pop("ds_npu profile") != VERSION:
        raise ValueError("another version of ds_npu has written it")
    known["degrees"] = Degrees(**known["degrees"])
    first, last = known["steps"]
    known["steps"] = (int(first), int(last))
    known["communicators"] = {name: tuple(ranks) for name, ranks in known["communicators"].items()}
    known["schedule"] = None if known["schedule"] is None else Scheduled(*known["schedule"])
    known["notes"] = tuple(known["notes"])
    return Header(**known)


@dataclass(frozen=True)
class RankTrace:
    """All work of a rank between ``begun`` and ``ended``, nanoseconds of one clock."""

    header: Header
    begun: int
    ended: int
    operations: tuple[Operation, ...]
    messages: tuple[CommunicatorCall, ...]
    copies: tuple[tuple[int, int], ...] = ()
    """Times of copies to or from the host."""

    def calls(self) -> Iterator[tuple[CallKey, CommunicatorCall]]:
        """The messages whose ranks are known, each with a key that the call has on all ranks that take part.

        Ranks of a ring send and receive alike: the n-th send of every rank is one call. Of two pipeline stages, both
        ends of a message have one key; in a communicator of more ranks, the other end is not known.
        """
        counts: Counter[tuple[Any, ...]] = Counter()
        stages = {rank: self.header.degrees.coordinates(rank)["pp"] for each in self.messages for rank in each.ranks}
        for each in sorted(self.messages, key=lambda message: message.begun):
            if not each.ranks:
                continue
            key = (each.ranks, each.name, -1)
            if each.name in ENDS and len({stages[rank] for rank in each.ranks}) > 1:
                first = self.header.rank == min(each.ranks)
                ends = (each.ranks, "messages", int(first == (each.name == "send")))
                key = ends if len(each.ranks) == 2 else (each.ranks, each.name, self.header.rank)
            counts[key] += 1
            yield CallKey(*key, counts[key]), each


class CallKey(NamedTuple):
    """The n-th call of a name on a communicator."""

    ranks: tuple[int, ...]
    name: str
    side: int
    """Tells messages between stages apart: which of two ranks sends, or the recording rank; -1 for any other call."""
    number: int


@cache
def kind_of(name: str) -> str:
    """The kind of computing of an operator or kernel, by its name."""
    if ATTENTIONS.search(name):
        return ATTENTION
    namespace, _, own = name.rpartition("::")
    if namespace:
        is_product = PRODUCT_OF_ATEN.fullmatch(own.rstrip("_")) is not None
    else:
        is_product = PRODUCT_OF_CANN.search(name) is not None
    return PRODUCTS if is_product else ELEMENTWISE
