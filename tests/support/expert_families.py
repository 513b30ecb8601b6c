"""Each decoder of transformers with experts over 2 expert ranks: exact, or refused; against one process in float64."""

from __future__ import annotations

import re
from pathlib import Path

import decoder_families as families
import tensor_parallel_rule
import tiny_models
import torch
import torch.distributed as dist
import transformers
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ds_npu.config.moe import MoeSection
from ds_npu.features.build import Build
from ds_npu.features.driver import apply_features
from ds_npu.features.experts.expert_ranks import MOE
from ds_npu.parallel.runtime.placement import placement_of
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology


def outcome(kind: str, etp: int = 1, bound: float = families.EXACT) -> str:
    """``exact`` (to ``bound``), ``refused: <why>`` or what went wrong; both ranks have the same tokens."""
    ranks = dist.get_world_size()
    topology = Topology(Degrees(dp=ranks, ep=ranks // etp, etp=etp))
    plain, ids = families.made(kind), tiny_models.tokens(families.SAMPLES, families.LENGTH)
    given = {"input_ids": ids, "labels": ids}
    try:
        expected = families.step(plain, given)
    except Exception as error:
        return f"one process: {type(error).__name__}: {error}"
    model = families.made(kind)
    try:
        apply_features([(MOE, MoeSection())], Build(topology, model))
    except ValueError as error:
        return f"refused: {error}"
    try:
        found = families.step(model, given)
    except Exception as error:
        kind_of_end = "refused at the first forward" if families.is_ours(error) else "CRASH"
        return f"{kind_of_end}: {type(error).__name__}: {error}"
    worst, where = abs(found / expected - 1), "loss"
    floor = 1e-3 * max(float(each.grad.abs().max()) for each in plain.parameters() if each.grad is not None)
    for name, weight in plain.named_parameters():
        own = model.get_parameter(name)
        mine = torch.zeros_like(own) if own.grad is None else own.grad
        # The tokens of every rank of the group add to an expert's gradient.
        times = ranks if placement_of(own).is_expert else 1
        whole = tensor_parallel_rule.assembled(topology, own, mine) / times
        right = torch.zeros_like(weight) if weight.grad is None else weight.grad
        error = float((whole - right).abs().max()) / max(float(right.abs().max()), floor)
        worst, where = max((worst, where), (error, name))
    return "exact" if worst <= bound else f"WRONG: {where} by {worst:.1e}"


def under_autocast(kind: str) -> None:
    """Losses and gradients of float32 weights under autocast, against transformers' grouped experts under it."""
    topology = Topology(Degrees(dp=2, ep=2))
    plain, model = families.made(kind).float(), families.made(kind).float()
    plain.set_experts_implementation("grouped_mm")
    ids = tiny_models.tokens(families.SAMPLES, families.LENGTH)
    apply_features([(MOE, MoeSection())], Build(topology, model))
    losses = []
    for each in (plain, model):
        with torch.autocast("cpu", torch.bfloat16):
            loss = each(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
    assert abs(losses[1] / losses[0] - 1) <= 2e-3, losses
    for name, weight in model.named_parameters():
        assert weight.grad is None or weight.grad.dtype == torch.float32, name
        if "experts.down_proj" in name:
            right = tensor_parallel_rule.assembled(topology, weight, weight.grad) / 2
            other = plain.get_parameter(name).grad
            assert float((right - other).norm() / other.norm()) <= 0.05, name


def has_experts(kind: str) -> bool:
    """Whether transformers' code of the family has a class of experts; nothing of it is imported."""
    name = model_type_to_module_name(kind)
    file = Path(transformers.__file__).parent / "models" / name / f"modeling_{name}.py"
    return file.exists() and re.search(r"^class \w*Experts\(", file.read_text(), re.MULTILINE) is not None


FAMILIES = [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if has_experts(kind)]
