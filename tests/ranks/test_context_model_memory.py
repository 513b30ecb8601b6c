"""The memory of a step of a whole model: a sequence four times as long on four times the ranks takes as much a rank."""

from __future__ import annotations

import pytest
import tiny_models
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from sequence_sharded_models import sequence_sharded
from wire import Memory

pytestmark = pytest.mark.slow

TOKENS = 256
"""Of a rank."""
SIZES = {"hidden_size": 64, "intermediate_size": 224, "num_attention_heads": 8, "num_key_value_heads": 2}


def peak(name: str, folder: str) -> None:
    """Write the most bytes that a rank of this world held in forward and backward, beside the weights."""
    length = TOKENS * dist.get_world_size()
    # Of Ulysses' ranks each needs a key head of its own, or what they share is not divided.
    sizes = SIZES | ({"num_key_value_heads": 8} if name == "ulysses" else {})
    model = sequence_sharded("llama", name, max_position_embeddings=length, **sizes).model.to(torch.bfloat16)
    ids = tiny_models.tokens(1, length)
    with Memory() as memory:
        model(input_ids=ids, labels=ids).loss.backward()
    peaks: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(peaks, memory.peak)
    if dist.get_rank() == 0:
        with open(folder, "w") as file:
            file.write(str(max(peaks)))


def measured(ranks: int, name: str, path) -> int:
    run_on_ranks(ranks, peak, name, str(path))
    return int(path.read_text())


@pytest.mark.parametrize("name", ["ulysses", "ring", "hybrid", "double ring"])
def test_four_times_the_tokens_on_four_times_the_ranks(name, tmp_path):
    few, many = (4, 8) if name in ("hybrid", "double ring") else (2, 8)
    small, large = (measured(ranks, name, tmp_path / str(ranks)) for ranks in (few, many))
    print(f"{name}: {small:,} bytes on {few} ranks, {large:,} on {many}")
    assert large <= 1.1 * small, (small, large)
