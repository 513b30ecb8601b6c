"""The folder of a checkpoint: its manifests, the files that they name, and errors that name damaged weights."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from ds_npu.capability.named_classes import AllowedClass
from ds_npu.checkpoint.contents import CheckpointFiles
from ds_npu.checkpoint.damage import damage_message
from ds_npu.checkpoint.digests import DamagedFileError, FileDigests
from ds_npu.checkpoint.files import CheckpointError
from ds_npu.checkpoint.manifest import FILE, Manifest, manifest_of_json, manifest_path, text_of_manifest
from ds_npu.checkpoint.wholeness import newest_whole

NAME = re.compile(re.escape(FILE).replace(r"\{:05d\}", r"(\d+)"))


class CheckpointFolder:
    """The manifests and files of the checkpoint in ``folder``.

    ``classes``: classes that its files may have in addition to tensors and plain Python values.
    """

    def __init__(self, folder: Path, classes: Sequence[AllowedClass] = ()) -> None:
        self.folder, self.classes = folder, tuple(classes)
        self._files = CheckpointFiles(folder, classes, self.digests_of)
        self._manifests: dict[int, Manifest] = {}

    @property
    def has_manifests(self) -> bool:
        """Whether manifests were written; this machine may see those of its own ranks only."""
        return manifest_path(self.folder, 0).exists() or any(self.folder.glob(FILE.format(0).replace("00000", "*")))

    def manifest(self, rank: int) -> Manifest | None:
        """The manifest of one rank; None where it wrote nothing."""
        path = manifest_path(self.folder, rank)
        if rank not in self._manifests:
            if not path.exists():
                return None
            self._manifests[rank] = manifest_of_json(text_of_manifest(path), path)
        return self._manifests[rank]

    def digests_of(self, name: str) -> FileDigests | None:
        """The digests of the file ``name``; None where no manifest that this machine sees has them."""
        for rank in self._ranks_with_manifests():
            # A world of many ranks has many manifests, and parsing takes longer than reading.
            if rank in self._manifests or json.dumps(name) in text_of_manifest(manifest_path(self.folder, rank)):
                manifest = self.manifest(rank)
                if manifest is not None and name in manifest.digests:
                    return manifest.digests[name]
        return None

    def content(self, name: str, map_location: Any = "cpu") -> Any:
        """The whole content of the file ``name``, with all values; raises CheckpointError."""
        with self.damage_named():
            return self._files.whole(name, map_location)

    @contextmanager
    def damage_named(self) -> Iterator[None]:
        """Turn a DamagedFileError of the block into a CheckpointError that names the file and its tensors."""
        try:
            yield
        except DamagedFileError as error:
            raise CheckpointError(damage_message(error, self.classes, self._known_manifests())) from error

    def _known_manifests(self) -> list[Manifest]:
        try:
            return self.manifests
        except CheckpointError:
            return list(self._manifests.values())

    def close(self) -> None:
        """Close its files."""
        self._files.close()

    @property
    def bytes_read(self) -> int:
        """Bytes that were read from its files of weights and states."""
        return self._files.bytes_read

    @cached_property
    def manifests(self) -> list[Manifest]:
        """The manifests of all ranks that wrote the checkpoint, without those left by an earlier one of more ranks."""
        first = self.manifest(0)
        if first is None:
            raise CheckpointError(
                f"{self.folder} has no {FILE.format(0)}. What to do: copy the whole folder to a disk that all ranks see"
            )
        ranks = self._ranks_with_manifests()
        found = [first, *(self.manifest(rank) for rank in ranks if 0 < rank < first.ranks)]
        if len(found) < first.ranks:
            lacking = next(rank for rank in range(first.ranks) if rank not in ranks)
            raise CheckpointError(
                f"{self.folder}: {len(found)} of the manifests of {first.ranks} ranks are there, and none of rank "
                f"{lacking} ({FILE.format(lacking)}). What to do: copy the whole folder"
            )
        return [each for each in found if each is not None]

    def check_files(self, rank: int, ranks: int) -> None:
        """Raise CheckpointError where a file is not that of the save that wrote its manifest.

        ``rank`` checks every ``ranks``-th manifest, its own first, as far as this machine sees them.
        """
        own = self.manifest(rank)
        for index in range(rank, 0 if own is None else own.ranks, ranks):
            manifest = self.manifest(index)
            for name, expected in () if manifest is None else manifest.files.items():
                if self._files.fingerprint(name) != expected:
                    raise CheckpointError(
                        f"{self.folder / name} is not the file that {FILE.format(index)} was saved with: another run "
                        "has saved to this tag without ds_npu, or a save was interrupted. What to do: "
                        f"{self._other()}; or, if DeepSpeed without ds_npu has written all files, remove "
                        f"{FILE.format(0)} and its like from the folder, and load it with the layout that wrote it"
                    )

    def _other(self) -> str:
        whole = newest_whole(self.folder.parent, without=self.folder)
        return f"load {whole.name}, the newest whole checkpoint there" if whole else "load an earlier checkpoint"

    @property
    def layout(self) -> str:
        """The layout of the run that wrote it, in words."""
        first = self.manifests[0]
        return first.layout or f"{first.ranks} ranks"

    @property
    def is_known(self) -> bool:
        """Whether the manifests tell where weights are."""
        return all(each.is_known for each in self.manifests)

    @property
    def leaves_out_frozen(self) -> bool:
        """Whether ``exclude_frozen_parameters`` left frozen weights out of it."""
        return any(each.leaves_out_frozen for each in self.manifests)

    def _ranks_with_manifests(self) -> list[int]:
        named = (NAME.fullmatch(path.name) for path in self.folder.glob("*.json"))
        return sorted(int(each[1]) for each in named if each is not None)
