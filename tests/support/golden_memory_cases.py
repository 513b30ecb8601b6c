"""Golden cases on the CPU of memory, of what follows a step, and of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from golden_cases import CSV, EIGHT, EP2, FP16, PP2, SP2, TP2, Case, Keys, context


def _memory(name: str, section: Keys, family: str = "llama", **more: object) -> Case:
    return Case(f"memory {name}", family, section, **more)  # type: ignore[arg-type]


WORDS: Keys = {"vocab_size": 2048}
WATCHED: Keys = {"config": CSV}
LONG: Keys = {"length": 48}
"""Activations that are more than the buffers of gradients."""
DROPS: Keys = {"attention_dropout": 0.3}
STATE: Keys = {"dtype": "bfloat16", "adam": True}


def memory() -> Iterator[Case]:
    """``recompute``, ``swap``, ``optimizer_memory``, ``chunked_loss``, ``watch``, ``memory_report``."""
    yield _memory("layers all", {"recompute": {"layers": "all"}}, changes=DROPS)
    yield _memory("layers uniform", {"recompute": {"layers": 2, "method": "uniform"}}, stage=3)
    yield _memory(
        "layers block", {"recompute": {"layers": 1, "method": "block", "keep": ["matmul", "attention"]}}, stage=2
    )
    yield _memory("modules", SP2 | {"recompute": {"modules": ["**.mlp"]}})
    yield _memory("norm activation", {"recompute": {"norm": True, "activation_function": True}}, "gpt2", stage=3)
    yield _memory("norm some", {"recompute": {"norm": ["**.layers.0"], "activation_function": ["**.layers.1.mlp"]}})
    yield _memory("attention_core", context(2, "ring") | {"recompute": {"attention_core": True}})
    yield _memory("experts again", EP2 | {"recompute": {"layers": "all"}}, "qwen3_moe", stage=2)
    # Budgets that are kept only where something is computed again, and one that nothing keeps.
    yield _memory("budget", {}, budget=737_000, **LONG)
    yield _memory("budget planned chunks", {"chunked_loss": "planned"}, budget=2_545_000, changes=WORDS, **LONG)
    yield _memory("budget stages", PP2, budget=807_000, changes={"num_hidden_layers": 4}, batch="padded", **LONG)
    yield _memory("budget too small", {}, budget=66_700, **LONG)
    yield _memory("swap", {"swap": {"activations": True}}, changes=DROPS)
    yield _memory("swap some", SP2 | {"swap": {"activations": ["**.mlp"], "depth": 2}}, stage=3)
    yield _memory("swap compress", EP2 | {"swap": {"activations": True, "depth": 1, "compress": True}}, "qwen3_moe")
    yield _memory("swap hidden_only", {"swap": {"activations": True, "hidden_only": True}}, stage=2)
    yield _memory("swap recompute", PP2 | {"swap": {"activations": True}, "recompute": {"norm": True}})
    for stage in range(4):
        yield _memory(
            f"share swap zero{stage}", {"optimizer_memory": {"share_fp32": True, "swap": True}}, stage=stage, **STATE
        )
    yield _memory("bf16 moments", TP2 | {"optimizer_memory": {"moments": "bf16", "share_fp32": True}}, **STATE)
    yield _memory("int8 moments", EP2 | {"optimizer_memory": {"moments": "int8"}}, "qwen3_moe", stage=2, **STATE)
    yield _memory("resident", {"optimizer_memory": {"swap": True, "resident_gib": 6e-5}}, stage=3, **STATE)
    yield _memory("chunked", SP2 | {"chunked_loss": 4}, "gemma2", stage=3)
    yield _memory("chunked context", context(2, "ulysses") | {"chunked_loss": True}, batch="padded")
    yield _memory(
        "report",
        {"memory_report": "FOLDER/use.svg", "watch": {"stall_factor": 0}},
        stage=2,
        adam=True,
        **WATCHED,
    )
    yield _memory("report experts", EP2 | {"memory_report": True}, "qwen3_moe", adam=True)


def subscribers() -> Iterator[Case]:
    """Every subscriber of an optimizer step at once, accumulation, and steps that are skipped."""
    load: Keys = {"load_report": "FOLDER/load.svg", "placement_interval": 1}
    every: Keys = EP2 | {"moe": load, "watch": {"finite": True}, "memory_report": True}
    more: Keys = WATCHED | {"changes": EIGHT, "batch": "few", "adam": True}
    for stage in (1, 3):
        yield Case(f"every subscriber zero{stage}", "mixtral", every, stage, **more)  # type: ignore[arg-type]
    state: Keys = {"optimizer_memory": {"swap": True, "share_fp32": True}}
    yield Case("every subscriber and state", "mixtral", every | state, 2, **more | {"dtype": "bfloat16"})  # type: ignore[arg-type]
    biased: Keys = EP2 | {"moe": {"bias_update_rate": 0.02, "load_report": "FOLDER/load.svg"}, "memory_report": True}
    biased |= state | {"swap": {"activations": True}, "watch": {"finite": True}}
    yield Case("biases and state", "deepseek_v3", biased, 2, dtype="bfloat16", adam=True, **WATCHED)
    for stage in (0, 1, 3):
        yield Case(f"not finite zero{stage}", "llama", {}, stage, adam=True, life="infinite")
    yield Case("not finite bf16", "llama", TP2, 1, dtype="bfloat16", adam=True, life="infinite")
    biased = EP2 | {"moe": {"bias_update_rate": 0.02}}
    yield Case("not finite biases", "deepseek_v3", biased, 1, adam=True, life="infinite")
    yield Case("watched not finite", "llama", TP2 | {"watch": {"finite": True}}, 2, adam=True, life="infinite")
    yield Case(
        "watched not finite stages",
        "llama",
        PP2 | {"watch": {"finite": True}},
        adam=True,
        life="infinite",
        changes={"num_hidden_layers": 4},
    )
    # DeepSpeed has no fp16 on the CPU; simulated NPUs have.
    yield Case("overflow", "llama", TP2, 1, dtype="float16", config=FP16, life="overflow")
    yield Case("one micro-batch", "llama", SP2, 2, config={"gradient_accumulation_steps": 1}, batch="padded")
    yield Case("not synchronised", "llama", TP2, 1, life="not synchronised")


def checkpoints() -> Iterator[Case]:
    """Checkpoints that are loaded at the layout that wrote them, and at another one."""
    more: Keys = {"adam": True, "life": "checkpoint"}
    llama = Case("checkpoint llama tp2", "llama", TP2, 1, **more)  # type: ignore[arg-type]
    yield llama
    yield replace(llama, name="checkpoint zero3", section={}, stage=3)
    yield replace(
        llama,
        name="checkpoint at stages",
        changes={"num_hidden_layers": 4},
        reader=replace(llama, section=PP2, changes={"num_hidden_layers": 4}),
    )
    staged = replace(
        llama,
        name="checkpoint stages",
        section=PP2 | {"pipeline": {"schedule": "zb_v"}},
        stage=2,
        changes={"num_hidden_layers": 4},
    )
    yield staged
    experts = Case(
        "checkpoint experts", "mixtral", EP2 | {"moe": {"placement_interval": 1}}, 2, changes=EIGHT, batch="few", **more
    )  # type: ignore[arg-type]
    yield experts
    yield replace(experts, name="checkpoint experts zero3", stage=3, section=EP2)
    yield replace(
        experts,
        name="checkpoint experts at tensor",
        stage=0,
        section=EP2,
        reader=replace(experts, section=TP2, stage=1),
    )
    state: Keys = {"optimizer_memory": {"share_fp32": True, "swap": True, "moments": "bf16"}}
    yield replace(llama, name="checkpoint state", section=state, stage=2, dtype="bfloat16")
    yield replace(
        experts,
        name="checkpoint biases",
        family="deepseek_v3",
        changes={},
        section=EP2 | {"moe": {"bias_update_rate": 0.02}},
        dtype="bfloat16",
        stage=1,
    )


def memory_cases() -> list[Case]:
    return [*memory(), *subscribers(), *checkpoints()]
