"""The heads and the width of a model from its Hugging Face config.json: plain JSON, without transformers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ds_npu.config.loading import json_of, read_text
from ds_npu.config.problems import ConfigError, Problem
from ds_npu.models.plan import AttentionShape
from ds_npu.planner.communicators import SIZES

OTHER_NAMES = {
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads",),
    "hidden_size": ("n_embd", "d_model"),
    "max_position_embeddings": ("n_positions",),
}
"""Other names that some models have for the usual keys."""
LARGEST_SIZE = 2**20


def attention_of(path: str) -> AttentionShape:
    """The attention of the language model at ``path``, a config.json or a folder with one.

    Raises ConfigError for a file that cannot be read or that has no heads.
    """
    file, found = _language_model(path)
    heads = found.count("num_attention_heads")
    if found.value("qk_nope_head_dim") is not None:
        # MLA: every head has keys and values of its own once they are projected up.
        nope, rope, value = map(found.count, ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        shape = AttentionShape(heads, heads, nope + rope, value, nope)
    else:
        # Falcon writes a number of key heads that counts only in its new architecture.
        one = found.value("multi_query") and not found.value("new_decoder_architecture")
        kv_heads = 1 if one else found.count("num_key_value_heads", heads)
        if not found.problems and heads % kv_heads:
            found.wrong("num_key_value_heads", f"a divisor of num_attention_heads, which is {heads}")
        given = found.value("head_dim") is not None
        width = found.count("head_dim") if given else found.count("hidden_size") // heads
        if not found.problems and not width:
            found.wrong("hidden_size", f"a multiple of num_attention_heads, which is {heads}")
        shape = AttentionShape(heads, kv_heads, width, width)
    if found.problems:
        raise ConfigError(found.problems, str(file))
    return shape


def hidden_size_of(path: str) -> int:
    """The width of the hidden states of the language model at ``path``; raises ConfigError as ``attention_of`` does."""
    file, found = _language_model(path)
    size = found.count("hidden_size")
    if found.problems:
        raise ConfigError(found.problems, str(file))
    return size


def message_settings_of(path: str) -> dict[str, int | None]:
    """The settings SIZES of the language model at ``path``, which tell how large its messages are; None: not stated."""
    _, found = _language_model(path)
    values = {name: found.value(name) for name in SIZES}
    return {name: value if type(value) is int and value > 0 else None for name, value in values.items()}


def _language_model(path: str) -> tuple[Path, _Entries]:
    file = Path(path) / "config.json" if os.path.isdir(path) else Path(path)
    config = _read(file)
    if isinstance(config.get("text_config"), dict):
        config = config["text_config"]
    return file, _Entries(config)


class _Entries:
    """The entries of a model's config, and what is wrong with those that were read."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.problems: list[Problem] = []

    def value(self, name: str) -> Any:
        """The entry ``name``, also under its other names; None where there is none."""
        names = (name, *OTHER_NAMES.get(name, ()))
        return next((self.config[each] for each in names if self.config.get(each) is not None), None)

    def count(self, name: str, default: int | None = None) -> int:
        found = self.value(name)
        found = default if found is None else found
        if isinstance(found, int) and not isinstance(found, bool) and 1 <= found <= LARGEST_SIZE:
            return found
        others = " or ".join(OTHER_NAMES.get(name, ()))
        self.wrong(name, f"an integer >= 1 and <= {LARGEST_SIZE}{f', here or as {others}' if others else ''}")
        return 1

    def wrong(self, name: str, accepted: str) -> None:
        if name not in (problem.path for problem in self.problems):
            self.problems.append(Problem(name, self.value(name), accepted))


def _read(file: Path) -> dict[str, Any]:
    accepted = "a Hugging Face config.json, or a folder with one"
    try:
        config = json_of(read_text(file, accepted))
    except ConfigError as error:
        problems = [Problem("--model", each.found, each.accepted) for each in error.problems]
        raise ConfigError(problems, str(file)) from None
    except json.JSONDecodeError as error:
        position = f"line {error.lineno}, column {error.colno}"
        raise ConfigError([Problem(position, error.msg, accepted)], str(file)) from None
    except RecursionError:
        raise ConfigError([Problem("--model", "objects or lists without end", accepted)], str(file)) from None
    if not isinstance(config, dict):
        raise ConfigError([Problem("--model", config, accepted)], str(file))
    return config
