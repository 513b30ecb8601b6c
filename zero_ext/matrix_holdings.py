"""The pieces that each rank holds of the matrices that Muon steps, and the plan that follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from ds_npu.config.deepspeed_keys import value_at
from ds_npu.config.problems import Config
from ds_npu.config.whole_matrices import MUON
from ds_npu.operator_costs import Shape, orthogonalisation_cost
from ds_npu.ops.orthogonalisation import steps_on_gram_matrices
from ds_npu.parallel.runtime.placement import placement_of
from ds_npu.parallel.runtime.tensor_attribute import TensorAttribute
from ds_npu.parallel.whole_matrices.exchange import MatrixExchange
from ds_npu.parallel.whole_matrices.holdings import MatrixWeight, contiguous, copy_of, planned_holdings, ranges_of
from ds_npu.parallel.whole_matrices.pieces import WeightHolding
from ds_npu.parallel.whole_matrices.plan import PortionPlan, plan_of_portion, shapes_of
from ds_npu.topology.topology import Topology
from ds_npu.zero_ext.bucket_plan import bucketed_runs
from ds_npu.zero_ext.bucketed_zero import BUCKETED, bucket_limits
from ds_npu.zero_ext.gradient_norm import REPLICATED
from ds_npu.zero_ext.matrix_optimizer import MatrixOptimizer, MatrixPortion, MomentumRun
from ds_npu.zero_ext.optimizer_layout import FlatRun, layout_of_optimizer
from ds_npu.zero_ext.weight_pieces import held_runs

HEAD_ROWS = TensorAttribute[int]("muon_head_dim")
"""DeepSpeed's mark, set by its key ``per_head_muon``, of the number of rows of a head."""
STEPPED = TensorAttribute[bool](MUON)
"""DeepSpeed's mark of the weights that Muon steps."""
PARTITIONED = (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3, BF16_Optimizer)
"""Optimizers that give each data rank a partition."""


def plan_whole_matrices(engine: Any, group: dist.ProcessGroup | None) -> list[PortionPlan]:
    """Plan the steps of the matrices of an engine whose optimizer is a MatrixOptimizer, and let it follow the plan.

    ``group``: the ranks of this pipeline stage, which all call it. Raises ValueError, on all of them, for what cannot
    be made whole.
    """
    inner: MatrixOptimizer = engine.basic_optimizer
    portions = _portions(engine.optimizer, inner)
    weights, refusal = _held(engine, list(portions.values()))
    own = dist.get_rank(group), list(portions), weights
    everyones = [own] * dist.get_world_size(group)
    dist.all_gather_object(everyones, own, group=group)
    if refusal is None and any(keys != own[1] for _, keys, _ in everyones):
        refusal = (
            "optimizer.type Muon: ranks of one pipeline stage step other parts of the weights: by group and sub-group "
            f"{[keys for _, keys, _ in everyones]}. What to do: the same parameter groups on every rank; with ZeRO 3, "
            "a zero_optimization.sub_group_size that holds all weights"
        )
    # Stages have different weights, and no rank may go on alone.
    refusals = [refusal] * dist.get_world_size()
    dist.all_gather_object(refusals, refusal)
    if found := next(filter(None, refusals), None):
        raise ValueError(found)
    all_held = [held for _, _, held in everyones]
    if [rank for rank, _, _ in everyones] != list(range(len(everyones))):
        # A prediction (without processes for other ranks): all gathered values are this rank's.
        all_held = expected_holdings(engine)
        all_held[own[0]] = weights
    plans, planned = [], []
    for number, tensors in enumerate(portions.values()):
        parts = [[each for each in held if each.portion == number] for held in all_held]
        plan = plan_of_portion(parts, _costs(parts, inner))
        plans.append(plan)
        exchange = MatrixExchange(plan.waves_of(own[0]), group)
        runs = _momentum_runs(engine.optimizer, list(engine.module.parameters()), tensors)
        planned.append(MatrixPortion(tensors, exchange, runs))
    inner.use(planned)
    return plans


def mark_matrices(model: nn.Module, ds_config: Config) -> None:
    """Mark the weights of a whole ``model`` that Muon will step, and their heads, as ``deepspeed.initialize`` does.

    Raises ValueError, DeepSpeed's own, where ``per_head_muon`` is set and it finds no heads.
    """
    settings = value_at(ds_config, "optimizer.params")
    deepspeed.set_optimizer_flags(SimpleNamespace(optimizer_name="muon", optimizer_params=settings), model)


def matrix_weights(model: nn.Module) -> list[MatrixWeight]:
    """The weights that Muon steps, in the order of the ``model``."""
    trained = [each for each in model.parameters() if each.requires_grad and STEPPED.get(each)]
    return [MatrixWeight(placement_of(each), HEAD_ROWS.get(each) or 0) for each in trained]


