"""Tells one file of a checkpoint from another of the same name, without reading the tensors in it."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path


def fingerprint(path: Path) -> str:
    """A digest of the names, sizes and checksums of all records in a file that torch.save wrote.

    torch writes zip archives, whose directory has a CRC-32 of each record. Raises OSError and zipfile.BadZipFile for
    what is no such archive, as a file that was cut short.
    """
    with zipfile.ZipFile(path) as archive:
        records = [(each.filename, each.file_size, each.CRC) for each in archive.infolist()]
    return hashlib.sha256(repr(records).encode()).hexdigest()
