"""Twenty steps of training with each axis that is built, and with ZeRO 0 to 3."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ds_npu.acceptance.case import Case, Scope

STEPS = 20
SMALL_S, LARGE_S = 300.0, 420.0
"""Seconds that a case may take; the large ones compute their references first."""

Keys = Mapping[str, object]
Model = Literal["decoder", "experts", "layers"]
"""A Llama or a Mixtral of transformers, which ds_npu shards, or a list of layers for a DeepSpeed pipeline."""

TOLERANCE = (
    "The reference is one process on the CPU in float64, from the same weights, with the whole batch. Relative to it, "
    "the loss and the gradient norm of each step may be off by twice the largest error that one process on the CPU has "
    "in the case's dtype, and by 2**-8 (bfloat16, half a unit in the last place) or 2**-13 (float32, the unit in which "
    "CANN accepts float32 functions) at least."
)


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of the model and of its global batch, which is the same for every number of data ranks."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_heads: int
    vocabulary: int
    sequences: int
    length: int


SMALL_SIZES = ModelSizes(32, 48, 1, 4, 2, 64, sequences=2, length=24)
LARGE_SIZES = ModelSizes(256, 704, 4, 8, 4, 1024, sequences=16, length=256)
"""Each of two tensor ranks has a size that the fused matrix products take (256 to 65534 inputs)."""
REAL_SIZES = ModelSizes(4096, 14336, 1, 32, 8, 512, sequences=2, length=1024)
"""A block of Llama-3 8B; one process on the CPU computes 3 TFLOP a step."""
REAL_STEPS = 3


@dataclass(frozen=True)
class TrainingRecipe:
    """Everything on which the losses of one process depend."""

    model: Model
    sizes: ModelSizes
    dtype: str
    optimizer: str = "SGD"
    steps: int = STEPS

    @property
    def file(self) -> str:
        """Name of the file that keeps the losses of one process."""
        return f"{self.model}-{self.sizes.hidden}-{self.dtype}-{self.optimizer}.json"


@dataclass(frozen=True)
class TrainingCase(Case):
    """A recipe on ``ranks`` NPUs with a ``"ds_npu"`` section (None: a config without one) and a ZeRO stage."""

    recipe: TrainingRecipe = field(default_factory=lambda: TrainingRecipe("decoder", SMALL_SIZES, "float32"))
    section: Keys | None = None
    stage: int = 0
    micro_batches: int = 2
    """Micro-batches of a step of a data rank, one for each sequence at most."""


def unmet() -> str | None:
    """Why no training can run here; None if it can."""
    is_there = importlib.util.find_spec("transformers") is not None
    return None if is_there else "transformers is not installed: pip install transformers"


def training_cases(scope: Scope) -> list[TrainingCase]:
    """Cases on two NPUs, and on more where there are more; on one NPU cases without any axis."""
    if scope.small:
        return list(_small()) if scope.npus > 1 else []
    cases = list(_one_npu())
    if scope.npus > 1:
        cases += _two_npus(scope.npus)
    if scope.npus >= 4:
        cases += _four_npus(scope.npus - scope.npus % 4)
    if scope.npus > 1:
        cases += _real(scope.npus)
    return cases


def _small() -> Iterator[TrainingCase]:
    cases: tuple[tuple[str, Keys | None, int, Model], ...] = (
        ("tensor 2 with sequence parallelism", _tensor(2, True), 1, "decoder"),
        ("context 2 by ring", _context(2, "ring"), 3, "decoder"),
        ("context 2 by ulysses", _context(2, "ulysses"), 2, "decoder"),
        ("expert 2", {"parallel": {"expert": 2}}, 2, "experts"),
        ("pipeline 2", {"parallel": {"pipeline": 2}}, 1, "layers"),
    )
    for name, section, stage, model in cases:
        yield TrainingCase(
            f"{name}, ZeRO {stage}, float32",
            2,
            SMALL_S,
            recipe=TrainingRecipe(model, SMALL_SIZES, "float32"),
            section=section,
            stage=stage,
            micro_batches=2 if model == "layers" else 1,
        )


def _case(
    name: str, ranks: int, section: Keys | None, stage: int, dtype: str, model: Model = "decoder"
) -> TrainingCase:
    return TrainingCase(
        f"{name}, ZeRO {stage}, {dtype}",
        ranks,
        LARGE_S,
        alone=True,
        recipe=TrainingRecipe(model, LARGE_SIZES, dtype),
        section=section,
        stage=stage,
    )


def _real(npus: int) -> Iterator[TrainingCase]:
    ranks = max(size for size in (2, 4, 8) if size <= npus)
    axes = {"tensor": _tensor(ranks, True), "context": _context(ranks, "ring")}
    if ranks >= 4:
        axes["tensor and context"] = {"parallel": {"tensor": 2, "sequence_parallel": True, "context": ranks // 2}}
    for axis, section in axes.items():
        yield TrainingCase(
            f"{axis} over {ranks}, a block of hidden size {REAL_SIZES.hidden}, ZeRO 1, float32",
            ranks,
            LARGE_S,
            alone=True,
            recipe=TrainingRecipe("decoder", REAL_SIZES, "float32", steps=REAL_STEPS),
            section=section,
            stage=1,
        )


def _one_npu() -> Iterator[TrainingCase]:
    # Without a section DeepSpeed 0.19.8 tells no gradient norm in float32 without ZeRO.
    yield _case("one NPU", 1, {}, 0, "float32")
    yield _case("one NPU", 1, {}, 1, "bfloat16")
    in_host_memory = {"swap": {"activations": True}, "optimizer_memory": {"share_fp32": True, "swap": True}}
    fused_adams: tuple[tuple[str, Keys, str], ...] = (
        ("one NPU, DeepSpeed's FusedAdam", {}, "float32"),
        ("one NPU, activations and optimizer state in host memory", in_host_memory, "bfloat16"),
    )
    for name, section, dtype in fused_adams:
        recipe = TrainingRecipe("decoder", LARGE_SIZES, dtype, "AdamW")
        yield TrainingCase(f"{name}, ZeRO 1, {dtype}", 1, LARGE_S, alone=True, recipe=recipe, section=section, stage=1)


def _two_npus(npus: int) -> list[TrainingCase]:
    # Data ranks share the global batch evenly.
    data = max(size for size in (2, 4, 8, 16) if size <= npus)
    pipeline = {"parallel": {"pipeline": 2}}
    return [
        *(_case(f"data {data}", data, None if stage else {}, stage, "float32") for stage in range(4)),
        *(_case(f"data {data}", data, None, stage, "bfloat16") for stage in (1, 2, 3)),
        _case("tensor 2", 2, _tensor(2), 0, "float32"),
        _case("tensor 2 with sequence parallelism", 2, _tensor(2, True), 1, "bfloat16"),
        *(
            _case(f"tensor 2, overlap {overlap}", 2, {**_tensor(2, True), "tensor_overlap": overlap}, 1, "bfloat16")
            for overlap in ("pipelined", "fused")
        ),
        *(
            _case(f"context 2 by {algorithm}", 2, _context(2, algorithm), 1, "float32")
            for algorithm in ("ring", "ulysses", "allgather")
        ),
        # In bf16 some tokens have other experts than in float64.
        _case("expert 2", 2, {"parallel": {"expert": 2}}, 1, "float32", model="experts"),
        _case("expert_tensor 2", 2, {"parallel": {"expert_tensor": 2}}, 1, "float32", model="experts"),
        *(
            _case(f"pipeline 2 by {schedule}", 2, pipeline | {"pipeline": {"schedule": schedule}}, 1, dtype)
            for schedule, dtype in (("1f1b", "float32"), ("zb_v", "bfloat16"))
        ),
        _case("pipeline 2 of layers", 2, pipeline, 0, "float32", model="layers"),
        _case("pipeline 2 of layers", 2, pipeline, 1, "bfloat16", model="layers"),
    ]


def _four_npus(npus: int) -> list[TrainingCase]:
    ranks = 8 if npus >= 8 else 4
    both = {"parallel": {"tensor": 2, "sequence_parallel": True, "context": 2}}
    experts = {"parallel": {"expert": 2, "tensor": 2}}
    staged = {"parallel": {"pipeline": 2, "tensor": 2, "sequence_parallel": True}, "pipeline": {"schedule": "zb_h1"}}
    return [
        _case("tensor 4", 4, _tensor(4, True), 2, "bfloat16"),
        _case("context 4 by double ring", 4, _context(4, "ring", window=2), 2, "float32"),
        _case("context 4 by hybrid", 4, _context(4, "hybrid", ulysses=2), 3, "bfloat16"),
        _case(f"tensor 2, context 2, data {ranks // 4}", ranks, both, 3, "float32"),
        _case(f"tensor 2, context 2, data {ranks // 4}", ranks, both, 1, "bfloat16"),
        _case(f"expert 2, tensor 2, data {ranks // 2}", ranks, experts, 2, "float32", model="experts"),
        _case("pipeline 2 of layers, data 2", 4, {"parallel": {"pipeline": 2}}, 1, "float32", model="layers"),
        _case("pipeline 2 by zb_h1, tensor 2", 4, staged, 1, "bfloat16"),
    ]


def _tensor(ranks: int, sequence_parallel: bool = False) -> Keys:
    return {"parallel": {"tensor": ranks, "sequence_parallel": sequence_parallel}}


def _context(ranks: int, algorithm: str, **factors: int) -> Keys:
    return {"parallel": {"context": ranks}, "context_parallel": {"algorithm": algorithm, **factors}}
