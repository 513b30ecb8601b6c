"""What users do with sharded models: loaders, Trainers, adapters, dropout, checkpoints, no algorithm in the config."""

from __future__ import annotations

from functools import partial
from unittest import mock

import gradient_rule as rule
import peft
import pytest
import tensor_parallel_rule as tensor_rule
import tiny_models
import torch
import torch.distributed as dist
from adapted_models import ATTENTION, adapted
from logged_lines import logged_lines
from ranks import run_on_ranks
from sequence_sharded_models import SequenceSharded, algorithm, padded, sequence_sharded, step, tokens
from sharded_models import agree, close, everyones
from trainer_runs import run_trainer

from ds_npu.features.context_parallel.sharded_sequences import shard_sequences
from ds_npu.features.tensor_parallel.sharded_model import shard_model
from ds_npu.models.globs import plan_for
from ds_npu.parallel.runtime.forward_wraps import Level, wrap_forward
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology

pytestmark = pytest.mark.slow


def made(family: str, section: dict[str, object], stage: int = 1, **options: object):
    """DeepSpeed's engine around a tiny model, and what else initialize() returns."""
    import deepspeed

    rule.without_extension()
    model = tiny_models.tiny(family, torch.float32)
    config = tensor_rule.config(stage, torch.float32, section)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config, **options)


def gathers_nothing(calls: list[int], forward: object, *args: object, **kwargs: object) -> object:
    """Counts what is asked of all ranks of the world inside of a forward."""
    with mock.patch.object(dist, "all_gather_object") as gathered, mock.patch.object(dist, "new_group") as opened:
        out = forward(*args, **kwargs)
    calls.append(gathered.call_count + opened.call_count)
    return out


def chosen() -> None:
    lines = logged_lines()
    engine, *_ = made("llama", {"parallel": {"context": 2}})
    inside = []
    wrap_forward(engine.module, partial(gathers_nothing, inside), Level.REGION)
    for length in (20, 31):
        ids = tiny_models.tokens(2, length)
        assert agree(engine(input_ids=ids, labels=ids).loss)
    assert inside == [0, 0]
    found = [line for line in lines if line.startswith("context_parallel: ")]
    if dist.get_rank() == 0:
        assert len(found) == 1 and "2 x 20 tokens, 4 heads of 8, 2 ranks" in found[0], lines


def test_the_algorithm_is_chosen_and_said_once():
    run_on_ranks(2, chosen)


