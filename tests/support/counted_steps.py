"""A counted step of a tiny model with ``watch.mfu``, and the FLOP that it has by hand."""

from __future__ import annotations

from collections.abc import Callable

import gradient_rule
import tiny_models
import torch
from torch.utils.flop_counter import FlopCounterMode

from ds_npu.zero_ext.step_flop import StepFlop

B, S, ACCUMULATION = 2, 8, 2
HIDDEN, INNER, LAYERS, HEADS, WIDTH, VOCABULARY = 32, 48, 2, 4, 8, tiny_models.VOCABULARY
CAUSAL = B * S * (S + 1) // 2
"""Pairs of a row and a key that it sees, of all samples, for one head."""


def micro_batch() -> dict[str, torch.Tensor]:
    ids = tiny_models.tokens(B, S)
    return {"input_ids": ids, "labels": ids}


def packed() -> dict[str, torch.Tensor]:
    """One sequence of documents of 6 and 10 tokens."""
    ids = tiny_models.tokens(1, B * S)
    positions = torch.cat([torch.arange(6), torch.arange(10)])[None]
    return {"input_ids": ids, "labels": ids, "position_ids": positions}


def step_of(
    family: str,
    section: dict,
    changes: dict | None = None,
    make: Callable = micro_batch,
    prepared: Callable = lambda model: model,
    **keys: object,
) -> StepFlop:
    """The counted step of an engine."""
    import deepspeed

    gradient_rule.without_extension()
    model = prepared(tiny_models.tiny(family, torch.float32, **(changes or {})))
    config = {
        "train_micro_batch_size_per_gpu": B,
        "gradient_accumulation_steps": ACCUMULATION,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "ds_npu": {**section, "watch": {"mfu": True}},
        **keys,
    }
    trained = [each for each in model.parameters() if each.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
    for _ in range(4 * ACCUMULATION):
        batch = {name: each.to(engine.device) for name, each in make().items()}
        engine.backward(engine(**batch).loss)
        engine.step()
    assert engine.step_flop is not None
    return engine.step_flop


def torch_counts(family: str, changes: dict | None = None, make: Callable = micro_batch, prepared=None) -> int:
    """FLOP of a forward and backward of the plain model by torch's counter, which knows no masks."""
    model = tiny_models.tiny(family, torch.float32, **(changes or {}))
    model = model if prepared is None else prepared(model)
    with FlopCounterMode(display=False) as counter:
        model(**make()).loss.backward()
    return counter.get_total_flops()


def attention(pairs: int, width: int = WIDTH, value: int = WIDTH, heads: int = HEADS) -> int:
    """FLOP of scores and sums in forward."""
    return 2 * pairs * heads * (width + value)


def dense(key_heads: int, pairs: int = CAUSAL) -> int:
    """FLOP of a llama's forward and backward by hand."""
    weights = HIDDEN * WIDTH * (2 * HEADS + 2 * key_heads) + 3 * HIDDEN * INNER
    return 3 * (LAYERS * (2 * B * S * weights + attention(pairs)) + 2 * B * S * HIDDEN * VOCABULARY)


def sparse() -> int:
    """FLOP of a mixtral with 4 experts, of which a token has 2."""
    weights = HIDDEN * WIDTH * (2 * HEADS + 2 * 2) + 4 * HIDDEN + 2 * 3 * HIDDEN * INNER
    return 3 * (LAYERS * (2 * B * S * weights + attention(CAUSAL)) + 2 * B * S * HIDDEN * VOCABULARY)


def latent() -> int:
    """FLOP of a deepseek_v3 with latent attention, a dense layer, and one of 4 experts, 2 for a token, and a shared."""
    q, kv, nope, rope, value, inner = 12, 10, 8, 4, 6, 16
    projections = HIDDEN * q + q * HEADS * (nope + rope) + HIDDEN * (kv + rope) + kv * HEADS * (nope + value)
    projections += HEADS * value * HIDDEN
    feed_forward = 3 * HIDDEN * INNER + (4 * HIDDEN + 3 * 3 * HIDDEN * inner)
    products = 2 * B * S * (LAYERS * projections + feed_forward + HIDDEN * VOCABULARY)
    return 3 * (products + LAYERS * attention(CAUSAL, nope + rope, value))


BY_HAND = {"llama": dense(4), "qwen2": dense(2), "mixtral": sparse(), "deepseek_v3": latent()}
HIDES = 3 * LAYERS * attention(B * S * S - CAUSAL)
"""FLOP of masked pairs, which the plain products of an attention compute as well."""
PACKED = 6 * 7 // 2 + 10 * 11 // 2