def expected_holdings(engine: Any) -> list[list[WeightHolding]]:
    """The holdings of all ranks of this stage by the rules of partitions, without a message."""
    topology = engine.topology
    weights = matrix_weights(engine.module)
    ranks = topology.ranks("dp", "cp", "tp")
    is_bucketed = BUCKETED.get(engine.optimizer) is not None
    partition = partial(bucketed_runs, bucket_limits(engine.optimizer)) if is_bucketed else contiguous
    return planned_holdings(weights, topology.degrees, engine.zero_optimization_stage(), ranks, partition)


def _momentum_runs(
    optimizer: Any, weights: Sequence[nn.Parameter], tensors: Sequence[torch.Tensor]
) -> list[MomentumRun] | None:
    """The runs of ``tensors[0]`` in ZeRO 1 and 2, in DeepSpeed's order; None elsewhere.

    Checkpoints have this order.
    """
    layout = layout_of_optimizer(optimizer, weights)
    if layout is None or not isinstance(optimizer, DeepSpeedZeroOptimizer):
        return None
    held = [(layout.runs[id(weight)], weight.numel()) for weight in weights if id(weight) in layout.runs]
    own = [(run, numel) for run, numel in held if layout.flats[run.flat] is tensors[0]]
    return sorted(MomentumRun(run.start, run.first, run.numel, numel) for run, numel in own)


def _costs(held: Sequence[Sequence[WeightHolding]], inner: MatrixOptimizer) -> dict[tuple[int, int], float]:
    parts = steps_on_gram_matrices(len(inner.settings.coefficients))
    shapes = shapes_of(held)
    return {each: orthogonalisation_cost(Shape((1, *each), 2), 2, parts, gram=True).flop for each in shapes}


def _portions(optimizer: Any, inner: MatrixOptimizer) -> dict[tuple[int, ...], Sequence[torch.Tensor]]:
    """The tensors that are stepped together, by the index of their group, in the order of the steps."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        flats = enumerate(optimizer.fp32_partitioned_groups_flat)
        steps = [(optimizer.sub_group_to_group_id[index], index, flat) for index, flat in flats]
        return {(group, index): [flat] for group, index, flat in steps if inner.param_groups[group][MUON]}
    return {(index,): group["params"] for index, group in enumerate(inner.param_groups) if group[MUON]}


def _held(engine: Any, portions: Sequence[Sequence[torch.Tensor]]) -> tuple[list[WeightHolding], str | None]:
    """This rank's holdings of the weights of its ``portions``, and why no matrices can be made of them, if so."""
    weights = list(engine.module.parameters())
    layout = layout_of_optimizer(engine.optimizer, weights)
    if layout is None:
        return [], (
            f"optimizer.type Muon: it is not known where {type(engine.optimizer).__name__} keeps the parts of whole "
            "matrices. What to do: zero_optimization without elastic_checkpoint, offload_param, zenflow and mics"
        )
    positions = {id(each): (number, index) for number, own in enumerate(portions) for index, each in enumerate(own)}
    is_partitioned = isinstance(engine.optimizer, PARTITIONED)
    held = []
    for weight in weights:
        for run in held_runs(engine.optimizer, layout, weight):
            position = positions.get(id(layout.flats[run.flat]))
            if position is None:
                continue
            if refusal := why_not_whole(weight, engine.topology):
                return [], refusal
            held.append(_held_weight(weight, run, position, engine.topology, is_partitioned))
    return held, None


def why_not_whole(weight: nn.Parameter, topology: Topology) -> str | None:
    """Why the ranks cannot put the matrices of ``weight`` together, in words; None where they can."""
    placement, reason = placement_of(weight), None
    dims = [sharding.dim for sharding in placement.sharded.values()]
    if "tp" in placement.absent and topology.size("tp") > 1:
        reason = "is of a tensor-parallel layer of the model's own, and nothing tells which part of it a rank has"
    elif REPLICATED.get(weight) is not None:
        reason = "is shared by several pipeline stages, each of which would step it"
    elif len(placement.shape) not in (2, 3, 4):
        reason = "has neither two dims, nor three of a stack, nor four of a convolution"
    elif len(set(dims)) < len(dims) or (len(placement.shape) == 4 and any(dims)):
        reason = f"is sharded along its dims {dims}, of which no rectangles can be made"
    if reason is None:
        return None
    return (
        f"optimizer.type Muon: {placement.name} (of shape {placement.shape}) {reason}. What to do: AdamW; or an "
        "optimizer of your own, deepspeed's MuonWithAuxAdam, with this weight in a group whose use_muon is false"
    )


def _held_weight(
    weight: nn.Parameter, run: FlatRun, position: tuple[int, int], topology: Topology, is_partitioned: bool
) -> WeightHolding:
    placement = placement_of(weight)
    ranks = topology.coordinates
    return WeightHolding(
        placement.name,
        placement.shape,
        *ranges_of(placement, ranks),
        run.first,
        run.numel,
        position[1],
        run.start,
        position[0],
        copy_of(placement, ranks, is_partitioned),
        HEAD_ROWS.get(weight) or 0,
    )