class Rows(torch.utils.data.Dataset):
    """Samples that say which they are."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.full((9,), index + 3), "labels": torch.full((9,), index + 3)}


def loaders() -> None:
    """The engine's own loader, and a script's that shuffles by the default generator, seeded differently by rank."""
    torch.manual_seed(dist.get_rank())
    engine, _, loader, _ = made("llama", {"parallel": {"context": 2}}, training_data=Rows())
    seen = []
    for batch in loader:
        engine.backward(engine(**batch).loss)
        engine.step()
        seen.append(batch["input_ids"][:, 0])
    drawn = everyones(torch.cat(seen))
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[2], drawn[3])
    assert sorted(torch.cat([drawn[0], drawn[2]]).tolist()) == list(range(3, 19))
    shuffled = torch.utils.data.DataLoader(Rows(), 2, shuffle=True)
    for batch in shuffled:
        engine(**batch)
    mine = everyones(torch.cat([batch["input_ids"][:, 0] for batch in shuffled]))
    assert torch.equal(mine[0], mine[1])


def test_context_ranks_are_given_the_same_samples():
    run_on_ranks(4, loaders)


def different() -> None:
    engine, *_ = made("llama", {"parallel": {"context": 2}})
    ids = tiny_models.tokens(2, 9) + dist.get_rank()
    with pytest.raises(RuntimeError, match=r"parallel\.context is 2, and its ranks .* rank 1 has .* rank 0 has"):
        engine(input_ids=ids, labels=ids)


def test_different_batches_are_refused():
    run_on_ranks(2, different)


def dropped(tensor: int) -> None:
    """Hidden states of other tokens are dropped differently, those of the same tokens alike."""
    both = sequence_sharded("gpt2", "ulysses", tensor, embd_pdrop=0.5, resid_pdrop=0.5, attn_pdrop=0.5)
    topology, patterns = both.topology, []
    # Sizes that all ranks share.
    ids = tokens(2, 12)
    for name, module in both.model.named_modules():
        if name.endswith(("drop", "resid_dropout", "mlp.dropout")):
            module.register_forward_hook(lambda _, args, out: patterns.append(out == 0))
    losses = []
    for seed in (1, 1, 2):
        patterns.clear()
        torch.manual_seed(seed)
        losses.append(both.model(input_ids=ids, labels=ids).loss)
        kept = torch.stack(patterns).int()
        places = [(rank // tensor, rank % tensor) for rank in range(dist.get_world_size())]
        for place, theirs in zip(places, everyones(kept), strict=True):
            assert torch.equal(theirs, kept) == (place[0] == topology.rank("cp")), place
        # What the script draws next it draws alike.
        assert agree(torch.randint(1 << 40, (3,)))
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("tensor", [1, 2])
def test_dropout_differs_over_context_ranks(tensor):
    run_on_ranks(2 * tensor, dropped, tensor)


def dropped_again() -> None:
    """A layer that is computed again drops the same: of its hidden states, and of its attention weights."""
    both = sequence_sharded("gpt2", "ring", embd_pdrop=0.3, resid_pdrop=0.3, attn_pdrop=0.3)
    found = []
    for checkpoints in (False, True):
        if checkpoints:
            both.model.gradient_checkpointing_enable()
        both.model.zero_grad()
        torch.manual_seed(3)
        with tiny_models.Float64():
            both.model(**padded("left")).loss.backward()
        found.append({name: weight.grad.clone() for name, weight in both.model.named_parameters()})
    # Norms are computed again outside of the mode.
    assert rule.relative(found[1], found[0]) <= 1e-5


def test_dropout_of_layers_that_are_computed_again():
    run_on_ranks(2, dropped_again)


def adapters(tensor: int) -> None:
    model, plain = (adapted("llama", [*ATTENTION, "lm_head"]) for _ in range(2))
    topology = Topology(Degrees(cp=2, tp=tensor))
    plan = plan_for(model, {})
    if tensor > 1:
        shard_model(model, plan, topology, sequence_parallel=True)
    shard_sequences(model, plan, topology, algorithm("ring", 2))
    both = SequenceSharded(model, plain, topology)
    # "eager" gives a row of padding before a sample a mean.
    for kind in ("right", "none"):
        expected, found = step(both.plain, **padded(kind)), step(both.model, **padded(kind))
        close(found, expected, kind)
        both.same_gradients()
    if tensor > 1:
        return
    merged = both.model.merge_and_unload()
    with pytest.raises(ValueError, match="was sharded as it stood in another model"):
        shard_sequences(merged, plan_for(merged, {}), topology, algorithm("ring", 2))


@pytest.mark.parametrize("tensor", [1, 2])
def test_lora_adapters(tensor):
    run_on_ranks(2 * tensor, adapters, tensor)


def prompted() -> None:
    """PEFT's prompts stand before the sequence: weights outside of the model that is sharded."""
    pairs = []
    for _ in range(2):
        model = tiny_models.tiny("llama")
        torch.manual_seed(7)
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
        pairs.append(peft.get_peft_model(model, config).double().train())
    topology = Topology(Degrees(cp=2))
    plan = plan_for(pairs[0], {"prompt_encoder.**": "replicated"})
    shard_sequences(pairs[0], plan, topology, algorithm("ring", 2))
    both = SequenceSharded(*pairs, topology)
    close(step(both.model, **padded("right")), step(both.plain, **padded("right")))
    both.same_gradients()


def test_prompt_tuning():
    run_on_ranks(2, prompted)


def from_checkpoint(folder: str, stage: int) -> None:
    """Read part by part, trained with recomputed layers, and saved: the weights of one process."""
    import deepspeed
    from transformers import AutoModelForCausalLM

    from ds_npu.engine.pretrained import from_pretrained

    rule.without_extension()
    config = tensor_rule.config(stage, torch.float32, {"parallel": {"context": 2, "tensor": 2}})
    model = from_pretrained(AutoModelForCausalLM, folder, config, dtype=torch.float32).train()
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    model.gradient_checkpointing_enable()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for seed in range(2):
        micros = [tiny_models.tokens(2, 9 + seed + place) for place in range(rule.ACCUMULATION)]
        plain.zero_grad()
        for ids in micros:
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            expected = plain(input_ids=ids, labels=ids).loss
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
            (expected / rule.ACCUMULATION).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), rule.CLIP)
        with torch.no_grad():
            for weight in plain.parameters():
                weight -= rule.LR * weight.grad
    engine.save_pretrained(f"{folder}/again")
    saved = AutoModelForCausalLM.from_pretrained(f"{folder}/again", dtype=torch.float32)
    assert rule.relative(dict(saved.named_parameters()), dict(plain.named_parameters())) <= 1e-5


@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_is_read_trained_and_saved(tmp_path, stage):
    tiny_models.tiny("qwen3", torch.float32).save_pretrained(tmp_path)
    run_on_ranks(4, from_checkpoint, str(tmp_path), stage)


def test_an_unchanged_trainer_script(tmp_path):
    """On context ranks it sees the samples and learning rates, and computes the losses, of the data ranks alone."""
    options = {"max_steps": 3, "save_strategy": "no"}
    alone = run_trainer(tmp_path / "alone", 2, None, options)
    found = run_trainer(tmp_path / "context", 4, {"parallel": {"context": 2}}, options)
    for rank, each in enumerate(found):
        expected = alone[rank // 2]
        assert each["samples"] == expected["samples"]
        torch.testing.assert_close(each["losses"], expected["losses"], rtol=1e-5, atol=0)
        torch.testing.assert_close(each["eval_loss"], expected["eval_loss"], rtol=1e-5, atol=0)
        assert each["accuracy"] == expected["accuracy"] and each["rates"] == expected["rates"]
