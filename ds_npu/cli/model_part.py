"""The part of ``ds_npu check`` about a model: the changes of each feature, and the placement of each parameter."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from ds_npu.capability import try_import
from ds_npu.cli.command import cli_module
from ds_npu.config.check import Checked

WITHOUT = "What ds_npu changes of a model is shown where transformers is installed"


def model_part(checked: Checked, arguments: Namespace) -> Iterator[str]:
    """Lines about rank 0 of the world; none where no model is named. Raises ValueError for a model that is refused."""
    if arguments.model is None:
        return
    # It imports torch, which takes seconds; no device is used.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    transformers, _ = try_import("transformers")
    if transformers is None:
        yield from ("", WITHOUT)
    else:
        yield from cli_module("planned_model").lines(Path(arguments.model), checked, arguments.changes)
        pipeline = cli_module("planned_pipeline")
        svg = None if arguments.svg is None else pipeline.schedule_file(arguments.svg)
        yield from pipeline.pipeline_lines(Path(arguments.model), checked, svg)
