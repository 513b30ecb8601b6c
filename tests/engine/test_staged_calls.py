"""What scripts call of an engine whose model is in pipeline stages: in order, out of order, and what is refused."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import pipeline_rule as rule
import pytest
import torch
import torch.distributed as dist
from gradient_rule import LR, reduced_gradients
from pipeline_rule import EXACT, batches, engine_of, loss_of, model_of, over_stages
from ranks import run_on_ranks
from tiny_models import Float64

from ds_npu.parallel.pipeline.executor import PipelineError
from ds_npu.parallel.pipeline.schedule import ScheduleError, to_csv
from ds_npu.parallel.pipeline.schedules import SCHEDULES

TWO = {"parallel": {"pipeline": 2}}
V_SHAPE = TWO | {"pipeline": {"schedule": "zb_v"}}


def one_batch(step: int = 0) -> dict[str, torch.Tensor]:
    return batches(1)[step][0]


def plain_gradients(factors: list[float]) -> dict[str, torch.Tensor]:
    """Of one process, of the sum of its losses on the first batches times ``factors``."""
    model = model_of("llama", torch.float64)
    for step, factor in enumerate(factors):
        (loss_of(model, one_batch(step), torch.float64) * factor).backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


def gradients_of(engine) -> dict[str, torch.Tensor]:
    return over_stages(reduced_gradients(engine, engine.module), engine.topology)


def evaluation(section: dict) -> None:
    """Loss and logits are whole on every rank, whoever calls the model."""
    plain, batch = model_of("llama", torch.float64).eval(), one_batch()
    with torch.no_grad(), Float64():
        expected = plain(**batch)
    engine = engine_of(model_of("llama", torch.float64), 1, torch.float64, section)
    engine.eval()
    for model in (engine, engine.module):
        with torch.no_grad(), Float64():
            found = model(**batch)
            assert type(found) is type(expected) and found.keys() <= expected.keys()
            assert abs(found.loss / expected.loss - 1) <= EXACT
            assert (found.logits - expected.logits).abs().max() <= EXACT
            assert (model(batch["input_ids"], batch["attention_mask"]).logits - found.logits).abs().max() == 0
            as_tuple = model(**batch, return_dict=False)
            assert isinstance(as_tuple, tuple) and torch.equal(as_tuple[1], found.logits)
    # Evaluation between a forward and its backward changes nothing.
    engine.train()
    loss = loss_of(engine, one_batch(), torch.float64)
    engine.eval()
    with torch.no_grad():
        engine(**one_batch(1))
    engine.train()
    engine.backward(loss, scale_wrt_gas=False)
    engine.step()
    loss = loss_of(engine, one_batch(1), torch.float64)
    engine.backward(loss, scale_wrt_gas=False)
    assert rule.rule.relative(gradients_of(engine), plain_gradients([1.0, 1.0])) <= EXACT


def scaled() -> None:
    """What a script makes of the loss, in place or not, is what its gradients are multiplied by."""
    for stage in (0, 1, 2):
        engine = engine_of(model_of("llama", torch.float64), stage, torch.float64, TWO)
        # A forward whose gradients nobody wants.
        loss_of(engine, one_batch(1), torch.float64)
        out = loss_of(engine, one_batch(), torch.float64)
        out *= 3
        engine.backward(out / 2 + 5.0)
        engine.step()
        engine.backward(loss_of(engine, one_batch(1), torch.float64))
        expected = plain_gradients([0.75, 0.5])
        assert rule.rule.relative(gradients_of(engine), expected) <= EXACT, stage
        engine.step()


def other_shapes() -> None:
    """Batches of other lengths and numbers of samples follow each other, also in an accumulation and in evaluation."""
    whole = one_batch()
    given = [{name: each[:rows, :length] for name, each in whole.items()} for rows, length in ((4, 10), (3, 7))]
    plain = model_of("llama", torch.float64)
    expected = [loss_of(plain, batch, torch.float64) for batch in given]
    (sum(expected) / 2).backward()
    for section in (TWO, V_SHAPE):
        engine = engine_of(model_of("llama", torch.float64), 0, torch.float64, section)
        for batch, right in zip(given, expected, strict=True):
            loss = loss_of(engine, batch, torch.float64)
            assert abs(loss / right - 1) <= EXACT
            engine.eval()
            with torch.no_grad(), Float64():
                assert abs(engine(**given[0]).loss / expected[0] - 1) <= EXACT
            engine.train()
            engine.backward(loss)
            if batch is given[-1]:
                found = gradients_of(engine)
            engine.step()
        assert rule.rule.relative(found, {name: each.grad for name, each in plain.named_parameters()}) <= EXACT


def made_under_zero_init() -> None:
    import deepspeed

    rule.rule.without_extension()
    model = model_of("llama", torch.float32)
    deepspeed.zero.Init(module=model)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM is sharded, or in an engine, already\. What to do: "):
        engine_of(model, 1, torch.float32, TWO)


def several_batches() -> None:
    """``train_batch``: every batch is a micro-batch, in one run; losses are averaged."""
    # ZeRO steps in float32, and so not within a mode that makes all of it float64.
    for stage, mode, dtype in ((0, Float64, torch.float64), (2, nullcontext, torch.float32)):
        bound = EXACT if dtype == torch.float64 else rule.SINGLE
        engine = engine_of(model_of("llama", dtype), stage, dtype, TWO, gradient_clipping=0.0)
        with mode():
            loss = engine.train_batch(iter([one_batch(0), one_batch(1)]))
        plain = model_of("llama", torch.float64)
        losses = [loss_of(plain, one_batch(step), torch.float64) for step in range(2)]
        assert abs(loss / (sum(losses) / 2) - 1) <= bound
        assert (engine.global_steps, engine.micro_steps) == (1, 2)
        expected = plain_gradients([0.5, 0.5])
        start = dict(plain.named_parameters())
        found = rule.dense.shared(engine.whole_state_dict())
        stepped = {name: start[name].detach() - LR * expected[name] for name in expected}
        assert rule.rule.relative({name: found[name].double() for name in stepped}, stepped) <= bound


def other_losses(micro_batches: int) -> None:
    """A loss of which each token is its own target, not the next one's."""
    plain = model_of("llama", torch.float64)
    keys = TWO | {"pipeline": {"micro_batches": micro_batches}}
    model = model_of("llama", torch.float64)
    for each in (plain, model):
        each.loss_type = "ForMaskedLM"
    loss_of(plain, one_batch(), torch.float64).backward()
    engine = engine_of(model, 0, torch.float64, keys)
    engine.backward(loss_of(engine, one_batch(), torch.float64), scale_wrt_gas=False)
    engine.step()
    expected = {name: weight.grad for name, weight in plain.named_parameters()}
    assert rule.rule.relative(gradients_of(engine), expected) <= EXACT


