"""A tiny model of each family that ds_npu shards, and float64 all through what transformers computes in float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode

VOCABULARY = 64
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
    # The default multiplies groups of float32 or narrower only.
    "experts_implementation": "eager",
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "attn_implementation": "eager",
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
SPARSE = {
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "output_router_logits": True,
}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
IMAGES = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}

FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("LlamaForCausalLM", {"num_key_value_heads": 4}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 8}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 6}),
    "gemma": ("GemmaForCausalLM", {"head_dim": 8, "num_key_value_heads": 1}),
    "gpt2": ("GPT2LMHeadModel", {}),
    "phi3": ("Phi3ForCausalLM", {"num_key_value_heads": 4}),
    "mixtral": (
        "MixtralForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
    ),
    "qwen3_moe": ("Qwen3MoeForCausalLM", SPARSE),
    "deepseek_v3": ("DeepseekV3ForCausalLM", LATENT),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", {}),
}
"""Of each family: the class, and what of COMMON is different."""
SCALED: dict[str, tuple[str, dict[str, object]]] = {
    "gemma2": (
        "Gemma2ForCausalLM",
        {"head_dim": 8, "final_logit_softcapping": 2.0, "attn_logit_softcapping": None, "sliding_window": 6},
    ),
    "cohere": ("CohereForCausalLM", {"logit_scale": 0.3}),
    "granite": ("GraniteForCausalLM", {"logits_scaling": 3.0}),
}
"""Families that compute logits from the products of their head, for tests of losses."""
TOP_2_OF_4 = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
OF_EXPERTS = FAMILIES | {
    "gpt_oss": ("GptOssForCausalLM", TOP_2_OF_4 | {"output_router_logits": True}),
    "llama4_text": ("Llama4ForCausalLM", TOP_2_OF_4 | {"intermediate_size_mlp": 48}),
}
"""With those whose experts only expert ranks shard."""

SHARED_EXPERTS: dict[str, tuple[str, dict[str, object]]] = {
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        LATENT | {"topk_method": "greedy", "n_group": None, "topk_group": None},
    ),
    "glm4_moe": (
        "Glm4MoeForCausalLM",
        {
            **{"head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
            **{"moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
        },
    ),
}
"""Beside DeepSeek-V3 families with shared experts and a dense first layer."""
DELTA_NET = {
    **{"head_dim": 8, "linear_key_head_dim": 4, "linear_value_head_dim": 6, "linear_conv_kernel_dim": 4},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_hidden_layers": 3},
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
LINEAR_ATTENTION: dict[str, tuple[str, dict[str, object]]] = {
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        SPARSE | DELTA_NET | {"shared_expert_intermediate_size": 16},
    ),
    "qwen3_5": ("Qwen3_5ForCausalLM", DELTA_NET),
    "mamba2": (
        "Mamba2ForCausalLM",
        {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 6, "chunk_size": 4, "expand": 2},
    ),
    "bamba": (
        "BambaForCausalLM",
        {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 6, "mamba_chunk_size": 4}
        | {"attn_layer_indices": [1], "num_hidden_layers": 3},
    ),
    "olmo_hybrid": ("OlmoHybridForCausalLM", {key: size for key, size in DELTA_NET.items() if key != "head_dim"}),
    "lfm2": ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}),
}
"""Families with layers of linear attention, most beside layers of another attention."""
FLATTENS = "qwen3_next"
"""Its experts' block makes hidden states [tokens, hidden], which sequence parallelism refuses."""
ALL = OF_EXPERTS | SCALED | SHARED_EXPERTS | LINEAR_ATTENTION


def config_of(family: str, **changes: object) -> transformers.PretrainedConfig:
    """The configuration of a tiny model; ``changes`` are values of its text part."""
    name, special = ALL[family]
    kind = getattr(transformers, name)
    if family == "gpt2":
        return kind.config_class(**GPT2 | changes)
    if family == "qwen2_5_vl":
        text = COMMON | SECTIONS | changes
        return kind.config_class(text_config=text, vision_config=VISION, attn_implementation="eager", **IMAGES)
    return kind.config_class(**COMMON | special | changes)


def tiny(family: str, dtype: torch.dtype = torch.float64, **changes: object) -> nn.Module:
    """A model in training mode, the same at every call; its weights are such that every one of them matters.

    A vision tower is frozen: the batches of these tests have no images.
    """
    transformers.logging.set_verbosity_error()
    torch.manual_seed(5)
    model = getattr(transformers, ALL[family][0])(config_of(family, **changes))
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # transformers starts biases at 0 and norms at 1, where mistakes would not show.
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=noise))
            parameter.requires_grad_("visual" not in name)
    return model.to(dtype).train()


def tokens(count: int, length: int) -> torch.Tensor:
    """``count`` sequences, the same at every call; none of them has a special token."""
    return torch.randint(3, 60, (count, length), generator=torch.Generator().manual_seed(2))


class Float64(TorchFunctionMode):
    """Makes every cast to float32 one to float64: norms, softmax and losses of transformers are computed in float32."""

    def __torch_function__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        wide = {torch.float32: torch.float64}
        if func is torch.Tensor.float:
            func, args = torch.Tensor.to, (args[0], torch.float64)
        if func is torch.full and len(args) > 1 and isinstance(args[1], float):
            # The default dtype of a number is float32, which has no such small ones (XGLM).
            kwargs = {"dtype": torch.float64} | (kwargs or {})
        args = tuple(wide.get(arg, arg) if isinstance(arg, torch.dtype) else arg for arg in args)
        named = {
            key: wide.get(arg, arg) if isinstance(arg, torch.dtype) else arg for key, arg in (kwargs or {}).items()
        }
        return func(*args, **named)


def compute_again_in_float64(model: nn.Module) -> None:
    """Put Float64 around the forwards of the classes of ``model`` in transformers, for the rest of this process.

    Autograd calls what it computes again with no such mode, whatever mode ``backward`` is called in.
    """
    mro = (each for module in model.modules() for each in type(module).__mro__)
    for kind in {each for each in mro if each.__module__.startswith("transformers.") and "forward" in vars(each)}:
        if not hasattr(kind.forward, "in_float64"):
            kind.forward = _in_float64(kind.forward)


def _in_float64(forward: Callable) -> Callable:
    @wraps(forward)
    def wide(*args: object, **kwargs: object) -> object:
        with Float64():
            return forward(*args, **kwargs)

    wide.in_float64 = True
    return wide
