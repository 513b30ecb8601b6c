"""The FLOP of a language model's training step, by which an MFU is counted."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from ds_npu.models.hugging_face_model import setting
from ds_npu.planner.model_file import attention_of

CHOSEN = ("num_experts_per_tok", "moe_topk", "moe_top_k", "num_experts_per_token")
"""Names under which configs say how many experts a token has."""
BACKWARD = 2
"""Backward has twice the products of forward."""


def model_flop(model: nn.Module, path: str, tokens: int) -> float:
    """FLOP of forward and backward of ``model`` (whole, any device) for a sample of ``tokens`` tokens.

    Products of weights and attention over all keys, masked ones too, as Megatron counts them; a token's own experts;
    no recomputation. ``path``: its config.json.
    """
    config: Any = model.config
    text = config.get_text_config()
    decoder, head = _language_model(model)
    weights = sum(_products(part, text) for part in (decoder, head) if part is not None)
    shape = attention_of(path)
    attention = 2 * tokens * shape.heads * (shape.head_dim + shape.value_dim) * _attention_layers(text)
    return (1 + BACKWARD) * tokens * (weights + attention)


def _language_model(model: Any) -> tuple[nn.Module, nn.Module | None]:
    """The layers of the language model without vision towers, and its head."""
    head = model.get_output_embeddings()
    decoder = model.get_decoder()
    return decoder, None if head is None or head in list(decoder.modules()) else head


def _products(part: nn.Module, config: Any) -> float:
    """FLOP of a token's products with the weights of ``part``."""
    found = 0.0
    for module in part.modules():
        if isinstance(module, nn.Embedding):
            continue
        for weight in module.parameters(recurse=False):
            if weight.dim() == 2:
                found += 2 * weight.numel()
            elif weight.dim() == 3:
                chosen = next(filter(None, (setting(config, name, int) for name in CHOSEN)), len(weight))
                found += 2 * math.prod(weight.shape[1:]) * chosen
    return found


def _attention_layers(config: Any) -> int:
    kinds = setting(config, "layer_types", list)
    layers = setting(config, "num_hidden_layers", int) or 0
    return layers if not kinds else sum("attention" in kind and "linear" not in kind for kind in kinds)
