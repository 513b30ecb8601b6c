"""What a block of a split Llama sends in a step: Megatron's minimum, counted at torch's collectives.

B batch, S sequence, H hidden. Of the same model with one block more, what is sent more is one block's.
"""

from __future__ import annotations

from collections import Counter

import pytest
import tiny_models
import torch
from ranks import run_on_ranks
from wire import Wire

B, S, H, WIDTH = 3, 8, 32, 8
NAMES = {"allreduce_": "all-reduce", "_allgather_base_": "all-gather", "_reduce_scatter_base_": "reduce-scatter"}


def messages(layers: int, family: str, parallel: dict[str, object]) -> Counter:
    """(collective, bytes of the whole) of a forward and a backward, each with how often it was sent."""
    from ds_npu.features.tensor_parallel.sharded_model import shard_model
    from ds_npu.models.globs import plan_for
    from ds_npu.topology.degrees import Degrees
    from ds_npu.topology.topology import Topology

    model = tiny_models.tiny(family, torch.float64, num_hidden_layers=layers)
    topology = Topology(Degrees(tp=2))
    shard_model(model, plan_for(model, {}), topology, **parallel)
    ids = tiny_models.tokens(B, S)
    wire = Wire()
    with tiny_models.Float64():
        loss = model(input_ids=ids, labels=ids).loss
        with wire:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
    # A gather's and a scatter's counted tensors: the whole, and this rank's part of it.
    sent = Counter((NAMES[name], size) for name, size in wire.sent)
    assert sum(sent.values()) > 0
    return sent


def one_block(family: str, sequence_parallel: bool, expected: dict[tuple[str, int], int]) -> None:
    parallel = {"sequence_parallel": sequence_parallel}
    more = messages(3, family, parallel)
    more.subtract(messages(2, family, parallel))
    assert {kind: count for kind, count in more.items() if count} == expected


HIDDEN = B * S * H * WIDTH


def test_a_block_without_sequence_parallelism():
    """Two all-reduces of hidden states each way."""
    run_on_ranks(2, one_block, "llama", False, {("all-reduce", HIDDEN): 4})


def test_a_block_with_sequence_parallelism():
    """Forward: gather, scatter, twice. Backward: of dy, of x again, and the scatter of dx, twice. And two norms."""
    expected = {("all-gather", HIDDEN): 6, ("reduce-scatter", HIDDEN // 2): 4, ("all-reduce", H * WIDTH): 2}
    run_on_ranks(2, one_block, "llama", True, expected)


@pytest.mark.slow
def test_latent_attention_enters_by_its_latents():
    """DeepSeek-V3's MoE blocks: latents of 12 and 14 numbers enter, not hidden states."""
    tokens = B * S * WIDTH
    latents = {("all-reduce", tokens * 12): 1, ("all-reduce", tokens * 14): 1}
    # Attention out, experts out and back with their weights, shared experts out and back; two head norms.
    rest = {
        ("all-reduce", HIDDEN): 5,
        ("all-reduce", tokens * 2): 1,
        ("all-reduce", 12 * WIDTH): 1,
        ("all-reduce", 10 * WIDTH): 1,
    }
    run_on_ranks(2, one_block, "deepseek_v3", False, latents | rest)
