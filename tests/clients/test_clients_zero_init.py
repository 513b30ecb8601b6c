"""The Hugging Face Trainer under ZeRO 3, where transformers makes the model under zero.Init, over tensor ranks."""

from __future__ import annotations

from pathlib import Path

import gradient_rule as rule
import pytest
import tiny_models
import torch
import transformers
from trainer_runs import run_trainer, weights_in

pytestmark = pytest.mark.slow

SINGLE = 1e-6
"""Relative error in float32."""


@pytest.mark.parametrize(
    ("option", "alone"), [("model_name_or_path", 1), ("config_name", 3)], ids=["from_pretrained", "from_config"]
)
def test_an_unchanged_script(option: str, alone: int, tmp_path: Path):
    """It trains as one process, and saves what plain transformers reads.

    New weights are drawn in another order under zero.Init, so one process draws them under it, too.
    """
    tiny_models.tiny("llama", torch.float32).save_pretrained(tmp_path / "start")
    options = {option: tmp_path / "start", "max_steps": 2, "learning_rate": 1e-3}
    plain, tensor = tmp_path / "plain", tmp_path / "tensor"
    said = run_trainer(plain, 1, None, options, alone)[0]
    for each in run_trainer(tensor, 2, {"parallel": {"tensor": 2}}, options, 3):
        torch.testing.assert_close(each["losses"], said["losses"], rtol=SINGLE, atol=0)
        torch.testing.assert_close(each["eval_loss"], said["eval_loss"], rtol=SINGLE, atol=0)
        assert each["train_batch_size"] == said["train_batch_size"]
    assert rule.relative(weights_in(tensor), weights_in(plain)) <= SINGLE
    read, info = transformers.AutoModelForCausalLM.from_pretrained(tensor, output_loading_info=True)
    assert not any(info.values()), info
    assert rule.relative(read.state_dict(), weights_in(plain)) <= SINGLE
