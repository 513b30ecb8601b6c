"""Whether a DeepSpeed config asks for ds_npu, and the config that is known before DeepSpeed is given one.

Every program that imports DeepSpeed imports this; the checks of a config (``ds_npu.engine.session``) are imported only
where there is a section to check.
"""

from __future__ import annotations

import base64
import itertools
import os
import sys
from typing import Any

from ds_npu.config.loading import load, load_text
from ds_npu.config.problems import ConfigError, Problem

SECTION = "ds_npu"
VARIABLE = "DS_NPU_CONFIG"

Config = str | os.PathLike[str] | dict[str, Any]


def with_section(config: Config | None) -> dict[str, Any] | None:
    """The DeepSpeed config as a dict where it holds the section; None for any other, which DeepSpeed itself judges."""
    if config is None:
        return None
    if not isinstance(config, dict):
        name = os.fspath(config)
        if os.path.exists(name):
            config = load(name)
        elif (text := _decoded(name)) is not None and SECTION in text:
            config = load_text(text, "the config in base64")
        else:
            return None
    return config if SECTION in config else None


def _decoded(config: str) -> str | None:
    """The text of a config in base64, which DeepSpeed takes too; None if ``config`` is nothing of the kind."""
    try:
        return base64.urlsafe_b64decode(config).decode("utf-8")
    except ValueError:
        return None


def announced() -> dict[str, Any] | None:
    """The config that DS_NPU_CONFIG or the command line names, if it has the section: known before any API call.

    Raises ConfigError where DS_NPU_CONFIG names no file: the script may never name another.
    """
    named = os.environ.get(VARIABLE)
    if not named:
        return with_section(_from_command_line(sys.argv))
    if not os.path.exists(named) and not (_decoded(named) or "").lstrip().startswith("{"):
        wanted = f"the name of a file that is there (this process runs in {os.getcwd()}), or a config in base64"
        raise ConfigError([Problem(VARIABLE, named, wanted)], "the environment")
    return with_section(named)


def _from_command_line(arguments: list[str]) -> str | None:
    """``--deepspeed_config X`` (DeepSpeed's own) or ``--deepspeed X.json`` (the Hugging Face Trainer's)."""
    words = [part for argument in arguments for part in argument.split("=", 1)]
    for flag, value in itertools.pairwise(words):
        if flag == "--deepspeed_config" or (flag == "--deepspeed" and value.endswith(".json")):
            return value
    return None
