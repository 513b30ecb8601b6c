"""The batch sizes of a DeepSpeed config, derived as DeepSpeed derives them, and whether they agree."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ds_npu.config.problems import Config, Problem

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"
MOST = 2**63 - 1
"""Largest number of samples."""
COUNTED = ", or nothing: leave the key out (or 'auto' for the Hugging Face Trainer to fill in)"


@dataclass(frozen=True)
class Batch:
    """``train == micro * steps * dp``; None where a size is not known before the run."""

    micro: int | None = None
    steps: int | None = None
    train: int | None = None


def batch_of(ds_config: Config, dp: int | None) -> tuple[Batch, list[Problem]]:
    """The batch sizes with ``dp`` data-parallel ranks (None: not known), and their mistakes."""
    found = {key: ds_config.get(key) for key in (TRAIN, MICRO, STEPS)}
    # The Hugging Face Trainer fills in an "auto" later.
    wrong = [
        Problem(key, value, f"an integer >= 1, or 'auto' for the Hugging Face Trainer to fill in, and <= {MOST}")
        for key, value in found.items()
        if value not in (None, "auto") and not (type(value) is int and 1 <= value <= MOST)
    ]
    if wrong:
        return Batch(), wrong
    if found[TRAIN] is None and found[MICRO] is None:
        return Batch(), [Problem(f"{TRAIN}, {MICRO}", None, "at least one of them, an integer >= 1")]
    # DeepSpeed does the same (runtime/config.py, _set_batch_related_parameters).
    if found[STEPS] is None and (found[TRAIN] is None or found[MICRO] is None):
        found[STEPS] = 1
    return _derived(found, dp)


def _derived(found: Config, dp: int | None) -> tuple[Batch, list[Problem]]:
    """Fill in the one size that is left out, if the others and ``dp`` give it."""
    train = found[TRAIN]
    factors = {key: found[key] for key in (MICRO, STEPS) if type(found[key]) is int}
    named = factors if dp is None else factors | {"data-parallel ranks": dp}
    product = math.prod(named.values())
    whole = dp is not None and len(factors) == 2
    if type(train) is int:
        if train != product if whole else train % product:
            text = " * ".join(f"{key} {value}" for key, value in named.items()) + (f" = {product}" if named else "")
            # A multiple: whoever filled it in has counted ranks that share samples.
            hint = COUNTED if whole and train % product == 0 else ""
            return Batch(), [Problem(TRAIN, train, (text if whole else f"a multiple of {text}") + hint)]
        missing = [key for key in (MICRO, STEPS) if found[key] is None]
        if dp is not None and len(factors) == 1 and missing:
            factors[missing[0]] = train // product
    elif train is None and whole:
        train = product
    return Batch(factors.get(MICRO), factors.get(STEPS), train if type(train) is int else None), []
