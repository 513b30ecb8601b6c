"""Runs that are saved at each of twelve layouts and go on at each other, against one process that is not interrupted.

An engine of each layout trains and saves. An engine of each layout then loads what the others have saved, one after
the other: the first into the state in which it was made, the next ones into the state of another training.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import deepspeed
import gradient_rule as rule
import layout_lives as lives
import muon_rule
import tensor_parallel_rule as dense
import torch
import torch.distributed as dist
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from muon_reference import OPTIMIZER, WholeMuon
from torch import nn

from ds_npu.checkpoint.written import WrittenCheckpoint
from ds_npu.engine.checkpoints.written_files import CLASSES
from ds_npu.features.experts.relocation import EXPERT_MAP

BEFORE, AFTER = 2, 2
"""Steps before a save, and after a load."""
ADAM = {"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.1}
SGD = {"lr": 0.2, "momentum": 0.9}
NO_DECAY = {"weight_decay": 0.0, "lr": 3e-2, "betas": (0.5, 0.7)}
"""The settings of the second group, of biases and norms."""
LOSS, UPDATE = 1e-5, 1e-3
"""Bounds of a loss, and of what both later steps did to a weight, in float32: a state that is not loaded makes 0.1."""
TINY = 1e-6
"""An update whose root mean square is below it is float32's rounding of the weight."""
LORA = {"r": 2, "target_modules": ["q_proj", "down_proj"]}
KEPT = {"optimizer_memory": {"share_fp32": True, "swap": True}}

Layout = tuple[int, dict]
"""A stage of ZeRO and a section."""


@dataclass(frozen=True)
class Kind:
    """One sort of training."""

    family: str = "llama"
    optimizer: str = "AdamW"
    adapters: bool = False
    is_tied: bool = False
    moves_experts: bool = False
    has_groups: bool = False
    is_narrow: bool = False
    """Whether weights are bf16, and every second layout has ``optimizer_memory``."""


KINDS = {
    "llama, AdamW": Kind(),
    "llama, Muon": Kind(optimizer="Muon"),
    "qwen3_moe, moved experts": Kind("qwen3_moe", moves_experts=True),
    "llama, LoRA": Kind(adapters=True),
    "llama, bf16 and optimizer_memory": Kind(is_narrow=True),
    "llama, tied, groups": Kind(is_tied=True, has_groups=True),
    "mixtral, SGD": Kind("mixtral", optimizer="SGD"),
    "gpt2, SGD": Kind("gpt2", optimizer="SGD"),
    "deepseek_v3, AdamW": Kind("deepseek_v3"),
    "qwen3_moe, Muon": Kind("qwen3_moe", optimizer="Muon"),
    "phi3, groups": Kind("phi3", has_groups=True),
    "llama, tied, Muon": Kind(is_tied=True, optimizer="Muon"),
}


def over(**parallel: int) -> dict:
    ring = {"context_parallel": {"algorithm": "ring"}} if "context" in parallel else {}
    return {"parallel": parallel} | ring


V_SHAPE = over(pipeline=2) | {"pipeline": {"schedule": "zb_v"}}
OWN_PARTITIONS = {"zero": {"overlap_comm": False, "round_robin_gradients": True}}
"""DeepSpeed's partitions, in another order."""
PLAIN_PARTITIONS = {"zero": {"overlap_comm": False}}
OFFLOADED = {"zero": {"offload_optimizer": {"device": "cpu"}}}
DENSE = [
    *[(1, {}), (3, over(tensor=2)), (0, over(pipeline=4)), (2, over(tensor=2)), (3, over(context=2)), (0, {})],
    *[(1, over(tensor=2, pipeline=2)), (3, over(tensor=2, context=2)), (2, V_SHAPE), (0, over(tensor=4))],
    *[(1, OWN_PARTITIONS), (2, OFFLOADED)],
]
EXPERTS = [
    *[(1, over(expert=2)), (3, over(expert=4)), (0, over(expert_tensor=2)), (1, over(pipeline=2, expert=2))],
    *[(3, over(expert=2, tensor=2)), (0, {}), (2, over(expert=4)), (0, over(expert=2, expert_tensor=2))],
    *[(3, {}), (2, over(tensor=2)), (1, over(expert=2, context=2)), (0, over(pipeline=2, tensor=2))],
]
DENSE_OF_EIGHT = [(1, over(tensor=2, pipeline=2)), (3, over(tensor=4)), (2, over(context=2, tensor=2)), (0, {})]
EXPERTS_OF_EIGHT = [
    *[(1, over(pipeline=2, expert=2)), (3, over(expert=4, tensor=2)), (2, over(expert=2, context=2))],
    *[(0, over(expert=2, expert_tensor=2))],
]
"""Stages of ZeRO and sections."""


