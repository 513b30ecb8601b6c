"""The gradient rule for ``ds_npu.chunked_loss``: DeepSpeed's engine against one process with whole logits."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import gradient_rule as rule
import pytest
import tensor_parallel_rule as tensor_rule
import tiny_models
import torch
import transformers
from ranks import run_on_ranks
from transformers.trainer_pt_utils import LabelSmoother

EXACT = 1e-12
SINGLE = 1e-6
"""ZeRO keeps its masters, and most of its norms, in float32, whatever the model."""
STAGES = (0, 1, 2, 3)
TOKENS = 3
"""Of a chunk: it divides no number of tokens of these batches."""
WORLDS = {
    "data 2": (2, {}),
    "tensor 2": (2, {"tensor": 2}),
    "sequence parallel": (2, {"tensor": 2, "sequence_parallel": True}),
    "context 2": (2, {"context": 2}),
    "tensor 2 x context 2": (4, {"tensor": 2, "context": 2}),
}
"""By name, (ranks, ``ds_npu.parallel``)."""
CORNERS = [
    ("tensor 2", "gemma2", (0, 3)),
    ("context 2", "gpt2", (0, 3)),
    ("data 2", "llama", (1, 3)),
    ("tensor 2 x context 2", "qwen3_moe", (2, 3)),
    ("sequence parallel", "gpt2", (0, 2)),
]
FAMILIES = ("llama", "gpt2", "gemma2", "qwen3_moe")
CASES = [(world, family, STAGES) for world in WORLDS for family in FAMILIES]


def steps(family: str, parallel: dict[str, object], stages: tuple[int, ...]) -> None:
    """Hold every stage to one process."""
    rule.without_extension()
    dp = torch.distributed.get_world_size() // (parallel.get("tensor", 1) * parallel.get("context", 1))
    expected = tensor_rule.reference(family, dp, dtype=torch.float64, start=torch.float64)
    for stage in stages:
        section = {"parallel": parallel, "chunked_loss": TOKENS, "fused_ops": {"matmul_accumulate": stage < 2}}
        errors = tensor_rule.engine_step(family, stage, torch.float64, section, expected)
        where = (family, parallel, stage, errors)
        assert errors.loss <= EXACT and errors.gradient <= EXACT, where
        loose = EXACT if stage == 0 else SINGLE
        assert errors.norm <= loose and errors.weight <= loose, where


@pytest.mark.slow
@pytest.mark.matrix(corners=len(CORNERS), drawn=1)
@pytest.mark.parametrize(("world", "family", "stages"), [*CORNERS, *CASES], ids=str)
def test_one_step_is_that_of_one_process(world, family, stages):
    ranks, parallel = WORLDS[world]
    run_on_ranks(ranks, steps, family, parallel, stages, deadline_s=600.0)


def smoothed_loss(model: torch.nn.Module, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """By the Trainer's own function, of whole logits or, in an engine with ``chunked_loss``, of chunks."""
    trainer = SimpleNamespace(
        label_smoother=LabelSmoother(0.2),
        compute_loss_func=None,
        model_accepts_loss_kwargs=True,
        accelerator=SimpleNamespace(unwrap_model=lambda model: model),
        args=SimpleNamespace(average_tokens_across_devices=False, past_index=-1),
    )
    labels = tokens.clone()
    labels[0, :3] = -100
    given = {"input_ids": tokens, "labels": labels}
    with tiny_models.Float64():
        loss = transformers.Trainer.compute_loss(trainer, model, given, num_items_in_batch=torch.tensor(11))
    assert trainer.label_smoother is not None
    return loss


def smoothed_steps(family: str, parallel: dict[str, object], stages: tuple[int, ...]) -> None:
    with mock.patch.object(tensor_rule, "loss_of", smoothed_loss):
        steps(family, parallel, stages)


SMOOTHED = [("tensor 2", "gemma2", (0, 3)), ("context 2", "llama", (1,)), ("tensor 2 x context 2", "gpt2", (2,))]


@pytest.mark.slow
@pytest.mark.matrix(corners=2, drawn=1)
@pytest.mark.parametrize(("world", "family", "stages"), SMOOTHED, ids=str)
def test_smoothed_labels_are_those_of_one_process(world, family, stages):
    ranks, parallel = WORLDS[world]
    run_on_ranks(ranks, smoothed_steps, family, parallel, stages, deadline_s=600.0)


def weight_gathers() -> None:
    """ZeRO-3 gathers the head's weight as often as without chunks, once it knows the order of modules."""
    import deepspeed
    from wire import Wire

    rule.without_extension()
    counted = {}
    for chunked in (False, 2):
        model = tiny_models.tiny("llama", torch.float32)
        config = tensor_rule.config(3, torch.float32, {"chunked_loss": chunked})
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        for _ in range(3):
            ids = tensor_rule.batches(2)
            with Wire() as wire:
                loss = engine(input_ids=ids, labels=ids).loss
                engine.backward(loss)
            engine.step()
        counted[chunked] = [sent for sent in wire.sent if "allgather" in sent[0]]
    assert counted[False] and len(counted[2]) == len(counted[False]), counted


@pytest.mark.slow
def test_the_weight_is_gathered_once_for_all_chunks():
    run_on_ranks(2, weight_gathers)
