"""Golden cases on the CPU of tensor, context, expert and pipeline ranks, with every key of ``moe`` and ``pipeline``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from golden_cases import CSV, EIGHT, EP2, FUSED, LORA, MIXED, PP2, SP2, TP2, Case, Keys, context, parallel

FAMILIES = ("qwen2", "qwen3", "mistral", "gemma", "gpt2", "phi3", "mixtral", "qwen3_moe", "deepseek_v3", "qwen2_5_vl")


def dense() -> Iterator[Case]:
    """Tensor and context ranks, every family and ZeRO stage."""
    for number, family in enumerate(FAMILIES):
        # Stages of ZeRO and the two kinds of tensor parallelism alternate.
        yield Case(f"{family} tp2", family, TP2 if number % 2 else SP2, 3 if number % 2 else 1)
    for stage in range(4):
        yield Case(f"llama float64 zero{stage}", "llama", SP2, stage, dtype="float64")
        yield Case(f"llama bf16 zero{stage}", "llama", TP2 | {"fused_ops": FUSED}, stage, dtype="bfloat16")
        yield Case(f"llama tp2 dp2 zero{stage}", "llama", SP2, stage, world=4)
    for algorithm in ("ulysses", "ring", "allgather"):
        yield Case(f"llama {algorithm}", "llama", context(2, algorithm))
        yield Case(f"qwen3 {algorithm} full", "qwen3", context(2, algorithm, kv_cache="full"), 3)
    yield Case("mistral ring", "mistral", context(2, "ring", kv_cache="half"), batch="padded")
    yield Case("gpt2 ulysses", "gpt2", context(2, "ulysses"))
    yield Case("llama pipelined", "llama", SP2 | {"tensor_overlap": "pipelined"})
    yield Case("llama chosen", "llama", {"parallel": {"context": 2}})
    yield Case("mixtral tp4", "mixtral", parallel(tensor=4), 2, world=4)
    yield Case("llama hybrid", "llama", context(4, "hybrid", ulysses=2), world=4)
    yield Case("llama double ring", "llama", context(4, "ring", window=2), world=4)
    yield Case("qwen3 tp2 cp2", "qwen3", context(2, "ulysses", tensor=2), 3, world=4)
    yield Case("llama tp2 cp2 ring fused", "llama", context(2, "ring", tensor=2) | {"fused_ops": FUSED}, 2, world=4)
    yield Case("llama lora", "llama", SP2, 2, adapters=LORA)
    yield Case("llama plan", "llama", TP2 | {"plan": {"model.layers.*.mlp": "replicated"}})
    yield Case("llama deterministic", "llama", SP2 | {"deterministic": True}, adam=True)


def _expert(name: str, family: str, moe: Keys, section: Keys = EP2, **more: object) -> Case:
    return Case(f"moe {name}", family, section | {"moe": moe}, **more)  # type: ignore[arg-type]


def experts() -> Iterator[Case]:
    """Every key of ``moe``, over expert, expert-tensor, tensor and context ranks."""
    for stage in range(4):
        yield _expert(f"zero{stage}", "qwen3_moe", {}, stage=stage, adam=True)
    yield _expert("deepseek", "deepseek_v3", {}, stage=2)
    yield _expert("gpt_oss", "gpt_oss", {}, stage=3)
    yield _expert("llama4", "llama4_text", {}, stage=2)
    yield _expert("bf16", "mixtral", {}, dtype="bfloat16", adam=True)
    yield _expert("matmul accumulate", "mixtral", {}, EP2 | {"fused_ops": {"matmul_accumulate": True}})
    yield _expert("allgather", "mixtral", {"dispatcher": "allgather"}, stage=2)
    yield _expert("allgather level1", "qwen3_moe", {"dispatcher": "allgather", "zero_memory": "level1"})
    yield _expert("fused", "mixtral", {"dispatcher": "fused"}, stand_in=True)
    extended: Keys = {"dispatcher": "fused", "tp_extends_ep": True}
    yield _expert("fused over tensor ranks", "qwen3_moe", extended, TP2, stand_in=True)
    yield _expert("expert_tensor", "mixtral", {}, parallel(expert_tensor=2))
    yield _expert("expert x tensor", "qwen3_moe", {}, parallel(expert=2, tensor=2))
    yield _expert(
        "expert x sp allgather",
        "qwen3_moe",
        {"dispatcher": "allgather"},
        SP2 | {"parallel": {"expert": 2, "tensor": 2, "sequence_parallel": True}},
        stage=3,
    )
    yield _expert("tp_extends_ep", "mixtral", {"tp_extends_ep": True}, TP2, stage=2)
    yield _expert(
        "expert x context",
        "qwen3_moe",
        {"aux_loss": {"coefficient": 0.3}},
        parallel(expert=2, context=2),
        changes=MIXED,
    )
    yield from _expert_keys()


def _expert_keys() -> Iterator[Case]:
    yield _expert("grouped", "mixtral", {"grouped_matmul": True}, {}, stage=2)
    yield _expert("grouped level1", "mixtral", {"zero_memory": "level1"}, {})
    yield _expert("overlap halves", "qwen3_moe", {"overlap": True}, stage=2)
    yield _expert("overlap shared", "deepseek_v3", {"overlap": True, "zero_memory": "level0"})
    yield _expert("level0", "mixtral", {"zero_memory": "level0"})
    yield _expert("capacity probs", "qwen3_moe", {"capacity_factor": 0.8})
    yield _expert("capacity position", "mixtral", {"capacity_factor": 0.8, "capacity_policy": "position"}, stage=2)
    yield _expert("capacity llama4", "llama4_text", {"capacity_factor": 0.8})
    yield _expert("padded", "mixtral", {"capacity_factor": 1.0, "pad_to_capacity": True, "overlap": True})
    yield _expert("row_margin tight", "qwen3_moe", {"row_margin": 1.0}, batch="few")
    yield _expert("row_margin wide", "mixtral", {"row_margin": 6.0, "zero_memory": "level0"}, stage=3)
    yield _expert("row_margin overlap", "deepseek_v3", {"row_margin": 6.0, "overlap": True}, stage=2)
    yield _expert("row_margin checkpoints", "qwen3_moe", {"row_margin": 1.0}, checkpointing=True)
    losses: Keys = {"coefficient": 0.3, "over": "sequence"}
    yield _expert("aux sequence z", "qwen3_moe", {"aux_loss": losses, "z_loss": 0.1}, changes=MIXED)
    losses = {"coefficient": 0.3, "over": "global_batch"}
    yield _expert("aux global", "deepseek_v3", {"aux_loss": losses}, changes={})
    yield _expert("bias", "deepseek_v3", {"bias_update_rate": 0.02, "load_report": "FOLDER/load.svg"}, config=CSV)
    yield _expert("relocation", "mixtral", {"placement_interval": 1}, stage=2, adam=True, changes=EIGHT, batch="few")
    yield _expert(
        "relocation zero3", "mixtral", {"placement_interval": 1}, stage=3, adam=True, changes=EIGHT, batch="few"
    )
    yield _expert("replicas", "mixtral", {"replica_rows": 1}, stage=0, batch="few")
    yield _expert("replicas allgather", "qwen3_moe", {"replica_rows": 1, "dispatcher": "allgather"}, stage=3)
    yield replace(_expert("expert2 dp4", "qwen3_moe", {"overlap": True}, stage=2, adam=True), world=4)
    yield replace(
        _expert(
            "relocation x etp",
            "mixtral",
            {"placement_interval": 1},
            parallel(expert=2, expert_tensor=2),
            adam=True,
            changes=EIGHT,
            batch="few",
        ),
        world=4,
    )


def _staged(name: str, pipeline: Keys, family: str = "llama", axes: Keys = PP2, **more: object) -> Case:
    section: Keys = {"pipeline": pipeline} if pipeline else {}
    of_experts = family in ("mixtral", "qwen3_moe")
    blocks: Keys = {"n_layer" if family == "gpt2" else "num_hidden_layers": 4} | (MIXED if of_experts else {})
    blocks |= more.pop("changes", {})  # type: ignore[arg-type]
    more = {"batch": "padded"} | more
    return Case(f"stages {name}", family, axes | section | more.pop("keys", {}), changes=blocks, **more)  # type: ignore[arg-type]


SCHEDULES = ("gpipe", "1f1b", "zb_h1", "zb_h2", "zb_v", "v_half", "v_min", "dualpipe_v")


def stages() -> Iterator[Case]:
    """Every key of ``pipeline``, alone and beside other axes and keys."""
    for number, schedule in enumerate(SCHEDULES):
        yield _staged(schedule, {"schedule": schedule}, stage=number % 3)
    yield _staged("interleaved", {"schedule": "interleaved", "virtual_stages": 2})
    yield _staged("micro_batches", {"micro_batches": 2}, "qwen3", adam=True)
    yield _staged("file", {"schedule": "FOLDER/own.csv", "micro_batches": 2})
    yield _staged("split", {"split": [3, 1]}, "gpt2", stage=0)
    yield _staged("noop_layers", {"noop_layers": [0, 5]})
    yield _staged("inline", {"schedule": "1f1b", "recompute": "inline"})
    yield _staged("bubble", {"schedule": "v_min", "recompute": "bubble"}, keys={"recompute": {"norm": True}})
    yield _staged("recompute", {"schedule": "zb_h1"}, keys={"recompute": {"layers": "all", "keep": ["matmul"]}})
    yield _staged("bf16", {"schedule": "zb_h1"}, dtype="bfloat16", adam=True)
    yield _staged("bf16 fp32 sums", {}, dtype="bfloat16", config={"data_types": {"grad_accum_dtype": "fp32"}})
    yield _staged("float64", {"schedule": "zb_v"}, dtype="float64", stage=2)
    yield _staged("tied", {"schedule": "zb_v"}, changes={"tie_word_embeddings": True}, stage=2)
    yield _staged("chunked", {"schedule": "zb_h1"}, keys={"chunked_loss": 4})
    yield _staged("train_batch", {"schedule": "zb_v", "micro_batches": 2}, life="train_batch", batch="plain")
    yield Case("stages PipelineModule", "PipelineModule", PP2, life="train_batch")
    yield _staged("lora", {"schedule": "zb_v"}, adapters=LORA)
    yield _staged("evaluated", {"schedule": "zb_v"}, life="evaluated")
    yield _staged("not synchronised", {}, life="not synchronised")
    yield _staged("zero3", {}, stage=3)
    yield _staged("matmul accumulate", {"schedule": "zb_h1"}, keys={"fused_ops": {"matmul_accumulate": True}})
    both = parallel(pipeline=2, expert=2)
    yield _staged("x expert overlap", {"overlap_experts": True}, "qwen3_moe", both, world=4)
    yield _staged(
        "x expert losses",
        {"schedule": "zb_h1"},
        "qwen3_moe",
        both,
        keys={"moe": {"z_loss": 0.1, "aux_loss": {"coefficient": 0.3}}},
        world=4,
    )
    yield _staged(
        "x expert dualpipe overlap",
        {"schedule": "dualpipe_v", "overlap_experts": True},
        "qwen3_moe",
        both,
        world=4,
        changes={"num_hidden_layers": 8},
    )
    yield from _stages_on_axes()


def _stages_on_axes() -> Iterator[Case]:
    yield _staged(
        "x tensor", {"schedule": "zb_h1"}, axes=parallel(pipeline=2, tensor=2, sequence_parallel=True), world=4
    )
    yield _staged("x context", {"schedule": "1f1b"}, axes=parallel(pipeline=2, context=2), world=4)
    yield _staged(
        "of four",
        {"schedule": "zb_h2"},
        axes=parallel(pipeline=4),
        world=4,
        keys={"optimizer_memory": {"swap": True}},
        adam=True,
        dtype="bfloat16",
    )
    yield _staged(
        "biases",
        {"micro_batches": 2},
        "deepseek_v3",
        keys={"moe": {"bias_update_rate": 0.02, "load_report": "FOLDER/load.svg"}},
        config=CSV,
    )


def axis_cases() -> list[Case]:
    return [*dense(), *experts(), *stages()]