def layouts_of(kind: Kind, ranks: int) -> list[Layout]:
    """The layouts of a sort of training, each with all that its section has."""
    is_dense = kind.family in ("llama", "gpt2", "phi3")
    of_four, of_eight = (DENSE, DENSE_OF_EIGHT) if is_dense else (EXPERTS, EXPERTS_OF_EIGHT)
    found = of_eight if ranks == 8 else of_four
    if kind.optimizer == "Muon":
        # The matrices' owners step on their devices: offloading is refused.
        found = [(2, over(context=2)) if section is OFFLOADED else (stage, section) for stage, section in found]
    if kind.moves_experts:
        moving = {"moe": {"placement_interval": 1}}
        found = [
            (stage, section | (moving if {"expert"} <= parallel.keys() and "pipeline" not in parallel else {}))
            for stage, section in found
            for parallel in (section.get("parallel", {}),)
        ]
    if kind.is_narrow:
        # With round_robin_gradients DeepSpeed tells another weight's values.
        found = [(stage, PLAIN_PARTITIONS if section is OWN_PARTITIONS else section) for stage, section in found]
        found = [
            (stage, section | (KEPT if index % 2 and section is not OFFLOADED else {}))
            for index, (stage, section) in enumerate(found)
        ]
    return [
        (stage, section | {"checkpoint": {"asynchronous": bool(index % 2)}})
        for index, (stage, section) in enumerate(found)
    ]


def pairs_of(kind: Kind, ranks: int) -> list[tuple[int, int]]:
    """All pairs of layouts, the saving one first, such that a part of them has many different ones."""
    count = len(layouts_of(kind, ranks))
    return [(index, (index + shift) % count) for shift in (1, *range(2, count), 0) for index in range(count)]


def model_of(kind: Kind, dtype: torch.dtype) -> nn.Module:
    adapters = LORA if kind.adapters else None
    if not kind.is_tied:
        return lives.model_of(kind.family, dtype, adapters)
    model = lives.model_of(kind.family, torch.float32)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return model.to(dtype)


