"""Layouts of training runs and what a formula says of their time and memory, to choose those that the twin runs.

The formula counts FLOP, bytes of messages and bytes of memory, at the speeds of a machine's profile. It knows nothing
of schedules, contention and single operators: ``ds_npu predict`` does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ds_npu.planner.parameter_bytes import bytes_of_a_parameter
from ds_npu.topology.machine import Machine

GIB = 2**30
BF16 = 2
"""Bytes of a weight or gradient."""
SAVED = {("ds_npu", ""): (10, 4), ("ds_npu", "norms"): (4, 2), ("DeepSpeed", ""): (13, 4)}
"""What a layer saves of each token for its backward: so many hidden sizes, and widths of its feed-forward layer.

Of ds_npu: docs/memory.md. Of plain DeepSpeed: as the twin found it, where norms and rotary embedding are many calls.
"""
LOGITS = {"ds_npu": 8, "DeepSpeed": 16}
"""Bytes of each logit: copies in bf16 and float32, and their gradients. Chunks of them take next to nothing."""
MORE = {"": 1.0, "norms": 1.02, "all": 4 / 3}
"""What a step computes, as a share of that without recomputation (of "norms": assumed)."""
RECOMPUTED = {"": [], "norms": ["recompute norms"], "all": ["recompute"]}
"""How a layout calls what it computes again."""
RECOMPUTE: dict[str, dict[str, Any]] = {
    "norms": {"norm": True, "activation_function": True},
    "all": {"layers": "all"},
}
PRECISION: dict[str, Any] = {"bf16": {"enabled": True}}
FUSED = 0.5
"""The part of messages along the tensor axis that is left where matrix products hide them (assumed)."""
HIDDEN = 0.5
"""The part of ring attention's messages that is left where computing hides them (assumed)."""
UNHIDDEN = 0.1
"""The part of ZeRO 3's messages that is always left (assumed; the twin says less)."""
FRAGMENTS = 1.04
"""The memory of the allocator over that of tensors: little, since where memory ends it gives back what is unused."""


