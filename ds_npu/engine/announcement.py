"""Whether a DeepSpeed config asks for ds_npu, and the config that is known before DeepSpeed is given one.

Every program that imports DeepSpeed imports this; what judges a config (``ds_npu.engine.session``) is imported where
there is a section to judge.
"""

from __future__ import annotations

import base64
import itertools
import os
import sys
from typing import Any

from ds_npu.config.loading import load, load_text

SECTION = "ds_npu"

Config = str | os.PathLike[str] | dict[str, Any]


def with_section(config: Config | None) -> dict[str, Any] | None:
    """The DeepSpeed config as a dict where it holds the section, else None (whatever else it is DeepSpeed's matter)."""
    if config is None:
        return None
    if not isinstance(config, dict):
        name = os.fspath(config)
        if os.path.exists(name):
            config = load(name)
        elif (text := _decoded(name)) is not None:
            config = load_text(text, "the config in base64")
        else:
            return None
    return config if SECTION in config else None


def _decoded(config: str) -> str | None:
    """The text of a config in base64, which DeepSpeed takes too, if it names the section."""
    try:
        text = base64.urlsafe_b64decode(config).decode("utf-8")
    except ValueError:
        return None
    return text if SECTION in text else None


def announced() -> dict[str, Any] | None:
    """The config that DS_NPU_CONFIG or the command line names, if it has the section: known before any API call."""
    return with_section(os.environ.get("DS_NPU_CONFIG") or _from_command_line(sys.argv))


def _from_command_line(arguments: list[str]) -> str | None:
    """``--deepspeed_config X`` (DeepSpeed's own) or ``--deepspeed X.json`` (the Hugging Face Trainer's)."""
    words = [part for argument in arguments for part in argument.split("=", 1)]
    for flag, value in itertools.pairwise(words):
        if flag == "--deepspeed_config" or (flag == "--deepspeed" and value.endswith(".json")):
            return value
    return None