def groups_of(kind: Kind, model: nn.Module) -> list:
    """The weights that are trained, or two groups of them."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    if not kind.has_groups:
        return trained
    halves = [[weight for weight in trained if (weight.dim() > 1) == is_matrix] for is_matrix in (True, False)]
    return [{"params": halves[0]}, {"params": halves[1], **NO_DECAY}]


def engine_of(kind: Kind, stage: int, section: dict):
    dtype = torch.bfloat16 if kind.is_narrow else torch.float32
    section = {**section}
    zero, more, parallel = section.pop("zero", {}), section.pop("more", {}), section.get("parallel", {})
    shared = parallel.get("tensor", 1) * parallel.get("pipeline", 1) * parallel.get("context", 1)
    config = dense.config(stage, dtype, section) | more
    config["optimizer"] = {
        "AdamW": {"type": "AdamW", "params": ADAM | {"torch_adam": True}},
        "SGD": {"type": "SGD", "params": SGD},
        "Muon": OPTIMIZER,
    }[kind.optimizer]
    config |= {"train_micro_batch_size_per_gpu": lives.SAMPLES * shared // dist.get_world_size()}
    config["gradient_accumulation_steps"] = 1
    config["zero_optimization"] = {**config["zero_optimization"], **zero}
    model = model_of(kind, dtype)
    return deepspeed.initialize(model=model, model_parameters=groups_of(kind, model), config=config)[0]


@dataclass(frozen=True)
class Expected:
    """What one process does in float64: the loss of each step, and weights before and behind the later ones."""

    losses: Sequence[float]
    saved: Mapping[str, torch.Tensor]
    last: Mapping[str, torch.Tensor]


def expected_of(kind: Kind) -> Expected:
    model = model_of(kind, torch.float64)
    trained, losses, saved = [weight for weight in model.parameters() if weight.requires_grad], [], {}
    muon = WholeMuon(model) if kind.optimizer == "Muon" else None
    groups = groups_of(kind, model)
    plain = torch.optim.SGD(groups, **SGD) if kind.optimizer == "SGD" else torch.optim.AdamW(groups, **ADAM)
    for step in range(BEFORE + AFTER):
        if step == BEFORE:
            saved = {name: each.clone() for name, each in model.state_dict().items()}
        loss = dense.loss_of(model, lives.tokens(step), torch.float64)
        loss.backward()
        losses.append(loss.item())
        if muon is not None:
            muon.step(rule.CLIP)
            continue
        torch.nn.utils.clip_grad_norm_(trained, rule.CLIP)
        plain.step()
        plain.zero_grad()
    return Expected(losses, saved, model.state_dict())


def hold(kind: Kind, pairs: Sequence[tuple[int, int]], folder: str) -> None:
    """Save at the first layout of each pair, go on at the second, and compare with one process."""
    rule.without_extension()
    muon_rule.iterate_in_float64()
    hold_layouts(kind, layouts_of(kind, dist.get_world_size()), pairs, folder)


def hold_layouts(kind: Kind, layouts: Sequence[Layout], pairs: Sequence[tuple[int, int]], folder: str) -> None:
    """The same with pairs of ``layouts``."""
    expected, states = None if kind.is_narrow else expected_of(kind), {}
    for index in sorted({first for first, _ in pairs}):
        states[index] = save(kind, layouts[index], f"{folder}/{index}", expected)
    assert not kind.moves_experts or any(has_moved(each) for each in Path(folder).iterdir())
    for second, same in itertools.groupby(sorted(pairs, key=lambda pair: pair[1]), key=lambda pair: pair[1]):
        engine = engine_of(kind, *layouts[second])
        for first, _ in sorted(same, key=lambda pair: (pair[0] - second) % len(layouts)):
            where = (layouts[first], layouts[second])
            path, _ = engine.load_checkpoint(f"{folder}/{first}", load_module_strict=not kind.adapters)
            assert path is not None and engine.global_steps == BEFORE, where
            if expected is None:
                assert same_states(states[first], digests_of(engine)), where
                lives.step_of(engine, BEFORE, torch.bfloat16)
            else:
                go_on(engine, expected, where)
        engine.destroy()


def save(kind: Kind, layout: Layout, folder: str, expected: Expected | None) -> Mapping[str, str]:
    """Train and save; where saves are asynchronous with a step in between. Returns digests of narrow states."""
    engine = engine_of(kind, *layout)
    dtype = torch.bfloat16 if expected is None else torch.float32
    for step in range(BEFORE):
        loss = lives.step_of(engine, step, dtype)
        assert expected is None or abs(loss / expected.losses[step] - 1) <= LOSS, (layout, step)
    states = digests_of(engine) if expected is None else {}
    engine.save_checkpoint(folder, exclude_frozen_parameters=kind.adapters and layout[0] > 1)
    if layout[1]["checkpoint"]["asynchronous"]:
        lives.step_of(engine, BEFORE, dtype)
        engine.finish_saving()
    engine.destroy()
    dist.barrier()
    return states


def has_moved(folder: Path) -> bool:
    """Whether experts are elsewhere than in the plain order in a checkpoint."""
    written = WrittenCheckpoint(folder / f"global_step{BEFORE}", CLASSES)
    maps = written.model_state().get(EXPERT_MAP) or {}
    written.close()
    places = [each["places"] for each in maps.values()]
    return any([one for held in each for one in held] != [*range(sum(map(len, each)))] for each in places)


def go_on(engine, expected: Expected, where: object) -> None:
    for step in range(BEFORE, BEFORE + AFTER):
        loss = lives.step_of(engine, step, torch.float32)
        assert abs(loss / expected.losses[step] - 1) <= LOSS, (where, step, loss, expected.losses[step])
    found, errors = dense.shared(engine.whole_state_dict()), {}
    assert found.keys() == expected.last.keys(), where
    for name, last in expected.last.items():
        if not last.is_floating_point():
            continue
        update = last - expected.saved[name]
        error = (found[name].double() - last).norm()
        errors[name] = float(error / max(update.norm(), TINY * last.numel() ** 0.5))
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= UPDATE, (where, worst, errors[worst])


def digests_of(engine) -> dict[str, str]:
    """A digest of each weight and moment, whole and in float32, of all stages."""
    # DeepSpeed links weights and states once, and not again behind a second load of the same engine.
    engine.optimizer._hp_optimizer_states_linked = False
    is_told = not isinstance(engine.optimizer, FP16_UnfusedOptimizer)
    states = lives.states_of(engine) if is_told else states_without_zero(engine)
    mine = {name: hashlib.sha256(each.contiguous().numpy().tobytes()).hexdigest() for name, each in states.items()}
    everyones: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyones, mine)
    return {name: each for own in everyones for name, each in own.items()}


def states_without_zero(engine) -> dict[str, torch.Tensor]:
    """The same as DeepSpeed tells of ZeRO, of the optimizer of which it tells nothing."""
    names = {id(weight): name for name, weight in engine.module.named_parameters()}
    whole, found = engine.optimizer.state_dict(), {}
    weights = [weight for group in engine.optimizer.fp16_groups for weight in group]
    masters = [master for group in whole["fp32_groups"] for master in group]
    for index, (weight, master) in enumerate(zip(weights, masters, strict=True)):
        state = whole["optimizer_state_dict"]["state"][index]
        for key, part in {None: master, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}.items():
            part = part.detach().cpu().view(weight.shape)
            found[f"{names[id(weight)]}/{key}"] = dense.assembled(engine.topology, weight, part)
    return found


def same_states(found: Mapping[str, str], expected: Mapping[str, str]) -> bool:
    return found.keys() == expected.keys() and all(found[name] == each for name, each in expected.items())
