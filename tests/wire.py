"""What a computation sends to other ranks and how much memory it takes, counted below torch's own interfaces."""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Wire(TorchDispatchMode):
    """The messages sent while it is entered: (collective, bytes of this rank's tensors)."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, torch.Tensor)]
            self.sent.append((func._opname, sum(tensor.nbytes for tensor in tensors)))
        return func(*args, **(kwargs or {}))


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
