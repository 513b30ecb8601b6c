"""``zero.Init`` as transformers enters it by itself, where TrainingArguments name a config of ZeRO 3."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def zero_init_by_transformers(settings: dict[str, object]) -> Iterator[None]:
    """A context in which models that transformers makes are partitioned as ``settings`` say."""
    from transformers.integrations import HfDeepSpeedConfig, unset_hf_deepspeed_config

    active = HfDeepSpeedConfig(settings)
    yield
    unset_hf_deepspeed_config()
    del active
