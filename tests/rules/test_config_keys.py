"""The keys of the section are a promise to users: this list changes only on purpose."""

from __future__ import annotations

from ds_npu.config.schema import leaves, section_schema
from ds_npu.config.sections import DsNpuConfig
from ds_npu.features.driver import FEATURES

KEYS = {
    "parallel.tensor": "integer >= 1",
    "parallel.sequence_parallel": "boolean",
    "parallel.context": "integer >= 1",
    "parallel.pipeline": "integer >= 1",
    "parallel.expert": "integer >= 1",
    "parallel.expert_tensor": "integer >= 1",
    "parallel.probe": "boolean",
    "plan": "module glob -> role",
    "fused_ops.flash_attention": "boolean",
    "fused_ops.rms_norm": "boolean",
    "fused_ops.swiglu": "boolean",
    "fused_ops.rotary": "boolean",
    "fused_ops.cross_entropy": "boolean",
    "fused_ops.adamw": "boolean",
    "fused_ops.matmul_accumulate": "boolean",
    "tensor_overlap": "none pipelined fused",
    "context_parallel.algorithm": "ulysses ring hybrid allgather",
    "context_parallel.ulysses": "integer >= 1",
    "context_parallel.window": "integer >= 1",
    "context_parallel.kv_cache": "none half full",
    "pipeline.schedule": "gpipe 1f1b interleaved zb_h1 zb_h2 zb_v v_half v_min dualpipe_v or a .csv",
    "pipeline.micro_batches": "integer >= 1",
    "pipeline.virtual_stages": "integer >= 1",
    "pipeline.split": "list of integers",
    "pipeline.noop_layers": "list of integers",
    "pipeline.recompute": "inline bubble",
    "pipeline.overlap_experts": "boolean",
    "moe.dispatcher": "alltoall allgather fused",
    "moe.tp_extends_ep": "boolean",
    "moe.grouped_matmul": "boolean",
    "moe.overlap": "boolean",
    "moe.zero_memory": "none level0 level1",
    "moe.capacity_factor": "number > 0",
    "moe.capacity_policy": "probs position",
    "moe.pad_to_capacity": "boolean",
    "moe.row_margin": "number > 0",
    "moe.aux_loss.coefficient": "number > 0",
    "moe.aux_loss.over": "micro_batch sequence global_batch",
    "moe.z_loss": "number > 0",
    "moe.bias_update_rate": "number > 0",
    "moe.load_report": "file.svg",
    "moe.placement_interval": "integer >= 0",
    "moe.replica_rows": "integer >= 0",
    "recompute.layers": "none all or integer >= 1",
    "recompute.method": "uniform block",
    "recompute.modules": "list of globs",
    "recompute.keep": "matmul attention",
    "recompute.activation_function": "boolean or list of globs",
    "recompute.norm": "boolean or list of globs",
    "recompute.attention_core": "boolean",
    "recompute.budget_gib": "number > 0",
    "swap.activations": "boolean or list of globs",
    "swap.hidden_only": "boolean",
    "swap.depth": "integer 1 to 4",
    "swap.compress": "boolean",
    "optimizer_memory.swap": "boolean",
    "optimizer_memory.resident_gib": "number >= 0",
    "optimizer_memory.share_fp32": "boolean",
    "optimizer_memory.moments": "fp32 bf16 int8",
    "chunked_loss": "boolean or integer >= 1",
    "memory_report": "boolean or file.svg",
    "deterministic": "boolean",
    "watch.stall_factor": "integer >= 0",
    "watch.finite": "boolean",
}


def test_the_keys_are_these_and_no_others():
    assert [path for path, _ in leaves(section_schema())] == list(KEYS)


def test_every_key_and_section_says_what_it_means_in_one_line():
    sections = {key: node for key, node in section_schema()["properties"].items() if "properties" in node}
    for path, node in [*leaves(section_schema()), *sections.items()]:
        assert node["description"].strip() and "\n" not in node["description"], path


def test_each_key_is_one_features():
    assert sorted(feature.key for feature in FEATURES) == sorted(DsNpuConfig.model_fields)
