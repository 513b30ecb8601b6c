"""What one rank wants of a weight, put together from written parts, against slices of the plain weight."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from ds_npu.checkpoint.digests import CHUNK_BYTES, DigestedWriter
from ds_npu.checkpoint.manifest import MODULE, Manifest, WrittenPart, WrittenRun, manifest_path
from ds_npu.checkpoint.selection import Selection, selected
from ds_npu.checkpoint.written import WrittenCheckpoint
from ds_npu.parallel.tensor.sharding import Sharding


def drawn_sharding(draw: random.Random, dim: int, size: int) -> Sharding:
    """A sharding over 1 to 3 ranks: sections, moved indices, or ranges that several ranks hold."""
    ranks = draw.randint(1, 3)
    kind = draw.choice(["even", "moved", "shared", "sections"])
    if kind == "shared":
        cut = draw.randint(0, size)
        ranges = [((0, size),) if rank == 0 else ((cut, size),) for rank in range(ranks)]
    elif kind == "moved":
        order = draw.sample(range(size), size)
        ranges = [tuple((index, index + 1) for index in order[rank::ranks]) for rank in range(ranks)]
    else:
        half = size // 2 if kind == "sections" else size
        bounds = [
            [start + (stop - start) * rank // ranks for rank in range(ranks + 1)]
            for start, stop in ((0, half), (half, size))
        ]
        ranges = [tuple((each[rank], each[rank + 1]) for each in bounds) for rank in range(ranks)]
    return Sharding(dim, size, tuple(ranges))


def part_of(whole: torch.Tensor, shards: list) -> torch.Tensor:
    for sharding, rank in shards:
        whole = sharding.take(whole, rank)
    return whole


def test_selections_are_slices_of_the_plain_weight():
    read = wanted_elements = 0
    for seed in range(400):
        draw = random.Random(seed)
        shape = tuple(draw.randint(1, 7) for _ in range(draw.randint(1, 3)))
        whole = torch.arange(math.prod(shape)).view(shape)
        written, mine, parts = {}, [], {}
        sizes = list(shape)
        for axis in draw.sample(["tp", "ep", "etp"], draw.randint(0, 2)):
            # Ranks of a further axis along the same dim have parts of equal lengths, as of experts.
            free = [dim for dim in range(len(shape)) if dim not in [each.dim for each in written.values()]]
            if free:
                dim = draw.choice(free)
                written[axis] = drawn_sharding(draw, dim, sizes[dim])
        for dim in draw.sample(range(len(shape)), draw.randint(0, len(shape))):
            sharding = drawn_sharding(draw, dim, shape[dim])
            mine.append((sharding, draw.randrange(len(sharding.ranges))))
        for ranks in itertools.product(*(range(len(each.ranges)) for each in written.values())):
            shards = list(zip(written.values(), ranks, strict=True))
            parts[ranks] = part_of(whole, shards)
        own = part_of(whole, mine).reshape(-1)
        first = draw.randint(0, own.numel())
        numel = draw.choice([None, draw.randint(0, own.numel() - first)])
        plan = selected(shape, written, Selection(mine, first, numel))
        rows = torch.full(plan.shape, -1)
        for block in plan.blocks:
            part = parts[tuple(block.coordinates.values())]
            held = part[block.rows.source : block.rows.source + block.rows.length]
            for source, target in block.slices():
                assert (rows[target] == -1).all(), "an element is read twice"
                rows[target] = held[source]
                read += held[source].numel()
        expected = own[first : own.numel() if numel is None else first + numel]
        wanted_elements += expected.numel()
        assert rows.view(-1)[plan.skipped : plan.skipped + plan.numel].equal(expected), seed
        assert (rows != -1).all() or not plan.numel
    assert read < 2 * wanted_elements


ROWS, COLUMNS = 12288, 512
"""24 MiB of float32."""


@pytest.mark.parametrize("has_digests", [True, False])
def test_bytes_that_are_read(has_digests, tmp_path):
    """Half of the rows in each of two files: a rank reads its third, whole chunks, and each file's directory."""
    halves = Sharding(0, ROWS, tuple(((rank * ROWS // 2, (rank + 1) * ROWS // 2),) for rank in range(2)))
    weight = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)
    for rank in range(2):
        name = f"mp_rank_0{rank}_model_states.pt"
        with DigestedWriter(tmp_path / name) as writer:
            torch.save({MODULE: {"weight": halves.take(weight, rank)}}, writer)
        run = WrittenRun(name, (MODULE, "weight"), 0, 0, weight.numel() // 2)
        part = WrittenPart((ROWS // 2, COLUMNS), {"tp": halves}, {"tp": rank}, run)
        digests = {name: writer.digests()} if has_digests else {}
        manifest_path(tmp_path, rank).write_text(Manifest({"weight": part}, 2, digests=digests).sealed())
    thirds = Sharding(0, ROWS, tuple(((rank * ROWS // 3, (rank + 1) * ROWS // 3),) for rank in range(3)))
    for rank, files in ((0, 1), (1, 2), (2, 1)):
        written = WrittenCheckpoint(tmp_path)
        mine = thirds.take(weight, rank)
        assert written.value("weight", Selection([(thirds, rank)])).equal(mine.view(-1))
        chunks = CHUNK_BYTES if has_digests else 2**12
        assert mine.nbytes <= written.bytes_read <= 1.05 * mine.nbytes + 4 * files * chunks
        written.close()
