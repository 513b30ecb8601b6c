"""DeepSpeed's checkpoint engine as ds_npu supplies it: files are read without running anything, and verified.

DeepSpeed (0.19.8 runtime/checkpoint_engine/torch_checkpoint_engine.py) loads files with pickle, which runs what they
say. Universal checkpoints are loaded by its optimizers, past any checkpoint engine: they are checked beforehand.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from ds_npu.capability.named_classes import AllowedClass
from ds_npu.checkpoint.contents import loaded
from ds_npu.checkpoint.digests import VerifiedReader
from ds_npu.checkpoint.written import WrittenCheckpoint


class AllowedFilesEngine(TorchCheckpointEngine):  # type: ignore[misc]
    """DeepSpeed's checkpoint engine, whose files may hold tensors, plain Python values and objects of ``classes``."""

    def __init__(self, config: Any, classes: Sequence[AllowedClass]) -> None:
        super().__init__(config)
        self.classes = tuple(classes)
        self._prepared: dict[Path, Any] = {}

    def load(self, path: str, map_location: Any = None) -> Any:
        """The content of the file at ``path``; raises CheckpointError for a damaged file and for other classes."""
        prepared = self._prepared.pop(Path(path).absolute(), None)
        return self._loaded(Path(path), map_location) if prepared is None else prepared

    def prepare(self, path: Path) -> Any:
        """Load the file at ``path`` to the host; ``load`` then hands it out, once."""
        self._prepared[path.absolute()] = content = self._loaded(path, "cpu")
        return content

    def forget_prepared(self) -> None:
        """Drop what was prepared and not asked for."""
        self._prepared.clear()

    def _loaded(self, path: Path, map_location: Any) -> Any:
        return WrittenCheckpoint(path.parent, self.classes).content(path.name, map_location)


def check_universal(folder: Path, classes: Sequence[AllowedClass], rank: int, ranks: int) -> None:
    """Raise CheckpointError where a file of a universal checkpoint would run code; each rank checks its share."""
    for path in sorted(folder.rglob("*.pt"))[rank::ranks]:
        with VerifiedReader(path, None) as reader:
            loaded(reader, classes)
