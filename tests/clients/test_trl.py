"""TRL's trainers, unmodified: over tensor and context ranks they log what one process logs."""

from __future__ import annotations

from pathlib import Path

import gradient_rule as rule
import pytest
from trainer_runs import run_trainer, weights_in

pytestmark = pytest.mark.slow

SINGLE = 1e-6
SCRIPT = str(Path(__file__).parent.parent / "support/trl_script.py")
USUAL = {
    "max_steps": 3,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "logging_strategy": "steps",
    "logging_steps": 1,
    "save_strategy": "no",
    # With the usual epsilon Adam makes a full step of a gradient that is rounding only.
    "learning_rate": 0.001,
    "adam_epsilon": 1e-4,
    "bf16": "false",
}
GENERATED = {"num_generations": 2, "max_completion_length": 6, "temperature": 1.3, "beta": 0.0}
KINDS = {
    "sft": ("sft", {"max_length": 32}),
    "sft, padding free": ("sft", {"padding_free": "true", "loss_type": "nll"}),
    "sft, assistant only": ("chat", {"max_length": 64, "assistant_only_loss": "true"}),
    "sft, experts": ("experts", {"max_length": 32, "router_aux_loss_coef": 0.1}),
    "dpo": ("dpo", {"max_length": 32}),
    "reward": ("reward", {"max_length": 32}),
    "grpo": ("grpo", GENERATED),
    "rloo": ("rloo", GENERATED),
    "sft, packed, dft": (
        "sft",
        {"max_length": 24, "packing": "true", "loss_type": "dft", "per_device_train_batch_size": 1},
    ),
}
PARALLEL = {"both": (4, {"tensor": 2, "context": 2}), "context": (2, {"context": 2}), "tensor": (2, {"tensor": 2})}
"""Each CI runs the first, in which shards are gathered behind the step, too."""
EXPERTS = {"expert": (2, {"expert": 2, "tensor": 2})}
STAGED = {"pipeline": (2, {"pipeline": 2}), "pipeline, tensor": (4, {"pipeline": 2, "tensor": 2})}
SUMS = ("sft", "sft, padding free", "sft, assistant only")
"""Their losses are sums of log-probabilities."""


CASES = [(kind, parallel) for kind in KINDS for parallel in PARALLEL if kind != "reward" or parallel == "tensor"]
"""Context ranks refuse a reward; see below."""
CASES += [("sft, experts", parallel) for parallel in EXPERTS]
CASES += [(kind, parallel) for kind in SUMS for parallel in STAGED]


@pytest.mark.matrix(corners=1, drawn=0)
@pytest.mark.parametrize(("kind", "parallel"), CASES)
def test_losses_norms_and_metrics_are_those_of_one_process(kind, parallel, tmp_path):
    trainer, options = KINDS[kind]
    ranks, degrees = (PARALLEL | EXPERTS | STAGED)[parallel]
    script = (SCRIPT, trainer)
    (expected,) = run_trainer(tmp_path / "one", 1, None, USUAL | options, script=script)
    everyones = run_trainer(tmp_path / "many", ranks, {"parallel": degrees}, USUAL | options, script=script)
    assert all(each == everyones[0] for each in everyones)
    found = everyones[0]
    assert len(found["losses"]) == 6
    # Those of GRPO and RLOO are means of terms of about 1, which nearly cancel each other.
    assert found["losses"] == pytest.approx(expected["losses"], rel=SINGLE, abs=SINGLE)
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=SINGLE)
    for mine, theirs in zip(found["logged"], expected["logged"], strict=True):
        assert mine == pytest.approx(theirs, rel=SINGLE, abs=SINGLE)
    assert rule.relative(weights_in(tmp_path / "many"), weights_in(tmp_path / "one")) <= SINGLE


@pytest.mark.matrix(corners=0, drawn=0)
@pytest.mark.parametrize("parallel", ["context"])
def test_scores_of_sequences_are_refused(parallel, tmp_path):
    ranks, degrees = PARALLEL[parallel]
    said = "LlamaForSequenceClassification has the loss ForSequenceClassificationLoss"
    with pytest.raises(AssertionError, match=said):
        run_trainer(tmp_path, ranks, {"parallel": degrees}, USUAL | KINDS["reward"][1], script=(SCRIPT, "reward"))


@pytest.mark.matrix(corners=0, drawn=0)
@pytest.mark.parametrize("parallel", ["expert"])
def test_balance_losses_are_refused(parallel, tmp_path):
    """TRL's loss is not the one that the model returns, to which they are added."""
    ranks, degrees = EXPERTS[parallel]
    section = {"parallel": degrees, "moe": {"aux_loss": {"coefficient": 0.1}}}
    with pytest.raises(AssertionError, match=r"moe\.aux_loss and z_loss are added to the loss that Qwen3Moe"):
        run_trainer(tmp_path, ranks, section, USUAL | KINDS["sft"][1], script=(SCRIPT, "experts"))


REFUSED = {
    "sft, packed, dft": "the loss weighs the log-probabilities of tokens differently",
    "dpo": "the loss weighs the log-probabilities of tokens differently",
    "grpo": "is in pipeline stages, which do not generate",
    "rloo": "is in pipeline stages, which do not generate",
    "reward": "pipeline",
}


@pytest.mark.matrix(corners=0, drawn=0)
@pytest.mark.parametrize("kind", REFUSED)
def test_other_losses_are_refused_in_stages(kind, tmp_path):
    trainer, options = KINDS[kind]
    with pytest.raises(AssertionError, match=REFUSED[kind]):
        run_trainer(tmp_path, 2, {"parallel": {"pipeline": 2}}, USUAL | options, script=(SCRIPT, trainer))


@pytest.mark.matrix(corners=0, drawn=0)
@pytest.mark.parametrize("parallel", ["tensor"])
def test_a_head_that_zero_3_partitions_is_refused(parallel, tmp_path):
    """TRL reads the head's weight outside of its forward, where ZeRO-3 has not gathered this rank's shard."""
    ranks, degrees = PARALLEL[parallel]
    with pytest.raises(
        AssertionError, match=r"ShardAccessError: lm_head\.weight \[64, 32\] is sharded over 2 tensor ranks"
    ):
        run_trainer(tmp_path, ranks, {"parallel": degrees}, USUAL | KINDS["sft"][1], stage=3, script=(SCRIPT, "sft"))
