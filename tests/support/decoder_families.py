"""A tiny model of every causal language model that the installed transformers knows, and what ds_npu makes of it.

Which settings a family is sharded with exactly, and what it is refused with, on the road that
``deepspeed.initialize`` takes (the features), against one process.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import tensor_parallel_rule
import tiny_models
import torch
import torch.distributed as dist
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ds_npu.config.context_parallel import ContextParallelSection
from ds_npu.config.parallel import ParallelSection
from ds_npu.features.build import Build
from ds_npu.features.context_parallel.context_ranks import CONTEXT_PARALLEL
from ds_npu.features.driver import apply_features
from ds_npu.features.tensor_parallel.tensor_ranks import PARALLEL
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology

EXACT = 1e-12
SAMPLES, LENGTH = 2, 13
LARGEST = 12_000_000
"""Parameters; families whose sizes have other names than the usual ones are left out beyond it."""
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 8, "v_head_dim": 6}
LATENT |= {"qk_rope_head_dim": 4, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8}
DELTA = {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2}
DELTA |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
INDEXED = LATENT | {"head_dim": 4, "index_topk": 5, "index_head_dim": 8, "index_n_heads": 2}
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
SOURCE = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "num_kv_shared_layers": 0}
SHORT = {"sliding_window": 6, "attention_chunk_size": 5}
"""Sizes that are shorter than the sequences of the tests, where a family has them."""
UNIFORM = {"recurrent_gemma"}
"""Families whose layers cannot be listed in this way."""
CHANGES: dict[str, dict[str, object]] = {
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
        "rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), SECTIONS),
    },
    "dbrx": {
        **{"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v32": INDEXED,
    "dots3_note_text": INDEXED,
    "glm_moe_dsa": INDEXED,
    "gemma3n_text": SOURCE | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "laurel_rank": 4},
    "gemma4_text": SOURCE | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64},
    "bailing_hybrid": LATENT | {"head_dim": 4, "layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen4_exp_text": DELTA | {"layer_types": ["linear_attention", "linear_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": LATENT
    | {"head_dim": 4, "num_layers": 2, "ffn_hidden_size": 48, "moe_topk": 2, "zero_expert_num": 1}
    | {"expert_ffn_hidden_size": 16},
    "reformer": {"is_decoder": True, "axial_pos_shape": [3, 4], "axial_pos_embds_dim": [8, 24]}
    | {"attention_head_size": 8, "attn_layers": ["local", "local"], "feed_forward_size": 48},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "num_key_value_heads": 4}
    | {"attention_hidden_size": 64, "attention_head_dim": 16, "n_mamba_heads": 2, "mamba_d_state": 8}
    | {"use_mamba_kernels": False},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 4}
    | {"mamba_d_state": 8, "adapter_rank": 4, "use_mamba_kernels": False},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16, "num_hidden_layers": 4},
    "kimi_linear": LATENT
    | {"head_dim": 4, "q_lora_rank": None, "layer_types": ["linear_attention", "full_attention"]}
    | {"linear_num_heads": 4, "linear_head_dim": 8, "mlp_layer_types": ["dense", "sparse"]},
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    **dict.fromkeys(("axk1", "axk2", "glm4_moe_lite", "minicpm3", "youtu"), LATENT | {"head_dim": 4}),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), LATENT),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), DELTA),
    "dots1": {"n_group": 2, "topk_group": 1, "n_shared_experts": 1},
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64},
    "gpt_neo": {"attention_types": [[["global"], 2]]},
    "granitemoehybrid": MAMBA | {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8},
    "nemotron_h": {"layer_types": ["linear_attention", "moe", "full_attention", "mlp"], "mamba_num_heads": 16}
    | {"mamba_head_dim": 8, "ssm_state_size": 8},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48},
    "xglm": {"ffn_dim": 48},
}


def config_of(kind: str) -> Any:
    """The configuration of a tiny model of the family ``kind``; nothing in it is random."""
    config_class = class_of(kind).config_class
    known = {field.name for field in dataclasses.fields(config_class)} | config_class.attribute_map.keys()
    sizes = {key: value for key, value in SIZES.items() if key in known}
    changes = CHANGES.get(kind) or every_kind_of_layer(config_class, kind)
    config = config_class(**sizes | of_all_layers(changes), experts_implementation="eager")
    for each in {id(config): config, id(config.get_text_config()): config.get_text_config()}.values():
        # PhiMoE's routers draw experts at random within a jitter.
        numbers = [key for key, value in vars(each).items() if isinstance(value, float)]
        dropped = [key for key in numbers if "drop" in key or "jitter" in key]
        vars(each).update(dict.fromkeys(dropped, 0.0))
    return config


def of_all_layers(changes: dict[str, Any]) -> dict[str, Any]:
    """``changes`` whose lists of kinds of layers are as long as the model has layers."""
    lists = {name: kinds for name, kinds in changes.items() if name in ("layer_types", "layers_block_type")}
    if not lists:
        return changes
    count = max(SIZES["num_hidden_layers"], *map(len, lists.values()))
    whole = {name: [kinds[index % len(kinds)] for index in range(count)] for name, kinds in lists.items()}
    return changes | whole | {"num_hidden_layers": count}


def every_kind_of_layer(config_class: Any, kind: str) -> dict[str, object]:
    """Changes with which a tiny model has a layer of each kind that the published one has, and short windows."""
    usual = config_class()
    windows = {name: size for name, size in SHORT.items() if isinstance(getattr(usual, name, None), int)}
    if kind in UNIFORM:
        return windows
    found = list(dict.fromkeys(getattr(usual, "layer_types", None) or ()))
    return windows | ({"layer_types": found} if len(found) > 1 else {})


def class_of(kind: str) -> Any:
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    return getattr(transformers, name if isinstance(name, str) else name[0])


def is_buildable(kind: str) -> bool:
    """Whether a tiny model of the family can be made from these sizes."""
    try:
        check_buildable(kind)
    except Exception:
        return False
    return True


def check_buildable(kind: str) -> None:
    """Raise what keeps a tiny model of the family from being made."""
    with torch.device("meta"):
        model = class_of(kind)(config_of(kind))
    count = sum(weight.numel() for weight in model.parameters())
    if count > LARGEST:
        raise ValueError(f"it has {count:,} parameters")


def made(kind: str) -> nn.Module:
    """In float64, the same at every call; every weight of it matters."""
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.manual_seed(5)
    model = class_of(kind)(config_of(kind))
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=noise))
    return model.to(torch.float64).train()


def outcome(kind: str, tensor: int, sequence_parallel: bool, globs: dict[str, str] | None = None) -> str:
    """``exact``, ``refused: <why>`` or what went wrong; the ranks that are not tensor ranks are context ranks."""
    context = dist.get_world_size() // tensor
    topology = Topology(Degrees(cp=context, tp=tensor))
    plain = made(kind)
    ids = tiny_models.tokens(SAMPLES, LENGTH)
    given = {"input_ids": ids, "labels": ids}
    try:
        expected = step(plain, given)
    except Exception as error:
        return f"one process: {type(error).__name__}: {error}"
    model = made(kind)
    build = Build(topology, model, globs or {})
    parallel = ParallelSection(tensor=tensor, context=context, sequence_parallel=sequence_parallel)
    try:
        apply_features([(PARALLEL, parallel)], build)
        apply_features([(CONTEXT_PARALLEL, ContextParallelSection(algorithm="ring"))], build)
    except ValueError as error:
        return f"refused: {error}"
    try:
        try:
            found = step(model, given)
        except ValueError as error:
            if "What to do: give it position_ids" not in str(error):
                raise
            given["position_ids"] = torch.arange(LENGTH)[None]
            found = step(model, given)
    except Exception as error:
        return f"{'refused at the first forward' if is_ours(error) else 'CRASH'}: {type(error).__name__}: {error}"
    worst, where = abs(found / expected - 1), "loss"
    # The gradients of a key's bias are 0 but for rounding.
    floor = 1e-3 * max(float(each.grad.abs().max()) for each in plain.parameters() if each.grad is not None)
    for name, weight in plain.named_parameters():
        gradient = model.get_parameter(name).grad
        mine = torch.zeros_like(model.get_parameter(name)) if gradient is None else gradient
        whole = tensor_parallel_rule.assembled(topology, model.get_parameter(name), mine).clone()
        dist.all_reduce(whole, group=topology.group("cp"))
        largest = 0.0 if weight.grad is None else float(weight.grad.abs().max())
        error = float((whole - (0 if weight.grad is None else weight.grad)).abs().max()) / max(largest, floor)
        worst, where = max((worst, where), (error, name))
    return "exact" if worst <= EXACT else f"WRONG: {where} by {worst:.1e}"


def step(model: nn.Module, given: dict[str, torch.Tensor]) -> float:
    with tiny_models.Float64():
        loss = model(**given).loss
        loss.backward()
    return float(loss)


def is_ours(error: Exception) -> bool:
    """Whether ``error`` was raised by a line of ds_npu's, on purpose."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    raised = "" if trace is None else trace.tb_frame.f_code.co_filename
    return isinstance(error, ValueError | RuntimeError) and "ds_npu" in raised.rpartition("site-packages")[2]
