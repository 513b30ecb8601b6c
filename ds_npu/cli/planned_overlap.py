"""The part of ``ds_npu check`` about sequence parallelism: how each matrix product overlaps with its collective."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import nn

from ds_npu.config.check import Checked
from ds_npu.config.problems import Config
from ds_npu.log import aligned
from ds_npu.models import names
from ds_npu.ops import matmul_collective
from ds_npu.parallel.tensor.linear import ColumnLinear, RowLinear
from ds_npu.parallel.tensor.overlap_cost import FUSED, SERIAL, OverlapCall, fastest_way, seconds_by_way
from ds_npu.planner.communicators import number_bytes
from ds_npu.topology.machine import Machine


class LayerProduct(NamedTuple):
    """A matrix product and its collective, of one layer or of layers that share their input."""

    layer: str
    """The name of the first layer."""
    others: int
    direction: Literal["forward", "backward"]
    call: OverlapCall
    inner: tuple[int, int]
    """The smallest and the largest inner dimension of the product on any rank."""


def overlap_lines(
    model: nn.Module, ds_config: Config, checked: Checked, machine: Machine, length: int | None
) -> Iterator[str]:
    """Lines about the products of ``model``, as features have changed it.

    None where there is no choice to make.
    """
    degrees, section = checked.degrees, checked.config
    if degrees.tp == 1 or not section.parallel.sequence_parallel or section.tensor_overlap is not None:
        return
    title = f"Sequence parallelism over {degrees.tp} tensor ranks: how each product overlaps with its message is chosen"
    if length is None or checked.batch.micro is None:
        yield from ("", f"{title} by estimates; to see them, say --sequence-length N and a micro-batch")
        return
    rows = -(-length // (degrees.cp * degrees.tp))
    blank = OverlapCall("all_gather", degrees.tp, checked.batch.micro, rows, (), number_bytes(ds_config))
    layers: dict[tuple[str, LayerProduct], list[str]] = {}
    for product in products(model, blank):
        kind = names.generic(product.layer), product._replace(layer="")
        layers.setdefault(kind, []).append(product.layer)
    yield from ("", f"{title}:")
    text = (
        f"Estimated for an {machine.name}, not measured: milliseconds of one product and its message on each rank, for "
        f"{blank.batch} x {length:,} tokens. On the CPU nothing overlaps."
    )
    yield from textwrap.wrap(text, 116, initial_indent="  ", subsequent_indent="  ")
    found = [(names.abbreviated(each), kind, _ways(kind, machine)) for (_, kind), each in layers.items()]
    ways = [SERIAL, *sorted({way for *_, seconds in found for way in seconds} - {SERIAL, FUSED}), FUSED]
    header = ("", "", "", *map(_word, ways), "taken")
    yield from (f"  {line}" for line in aligned([header, *(_row(*each, ways) for each in found)]))


def products(model: nn.Module, blank: OverlapCall) -> Iterator[LayerProduct]:
    """The products of ``model`` that have a collective; ``blank``: the call that each fills in."""
    names_of = {module: name for name, module in model.named_modules()}
    for module, name in names_of.items():
        if isinstance(module, RowLinear) and module.axis.sequence_parallel:
            outer = module.layout.matrix(module.weight).shape[1]
            shards = module.layout.shards
            out = blank._replace(collective="reduce_scatter", products=((shards[1], outer),))
            yield LayerProduct(name, 0, "forward", out, shards)
            yield LayerProduct(name, 0, "backward", blank._replace(products=((outer, shards[1]),)), (outer, outer))
    for group in _column_groups(model):
        inner = group[0].layout.matrix(group[0].weight).shape[0]
        name, others = names_of[group[0]], len(group) - 1
        sizes = tuple((inner, each.layout.most) for each in group)
        yield LayerProduct(name, others, "forward", blank._replace(products=sizes, gathered=False), (inner, inner))
        back = tuple((outer, inner) for _, outer in sizes)
        call = blank._replace(collective="reduce_scatter", products=back, hides=group[0].weight.requires_grad)
        yield LayerProduct(name, others, "backward", call, group[0].layout.shards)


def _column_groups(model: nn.Module) -> Iterator[list[ColumnLinear]]:
    """The groups of column linears that share one gathered input."""
    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, ColumnLinear) and module.axis.sequence_parallel and id(module.projections) not in seen:
            seen.add(id(module.projections))
            yield module.projections.layers


def _ways(product: LayerProduct, machine: Machine) -> Mapping[int, float]:
    call, dtype = product.call, torch.bfloat16 if product.call.itemsize == 2 else torch.float32
    is_one = call.collective == "all_gather" or len(call.products) == 1
    unmet = (matmul_collective.unmet("npu", (dtype, dtype), each, call.ranks) for each in product.inner)
    return seconds_by_way(call, machine, is_one and not any(unmet))


def _word(way: int) -> str:
    return {SERIAL: "none", FUSED: "one kernel"}.get(way, f"{way} pieces")


def _row(layers: str, product: LayerProduct, seconds: Mapping[int, float], ways: Sequence[int]) -> tuple[str, ...]:
    times = (f"{1e3 * seconds[way]:.3f}" if way in seconds else "-" for way in ways)
    collective = product.call.collective.replace("_", "-")
    name = f"{layers} and {product.others} more" if product.others else layers
    return (name, product.direction, collective, *times, _word(fastest_way(seconds)))
