"""The part of ``ds_npu check`` about Muon: owners of the matrices of a model, seconds, and bytes that travel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ds_npu.operator_costs import Shape, orthogonalisation_cost
from ds_npu.ops.orthogonalisation import COEFFICIENTS, steps_on_gram_matrices
from ds_npu.parallel.whole_matrices.holdings import MatrixWeight, Partition, contiguous, planned_holdings
from ds_npu.parallel.whole_matrices.plan import PortionPlan, plan_of_portion, shapes_of
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.machine import Machine

MIB = 2**20
GRADIENT_BYTES, UPDATE_BYTES = 4, 2
"""Bytes of an element that travels: float32 to the owner, 16 bits back (``ns_method`` gram)."""


def planned_portions(
    weights: Sequence[MatrixWeight], degrees: Degrees, zero_stage: int, steps: int, partition: Partition
) -> list[PortionPlan]:
    """The plans of the first pipeline stage's ``weights``, whose matrices are iterated in ``steps`` steps."""
    if not weights:
        return []
    ranks = degrees.groups("dp", "cp", "tp")[0]
    holdings = planned_holdings(weights, degrees, zero_stage, ranks, partition)
    found = []
    for portion in sorted({each.portion for held in holdings for each in held}):
        held = [[each for each in own if each.portion == portion] for own in holdings]
        parts = steps_on_gram_matrices(steps)
        costs = {
            each: orthogonalisation_cost(Shape((1, *each), 2), 2, parts, gram=True).flop for each in shapes_of(held)
        }
        found.append(plan_of_portion(held, costs))
    return found


def matrix_lines(
    weights: Sequence[MatrixWeight],
    degrees: Degrees,
    zero_stage: int,
    coefficients: str,
    machine: Machine,
    partition: Partition = contiguous,
) -> Iterator[str]:
    """Lines about the matrices of the first pipeline stage, if any; ``partition``: how ZeRO 1 and 2 partition them."""
    plans = planned_portions(weights, degrees, zero_stage, len(COEFFICIENTS[coefficients]), partition)
    if not plans:
        return
    ranks = plans[0].ranks
    count = sum(len(plan.matrices) for plan in plans)
    owned = [sum(plan.owners.count(rank) for plan in plans) for rank in range(ranks)]
    loads = [sum(plan.loads()[rank] for plan in plans) / machine.matmul for rank in range(ranks)]
    there, back = (sum(plan.sent_elements()[way] for plan in plans) for way in (0, 1))
    stage = " of the first pipeline stage" if degrees.pp > 1 else ""
    yield f"Muon: {count:,} whole matrices{stage}, each orthogonalised once, by one of {ranks} ranks"
    few = f"{min(owned):,} to {max(owned):,}" if min(owned) < max(owned) else f"{max(owned):,}"
    times = f"{1e3 * min(loads):,.1f} to {1e3 * max(loads):,.1f} ms of products a step"
    yield f"  A rank owns {few}: {times}, estimated for an {machine.name}"
    yield (
        f"  A rank sends {there * GRADIENT_BYTES / MIB / ranks:,.1f} MiB of gradients and "
        f"{back * UPDATE_BYTES / MIB / ranks:,.1f} MiB of updates, on average"
    )
