"""DeepSpeed's own axes in a prediction: AutoTP, Ulysses and AutoEP, whose degrees stand in DeepSpeed's keys.

The grid is that of ``topology/degrees.py``: DeepSpeed, too, lays tensor, sequence and expert ranks next to each other.
With a section of ds_npu, ``ds_npu/config`` checks these keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ds_npu.config.batch import batch_of
from ds_npu.config.check import Checked
from ds_npu.config.deepspeed_keys import value_at
from ds_npu.config.problems import Config, Problem
from ds_npu.topology.degrees import Degrees

TENSOR, SEQUENCE, EXPERT = "tensor_parallel.autotp_size", "sequence_parallel_size", "expert_parallel.autoep_size"


def tensor_ranks(ds_config: Config) -> int:
    """The tensor ranks of AutoTP."""
    return value_at(ds_config, TENSOR) or 1


def sequence_ranks(ds_config: Config) -> int:
    """The ranks over which Ulysses splits a sequence."""
    return value_at(ds_config, SEQUENCE) or 1


def expert_ranks(ds_config: Config) -> int:
    """The expert ranks of AutoEP."""
    return (value_at(ds_config, EXPERT) or 1) if value_at(ds_config, "expert_parallel.enabled") else 1


def _unpredicted(ds_config: Config, world_size: int, length: int) -> Iterator[Problem]:
    """Mistakes in the three keys: values that do not fit the world or the samples, or that cannot be predicted."""
    found = {TENSOR: tensor_ranks(ds_config), SEQUENCE: sequence_ranks(ds_config), EXPERT: expert_ranks(ds_config)}
    wrong = [key for key, size in found.items() if not (type(size) is int and size >= 1 and world_size % size == 0)]
    for key in wrong:
        yield Problem(key, found[key], f"an integer >= 1 that divides the world size, {world_size:,}")
    if not wrong and length % found[SEQUENCE]:
        yield Problem(SEQUENCE, found[SEQUENCE], f"a divisor of the tokens of a sample, {length:,}")
    for key in [key for key, size in found.items() if size != 1][1:]:
        yield Problem(key, found[key], "1: several of DeepSpeed's own axes are not predicted together")


def with_own_axes(ds_config: Config, world_size: int, length: int, checked: Checked) -> tuple[Checked, list[Problem]]:
    """``checked`` with the grid and the batch that DeepSpeed's own keys give, and the mistakes in these.

    The config has no section of ds_npu. ``length``: tokens of a sample.
    """
    if problems := [*_unpredicted(ds_config, world_size, length)]:
        return checked, problems
    tp = tensor_ranks(ds_config)
    cp = sequence_ranks(ds_config)
    ep = expert_ranks(ds_config)
    degrees = Degrees(dp=world_size // (tp * cp), cp=cp, tp=tp, ep=ep)
    # DeepSpeed takes the ranks of AutoTP for data ranks when it counts samples (runtime/config.py of 0.19.8).
    batch, problems = batch_of(ds_config, degrees.dp * tp)
    return replace(checked, degrees=degrees, batch=batch), problems
