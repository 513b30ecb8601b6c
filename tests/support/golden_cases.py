"""The type of a golden case: what is trained, with which keys, on how many ranks; and keys that many have."""

from __future__ import annotations

from dataclasses import dataclass, field

Keys = dict[str, object]

FUSED: Keys = dict.fromkeys(("flash_attention", "rms_norm", "swiglu", "rotary", "cross_entropy"), True)
MIXED: Keys = {"output_router_logits": False}
"""A Mixtral or Qwen3-MoE without transformers' own auxiliary loss, which stages and ds_npu's losses exclude."""
EIGHT: Keys = {"num_local_experts": 8}
"""A Mixtral with enough experts to move."""
CSV: Keys = {"csv_monitor": {"enabled": True, "output_path": "FOLDER", "job_name": "job"}, "steps_per_print": 1}
FP16: Keys = {"fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1, "loss_scale_window": 2}}
LORA: Keys = {"r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}


@dataclass(frozen=True)
class Case:
    """One run: a tiny model, its engine's config, and what happens to the engine."""

    name: str
    family: str
    """A name in ``tiny_models.ALL``, or ``PipelineModule``."""
    section: Keys = field(default_factory=dict)
    """The ``"ds_npu"`` section."""
    stage: int = 1
    world: int = 2
    dtype: str = "float32"
    changes: Keys = field(default_factory=dict)
    """Values of the model's own configuration."""
    config: Keys = field(default_factory=dict)
    """More keys of DeepSpeed's config."""
    zero: Keys = field(default_factory=dict)
    """More keys of ``zero_optimization``."""
    adam: bool = False
    """AdamW in place of SGD."""
    batch: str = "plain"
    """``plain``, ``padded`` (ignored labels and padding) or ``few`` (uneven loads of experts)."""
    length: int = 10
    """Tokens of a sample; neither 4 ranks nor 3 divide 10."""
    checkpointing: bool = False
    """Whether transformers computes each block again in backward."""
    adapters: Keys = field(default_factory=dict)
    """Arguments of PEFT's LoraConfig; empty: no adapters."""
    life: str = "steps"
    """The life of the engine: a name in ``golden_runs.LIVES``."""
    stand_in: bool = False
    """Whether the kernels of fused experts are computed on the CPU."""
    budget: int | None = None
    """Bytes of ``recompute.budget_gib``, of which what earlier engines hold is a part: such cases are the first."""
    reader: Case | None = None
    """The engine that loads the checkpoint, where it is another one."""
    checkpoints: str = ""
    """A folder in which checkpoints are kept; empty: a temporary one."""
    chaos: bool = False
    """Whether simulated NPUs run it in odd orders, too."""
    reads: bool = False
    """Load the checkpoint that an earlier record has left in ``checkpoints``."""


def parallel(**axes: object) -> Keys:
    """A section with these axes; context ranks form a ring."""
    ring: Keys = {"context_parallel": {"algorithm": "ring"}} if "context" in axes else {}
    return {"parallel": axes} | ring


def context(degree: int, algorithm: str, tensor: int = 1, **keys: object) -> Keys:
    axes = {"context": degree, "tensor": tensor, "sequence_parallel": tensor > 1}
    return {"parallel": axes, "context_parallel": {"algorithm": algorithm, **keys}}


TP2, SP2 = parallel(tensor=2), parallel(tensor=2, sequence_parallel=True)
EP2, PP2 = parallel(expert=2), parallel(pipeline=2)