@dataclass(frozen=True)
class Model:
    """The sizes of a decoder, from the config.json that its authors publish."""

    config: dict[str, Any]

    def __getattr__(self, name: str) -> int:
        return int(self.config[name])

    @property
    def head_dim(self) -> int:
        return int(self.config.get("head_dim", self.hidden_size // self.num_attention_heads))

    @property
    def experts(self) -> int:
        return int(self.config.get("num_experts", self.config.get("num_local_experts", 0)))

    @property
    def expert_weights(self) -> int:
        """Weights of all experts of a layer."""
        width = self.config.get("moe_intermediate_size", self.intermediate_size)
        return 3 * self.hidden_size * width * self.experts

    @property
    def dense_weights(self) -> int:
        """Weights of a layer that each token uses, but for its experts."""
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        attention = self.hidden_size * self.head_dim * (2 * heads + 2 * groups)
        return attention + (0 if self.experts else 3 * self.hidden_size * self.intermediate_size)

    @property
    def width(self) -> int:
        """Hidden sizes of feed-forward layers that a token passes in a layer."""
        if not self.experts:
            return self.intermediate_size
        return int(self.config.get("moe_intermediate_size", self.intermediate_size)) * self.num_experts_per_tok

    def flop(self, tokens: float, keys: int) -> tuple[float, float]:
        """FLOP of ``tokens``, forward and backward: of matrix products, and of causal attention over ``keys`` keys."""
        active = self.dense_weights + (3 * self.hidden_size * self.width if self.experts else 0)
        products = self.num_hidden_layers * active + self.hidden_size * self.vocab_size
        scores = self.num_hidden_layers * self.num_attention_heads * self.head_dim * keys
        return 6 * tokens * products, 6 * tokens * scores


@dataclass(frozen=True)
class Case:
    """A training run: ``samples`` of ``length`` tokens in each optimizer step on ``npus`` NPUs."""

    name: str
    model: Model
    npus: int
    length: int
    samples: int


@dataclass(frozen=True)
class Layout:
    """One way to train a case."""

    side: str
    """ "ds_npu", or "DeepSpeed" without a section: its axes are AutoTP, Ulysses and AutoEP."""
    zero: int
    micro: int
    """Samples of a micro-batch."""
    recompute: str
    """What is computed again: "" nothing; "norms" norms, activation functions and logits; "all" each block."""
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    def __str__(self) -> str:
        axes = [f"{name} {getattr(self, name)}" for name in ("tp", "pp", "cp", "ep") if getattr(self, name) > 1]
        return ", ".join([*axes, f"ZeRO {self.zero}", f"micro {self.micro}", *RECOMPUTED[self.recompute]])

    def dp(self, npus: int) -> int:
        return npus // (self.tp * self.pp * self.cp)

    def micro_batches(self, case: Case) -> int:
        return case.samples // (self.dp(case.npus) * self.micro)

    def ds_config(self, case: Case) -> dict[str, Any]:
        """The config of DeepSpeed that trains it."""
        count = self.micro_batches(case)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": self.micro * (count if self.pp > 1 else 1),
            "gradient_accumulation_steps": 1 if self.pp > 1 else count,
            "zero_optimization": {"stage": self.zero, "overlap_comm": True},
            **PRECISION,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        }
        if self.side != "ds_npu":
            return config | self._own_axes()
        parallel = {"tensor": self.tp, "pipeline": self.pp, "context": self.cp, "expert": self.ep}
        section: dict[str, Any] = {"parallel": {axis: size for axis, size in parallel.items() if size > 1}}
        if self.tp > 1:
            section["parallel"]["sequence_parallel"] = True
            section["tensor_overlap"] = "fused"
        if self.pp > 1:
            section["pipeline"] = {"micro_batches": count}
        if self.recompute:
            section["recompute"] = RECOMPUTE[self.recompute]
            section["chunked_loss"] = True
        if self.recompute == "norms" and case.model.experts:
            section["recompute"] = {"norm": True}
            section["moe"] = {"zero_memory": "level0"}
        return config | {"ds_npu": section}

    def _own_axes(self) -> dict[str, Any]:
        """DeepSpeed's keys of its own axes."""
        keys = {
            "tensor_parallel": (self.tp, {"autotp_size": self.tp}),
            "sequence_parallel_size": (self.cp, self.cp),
            "expert_parallel": (self.ep, {"enabled": True, "autoep_size": self.ep}),
        }
        return {key: value for key, (size, value) in keys.items() if size > 1}


@dataclass(frozen=True)
class Estimate:
    """What the formula says of a layout: seconds of a step by reason, and bytes of the fullest rank."""

    seconds: dict[str, float]
    memory: float

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def ds_npu_layouts(case: Case) -> Iterator[Layout]:
    """The layouts of ds_npu's axes that fit the sizes of ``case``."""
    model, powers = case.model, [1, 2, 4, 8, 16, 32]
    for tp, pp, cp, ep in itertools.product(powers[:4], powers[:4], powers, powers[:5]):
        dp = case.npus // (tp * pp * cp)
        fits = dp * tp * pp * cp == case.npus and case.samples % max(dp, 1) == 0
        fits &= model.num_key_value_heads % tp == 0 and model.num_hidden_layers % pp == 0
        fits &= ep == 1 or (model.experts >= ep and model.experts % ep == 0 and (dp * cp) % ep == 0 and tp == 1)
        if not fits or not dp or (cp > 1 and case.length // cp < 2048):
            continue
        for zero, micro, recompute in itertools.product((1, 3), (1, 2, 4), ("", "norms", "all")):
            made = Layout("ds_npu", zero, micro, recompute, tp, pp, cp, ep)
            if case.samples % (dp * micro) == 0 and (pp == 1 or (zero < 3 and made.micro_batches(case) >= pp)):
                yield made


def deepspeed_layouts(case: Case) -> Iterator[Layout]:
    """Plain DeepSpeed: its stages of ZeRO, and AutoTP, Ulysses or AutoEP."""
    model, sizes = case.model, [2, 4, 8, 16, 32]
    heads, groups = model.num_attention_heads, model.num_key_value_heads
    tensor = [{"tp": size} for size in sizes[:3] if groups % size == 0]
    context = [{"cp": size} for size in sizes if heads % size == 0 and (groups % size == 0 or size % groups == 0)]
    expert = [{"ep": size} for size in sizes[:4] if model.experts and model.experts % size == 0]
    for axes in ({}, *tensor, *context, *expert):
        if case.npus % max(axes.values(), default=1):
            continue
        for zero, micro, recompute in itertools.product((1, 2, 3), (1, 2, 4), ("", "all")):
            made = Layout("DeepSpeed", zero, micro, recompute, **axes)
            if case.samples % (made.dp(case.npus) * micro) == 0:
                yield made


def estimate(case: Case, layout: Layout, machine: Machine) -> Estimate:
    """The formula's answer for ``layout``."""
    model, ranks = case.model, case.npus
    dp, count = layout.dp(ranks), layout.micro_batches(case)
    layers = model.num_hidden_layers / layout.pp
    tokens = layout.micro * case.length / layout.cp
    dense = layers * model.dense_weights / layout.tp + 2 * model.hidden_size * model.vocab_size / layout.tp / layout.pp
    experts = layers * model.expert_weights / layout.tp / layout.ep
    products, scores = model.flop(case.samples * case.length, case.length)
    computes = (products / machine.matmul + machine.attention_seconds(scores, case.length)) / ranks
    computes *= MORE[layout.recompute]
    seconds = {"computes": computes, "bubble": computes * (layout.pp - 1) / count}
    passes = count * layers * (3 if layout.recompute == "all" else 2)
    seconds["tensor"] = passes * _tensor_seconds(model, layout, machine, tokens)
    seconds["context"] = passes * _context_seconds(model, layout, machine, tokens)
    seconds["expert"] = passes * _expert_seconds(model, layout, machine, tokens)
    data = _data_seconds(layout, machine, BF16 * dense, dp * layout.cp, count)
    data += _data_seconds(layout, machine, BF16 * experts, dp * layout.cp // layout.ep, count)
    # ZeRO 3 sends while layers compute.
    seconds["data"] = max(UNHIDDEN * data, data - computes) if layout.zero == 3 else data
    return Estimate(seconds, _memory(case, layout, dense, experts, tokens))


def _tensor_seconds(model: Model, layout: Layout, machine: Machine, tokens: float) -> float:
    """Two all-gathers and two reduce-scatters of hidden states for each layer and pass; AutoTP sums, as many bytes."""
    if layout.tp == 1:
        return 0.0
    size = BF16 * tokens * model.hidden_size
    kinds = ("all_gather", "reduce_scatter")
    exposed = FUSED if layout.side == "ds_npu" else 1.0
    return exposed * 2 * sum(machine.collective_seconds(kind, size, layout.tp, 1) for kind in kinds)


def _context_seconds(model: Model, layout: Layout, machine: Machine, tokens: float) -> float:
    """Keys and values of all other ranks once for each layer and pass, hidden for a part; Ulysses' four exchanges."""
    if layout.cp == 1:
        return 0.0
    heads = model.num_key_value_heads
    near = max(1, min(layout.cp, machine.node // layout.tp))
    if layout.side == "ds_npu":
        size = BF16 * tokens * layout.cp * 2 * heads * model.head_dim / layout.tp
        return HIDDEN * machine.collective_seconds("all_gather", size, near, layout.cp // near)
    size = BF16 * tokens * 2 * (model.num_attention_heads + max(heads, layout.cp)) * model.head_dim
    return machine.collective_seconds("all_to_all", size, near, layout.cp // near)


def _expert_seconds(model: Model, layout: Layout, machine: Machine, tokens: float) -> float:
    """Tokens to their experts and back, for each layer and pass."""
    if layout.ep == 1:
        return 0.0
    size = BF16 * tokens * model.num_experts_per_tok * model.hidden_size
    near = min(layout.ep, machine.node)
    return 2 * machine.collective_seconds("all_to_all", size, near, layout.ep // near)


def _data_seconds(layout: Layout, machine: Machine, size: float, ranks: int, count: int) -> float:
    """ZeRO's messages for ``size`` bytes of weights over ``ranks`` ranks, hidden or not."""
    if ranks <= 1:
        return 0.0
    near = max(1, min(ranks, machine.node // layout.tp))
    gather, scatter = (
        machine.collective_seconds(kind, size, near, ranks // near) for kind in ("all_gather", "reduce_scatter")
    )
    # Plain DeepSpeed scatters the gradients of each micro-batch under ZeRO 2 and 3, and gathers weights twice under 3.
    if layout.zero == 3:
        return count * (2 * gather + scatter)
    return gather + scatter * (count if layout.zero == 2 else 1)


def _memory(case: Case, layout: Layout, dense: float, experts: float, tokens: float) -> float:
    """Bytes of the fullest rank: its weights, gradients, optimizer state, saved activations and logits."""
    model, dp = case.model, layout.dp(case.npus) * layout.cp
    total = 0.0
    for weights, ranks in ((dense, dp), (experts, dp // layout.ep)):
        total += weights * bytes_of_a_parameter(PRECISION, layout.zero, ranks)
    layers = model.num_hidden_layers / layout.pp
    in_flight = min(layout.pp, layout.micro_batches(case))
    # AutoTP shards what lies within attention and the feed-forward layer, not the hidden states, nor the logits.
    own = 1 if layout.side == "DeepSpeed" else layout.tp
    hidden, widths = SAVED[layout.side, "" if layout.recompute == "all" else layout.recompute]
    layer = BF16 * tokens * (hidden * model.hidden_size / own + widths * model.width / layout.tp)
    kept = BF16 * tokens * model.hidden_size / own
    total += in_flight * layers * kept + layer if layout.recompute == "all" else in_flight * layers * layer
    is_chunked = layout.side == "ds_npu" and layout.recompute
    return FRAGMENTS * (total + (0 if is_chunked else LOGITS[layout.side] * tokens * model.vocab_size / own))
