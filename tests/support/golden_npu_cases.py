"""The table of golden cases on simulated NPUs: bf16, two devices and four. Data only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from golden_cases import CSV, EIGHT, EP2, FP16, MIXED, PP2, SP2, TP2, Case, Keys, context, parallel

FOUR: Keys = {"num_hidden_layers": 4}
WIDE: Keys = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 512}
"""Sizes of a model whose shards have the inner dimensions of fused products."""
BUDGET = 427_400_000
"""Bytes, most of which HCCL's buffers take."""


def _npu(name: str, family: str, section: Keys, **more: object) -> Case:
    """A case that runs in odd orders, too."""
    return replace(_once(name, family, section, **more), chaos=True)


def _once(name: str, family: str, section: Keys, **more: object) -> Case:
    given: Keys = {"dtype": "bfloat16", "adam": True} | more
    return Case(f"npu {name}", family, section, **given)  # type: ignore[arg-type]


def _experts() -> Iterator[Case]:
    yield _npu("experts", "qwen3_moe", EP2, stage=2)
    yield _once("experts zero3 level1", "mixtral", EP2 | {"moe": {"zero_memory": "level1"}}, stage=3)
    yield _once("allgather x tensor", "qwen3_moe", parallel(expert=2, tensor=2) | {"moe": {"dispatcher": "allgather"}})
    yield _npu("overlap", "deepseek_v3", EP2 | {"moe": {"overlap": True, "bias_update_rate": 0.02}})
    # The kernels are for 8 ranks: two take another way, and say so.
    yield _once("fused experts", "mixtral", EP2 | {"moe": {"dispatcher": "fused"}})
    yield _once("padded", "qwen3_moe", EP2 | {"moe": {"capacity_factor": 1.0, "pad_to_capacity": True}})
    yield _npu("row_margin", "qwen3_moe", EP2 | {"moe": {"row_margin": 1.0}}, batch="few")
    yield _npu("replicas", "mixtral", EP2 | {"moe": {"replica_rows": 1}}, batch="few")
    yield _once("losses", "qwen3_moe", EP2 | {"moe": {"z_loss": 0.1, "aux_loss": {"coefficient": 0.3}}}, changes=MIXED)


def _stages() -> Iterator[Case]:
    blocks: Keys = {"changes": FOUR, "batch": "padded"}
    yield _npu("stages 1f1b", "llama", PP2 | {"pipeline": {"schedule": "1f1b", "recompute": "bubble"}}, **blocks)
    yield _npu("stages zb_v", "llama", PP2 | {"pipeline": {"schedule": "zb_v"}, "chunked_loss": 4}, stage=2, **blocks)
    moe: Keys = {"changes": MIXED | FOUR, "batch": "padded", "world": 4}
    overlapped = parallel(pipeline=2, expert=2) | {"pipeline": {"overlap_experts": True}}
    yield _once("stages overlap_experts", "qwen3_moe", overlapped, **moe)


def _memory() -> Iterator[Case]:
    yield _once("recompute", "llama", TP2 | {"recompute": {"layers": "all", "keep": ["matmul", "attention"]}})
    yield _once("recompute parts", "llama", {"recompute": {"norm": True, "activation_function": True}}, stage=3)
    yield _npu("budget", "llama", {"chunked_loss": "planned"}, budget=BUDGET, changes={"vocab_size": 2048}, length=48)
    yield _npu("swap", "llama", {"swap": {"activations": True, "depth": 2}}, stage=2, changes=FOUR)
    yield _npu(
        "swap compress", "llama", SP2 | {"swap": {"activations": True, "depth": 1, "compress": True}}, changes=FOUR
    )
    yield _npu("state", "llama", {"optimizer_memory": {"share_fp32": True, "swap": True, "resident_gib": 6e-5}})
    yield _once("state int8", "llama", {"optimizer_memory": {"moments": "int8"}}, stage=3)
    yield _once("chunked", "gemma2", TP2 | {"chunked_loss": 4}, stage=2)


def _others() -> Iterator[Case]:
    yield _once("zero0", "llama", SP2, stage=0)
    yield _npu("ring deterministic", "llama", context(2, "ring") | {"deterministic": True})
    yield _once("ulysses", "qwen3", context(2, "ulysses"), stage=3)
    yield _npu("pipelined", "llama", SP2 | {"tensor_overlap": "pipelined"})
    yield _npu("fused overlap", "llama", SP2 | {"tensor_overlap": "fused"}, changes=WIDE)
    moe: Keys = {"placement_interval": 1, "load_report": "FOLDER/load.svg"}
    every = EP2 | {"moe": moe, "watch": {"finite": True}, "memory_report": True}
    more: Keys = {"config": CSV, "changes": EIGHT, "batch": "few"}
    yield _npu("every subscriber", "mixtral", every, stage=2, **more)
    state: Keys = {"optimizer_memory": {"swap": True, "share_fp32": True}, "swap": {"activations": True, "depth": 1}}
    biased = EP2 | {"moe": {"bias_update_rate": 0.02}, "watch": {"finite": True}, "memory_report": True} | state
    yield _npu("biases and state", "deepseek_v3", biased, stage=2)
    yield _once("overflow", "llama", TP2, dtype="float16", adam=False, config=FP16, life="overflow")
    yield _once("not finite", "llama", TP2 | {"watch": {"finite": True}}, stage=2, life="infinite")
    written = _once("checkpoint", "mixtral", EP2, stage=2, life="checkpoint")
    yield written
    yield replace(written, name="npu checkpoint state", family="llama", section=PP2, changes=FOUR)


def npu_cases() -> list[Case]:
    return [*_experts(), *_stages(), *_memory(), *_others()]
