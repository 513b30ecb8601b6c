"""With an empty section a step of ZeRO runs few functions of ds_npu, and none in a micro-batch: counted, not timed."""

from __future__ import annotations

import json
import sys
from collections import Counter
from contextlib import contextmanager

import gradient_rule
import pytest
import tiny_models
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from torch import nn

from ds_npu.zero_ext import bucket_plan, gather_plan


def calls_of_a_step(stage: int, layers: int = 2) -> Counter[str]:
    """The calls of functions of ds_npu in the third step of a model of linear layers."""
    import deepspeed

    gradient_rule.without_extension()
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "ds_npu": {},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    assert type(engine).__name__ == "NpuEngine"
    for _ in range(3):
        with calls_of_ds_npu() as called:
            engine.backward(engine(torch.ones(2, 4)).square().mean())
            engine.step()
    engine(torch.ones(2, 4))  # Until its weights are there it listens to the forwards of other engines' modules, too.
    return called


@contextmanager
def calls_of_ds_npu():
    """Yields a Counter that has, at the end, how often each function of ds_npu was called, on this thread."""
    called: Counter[str] = Counter()

    def count(frame, event, _argument) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith("ds_npu"):
            called[f"{name}.{frame.f_code.co_name}"] += 1

    sys.setprofile(count)
    try:
        yield called
    finally:
        sys.setprofile(None)


def calls_of_micro_batches(layers: int, section: dict) -> int:
    """Calls of functions of ds_npu in a forward and backward of a llama; the same in each after the first."""
    import deepspeed

    gradient_rule.without_extension()
    model = tiny_models.tiny("llama", torch.float32, num_hidden_layers=layers)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "ds_npu": section,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    ids = tiny_models.tokens(2, 8)
    counted = []
    for _ in range(4):
        with calls_of_ds_npu() as called:
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
        counted.append(called)
    assert counted[1] == counted[2] == counted[3], [each - counted[1] for each in counted]
    return counted[1].total()


PER_MICRO_BATCH = {
    "tensor": ({"parallel": {"tensor": 2, "probe": False}}, 131, 290),
    "sequence_parallel": ({"parallel": {"tensor": 2, "sequence_parallel": True, "probe": False}}, 200, 426),
    "context": ({"parallel": {"context": 2}, "context_parallel": {"algorithm": "ulysses"}}, 193, 506),
    "nothing": ({}, 16, 27),
    "finite": ({"watch": {"finite": True}}, 39, 27),
    "fused_ops": ({"fused_ops": dict.fromkeys(("rms_norm", "swiglu", "rotary", "cross_entropy"), True)}, 38, 63),
}
"""A section, and the calls of Python functions in a micro-batch: outside of blocks, and in each block."""


def count_micro_batches() -> None:
    for name, (section, outside, in_block) in PER_MICRO_BATCH.items():
        two, three = (calls_of_micro_batches(layers, section) for layers in (2, 3))
        found = (two - 2 * (three - two), three - two)
        assert found == (outside, in_block), (name, found)


def test_a_micro_batch_costs_a_fixed_number_of_calls():
    run_on_ranks(2, count_micro_batches)


CLIPPING = {
    "ds_npu.engine.hooks.fill",
    "ds_npu.engine.hooks.gather",
    "ds_npu.parallel.runtime.forward_wraps.__call__",
    "ds_npu.zero_ext.method_wraps.<lambda>",
    "ds_npu.zero_ext.stage_1_2_corrections.unscale_and_clip_grads",
}
EXPECTED = {0: {"ds_npu.zero_ext.gradient_norm.clip_gradients"}, 1: CLIPPING, 2: CLIPPING, 3: set()}
"""Without ZeRO ds_npu reduces and clips gradients; in ZeRO 1 and 2 it clips, so that the host waits for one number."""
BUCKETED = {1: (76, 43), 2: (76, 43), 3: (62, 47)}
"""The calls of a step of ZeRO with several data ranks: outside of layers, and for each layer, of two weights."""


def count_all() -> None:
    for stage, expected in EXPECTED.items():
        called = calls_of_a_step(stage)
        if stage in BUCKETED and dist.get_world_size() > 1:
            bucket_plan.LEAST = 10**6  # One bucket, of any number of layers.
            gather_plan.LEAST = 10**6
            two, three = (calls_of_a_step(stage, layers).total() for layers in (2, 3))
            found = (two - 2 * (three - two), three - two)
            assert found == BUCKETED[stage], (stage, found)
        else:
            # Each once, and without ZeRO also others.
            assert expected <= set(called) if stage == 0 else called == Counter(expected), (stage, called)


def count_checks(file: str) -> None:
    """The config is read for the process group, from the command line, for DeepSpeed's config and for the engine."""
    import deepspeed

    from ds_npu.engine import session

    gradient_rule.without_extension()
    checked, original = [], session.check
    session.check = lambda *args: checked.append(args) or original(*args)
    sys.argv += ["--deepspeed_config", file]
    for expected in (1, 1):
        model = nn.Linear(4, 4)
        deepspeed.initialize(model=model, model_parameters=model.parameters(), config=file)
        assert len(checked) == expected


def test_a_config_is_checked_once(tmp_path):
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}, "ds_npu": {}}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(config))
    run_on_ranks(1, count_checks, str(file))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_of_zero_runs_few_functions_of_ds_npu(ranks):
    run_on_ranks(ranks, count_all)
