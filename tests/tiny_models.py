"""Small Hugging Face models of the families that ds_npu is tested with, in float64."""

import torch
import transformers

VOCABULARY = 96
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**SIZES, "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 128}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "out_hidden_size": 32,
    "patch_size": 4,
    "fullatt_block_indexes": [1],
    "window_size": 16,
}
SECTIONS = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}

FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(**GROUPED, **TOKENS),
    "mistral": lambda: transformers.MistralConfig(**GROUPED, **TOKENS, sliding_window=5),
    "qwen2": lambda: transformers.Qwen2Config(**GROUPED, **TOKENS),
    "qwen2 sliding": lambda: transformers.Qwen2Config(
        **GROUPED, **TOKENS, use_sliding_window=True, sliding_window=4, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**GROUPED, **TOKENS, head_dim=8),
    "gemma": lambda: transformers.GemmaConfig(**{**GROUPED, "num_key_value_heads": 1}, **TOKENS, head_dim=16),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=VOCABULARY, n_positions=128, **TOKENS,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    ),
    "phi3": lambda: transformers.Phi3Config(**GROUPED, **TOKENS),
    "mixtral": lambda: transformers.MixtralConfig(
        **GROUPED, **TOKENS, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **GROUPED, **TOKENS, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        decoder_sparse_step=1, mlp_only_layers=[0],
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{**GROUPED, "num_key_value_heads": 4}, **TOKENS, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=12, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2,
        n_group=2, topk_group=1, first_k_dense_replace=1,
    ),
    "qwen2_5_vl": lambda: transformers.Qwen2_5_VLConfig(
        text_config={**GROUPED, **TOKENS, "rope_scaling": SECTIONS}, vision_config=VISION
    ),
}  # fmt: skip


def tiny_model(family, config=None):
    """A model with random weights, all alike for a family; its attention is "eager"."""
    torch.manual_seed(1)
    config = config or FAMILIES[family]()
    config._attn_implementation = "eager"
    auto = transformers.AutoModelForCausalLM
    if family == "qwen2_5_vl":
        auto = transformers.AutoModelForImageTextToText
    model = auto.from_config(config).double()
    if family in ("mixtral", "qwen3_moe", "deepseek_v3"):
        model.set_experts_implementation("eager")  # torch's grouped matrix product knows no float64
    with torch.no_grad():
        for parameter in model.parameters():
            # Larger than at the beginning of training: a softmax that is nearly flat hides what it is taken over.
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.train()
