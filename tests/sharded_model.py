"""Tiny Hugging Face models of several families, and a stand-in for the surgery that shards their parameters."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from ds_npu.parallel.tensor.sharding import Sharding, mark, split

H, I, V, D = 16, 24, 40, 4
HEADS, KV_HEADS = 4, 2
DENSE = {
    "hidden_size": H,
    "intermediate_size": I,
    "vocab_size": V,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": D,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = 4
QKV = (HEADS * D, KV_HEADS * D, KV_HEADS * D)
Rule = Callable[[int], Sharding]
"""The sharding of a weight over so many tensor ranks."""


def sections(dim: int, *sizes: int, unit: int = 1) -> Rule:
    return lambda ranks: split(dim, sizes, ranks, unit)


VOCABULARY = {r"(embed_tokens|lm_head)\.weight$": sections(0, V)}
ATTENTION = {
    r"q_proj\.(weight|bias)$": sections(0, HEADS * D, unit=D),
    r"[kv]_proj\.(weight|bias)$": sections(0, KV_HEADS * D, unit=D),
    r"o_proj\.weight$": sections(1, HEADS * D, unit=D),
}
MLP = {r"(gate|up)_proj\.weight$": sections(0, I), r"down_proj\.weight$": sections(1, I)}
MERGED_EXPERTS = {r"experts\.gate_up_proj$": sections(1, I, I), r"experts\.down_proj$": sections(2, I)}
LATENT = {
    r"q_b_proj\.weight$": sections(0, HEADS * 12, unit=12),
    r"kv_b_proj\.weight$": sections(0, HEADS * 16, unit=16),
    r"o_proj\.weight$": sections(1, HEADS * 8, unit=8),
}


@dataclass(frozen=True)
class Family:
    model_type: str
    config: dict
    rules: dict[str, Rule]
    """The first pattern that is found in a parameter's name says how it is split; without one it is whole."""
    auto: type = AutoModelForCausalLM

    def make(self, dtype: torch.dtype = torch.float32, **changes) -> nn.Module:
        """A model with random weights (not those of its initialisation: norms and biases differ from 1 and 0)."""
        config = AutoConfig.for_model(self.model_type, **{**self.config, **changes})
        torch.manual_seed(1)
        model = self.auto.from_config(config, dtype=dtype)
        with torch.no_grad():
            for each in (*model.parameters(), *(model.get_buffer(name) for name in persistent(model))):
                each.copy_(torch.randn_like(each))
        return model


def persistent(model: nn.Module) -> list[str]:
    """Names of the buffers that a checkpoint holds."""
    return [name for name, _ in model.named_buffers() if name in model.state_dict()]


MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": I, "num_experts": EXPERTS}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": H}

FAMILIES = {
    "llama": Family("llama", DENSE, VOCABULARY | ATTENTION | MLP),
    "gpt2": Family(
        "gpt2",
        {"n_embd": H, "n_inner": I, "n_layer": 2, "n_head": HEADS, "vocab_size": V, "n_positions": 32}
        | {"bos_token_id": 1, "eos_token_id": 2},
        {
            r"(wte|lm_head)\.weight$": sections(0, V),
            # Conv1D holds [in, out].
            r"c_attn\.weight$": sections(1, H, H, H, unit=D),
            r"c_attn\.bias$": sections(0, H, H, H, unit=D),
            r"attn\.c_proj\.weight$": sections(0, H, unit=D),
            r"c_fc\.weight$": sections(1, I),
            r"c_fc\.bias$": sections(0, I),
            r"mlp\.c_proj\.weight$": sections(0, I),
        },
    ),
    "mixtral": Family(
        "mixtral",
        DENSE | {"num_local_experts": EXPERTS, "num_experts_per_tok": 2},
        VOCABULARY | ATTENTION | MERGED_EXPERTS,
    ),
    "qwen3_moe": Family("qwen3_moe", DENSE | MOE, VOCABULARY | ATTENTION | MERGED_EXPERTS),
    "deepseek_v3": Family(
        "deepseek_v3",
        DENSE
        | {"moe_intermediate_size": I, "n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "n_group": 2}
        | {"topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4}
        | {"qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 4, "num_key_value_heads": HEADS},
        VOCABULARY | LATENT | MERGED_EXPERTS | MLP,
    ),
    "phi3": Family(
        "phi3",
        DENSE,
        VOCABULARY
        | {r"qkv_proj\.weight$": sections(0, *QKV, unit=D), r"gate_up_proj\.weight$": sections(0, I, I)}
        | ATTENTION
        | MLP,
    ),
    "gemma": Family("gemma", DENSE | {"tie_word_embeddings": True}, VOCABULARY | ATTENTION | MLP),
    "qwen2_5_vl": Family(
        "qwen2_5_vl",
        {
            "text_config": DENSE | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 0]}},
            "vision_config": VISION | {"patch_size": 4, "spatial_merge_size": 2, "window_size": 16, "in_channels": 3},
        },
        {rf"language_model.*{end}": rule for end, rule in (ATTENTION | MLP).items()} | VOCABULARY,
        AutoModelForImageTextToText,
    ),
}


def shard(model: nn.Module, rules: dict[str, Rule], ranks: int, rank: int) -> nn.Module:
    """Give ``rank`` its part of each parameter: what the surgery on real models leaves, without its modules."""
    done: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for leaf, old in list(module._parameters.items()):
            name = f"{path}.{leaf}"
            rule = next((rule for pattern, rule in rules.items() if re.search(pattern, name)), None)
            if old is None or rule is None:
                continue
            if id(old) not in done:
                sharding = rule(ranks)
                shape = list(old.shape)
                assert shape[sharding.dim] == sharding.size, name
                shape[sharding.dim] = sharding.length(rank)
                new = torch.empty(shape, device="meta", dtype=old.dtype) if old.is_meta else sharding.take(old, rank)
                done[id(old)] = nn.Parameter(new.detach())
                mark(done[id(old)], sharding)
                vars(done[id(old)])["kept"] = old  # also keeps old's id from being used again
            module._parameters[leaf] = done[id(old)]
    return model
