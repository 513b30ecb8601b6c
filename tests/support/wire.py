"""What a computation sends to other ranks and how much memory it takes, counted below torch's own interfaces."""

from __future__ import annotations

import weakref
from collections import Counter
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_npu.comm.pending import Pending

KINDS = {
    "send": "send",
    "alltoall_base_": "exchange",
    "_allgather_base_": "gather",
    "_reduce_scatter_base_": "scatter",
}


class Wire(TorchDispatchMode):
    """The messages sent while it is entered: (collective, bytes of this rank's tensors).

    ``leaving`` are the bytes that another rank must get of this one, however they are brought there, by kind (one of
    ``KINDS``, with the tag of what goes from one rank to another) and the global rank of the other. All-reduces are not
    among them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, int]] = []
        self.leaving: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, torch.Tensor)]
            self.sent.append((func._opname, sum(tensor.nbytes for tensor in tensors)))
            if func._opname in KINDS:
                kind, sizes = _to_ranks(func._opname, args)
                self.leaving.update({(kind, to): size for to, size in sizes.items() if to != dist.get_rank()})
        return func(*args, **(kwargs or {}))


def _to_ranks(name: str, args: tuple) -> tuple[str, dict[int, int]]:
    """The kind of a message and the bytes for each global rank."""
    tensors, group = (args[0], args[1]) if name == "send" else ([args[1]], args[2])
    ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))
    whole = sum(tensor.nbytes for tensor in tensors)
    if name == "send":
        return f"{KINDS[name]} {args[3]}", {ranks[args[2]]: whole}
    if name == "alltoall_base_" and args[4]:
        row = whole // max(tensors[0].shape[0], 1)
        return KINDS[name], {to: row * rows for to, rows in zip(ranks, args[4], strict=True)}
    return KINDS[name], dict.fromkeys(ranks, whole if name == "_allgather_base_" else whole // len(ranks))


class Messages:
    """The messages (``Pending``) begun while it is entered."""

    def __enter__(self) -> Messages:
        self.begun: list[Pending] = []
        start = Pending.__init__

        def begin(pending: Pending, *args, **kwargs) -> None:
            self.begun.append(pending)
            start(pending, *args, **kwargs)

        self._patch = mock.patch.object(Pending, "__init__", begin)
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()

    @property
    def unwaited(self) -> int:
        """How many nobody has waited for: their buffers may be freed while HCCL reads and writes them."""
        return sum(each._work is not None for each in self.begun)


class Memory(TorchDispatchMode):
    """Bytes of the tensors made while it is entered: those alive, and the most that ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if torch.is_tensor(leaf) and leaf.untyped_storage()._cdata not in known | self._known:
                self._made(leaf.untyped_storage())
        return found

    def _made(self, storage: torch.UntypedStorage) -> None:
        self._known.add(storage._cdata)
        self.alive += storage.nbytes()
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size
