"""Accelerate and the Hugging Face Trainer save, resume and load models sharded over tensor ranks."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import gradient_rule as rule
import pytest
import tiny_models
import torch
import torch.distributed as dist
import transformers
from ranks import run_on_ranks
from trainer_runs import run_trainer, same, weights_in

pytestmark = pytest.mark.slow

EXACT = 1e-12
MASTERS = 1e-6
"""Of weights that DeepSpeed's ZeRO keeps in float32."""
LR = 0.01


def batches(count: int) -> list[torch.Tensor]:
    return list(tiny_models.tokens(2 * count, 9).split(2))


# ---- accelerate, in float64 ----


def prepared(stage: int, family: str):
    """What a script has after ``accelerator.prepare``."""
    import accelerate

    accelerate.state.AcceleratorState._reset_state(True)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "ds_npu": {"parallel": {"tensor": 2, "sequence_parallel": True}},
    }
    accelerate.PartialState(cpu=True)
    plugin = accelerate.utils.DeepSpeedPlugin(hf_ds_config=config)
    accelerator = accelerate.Accelerator(deepspeed_plugin=plugin)
    model = tiny_models.tiny(family)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer


def trained(accelerator, model, optimizer, micros: list[torch.Tensor]) -> list[float]:
    losses = []
    for ids in micros:
        with tiny_models.Float64():
            loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plainly_trained(family: str, micros: list[torch.Tensor]) -> torch.nn.Module:
    model = tiny_models.tiny(family)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    with tiny_models.Float64():
        for ids in micros:
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


def saved_by_accelerate(folder: Path, family: str) -> None:
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    rule.without_extension()
    plain = plainly_trained(family, batches(2))
    for stage in range(4):
        state, written = folder / f"state-{stage}", folder / f"written-{stage}"
        accelerator, model, optimizer = prepared(stage, family)
        trained(accelerator, model, optimizer, batches(4)[:2])
        accelerator.save_state(state)
        weights = accelerator.get_state_dict(model)
        assert bool(weights) == accelerator.is_main_process
        accelerator.unwrap_model(model).save_pretrained(
            written, is_main_process=accelerator.is_main_process, save_function=accelerator.save, state_dict=weights
        )
        after = trained(accelerator, model, optimizer, batches(4)[2:])
        accelerator, model, optimizer = prepared(stage, family)
        accelerator.load_state(state)
        assert trained(accelerator, model, optimizer, batches(4)[2:]) == after, stage
        dist.barrier()
        # accelerate has told it to make every model under zero.Init, ZeRO-3's.
        transformers.integrations.unset_hf_deepspeed_config()
        again = type(plain).from_pretrained(written, dtype=torch.float64)
        error = rule.relative(again.state_dict(), plain.state_dict())
        assert error <= (MASTERS if stage else EXACT), (stage, error)
        # What stands in the files, too: names and conversions are those of the plain model's own save.
        again.save_pretrained(folder / "resaved")
        if dist.get_rank() == 0:  # which alone writes
            assert same(weights_in(written), weights_in(folder / "resaved"))


@pytest.mark.parametrize("family", ["mixtral", "gemma", "phi3"])
def test_a_script_for_accelerate(family, tmp_path):
    """Saves its state, its weights and goes on from its state, under each stage of ZeRO."""
    run_on_ranks(2, saved_by_accelerate, tmp_path, family)


# ---- the Trainer ----

SAVING = {
    "max_steps": 6,
    "learning_rate": 1e-3,
    "save_strategy": "steps",
    "save_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_total_limit": 2,
    "load_best_model_at_end": True,
    # The highest loss, so that the best checkpoint is the first one, and what lies between it and the last one goes.
    "metric_for_best_model": "eval_loss",
    "greater_is_better": True,
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The folder of one process without ds_npu, and what it says."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, run_trainer(folder, 1, None, SAVING)[0]


@pytest.mark.parametrize(
    ("ranks", "parallel", "stage", "other"),
    [
        (4, {"tensor": 2, "context": 2}, 2, {"pipeline": 2}),
        (2, {"tensor": 2, "sequence_parallel": True}, 3, {"context": 2}),
    ],
    ids=["context, ZeRO 2", "sequences, ZeRO 3"],
)
def test_the_trainer(ranks, parallel, stage, other, alone, tmp_path):
    """An unchanged script saves, rotates its checkpoints, loads the best one and resumes, also at another layout."""
    plain, said = alone
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    first = run_trainer(whole, ranks, {"parallel": parallel}, SAVING, stage)
    for each in first:
        torch.testing.assert_close(each["losses"], said["losses"], rtol=1e-5, atol=0)
    assert sorted(path.name for path in whole.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-6"]
    for name in ("", "checkpoint-2", "checkpoint-6"):
        assert rule.relative(weights_in(whole / name), weights_in(plain / name)) <= 1e-5, name
    # The last save is of the best model, which was loaded.
    assert same(weights_in(whole), weights_in(whole / "checkpoint-2"))
    assert not same(weights_in(whole), weights_in(whole / "checkpoint-6"))
    shutil.copytree(whole / "checkpoint-2", resumed / "checkpoint-2")
    options = SAVING | {"resume_from_checkpoint": resumed / "checkpoint-2"}
    again = run_trainer(resumed, ranks, {"parallel": parallel}, options, stage)
    for each, before in zip(again, first, strict=True):
        assert each["losses"] == before["losses"][-len(each["losses"]) :] and len(each["losses"]) == 7
        assert each["eval_loss"] == before["eval_loss"]
    assert same(weights_in(resumed / "checkpoint-6"), weights_in(whole / "checkpoint-6"))
    for each in run_trainer(tmp_path / "other", 2, {"parallel": other}, options, 1):
        torch.testing.assert_close(each["losses"], said["losses"][-len(each["losses"]) :], rtol=1e-5, atol=0)
    assert rule.relative(weights_in(tmp_path / "other" / "checkpoint-6"), weights_in(plain / "checkpoint-6")) <= 1e-5
