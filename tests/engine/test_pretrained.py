"""Checkpoints into split models and back through DeepSpeed's engine, as a user's script does it."""

from __future__ import annotations

from pathlib import Path

import gradient_rule as rule
import pytest
import tensor_parallel_rule
import tiny_models
import torch
import torch.distributed as dist
import transformers
from allocated import peak_bytes
from ranks import run_on_ranks
from sharded_models import first_fast
from torch import nn
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.slow

FAMILIES = ("llama", "mixtral", "phi3")


def saved(family: str, folder: Path) -> None:
    tiny_models.tiny(family, torch.float32).save_pretrained(folder)


def section(sequence_parallel: bool) -> dict[str, object]:
    return {"parallel": {"tensor": 2, "sequence_parallel": sequence_parallel}}


def config(stage: int, sequence_parallel: bool, dtype: torch.dtype = torch.float32) -> dict[str, object]:
    return tensor_parallel_rule.config(stage, dtype, section(sequence_parallel))


def engine_of(model: nn.Module, stage: int, sequence_parallel: bool):
    import deepspeed

    rule.without_extension()
    engine, *_ = deepspeed.initialize(
        model=model.train(), model_parameters=model.parameters(), config=config(stage, sequence_parallel)
    )
    return engine


def trained(engine, steps: int = 2) -> list[float]:
    losses = []
    for tokens in tiny_models.tokens(2 * steps * tensor_parallel_rule.ACCUMULATION, 9).split(2):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def loaded(engine_config: dict[str, object], folder: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    from ds_npu.engine.pretrained import from_pretrained

    rule.without_extension()
    return from_pretrained(AutoModelForCausalLM, folder, engine_config, dtype=dtype, attn_implementation="eager")


def plain(folder: str) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def same_losses(folder: str, stages: tuple[int, ...]) -> None:
    """Loaded part by part or loaded whole and split: the same bits."""
    transformers.logging.set_verbosity_error()
    for stage in stages:
        for sequence_parallel in (False, True):
            engine = engine_of(loaded(config(stage, sequence_parallel), folder), stage, sequence_parallel)
            losses = trained(engine)
            other = engine_of(plain(folder), stage, sequence_parallel)
            assert losses == trained(other), (stage, sequence_parallel)
            mine, theirs = (tensor_parallel_rule.shared(each.whole_state_dict()) for each in (engine, other))
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[name], theirs[name]) for name in mine), (stage, sequence_parallel)


@first_fast("family", FAMILIES)
def test_a_checkpoint_loaded_part_by_part_trains_as_one_loaded_whole(family, tmp_path):
    saved(family, tmp_path)
    run_on_ranks(2, same_losses, str(tmp_path), (1, 3))


@pytest.mark.slow
def test_with_data_ranks_beside(tmp_path):
    saved("llama", tmp_path)
    run_on_ranks(4, same_losses, str(tmp_path), (1, 3))


def trained_and_saved(folder: str, stage: int) -> None:
    """What is saved is what was trained."""
    transformers.logging.set_verbosity_error()
    engine = engine_of(loaded(config(stage, True), folder), stage, True)
    trained(engine)
    tokens = tiny_models.tokens(3, 9)
    engine.eval()
    with torch.no_grad():
        expected = engine(input_ids=tokens).logits
    engine.save_pretrained(f"{folder}/saved")
    assert engine.save_16bit_model(f"{folder}/16bit", "weights.bin")
    if dist.get_rank() == 0:
        model = plain(f"{folder}/saved").eval()
        before = plain(folder).eval()
        with torch.no_grad():
            found = model(input_ids=tokens).logits
            assert not torch.allclose(before(input_ids=tokens).logits, expected, atol=1e-3)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        before.load_state_dict(torch.load(f"{folder}/16bit/weights.bin"))
        assert all(map(torch.equal, before.state_dict().values(), model.state_dict().values()))


@pytest.mark.parametrize("stage", [1, 3])
@first_fast("family", FAMILIES)
def test_a_plain_model_loads_what_was_trained(family, stage, tmp_path):
    saved(family, tmp_path)
    run_on_ranks(2, trained_and_saved, str(tmp_path), stage)


def resumed(folder: str, stage: int) -> None:
    transformers.logging.set_verbosity_error()
    engine = engine_of(loaded(config(stage, True), folder), stage, True)
    trained(engine)
    engine.save_checkpoint(f"{folder}/steps")
    after = trained(engine)
    other = engine_of(loaded(config(stage, True), folder), stage, True)
    assert trained(other) != after
    path, _ = other.load_checkpoint(f"{folder}/steps")
    assert path is not None and trained(other) == after


@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeeds_checkpoints_resume_to_the_bit(stage, tmp_path):
    saved("llama", tmp_path)
    run_on_ranks(2, resumed, str(tmp_path), stage)


def unwritable(folder: str) -> None:
    engine = engine_of(loaded(config(1, False), folder), 1, False)
    Path(folder, "file").write_text("")
    for save in (engine.save_pretrained, engine.save_16bit_model):
        with pytest.raises(RuntimeError, match=r"file/below: the whole model could not be written there: ") as caught:
            save(f"{folder}/file/below")
        print(caught.value)
    trained(engine)


def test_a_folder_that_cannot_be_written_is_an_error_on_every_rank(tmp_path):
    saved("llama", tmp_path)
    run_on_ranks(2, unwritable, str(tmp_path))


WIDE = {"hidden_size": 128, "moe_intermediate_size": 256, "num_experts": 16, "num_hidden_layers": 4}


def experts_peak(folder: str) -> None:
    """Loading takes the rank's experts and what all ranks have, and less than one weight besides."""
    made = tensor_parallel_rule.config(3, torch.bfloat16, {"parallel": {"expert": 2}})
    peak = peak_bytes(lambda: loaded(made, folder, torch.bfloat16), mapped=[Path(folder) / "model.safetensors"])
    weights = [weight.nbytes for weight in loaded(made, folder, torch.bfloat16).parameters()]
    assert sum(weights) <= peak <= sum(weights) + max(weights)


def test_under_zero_3_each_rank_reads_its_experts(tmp_path):
    model = tiny_models.tiny("qwen3_moe", torch.bfloat16, **WIDE)
    whole = sum(weight.nbytes for weight in model.parameters())
    model.save_pretrained(tmp_path)
    # The file itself is mapped, and holds twice what a rank loads.
    assert (tmp_path / "model.safetensors").stat().st_size > whole
    run_on_ranks(2, experts_peak, str(tmp_path))
