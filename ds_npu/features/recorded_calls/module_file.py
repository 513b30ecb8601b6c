"""Files with one call of one module, which a run writes and ``ds_npu replay`` reads.

They hold tensors and plain data only (``torch.load(weights_only=True)`` reads them): no code.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch

from ds_npu.features.recorded_calls.plain_data import Plain

FORMAT = "ds_npu first wrong module"
VERSION = 1


class ModuleFileError(ValueError):
    """A file that is not one of a module's call, or not a whole one."""


def write_module_file(file: Path, data: dict[str, Plain]) -> int:
    """Write ``data``; returns the bytes written. Raises OSError, and leaves nothing then."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.unfinished")
    try:
        with unfinished.open("wb") as stream:
            torch.save({FORMAT: VERSION, **data}, stream)
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.replace(file)
    except BaseException as error:
        unfinished.unlink(missing_ok=True)
        if isinstance(error, RuntimeError):
            # torch's writer raises one where the stream could not be written.
            raise OSError(_errno_of(error), str(error)) from error
        raise
    return file.stat().st_size


def _errno_of(error: BaseException) -> int:
    cause = error.__context__
    return cause.errno or 0 if isinstance(cause, OSError) else 0


def read_module_file(file: Path) -> dict[str, Plain]:
    """The data of ``file``. Raises OSError, and ModuleFileError for another file."""
    try:
        data: Any = torch.load(file, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, KeyError) as error:
        raise ModuleFileError("it is no file of ds_npu.watch.finite, or not a whole one") from error
    if not isinstance(data, dict) or FORMAT not in data:
        raise ModuleFileError("it is no file of ds_npu.watch.finite")
    if data[FORMAT] != VERSION:
        raise ModuleFileError(f"it has version {data[FORMAT]} of the format, and this ds_npu reads {VERSION}")
    return data
