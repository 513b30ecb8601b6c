"""Who has which tokens, which keys a block needs, and how blocks travel: pure, against counting one by one."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_npu.config.context_algorithm import ContextAlgorithm, algorithm_of
from ds_npu.ops.attention import CAUSAL, FULL, Mask, sliding
from ds_npu.parallel.context.kernel_calls import block_calls, last_step, pairs
from ds_npu.parallel.context.load_balance import shard_documents, shard_evenly
from ds_npu.parallel.context.mask_tiles import tiles
from ds_npu.parallel.context.ring_schedule import ring_steps

MASKS = [FULL, CAUSAL, sliding(1), sliding(4), Mask(before=3, after=2), Mask(before=2), Mask(after=3)]


@st.composite
def batches(draw):
    """Samples, their length, and ascending documents within them, with gaps of padding."""
    samples, length = draw(st.integers(1, 3)), draw(st.integers(16, 40))
    documents = []
    for sample in range(samples):
        at, end = sample * length + draw(st.integers(0, 3)), (sample + 1) * length
        while at < end:
            size = min(draw(st.integers(1, 14)), end - at)
            documents.append(range(at, at + size))
            at += size + draw(st.sampled_from([0, 0, 0, 1]))
    return samples, length, documents


algorithms = st.builds(ContextAlgorithm, st.sampled_from([1, 2]), st.sampled_from([1, 2, 3, 4]))


@given(batch=batches(), algorithm=algorithms)
def test_every_token_has_one_rank_and_every_rank_as_many_of_each_sample(batch, algorithm):
    samples, length, documents = batch
    tokens = shard_documents(samples, length, documents, algorithm)
    given_out = []
    for rank in range(algorithm.size):
        mine = [token for piece in tokens.pieces(rank) for token in piece]
        assert mine == sorted(mine)
        assert len(mine) == samples * tokens.count(rank)
        index = tokens.index(rank) + torch.arange(samples)[:, None] * length
        assert index.flatten().tolist() == mine
        given_out += mine
    assert sorted(given_out) == list(range(samples * length))
    counts = tokens.ring_token_counts
    assert max(counts) - min(counts) <= 1


@given(batch=batches(), ring=st.sampled_from([1, 2, 3, 4]), mask=st.sampled_from(MASKS))
def test_tiles_are_the_mask(batch, ring, mask):
    tokens = shard_documents(*batch, ContextAlgorithm(1, ring))
    document = dict.fromkeys(range(tokens.total), -1)
    for number, each in enumerate(tokens.documents):
        document |= dict.fromkeys(each, number)

    def sees(row: int, key: int) -> bool:
        near = (mask.before is None or key >= row - mask.before) and (mask.after is None or key <= row + mask.after)
        return near and document[row] == document[key] >= 0

    everything = (range(tokens.total),)
    for rows_of in tokens.ring:
        rows = [token for piece in rows_of for token in piece]
        for keys_of in (*tokens.ring, everything):
            keys = [token for piece in keys_of for token in piece]
            wanted = torch.tensor([[sees(row, key) for key in keys] for row in rows])
            found = torch.zeros_like(wanted)
            for tile in tiles(rows_of, keys_of, mask, tokens.documents):
                count = len(tile.rows), len(tile.keys)
                band = Mask(tile.before, tile.after).band(*count)
                hidden = band.hidden(range(count[0]), range(count[1]), torch.device("cpu"))
                seen = torch.ones(count, dtype=torch.bool) if hidden is None else ~hidden
                part = found[tile.rows.start : tile.rows.stop]
                assert seen.any(1).all() and not part.any(), "a row without a key, or in two tiles"
                assert tile.pairs == seen.sum()
                part[:, tile.keys.start : tile.keys.stop] = seen
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_zigzag_ring_needs_one_call_a_step_and_the_same_work_on_every_rank_in_every_step(size):
    tokens = shard_evenly(64 * size, ContextAlgorithm(1, size))
    found = [
        [block_calls(tokens, rank, (rank - i) % size, (None, 0), True) for i in range(size)] for rank in range(size)
    ]
    assert all(len(calls) == 1 for steps in found for calls in steps)
    for i in range(1, size):
        assert len({steps[i][0].pairs for steps in found}) == 1


@pytest.mark.parametrize("size", [2, 4, 8, 16])
@pytest.mark.parametrize("total", [16384, 16384 + 37])
def test_causal_work_is_equal_within_two_percent(size, total):
    tokens = shard_evenly(total, ContextAlgorithm(1, size))
    work = [pairs(tokens, rank, CAUSAL) for rank in range(size)]
    assert sum(work) == total * (total + 1) // 2
    assert [each * size / sum(work) for each in work] == pytest.approx([1.0] * size, abs=0.02)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("shortest, longest", [(2, 40), (10, 3000), (500, 9000)])
def test_packed_work_is_equal_within_two_percent(size, shortest, longest):
    draw, total, documents, at = random.Random(size), 32768, [], 0
    while at < total:
        length = int(math.exp(draw.uniform(math.log(shortest), math.log(longest))))
        documents.append(range(at, min(at + length, total)))
        at = documents[-1].stop
    tokens = shard_documents(1, total, documents, ContextAlgorithm(1, size))
    work = [pairs(tokens, rank, CAUSAL) for rank in range(size)]
    assert sum(work) == sum(len(each) * (len(each) + 1) // 2 for each in documents)
    assert [each * size / sum(work) for each in work] == pytest.approx([1.0] * size, abs=0.02)


@given(rings=st.integers(1, 4), window=st.integers(1, 4), data=st.data())
@settings(deadline=None)
def test_blocks_are_where_steps_say_and_gradients_come_home(rings, window, data):
    size = rings * window
    last = data.draw(st.integers(0, size - 1)) if rings == 1 else None
    steps = [ring_steps(rank, size, window, last) for rank in range(size)]
    held = [{rank} for rank in range(size)]
    sums: list[dict[int, int]] = [{} for _ in range(size)]
    home = [0] * size
    for moment in zip(*steps, strict=True):
        sent, summed = {}, {}
        for rank, step in enumerate(moment):
            assert step.source in held[rank], "a block is used before it came"
            sent |= {(rank, hop.to, hop.link): step.source for hop in step.hops}
            total = 1 + (sums[rank].pop(step.source) if step.adds else 0)
            if step.gradient is None:
                assert step.source == rank
                home[rank] += total
            else:
                summed[rank, step.gradient.to] = step.source, total
        for rank, step in enumerate(moment):
            for hop in step.hops:
                assert sent.pop((hop.origin, rank, hop.link)) == hop.received
                held[rank].add(hop.received)
            if step.gradient is not None:
                source, total = summed.pop((step.gradient.origin, rank))
                assert source == step.gradient.received
                if source == rank:
                    home[rank] += total
                else:
                    sums[rank][source] = total
        assert not sent and not summed
    assert home == [size if last is None else last + 1] * size
    assert all(not each for each in sums)


def test_a_window_ends_the_ring_early_and_nothing_else_does():
    contiguous = shard_evenly(64, ContextAlgorithm(1, 8), zigzag=False)
    assert last_step(contiguous, (7, 0)) == 1
    assert last_step(contiguous, (9, 0)) == 2
    assert last_step(contiguous, (None, 0)) is None
    assert last_step(shard_evenly(64, ContextAlgorithm(1, 8)), (7, 0)) == 7


@pytest.mark.parametrize("algorithm", [ContextAlgorithm(4, 1), ContextAlgorithm(1, 4), ContextAlgorithm(2, 2)])
def test_a_sequence_too_short_to_split_names_the_key(algorithm):
    least = 4 if algorithm.ring == 1 else 8
    assert shard_evenly(least, algorithm).total == least
    with pytest.raises(ValueError, match=rf"ds_npu.parallel.context .* found {least - 1}, at least {least}"):
        shard_evenly(least - 1, algorithm)


@pytest.mark.parametrize("documents", [[range(4, 20)], [range(8), range(4, 12)], [range(8, 12), range(4)]])
def test_documents_that_do_not_ascend_within_samples_are_refused(documents):
    with pytest.raises(ValueError, match="documents must ascend, each within one of 2 samples of 16 tokens"):
        shard_documents(2, 16, documents, ContextAlgorithm(1, 2))


def test_algorithms_by_name():
    assert algorithm_of("ulysses", 4) == ContextAlgorithm(4, 1, kv_cache="full")
    assert algorithm_of("ring", 4, window=2) == ContextAlgorithm(1, 4, 2)
    assert algorithm_of("hybrid", 8, ulysses=2, kv_cache="half") == ContextAlgorithm(2, 4, kv_cache="half")
    assert algorithm_of("allgather", 4) == ContextAlgorithm(1, 4, gather=True)
    names = ["ulysses", "ring", "hybrid", "allgather"]
    assert [algorithm_of(name, 4, 2).name for name in names] == names
    with pytest.raises(ValueError, match="window divides ring"):
        algorithm_of("ring", 4, window=3)
