"""How even the loads of expert ranks become: by experts that move, and by replicas; what is sent for it.

    python benchmarks/expert_balance.py

No ranks are there: the plans are those that every rank would make (ds_npu.parallel.expert.expert_map and .sharing), for
routers that choose experts unevenly: the n-th most popular expert of a layer n^-s times as often as the first. The
popularity of the first half of the tokens is measured, experts move, and the second half is computed; in it popularity
has drifted: each expert's has changed by a factor of e^(0.2 g), g normal. Load is that of the heaviest rank over the
mean; what is sent is of weights of 3 x hidden x columns numbers in bf16.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
from collections.abc import Sequence

from ds_npu.parallel.expert.expert_map import heaviest, map_by_load, moves_between, plain_map
from ds_npu.parallel.expert.sharing import shared_rows

EXPERTS, CHOICES, TOKENS = 128, 8, 8192
HIDDEN, COLUMNS = 2048, 768
EXPERT_MIB = 3 * HIDDEN * COLUMNS * 2 / 2**20
LEASTS = (1, 1500, 9000)
LAYERS = 20


def popularity(exponent: float, seed: int) -> tuple[list[float], list[float]]:
    """Of each expert of one layer, when it is measured and later."""
    made = random.Random(seed)
    first = [(rank + 1) ** -exponent for rank in range(EXPERTS)]
    made.shuffle(first)
    return first, [each * math.exp(0.2 * made.gauss(0, 1)) for each in first]


def rows_of(shares: Sequence[float], ranks: int) -> list[int]:
    """By expert, the rows of all ranks' tokens; an expert is chosen by a token once at most."""
    rows, scale = [0] * EXPERTS, 1.0
    for _ in range(60):  # Scale until all choices are made.
        total = sum(min(each * scale, 1.0) for each in shares)
        scale *= CHOICES / total
    for expert, each in enumerate(shares):
        rows[expert] = round(TOKENS * ranks * min(each * scale, 1.0))
    return rows


def figures(exponent: float, ranks: int) -> list[str]:
    """The means over layers, as the cells of a row."""
    plain, moved, count = [], [], []
    replicated: dict[int, list[tuple[float, float]]] = {least: [] for least in LEASTS}
    for seed in range(LAYERS):
        measured, later = (rows_of(each, ranks) for each in popularity(exponent, seed))
        before = plain_map(EXPERTS, ranks)
        after, mean = map_by_load(measured, before), sum(later) / ranks
        plain.append(heaviest(later, before) / mean)
        moved.append(heaviest(later, after) / mean)
        count.append(len(list(moves_between(before, after))))
        in_order = [later[expert] for expert in itertools.chain(*after)]
        for least, found in replicated.items():
            plan = shared_rows([in_order], ranks, least)
            loads = [0] * ranks
            for rank, rows in itertools.chain(*plan.rows):
                loads[rank] += rows
            found.append((max(loads) / mean, plan.spare))
    cells = [f"{sum(each) / LAYERS:.2f}" for each in (plain, moved)]
    cells.append(f"{sum(count) / LAYERS:.0f} ({sum(count) / LAYERS * EXPERT_MIB * 7:,.0f} MiB)")
    for found in replicated.values():
        load, replicas = (sum(each) / LAYERS for each in zip(*found, strict=True))
        cells.append(f"{load:.2f} ({replicas:.1f})")
    return cells


def main() -> None:
    """Read the command line and print a table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    print(
        f"{EXPERTS} experts, {CHOICES} of each token, {TOKENS} tokens of each rank, an expert is {EXPERT_MIB:.0f} MiB"
    )
    heads = ["s", "ranks", "plain", "moved", "experts, with Adam's state"]
    heads += [f"replicas for {least} rows" for least in LEASTS]
    print("Replicas are of the layer that moved; in brackets the most that a rank holds.")
    print(" | ".join(heads))
    for exponent, ranks in itertools.product((0.5, 1.0), (8, 16, 32)):
        print(" | ".join([f"{exponent}", f"{ranks}", *figures(exponent, ranks)]))


if __name__ == "__main__":
    main()
