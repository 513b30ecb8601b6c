"""What crosses the borders of pipeline stages with sequence parallelism: shards of hidden states, and no more."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import pipeline_rule as rule
import pytest
import torch
from ranks import run_on_ranks
from wire import Wire

from ds_npu.parallel.tensor.sequence_shards import whole_length

HIDDEN, BYTES = 32, 8
"""Of the tiny models; of a number in float64."""
ODD = 9
"""Tokens that two tensor ranks do not divide."""


def section(schedule: str = "1f1b", **pipeline: object) -> dict:
    parallel = {"pipeline": 2, "tensor": 2, "sequence_parallel": True}
    return {"parallel": parallel, "pipeline": {"schedule": schedule, **pipeline}}


def count_messages(length: int) -> None:
    with mock.patch.object(rule, "LENGTH", length):
        gathers = []
        for split in ([2, 2], [4, 0]):
            engine = rule.engine_of(rule.model_of("llama", torch.float64), 1, torch.float64, section(split=split))
            first, second = (each[0] for each in rule.batches(1))
            engine.backward(rule.loss_of(engine, first, torch.float64))  # Shapes are sent once.
            with Wire() as wire:
                engine.backward(rule.loss_of(engine, second, torch.float64))
            # Hidden states one way and their gradients the other; the last stage without blocks needs whole ones.
            tokens = -(-length // 2) if split[1] else length
            sent = {to: size for (kind, to), size in wire.leaving.items() if kind.startswith("send")}
            assert list(sent.values()) == [rule.SAMPLES * tokens * HIDDEN * BYTES], (split, sent)
            gathers.append(Counter(name for name, _ in wire.sent)["_allgather_base_"])
        if engine.topology.rank("pp") == 0:
            # In each micro-batch the gradient of the embeddings is gathered, and with four blocks what leaves the last.
            per_block = (gathers[1] - gathers[0] - rule.SAMPLES) / 2
            assert gathers[0] == 2 * per_block + rule.SAMPLES and per_block > 0, gathers


@pytest.mark.parametrize("length", [rule.LENGTH, ODD])
def test_stages_send_shards_of_sequences(length):
    run_on_ranks(4, count_messages, length)


def hold_odd_lengths() -> None:
    with mock.patch.object(rule, "LENGTH", ODD):
        for family in ("llama", "gpt2", "deepseek_v3"):
            sections = [section("1f1b"), section("zb_v"), section(split=[1, 3]), section(split=[4, 0])]
            rule.hold_all(family, (1,), sections, {})


def test_padded_sequences_and_stages_without_blocks():
    run_on_ranks(4, hold_odd_lengths, deadline_s=600.0)


def test_a_length_that_nothing_tells_is_an_error():
    shard = torch.zeros(2, 5, 8)
    assert whole_length(shard, {"position_ids": torch.zeros(1, 9)}) == 9
    with pytest.raises(ValueError, match=r"was sent shards \[2, 5, 8\].*input_ids in place of inputs_embeds"):
        whole_length(shard, {})
