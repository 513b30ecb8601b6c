"""Small models of Hugging Face trained for two steps on an NPU, against the same on the CPU."""

import pytest
import torch
import transformers
from transformers import GPT2Config, LlamaConfig, MixtralConfig, Qwen2Config, Qwen3Config

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "Llama": LlamaConfig(**SIZES),
    "GPT2": GPT2Config(
        vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    ),
    "Qwen2": Qwen2Config(**SIZES),
    "Qwen3": Qwen3Config(**SIZES, head_dim=16),
    "Mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True),
}


def trained(model: torch.nn.Module, tokens: torch.Tensor, steps: int) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of ``steps`` steps of AdamW with clipped gradients, and the parameters afterwards (CPU, float64)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [parameter.detach().cpu().double() for parameter in model.parameters()]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", CONFIGS)
def test_two_steps_of_training_are_those_of_the_cpu(name, attention):
    torch.manual_seed(0)
    model_class = getattr(transformers, f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")
    config = CONFIGS[name]
    config._attn_implementation = attention
    on_cpu, on_npu = model_class(config), model_class(config)
    on_npu.load_state_dict(on_cpu.state_dict())
    assert on_cpu.config._attn_implementation == attention
    tokens = torch.randint(0, 96, (2, 24))
    expected, parameters = trained(on_cpu, tokens, steps=2)
    found, on_device = trained(on_npu.to("npu"), tokens.npu(), steps=2)
    # Losses near 4.6: a few float32 roundings.
    assert found == pytest.approx(expected, rel=1e-6)
    # A step of Adam is the learning rate times a ratio that for tiny gradients is all rounding: few may differ by more.
    differences = torch.cat([(mine - true).abs().flatten() for mine, true in zip(on_device, parameters, strict=True)])
    assert differences.max() <= 4e-3
    assert differences.quantile(0.999) <= 1e-5