def chosen_algorithm() -> None:
    """The first batch of a run may be one of ``train_batch``, before which context ranks choose an algorithm."""
    section = {"parallel": {"pipeline": 2, "context": 2}}
    engine = engine_of(model_of("llama", torch.float64), 0, torch.float64, section, gradient_clipping=0.0)
    with pytest.raises(ValueError, match="given output_hidden_states"):
        engine.train_batch(iter([{**one_batch(step), "output_hidden_states": True} for step in range(2)]))
    with Float64():
        loss = engine.train_batch(iter([one_batch(0), one_batch(1)]))
    plain = model_of("llama", torch.float64)
    losses = [loss_of(plain, one_batch(step), torch.float64).item() for step in range(2)]
    assert abs(loss.item() / (sum(losses) / 2) - 1) <= EXACT
    engine = engine_of(model_of("llama", torch.float64), 0, torch.float64, section)
    other = {name: each + dist.get_rank() for name, each in one_batch().items()}
    with pytest.raises(RuntimeError, match="its ranks were given different batches"):
        engine.train_batch(iter([other, other]))


def own_optimizer() -> None:
    """A client's optimizer and schedule, made of the whole model before the engine."""
    import deepspeed

    rule.rule.without_extension()
    model = model_of("llama", torch.float32)
    decayed = [weight for weight in model.parameters() if weight.dim() > 1]
    others = [weight for weight in model.parameters() if weight.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    config = rule.dense.config(1, torch.float32, TWO) | {"gradient_accumulation_steps": 1}
    del config["optimizer"]
    engine = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)[0]
    plain = model_of("llama", torch.float32)
    split = [weight for weight in plain.parameters() if weight.dim() > 1]
    rest = [weight for weight in plain.parameters() if weight.dim() < 2]
    alone = torch.optim.AdamW([{"params": split, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-2)
    slower = torch.optim.lr_scheduler.LambdaLR(alone, lambda step: 1 / (1 + step))
    for step in range(3):
        batch = one_batch(step % 2)
        engine.backward(engine(**batch).loss)
        engine.step()
        plain(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), rule.CLIP)
        alone.step()
        slower.step()
        alone.zero_grad()
    found = {name: each.double() for name, each in rule.dense.shared(engine.whole_state_dict()).items()}
    assert rule.rule.relative(found, {name: each.double() for name, each in plain.state_dict().items()}) <= 1e-5


def refused() -> None:
    engine = engine_of(model_of("llama", torch.float32), 1, torch.float32, TWO)
    batch = one_batch()
    with pytest.raises(ValueError, match="is trained and given no labels: in pipeline stages the backward"):
        engine(batch["input_ids"])
    with pytest.raises(RuntimeError, match=r"engine\.backward: no gradients are pending"):
        engine.backward(torch.ones((), requires_grad=True))
    out = engine(**batch)
    with pytest.raises(RuntimeError, match="logits of a model in pipeline stages, which are not kept in training"):
        out.logits.float().argmax(-1)
    with pytest.raises(RuntimeError, match=r"wait for engine\.backward\(loss\)"):
        engine.step()
    penalty = sum(weight.square().sum() for weight in engine.module.parameters())
    with pytest.raises(ValueError, match=r"the loss is made of a tensor \[.*\], too"):
        engine.backward(out.loss + penalty)
    with pytest.raises(ValueError, match="the loss is made of nothing that was returned"):
        engine.backward(torch.ones(()))
    engine.backward(out.loss)
    engine.step()
    with pytest.raises(NotImplementedError, match="in pipeline stages, which do not generate"):
        engine.module.generate(batch["input_ids"])
    with pytest.raises(ValueError, match=r"token_type_ids \[3\] beside 4 samples"):
        engine(**batch, token_type_ids=torch.zeros(3))
    with pytest.raises(ValueError, match="given output_hidden_states"):
        engine(**batch, output_hidden_states=True)
    other = {name: each + dist.get_rank() for name, each in batch.items()}
    engine = engine_of(model_of("llama", torch.float32), 1, torch.float32, TWO)
    with pytest.raises(
        RuntimeError, match=r"ds_npu\.parallel\.pipeline is 2, and its ranks were given different batches"
    ):
        engine(**other)
    for keys, said in (
        (
            {"split": [1, 1]},
            r"pipeline\.split: found \[1, 1\]; 2 numbers, for the stages, that add up to the 4",
        ),
        ({"noop_layers": [0]}, "5 positions for 2 stages"),
        ({"schedule": "interleaved", "virtual_stages": 3}, "4 blocks for 6 stages"),
        ({"schedule": "absent.csv"}, "No such file"),
    ):
        with pytest.raises(ValueError, match=said):
            engine_of(model_of("llama", torch.float32), 1, torch.float32, TWO | {"pipeline": keys})
    model = model_of("mixtral", torch.float32, output_router_logits=True)
    with pytest.raises(ValueError, match="output_router_logits in its config"):
        engine_of(model, 1, torch.float32, TWO)


def not_finite(folder: str) -> None:
    """``watch.finite`` ends the run in the step of a loss that is not finite, on every rank."""
    for section in (TWO, V_SHAPE):
        engine = engine_of(model_of("llama", torch.float32), 0, torch.float32, section | {"watch": {"finite": folder}})
        with torch.no_grad():
            for name, weight in engine.module.named_parameters():
                if "layers.2.mlp.up_proj" in name:
                    weight.fill_(float("nan"))
        with pytest.raises(FloatingPointError, match=r"step 1: the loss is not finite"):
            for step in range(2):
                engine.backward(engine(**one_batch(step)).loss)
                engine.step()


def dies() -> None:
    """The second stage dies in its second batch; the first one's error names it, the cell and what was to come."""
    engine = engine_of(model_of("llama", torch.float32), 1, torch.float32, TWO)
    engine.backward(engine(**one_batch()).loss)
    engine.step()
    if dist.get_rank() == 1:
        engine.module.get_submodule("model.layers.3").register_forward_hook(lambda *_: os._exit(0))
    with pytest.raises(PipelineError, match=r"rank 0 waited in cell \d \(0B\d\) for 1B\d of rank 1, which failed"):
        engine(**one_batch(1))
    # There is nobody left to meet at the harness's barrier.
    os._exit(0)


def of_a_file(path: Path) -> None:
    """A schedule of one's own: here ZB-H1's, in a file."""
    section = TWO | {"pipeline": {"schedule": str(path)}}
    rule.hold_all("llama", (1,), [section], {})
    engine = engine_of(model_of("llama", torch.float32), 1, torch.float32, section)
    with pytest.raises(ScheduleError, match=r"a schedule of 4 micro-batches, and the batch has 2"):
        engine(**{name: each[:2] for name, each in one_batch().items()})


@pytest.mark.parametrize("section", [TWO, V_SHAPE], ids=["1f1b", "zb_v"])
def test_evaluation(section):
    run_on_ranks(2, evaluation, section)


def test_what_scripts_make_of_a_loss():
    run_on_ranks(2, scaled)


@pytest.mark.slow
def test_batches_of_other_shapes():
    run_on_ranks(2, other_shapes)


@pytest.mark.slow
def test_a_model_made_under_zero_init_is_refused():
    run_on_ranks(2, made_under_zero_init)


def test_several_batches_in_one_run():
    run_on_ranks(2, several_batches)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_losses_that_do_not_shift(micro_batches):
    run_on_ranks(2, other_losses, micro_batches)


def test_a_context_algorithm_is_chosen():
    run_on_ranks(4, chosen_algorithm)


def test_an_optimizer_of_the_client():
    run_on_ranks(2, own_optimizer)


def test_what_is_refused():
    run_on_ranks(2, refused)


def test_a_loss_that_is_not_finite(tmp_path):
    run_on_ranks(2, not_finite, f"{tmp_path}/")


@pytest.mark.slow
def test_a_stage_that_dies():
    run_on_ranks(2, dies)


def test_a_schedule_of_ones_own(tmp_path):
    path = tmp_path / "zb_h1.csv"
    path.write_text(to_csv(SCHEDULES["zb_h1"].make(2, 4, 1)))
    run_on_ranks(2, of_a_file, path)
