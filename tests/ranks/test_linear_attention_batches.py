"""Padded and packed batches through models with linear attention whose sequences are sharded, in float64.

Padding is compared with transformers' own; packed documents, which its layers do not end without foreign kernels, with
the documents one by one.
"""

from __future__ import annotations

import itertools

import pytest
import tiny_models
import torch
from ranks import run_on_ranks
from sequence_sharded_models import SequenceSharded, algorithm, packed, step, tokens
from sharded_models import close
from test_context_batches import CASES

from ds_npu.features.context_parallel.sharded_sequences import shard_sequences
from ds_npu.models.globs import partial_plan_for
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology

pytestmark = pytest.mark.slow

PADDED = ("plain", "ignored", "shift_labels", *(f"padding {kind}" for kind in ("left", "right", "both", "holes")))


def sharded(family: str, chosen: str, context: int, **changes: object) -> SequenceSharded:
    topology = Topology(Degrees(cp=context))
    # A row of padding sees nothing: "eager" would give it a mean. Mamba 2 has no attention.
    options = changes if family == "mamba2" else changes | {"attn_implementation": "sdpa"}
    model, plain = (tiny_models.tiny(family, **options) for _ in range(2))
    shard_sequences(model, partial_plan_for(model, {}), topology, algorithm(chosen, context))
    return SequenceSharded(model, plain, topology)


def of_whole_samples(family: str, chosen: str, context: int) -> None:
    both = sharded(family, chosen, context)
    for name in PADDED:
        given = CASES[name]()
        close(step(both.model, **given), step(both.plain, **given), name)
        both.same_gradients()


def document_by_document(both: SequenceSharded, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The loss of the documents one by one, with its gradients; the first token of each is no target."""
    documents = []
    for row, places in zip(ids, positions.expand(len(ids), -1), strict=True):
        begins = [*(places == 0).nonzero().flatten().tolist(), len(row)]
        documents += [row[None, a:b] for a, b in itertools.pairwise(begins)]
    count = sum(each.shape[1] - 1 for each in documents)
    both.plain.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    with tiny_models.Float64():
        for each in documents:
            if each.shape[1] > 1:
                share = both.plain(input_ids=each, labels=each).loss * (each.shape[1] - 1) / count
                share.backward()
                total += share.detach()
    return total


def of_documents(family: str, chosen: str, context: int) -> None:
    # The auxiliary loss of a batch is not the mean of its documents'.
    both = sharded(family, chosen, context, output_router_logits=False)
    for rows in (1, 2):
        ids, positions = tokens(2), packed(rows)
        labels = ids.masked_fill(positions.expand(2, -1) == 0, -100)
        expected = document_by_document(both, ids, positions)
        told = [{"position_ids": positions}]
        if family == "mamba2":
            told.append({"seq_idx": (positions == 0).cumsum(1).expand(2, -1).int()})
        for each in told:
            found = step(both.model, input_ids=ids, labels=labels, **each)
            close(found, expected, f"{rows} {each.keys()}")
            both.same_gradients()


@pytest.mark.matrix(corners=2, drawn=1)
@pytest.mark.parametrize(
    ("family", "chosen", "context"),
    [
        ("lfm2", "ring", 2),
        ("mamba2", "ulysses", 2),
        ("qwen3_5", "ring", 3),
        ("qwen3_next", "ulysses", 2),
        ("mamba2", "ring", 3),
        ("qwen3_5", "hybrid", 4),
        ("lfm2", "ring", 3),
        ("bamba", "ulysses", 2),
        ("olmo_hybrid", "ring", 2),
    ],
)
def test_padding_and_documents(family, chosen, context):
    run_on_ranks(context, of_whole_samples, family, chosen, context)
    run_on_ranks(context, of_documents, family, chosen, context)
