"""Configs drawn by a number: a family, axes, a stage of ZeRO, accumulation, and keys of the section beside each other.

Each is held to one process in float64, with what is on by default on NPUs (``gradient_rule.ON_NPUS`` on the CPU).
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass

import gradient_rule
import pipeline_rule as rule
import tensor_parallel_rule as dense
import torch
import torch.distributed as dist
from torch import nn

from ds_npu.config.rules import broken_rules
from ds_npu.config.sections import DsNpuConfig
from ds_npu.memory import swapped_activations

Keys = dict[str, object]
FAMILIES = ("llama", "gpt2", "qwen2", "phi3", "qwen3_moe", "mixtral", "deepseek_v3")
OF_EXPERTS = ("qwen3_moe", "mixtral", "deepseek_v3")
BLOCKS = 4
AXES: tuple[Keys, ...] = (
    {},
    {"tensor": 2},
    {"tensor": 2, "sequence_parallel": True},
    {"context": 2},
    {"pipeline": 2},
    {"pipeline": 4},
    {"pipeline": 2, "tensor": 2},
    {"pipeline": 2, "context": 2},
    {"tensor": 2, "context": 2},
    {"expert": 2},
    {"tensor": 2, "expert": 2},
    {"pipeline": 2, "expert": 2},
)
"""Axes of 4 ranks; data has what they leave."""
SWITCHES: tuple[Keys, ...] = (
    {"recompute": {"layers": 1, "method": "block"}},
    {"recompute": {"norm": True, "activation_function": True}},
    {"swap": {"activations": True}},
    {"chunked_loss": 4},
    {"moe": {"dispatcher": "allgather"}},
    {"moe": {"zero_memory": "level0"}},
    {"moe": {"grouped_matmul": True}},
    {"tensor_overlap": "pipelined"},
    {"context_parallel": {"algorithm": "ring"}},
)
SCHEDULES = ("1f1b", "gpipe", "zb_h1", "zb_v", "interleaved", "dualpipe_v")
OF_ONE_STAGE = SCHEDULES[:3]
"""Those whose ranks hold one stage each: a block of BLOCKS for each of 4 ranks."""


@dataclass(frozen=True)
class Drawn:
    """A config, and the model that it is for."""

    family: str
    stage: int
    dtype: torch.dtype
    section: Keys

    @property
    def recomputes(self) -> bool:
        return "recompute" in self.section

    def changes(self) -> Keys:
        """What of the tiny model is different: losses of routers are means over micro-batches, which pipelines cut."""
        blocks: Keys = {} if self.family == "gpt2" else {"num_hidden_layers": BLOCKS}
        return blocks | ({"output_router_logits": False} if self.family in ("qwen3_moe", "mixtral") else {})


def drawn(number: int, dtypes: tuple[torch.dtype, ...]) -> Drawn:
    """The config of ``number``; no rule of the section forbids it."""
    chance = random.Random(number)
    while True:
        parallel = chance.choice(AXES)
        family = chance.choice(OF_EXPERTS if "expert" in parallel else FAMILIES)
        section: Keys = {"parallel": parallel}
        for switch in chance.sample(SWITCHES, chance.randint(0, 4)):
            section |= {key: value for key, value in switch.items() if key not in section}
        if "pipeline" in parallel:
            schedule = chance.choice(OF_ONE_STAGE if parallel["pipeline"] == BLOCKS else SCHEDULES)
            section["pipeline"] = {"schedule": schedule} | ({"virtual_stages": 2} if schedule == "interleaved" else {})
        if "moe" in section and family not in OF_EXPERTS:
            continue
        recompute = section.get("recompute", {})
        if family == "mixtral" and isinstance(recompute, dict) and "activation_function" in recompute:
            continue  # It has no MLP but its experts.
        if list(broken_rules(DsNpuConfig.model_validate(section), frozenset())):
            continue
        stage = chance.choice((0, 1, 1, 2) if "pipeline" in parallel else (0, 1, 2, 3))
        dtype = chance.choice(dtypes)
        # In bf16 a few tokens go to other experts than in float64, which hides all else.
        return Drawn(
            family, stage, torch.float32 if family in OF_EXPERTS and dtype == torch.bfloat16 else dtype, section
        )


ROW_MARGINS: tuple[Keys, ...] = ({}, {"moe": {"row_margin": 1.5}})
"""Memory for the rows of experts by their counts, and by a margin."""


def stages_by_axes() -> list[Drawn]:
    """Each stage of ZeRO with each of AXES and of ROW_MARGINS that the section's rules allow beside them."""
    found = []
    for stage, parallel, margin in itertools.product((0, 1, 2, 3), AXES, ROW_MARGINS):
        section = {"parallel": parallel} | margin
        is_allowed = not list(broken_rules(DsNpuConfig.model_validate(section), frozenset()))
        if is_allowed and ("pipeline" not in parallel or stage < 3) and ("expert" in parallel or not margin):
            family = "qwen3_moe" if "expert" in parallel else "llama"
            found.append(Drawn(family, stage, torch.float64, section))
    return found


def hold_all(cases: tuple[Drawn, ...], device: str) -> None:
    for case in cases:
        hold(case, device)


def hold(case: Drawn, device: str) -> None:
    """Hold one step to one process."""
    dtype = torch.float32 if case.recomputes and case.dtype == torch.float64 else case.dtype
    parallel = case.section["parallel"]
    assert isinstance(parallel, dict)
    dp = dist.get_world_size() // math.prod(parallel.get(axis, 1) for axis in ("pipeline", "tensor", "context"))
    # Weights of the dtype, computed with in float64.
    expected = rule.reference(model_of(case, dtype).double(), dp, torch.float64)
    swapped_activations.LEAST_BYTES = 1
    engine = rule.engine_of(model_of(case, dtype), case.stage, dtype, case.section)
    found = rule.errors_of_step(engine, dtype, expected)
    bound = bounds(case, dtype, dp, expected, device)
    assert found.loss <= bound.loss and found.gradient <= bound.gradient, (case, found, bound)
    assert found.norm <= bound.norm and found.weight <= bound.weight, (case, found, bound)


def bounds(case: Drawn, dtype: torch.dtype, dp: int, expected: gradient_rule.Reference, device: str) -> dense.Errors:
    """The most that is allowed: float64's roundings, a few of float32, in bf16 twice the error of one process."""
    if dtype == torch.float64:
        loose = rule.EXACT if case.stage == 0 else rule.SINGLE
        return dense.Errors(rule.EXACT, rule.EXACT, loose, loose)
    if dtype == torch.float32:
        return dense.Errors(*[4 * rule.SINGLE] * 4)
    single = rule.reference(rule.taking_batches_to(device, model_of(case, dtype)), dp, dtype)
    bound = 2 * gradient_rule.relative(single.gradients, expected.gradients)
    # Weights are rounded to bf16 behind the step; one that was not made is off by more.
    return dense.Errors(4e-3, bound, bound, 2**-8)


def model_of(case: Drawn, dtype: torch.dtype) -> nn.Module:
    return rule.model_of(case.family, dtype, **case.changes())


def hold_drawn(numbers: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: str) -> None:
    hold_all(tuple(drawn(number, dtypes) for number in numbers), device)
