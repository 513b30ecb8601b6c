"""``ds_npu.swap`` on simulated NPUs: numbers to the bit, waits of the host, device memory as the allocator counts."""

from __future__ import annotations

import gc

import deepspeed
import gradient_rule as rule
import pytest
import tensor_parallel_rule as tensor_rule
import tiny_models
import torch
from host_waits import HostWaits, check_no_wait
from ranks import run_on_ranks

from ds_npu.memory import swapped_activations
from ds_npu.parallel.tensor.shard_access import local_shard

SWAP: dict[str, object] = {"swap": {"activations": True}}
VARIANTS: list[dict[str, object]] = [
    {},
    {"recompute": {"norm": True, "activation_function": True}},
    {"recompute": {"layers": "all"}},
]
"""What is swapped."""


def engine_of(stage: int, section: dict[str, object], **sizes: object) -> deepspeed.DeepSpeedEngine:
    family = "qwen3_moe" if "expert" in section.get("parallel", {}) else "llama"
    model = tiny_models.tiny(family, torch.float32, **sizes).to(torch.bfloat16)
    config = tensor_rule.config(stage, torch.bfloat16, section)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def trained(stage: int, section: dict[str, object]) -> tuple[list[torch.Tensor], list[str]]:
    """Losses and weights of three steps, and what the host waited for in the last one."""
    drop = 0.0 if "context" in section.get("parallel", {}) else 0.3
    engine = engine_of(stage, section, num_hidden_layers=4, attention_dropout=drop)
    torch.manual_seed(7)
    losses, waits = [], HostWaits()
    for tokens in tensor_rule.batches(3 * rule.MICRO * rule.ACCUMULATION).to(engine.device).split(rule.MICRO):
        with waits:
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
        losses.append(loss.detach())
        engine.step()
    if stage == 1 and "expert" not in section.get("parallel", {}):
        # ZeRO 3 waits in backward, and pipelines for messages.
        check_no_wait(engine)
    return [*losses, *map(local_shard, rule.whole_weights(engine.module).values())], waits.found


def runs(cases: list[tuple[dict[str, object], int]]) -> None:
    rule.without_extension()
    swapped_activations.LEAST_BYTES = 1
    for section, stage in cases:
        for variant in VARIANTS:
            expected, waits = trained(stage, section | variant)
            found, more = trained(stage, section | variant | SWAP)
            assert len(found) == len(expected) and all(map(torch.equal, found, expected)), (section, stage, variant)
            assert more == waits, (section, stage, variant)


def test_swapped_runs_are_those_without_to_the_bit_and_the_host_waits_no_more_often():
    sequence = {"tensor": 2, "sequence_parallel": True}
    stages = {"parallel": {"pipeline": 2}, "pipeline": {"schedule": "zb_h1"}}
    cases = [({"parallel": sequence}, 1), ({}, 3), (stages, 0)]
    run_on_ranks(2, runs, cases, backend="hccl", sets_device=False, deadline_s=600.0)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["context", "expert"])
def test_swapped_runs_on_other_axes_are_those_without_to_the_bit(axis):
    cases = [({"parallel": {axis: 2}}, 1)]
    run_on_ranks(2, runs, cases, backend="hccl", sets_device=False, deadline_s=600.0)


SIZES = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 4}
TOKENS = 512


def held(layers: int, section: dict[str, object]) -> tuple[int, int]:
    """Bytes of the device that a forward keeps until backward, and the most of a forward and backward."""
    engine = engine_of(0, section, num_hidden_layers=layers, max_position_embeddings=TOKENS, **SIZES)
    ids = torch.randint(0, 64, (1, TOKENS)).to(engine.device)
    for _ in range(2):
        gc.collect()
        torch.npu.synchronize()
        torch.npu.reset_peak_memory_stats()
        before = torch.npu.memory_allocated()
        loss = engine(input_ids=ids, labels=ids).loss
        kept = torch.npu.memory_allocated() - before
        engine.backward(loss)
        loss = None
        peak = torch.npu.max_memory_allocated() - before
    return kept, peak


def bytes_of_blocks() -> None:
    """A block more or less: of 512 tokens, hidden 256 and intermediate 704 it saves 2 T (10 H + 2 K + 4 I) bytes."""
    rule.without_extension()
    swapped_activations.LEAST_BYTES = 2**14
    saved = 2 * TOKENS * (10 * 256 + 2 * 256 + 4 * 704)
    per_block = {}
    for name, section in (("plain", {}), ("swapped", SWAP)):
        (more, high), (fewer, low) = (held(layers, section) for layers in (10, 6))
        per_block[name] = ((more - fewer) / 4, (high - low) / 4)
    print(f"bytes of a block, kept and at the peak: {per_block}; {saved:,} are saved")
    plain, swapped = per_block["plain"], per_block["swapped"]
    assert plain[0] >= 0.75 * saved
    assert swapped[0] <= 0.02 * plain[0], per_block
    # Weights' gradients are made in both.
    assert swapped[1] <= plain[1] - 0.95 * plain[0], per_block


def test_swapped_blocks_take_no_device_memory():
    run_on_ranks(1, bytes_of_blocks, backend="hccl", sets_device=False)
