"""Models whose sequences are sharded over simulated NPUs: a step of DeepSpeed's engine over HCCL, and other batches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gradient_rule as rule
import pytest
import tensor_parallel_rule as tensor_rule
import torch
from ranks import run_on_ranks
from sequence_sharded_models import LENGTH, padded, sequence_sharded

SCRIPT = Path(__file__).with_name("accelerate_script.py")
SECTIONS = {
    "ring": {"algorithm": "ring"},
    "ulysses": {"algorithm": "ulysses"},
    "allgather": {"algorithm": "allgather"},
    "chosen": {},
}


def step(family: str, section: dict, stage: int) -> None:
    """bf16 within twice the error of one process."""
    expected = tensor_rule.reference(family, 1, dtype=torch.float64, start=torch.bfloat16)
    # The engine first: nothing here sets the device.
    errors = tensor_rule.engine_step(family, stage, torch.bfloat16, section, expected)
    single = tensor_rule.reference(family, 1, dtype=torch.bfloat16, start=torch.bfloat16, device="npu")
    bound = 2 * rule.relative(single.gradients, expected.gradients)
    assert max(errors.gradient, errors.norm) <= bound and errors.loss <= 4e-3, (errors, bound)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name", "stage"),
    [("llama", "ring", 1), ("qwen3", "ulysses", 3), ("mistral", "allgather", 2), ("gpt2", "chosen", 0)],
)
def test_a_step(family, name, stage):
    section = {"parallel": {"context": 2}, "context_parallel": SECTIONS[name]}
    run_on_ranks(2, step, family, section, stage, backend="hccl", sets_device=False)


def batches(name: str) -> None:
    """Losses, logits and gradients of padded batches, packed ones and masks, in float32."""
    both = sequence_sharded("llama", name, device="npu", dtype=torch.float32)
    both.plain.cpu()
    for kind in ("right", "left", "holes"):
        given = padded(kind)
        found = both.model(**{key: value.npu() for key, value in given.items()}).loss
        found.backward()
        expected = both.plain(**given).loss
        expected.backward()
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=0)
        expected_gradients = {key: weight.grad for key, weight in both.plain.named_parameters()}
        found_gradients = {key: gradient.cpu() for key, gradient in both.gradients().items()}
        assert rule.relative(found_gradients, expected_gradients) <= 1e-5, kind
        both.model.zero_grad(), both.plain.zero_grad()
    given = padded("left")["input_ids"]
    with torch.no_grad():
        found, expected = both.model(given.npu()).logits.cpu(), both.plain(given).logits
    assert found.shape[1] == LENGTH
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ring", "ulysses"])
def test_batches(name):
    run_on_ranks(2, batches, name, backend="hccl")


def run_by_accelerate(folder: Path, ranks: int, section: dict[str, object] | None) -> list[dict[str, list]]:
    """What each rank of ``accelerate_script.py`` says."""
    config = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 1}}
    path = folder / "config.json"
    path.write_text(json.dumps(config if section is None else config | {"ds_npu": section}))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    search = f"{SCRIPT.parents[2]}:{SCRIPT.parents[1] / 'support'}"
    done = subprocess.run(
        [*command, str(SCRIPT), str(path), str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"PYTHONPATH": search},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"said by {rank}.json").read_text()) for rank in range(ranks)]


def test_an_unchanged_script_for_accelerate(tmp_path):
    """Samples, losses and learning rates are those of the data ranks alone: here of one."""
    (alone,) = run_by_accelerate(tmp_path, 1, None)
    for found in run_by_accelerate(tmp_path, 2, {"parallel": {"context": 2}}):
        assert found["samples"] == alone["samples"] and found["rates"] == alone["rates"]
        torch.testing.assert_close(found["losses"], alone["losses"], rtol=1e-4, atol=0)
