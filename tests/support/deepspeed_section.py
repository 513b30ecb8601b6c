"""Puts a "ds_npu" section into every config that a script or a test of DeepSpeed's hands to ``deepspeed.initialize``.

Imported with ``DS_NPU_TEST_SECTION`` set, the section as JSON, it does so at once.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import deepspeed
import hjson


def with_section(config: Any, section: dict[str, Any]) -> Any:
    """``config``, a dict or a file, with ``section``."""
    if isinstance(config, str | Path) and Path(config).is_file():
        config = hjson.loads(Path(config).read_text())
    return config | {"ds_npu": section} if isinstance(config, dict) else config


def install(section: dict[str, Any]) -> None:
    """Make ``deepspeed.initialize`` put ``section`` into its config."""
    plain = deepspeed.initialize

    @functools.wraps(plain)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("args")
        file = given is not None and getattr(given, "deepspeed_config", None)
        if file and not (kwargs.get("config") or kwargs.get("config_params")):
            kwargs["config"], given.deepspeed_config = file, None
        for key in ("config", "config_params"):
            if key in kwargs:
                kwargs[key] = with_section(kwargs[key], section)
        return plain(*args, **kwargs)

    deepspeed.initialize = initialize


if "DS_NPU_TEST_SECTION" in os.environ:
    install(json.loads(os.environ["DS_NPU_TEST_SECTION"]))
