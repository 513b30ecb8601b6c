"""The part of ``ds_npu check`` about a model: what each feature changes of it, and where each parameter is."""

from __future__ import annotations

import importlib
import os
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from ds_npu.capability import try_import
from ds_npu.config.check import Checked
from ds_npu.config.problems import ConfigError, Problem

WITHOUT = "Model: what ds_npu changes of it is shown where transformers is installed"


def model_part(checked: Checked, arguments: Namespace) -> Iterator[str]:
    """Lines about rank 0 of the world; none where no model is named. Raises ConfigError for a model that is refused."""
    if arguments.model is None:
        return
    # Importing transformers imports torch, which takes seconds; no device is used.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    transformers, _ = try_import("transformers")
    if transformers is None:
        yield from ("", WITHOUT)
        return
    planned = importlib.import_module("ds_npu.cli.planned_model")
    try:
        lines: list[str] = list(planned.lines(transformers, Path(arguments.model), checked))
    except (ValueError, ImportError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError([Problem("--model", arguments.model, str(error))]) from error
    yield from lines
