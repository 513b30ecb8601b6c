"""Tiny Hugging Face models of several families, and a stand-in for the surgery that shards their parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from ds_npu.checkpoint.loading import meta_model
from ds_npu.checkpoint.saving import Holders, ViewHolders
from ds_npu.parallel.runtime.placement import mark_sharded, sharding_of
from ds_npu.parallel.tensor.sharding import Sharding, shard_sections

SINGLE = "model.safetensors"

H, F, V, D = 16, 24, 40, 4
HEADS, KV_HEADS = 4, 2
DENSE = {
    "hidden_size": H,
    "intermediate_size": F,
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
    return lambda ranks: shard_sections(dim, sizes, ranks, unit)


VOCABULARY = {r"(embed_tokens|lm_head)\.weight$": sections(0, V)}
ATTENTION_OUT = r"o_proj\.weight$"
ATTENTION = {
    r"q_proj\.(weight|bias)$": sections(0, HEADS * D, unit=D),
    r"[kv]_proj\.(weight|bias)$": sections(0, KV_HEADS * D, unit=D),
    ATTENTION_OUT: sections(1, HEADS * D, unit=D),
}
MLP = {r"(gate|up)_proj\.weight$": sections(0, F), r"down_proj\.weight$": sections(1, F)}
MERGED_EXPERTS = {r"experts\.gate_up_proj$": sections(1, F, F), r"experts\.down_proj$": sections(2, F)}
LATENT = {
    r"q_b_proj\.weight$": sections(0, HEADS * 12, unit=12),
    r"kv_b_proj\.weight$": sections(0, HEADS * 16, unit=16),
    ATTENTION_OUT: sections(1, HEADS * 8, unit=8),
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


MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": F, "num_experts": EXPERTS}
MROPE = {"rope_type": "default", "mrope_section": [1, 1, 0]}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": H}

EVERY = {
    "llama": Family("llama", DENSE, VOCABULARY | ATTENTION | MLP),
    "gpt2": Family(
        "gpt2",
        {"n_embd": H, "n_inner": F, "n_layer": 2, "n_head": HEADS, "vocab_size": V, "n_positions": 32}
        | {"bos_token_id": 1, "eos_token_id": 2},
        {
            r"(wte|lm_head)\.weight$": sections(0, V),
            # Conv1D holds [in, out].
            r"c_attn\.weight$": sections(1, H, H, H, unit=D),
            r"c_attn\.bias$": sections(0, H, H, H, unit=D),
            r"attn\.c_proj\.weight$": sections(0, H, unit=D),
            r"c_fc\.weight$": sections(1, F),
            r"c_fc\.bias$": sections(0, F),
            r"mlp\.c_proj\.weight$": sections(0, F),
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
        | {"moe_intermediate_size": F, "n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "n_group": 2}
        | {"topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4}
        | {"qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 4, "num_key_value_heads": HEADS},
        VOCABULARY | LATENT | MERGED_EXPERTS | MLP,
    ),
    "phi3": Family(
        "phi3",
        DENSE,
        VOCABULARY
        | {r"qkv_proj\.weight$": sections(0, *QKV, unit=D), r"gate_up_proj\.weight$": sections(0, F, F)}
        | ATTENTION
        | MLP,
    ),
    "gemma": Family("gemma", DENSE | {"tie_word_embeddings": True}, VOCABULARY | ATTENTION | MLP),
    # Fused in the checkpoint, apart in the model.
    "hrm_text": Family(
        "hrm_text",
        {key: value for key, value in DENSE.items() if key != "num_key_value_heads"} | {"num_hidden_layers": 1},
        VOCABULARY
        | {r"(q|k|v|attn\.gate)_proj\.weight$": sections(0, HEADS * D, unit=D), ATTENTION_OUT: ATTENTION[ATTENTION_OUT]}
        | MLP,
    ),
    # [E, H, 2I] in older checkpoints, [E, 2I, H] in the model.
    "qwen3_vl_moe": Family(
        "qwen3_vl_moe",
        {
            "text_config": DENSE | MOE | {"decoder_sparse_step": 1, "rope_parameters": MROPE},
            "vision_config": VISION | {"patch_size": 4, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        },
        VOCABULARY | {rf"language_model.*{end}": rule for end, rule in (ATTENTION | MERGED_EXPERTS).items()},
        AutoModelForImageTextToText,
    ),
    "qwen2_5_vl": Family(
        "qwen2_5_vl",
        {
            "text_config": DENSE | {"rope_parameters": MROPE},
            "vision_config": VISION | {"patch_size": 4, "spatial_merge_size": 2, "window_size": 16, "in_channels": 3},
        },
        {rf"language_model.*{end}": rule for end, rule in (ATTENTION | MLP).items()} | VOCABULARY,
        AutoModelForImageTextToText,
    ),
}
FAMILIES = {name: family for name, family in EVERY.items() if family.model_type in CONFIG_MAPPING}
"""Those that the installed transformers has: hrm_text came after the oldest release that is supported."""


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
                mark_sharded(done[id(old)], sharding)
                vars(done[id(old)])["kept"] = old  # also keeps old's id from being used again
            module._parameters[leaf] = done[id(old)]
    return model


def sharded(family, folder, ranks, rank, **options):
    return shard(meta_model(family.auto, folder, **options), family.rules, ranks, rank)


def tensors_of(model):
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())


def assert_parts(model, plain, rank):
    """Each tensor of ``model`` is bitwise this rank's part of the plain model's, in dtype, too."""
    ours, theirs = tensors_of(model), tensors_of(plain)
    assert ours.keys() == theirs.keys()
    for name, whole in theirs.items():
        sharding = sharding_of(ours[name])
        expected = whole if sharding is None else whole[(slice(None),) * sharding.dim + (held(sharding, rank),)]
        assert ours[name].dtype == whole.dtype and ours[name].device == whole.device, name
        assert ours[name].requires_grad == whole.requires_grad, name
        assert torch.equal(ours[name], expected), name


def held(sharding: Sharding, rank: int) -> list[int]:
    return [index for start, stop in sharding.ranges[rank] for index in range(start, stop)]


def save_single(model, folder):
    model.save_pretrained(folder)
    assert (folder / SINGLE).is_file()


def save_in_files(model, folder):
    model.save_pretrained(folder, max_shard_size="6KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 3


def save_pickled(model, folder):
    """As older releases did: the model's own names, and tied weights under each of theirs."""
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def save_pickled_in_files(model, folder):
    model.config.save_pretrained(folder)
    weight_map = {}
    for number, name in enumerate(model.state_dict()):
        weight_map[name] = f"pytorch_model-{number % 3}.bin"
    for file in set(weight_map.values()):
        mine = {name: tensor.clone() for name, tensor in model.state_dict().items() if weight_map[name] == file}
        torch.save(mine, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def tensor_holders(group) -> ViewHolders:
    """The tensor ranks ``group``, which gather whole weights."""
    return ViewHolders(Holders.tensor_ranks(group))
