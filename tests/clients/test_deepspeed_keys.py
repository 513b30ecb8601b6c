"""DeepSpeed's own keys beside a section, on each axis: ZeRO-Offload, and the second copies of weights of ZeRO++."""

from __future__ import annotations

import gradient_rule as rule
import pytest
import tiny_models
import torch
import torch.distributed as dist
from ranks import run_on_ranks

SAMPLES, LENGTH, STEPS, LR, CLIP = 4, 12, 3, 0.5, 0.1
EXACT = 1e-6
"""ZeRO keeps its masters in float32."""
LAYOUTS = {"data": {}, "tensor": {"tensor": 2}, "context": {"context": 2}}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
KEYS = {
    "nothing": {"stage": 0},
    "offload, ZeRO 1": {"stage": 1, **OFFLOAD},
    "offload, ZeRO 2": {"stage": 2, **OFFLOAD},
    "offload, ZeRO 3": {"stage": 3, **OFFLOAD, "offload_param": {"device": "cpu"}},
    "second copies": {"stage": 3, "zero_hpz_partition_size": 2},
}
"""``zero_optimization``; hpZ is ZeRO++'s key that needs no kernel of CUDA's."""


def config(layout: str, zero: dict[str, object], **more: object) -> dict[str, object]:
    return {
        "train_batch_size": SAMPLES,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        "ds_npu": {"parallel": LAYOUTS[layout]},
        **more,
    }


def one_process() -> list[float]:
    """The losses of plain PyTorch on the whole batch."""
    model, tokens, found = tiny_models.tiny("llama"), tiny_models.tokens(SAMPLES, LENGTH), []
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(STEPS):
        with tiny_models.Float64():
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def engine_of(ds_config: dict[str, object]):
    import deepspeed

    rule.without_extension()
    model = tiny_models.tiny("llama")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
    return engine


def train(engine, steps: int = STEPS) -> list[float]:
    """This rank's losses on its data rank's samples, the same in each step."""
    dp = engine.topology.size("dp")
    tokens = tiny_models.tokens(SAMPLES, LENGTH).view(dp, SAMPLES // dp, LENGTH)[engine.topology.rank("dp")]
    found = []
    for _ in range(steps):
        with tiny_models.Float64():
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def mean_over_data(engine, found: list[float]) -> list[float]:
    every: list[list[float]] = [[]] * dist.get_world_size()
    dist.all_gather_object(every, found)
    assert engine.topology.size("dp") > 1 or every[0] == every[1]
    return [sum(each) / len(each) for each in zip(*every, strict=True)]


def hold_to_one_process(layout: str, titles: list[str]) -> None:
    from deepspeed.utils import groups

    expected = one_process()
    assert expected[-1] < expected[0] - 0.01
    for title in titles:
        engine = engine_of(config(layout, KEYS[title]))
        found = mean_over_data(engine, train(engine))
        assert found == pytest.approx(expected, rel=EXACT), (layout, title)
        engine.destroy()
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


@pytest.mark.slow
@pytest.mark.matrix(corners=3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_offload_and_second_copies(layout):
    titles = [title for title in KEYS if (layout, title) != ("tensor", "second copies")]
    run_on_ranks(2, hold_to_one_process, layout, titles)
