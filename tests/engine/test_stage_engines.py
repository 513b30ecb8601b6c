"""Engines of models that are cut into stages: tensor ranks, the norm, saved weights, checkpoints of each stage."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import gradient_rule as rule
import peft
import pytest
import tensor_parallel_rule
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from staged_models import labelled, stageable
from tiny_models import Float64
from torch import nn
from transformers import AutoModelForCausalLM

from ds_npu.checkpoint.loading import load_checkpoint, meta_model
from ds_npu.features.pipeline.stages import cut_into_stages, run_stage, stages_of
from ds_npu.features.tensor_parallel.sharded_model import shard_model
from ds_npu.models.globs import plan_for
from ds_npu.parallel.pipeline.pass_through import stages_in
from ds_npu.parallel.runtime.placement import placement_of
from ds_npu.parallel.tensor.shard_access import local_shard
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology
from ds_npu.zero_ext.held_reduction import HeldReduction

EXACT, SINGLE = 1e-12, 1e-6
STAGES = 2


def own_stage(model: nn.Module) -> nn.Module:
    """``model`` cut into the stage of this rank, by the grid (pp, dp, cp, tp) of two stages."""
    plan = plan_for(model, {})
    index = dist.get_rank() // (dist.get_world_size() // STAGES)
    cut_into_stages(model, plan, stages_of(plan, STAGES)[index])
    return model


def section(parallel: dict[str, object]) -> dict[str, object]:
    # With two algorithms to choose from, ds_npu would agree on one at the first batch.
    context = {"context_parallel": {"algorithm": "ring"}} if "context" in parallel else {}
    return {"parallel": {"pipeline": STAGES, **parallel}} | context


def engine_of(model: nn.Module, zero: int, dtype: torch.dtype, parallel: dict[str, object]) -> Any:
    import deepspeed

    rule.without_extension()
    config = tensor_parallel_rule.config(zero, dtype, section(parallel)) | {"gradient_accumulation_steps": 1}
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
    return engine


def one_step(engine: Any) -> float:
    """Forward and backward of both stages on ``labelled()``; the loss, on the last stage."""
    topology, stage = engine.topology, stages_in(engine.module)[0]
    dtype = next(engine.module.parameters()).dtype
    group, (first, last) = topology.group("pp"), topology.ranks("pp")
    loss = torch.zeros(())
    with HeldReduction(engine) as held, Float64():
        if stage.index == 0:
            (x,) = run_stage(engine.module, stage, None, **labelled())
            dist.broadcast_object_list([x.shape], first, group=group)
            dist.broadcast(x.detach().contiguous(), first, group=group)
            gradient = torch.empty(x.shape, dtype=dtype)
            dist.broadcast(gradient, last, group=group)
            held.backward(x, gradient)
        else:
            shape = [torch.Size()]
            dist.broadcast_object_list(shape, first, group=group)
            x = torch.empty(shape[0], dtype=dtype)
            dist.broadcast(x, first, group=group)
            x.requires_grad_()
            loss = run_stage(engine.module, stage, (x,), **labelled()).loss
            held.backward(loss)
            dist.broadcast(x.grad.contiguous(), last, group=group)
    return loss.item()


def train(family: str, zero: int, parallel: dict[str, object]) -> None:
    """One step of two stages against one process that does the same batch."""
    plain = stageable(family)
    with Float64():
        expected = plain(**labelled()).loss
        expected.backward()
    trained = {name: weight for name, weight in plain.named_parameters() if weight.requires_grad}
    norm = torch.cat([weight.grad.flatten() for weight in trained.values()]).norm().item()
    model = own_stage(stageable(family))
    engine = engine_of(model, zero, torch.float64, parallel)
    topology, where = engine.topology, (family, zero, parallel)
    loss = one_step(engine)
    gradients = rule.reduced_gradients(engine, model)
    engine.step()
    if topology.rank("pp") == STAGES - 1:
        assert abs(loss / expected.item() - 1) <= EXACT, where
    named = dict(model.named_parameters())
    found = {name: tensor_parallel_rule.assembled(topology, named[name], part) for name, part in gradients.items()}
    assert found.keys() == {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert rule.relative(found, {name: trained[name].grad for name in found}) <= EXACT, where
    bound = EXACT if zero == 0 else SINGLE
    assert abs(float(engine.get_global_grad_norm()) / norm - 1) <= bound, where
    scale = min(1.0, rule.CLIP / (norm + 1e-6))
    weights = {name: w.detach() - rule.LR * scale * w.grad for name, w in trained.items()}
    whole = tensor_parallel_rule.shared(engine.whole_state_dict())
    assert list(whole) == list(plain.state_dict())
    assert rule.relative({name: whole[name].double() for name in weights}, weights) <= bound, where
    for name, parameter in model.named_parameters():
        placement = placement_of(parameter)
        assert placement.part("pp") == "absent" and placement.shape == tuple(plain.get_parameter(name).shape)
    if topology.size("tp") > 1:
        with pytest.raises(RuntimeError, match=r"save_pretrained\('x'\) would write one"):
            model.save_pretrained("x")


def train_all(*cases: tuple[str, int, dict[str, object]]) -> None:
    for case in cases:
        train(*case)


def test_two_stages_train_as_one_process():
    run_on_ranks(2, train_all, *[("llama", zero, {}) for zero in (0, 1, 2)])


SEQUENCES = {"tensor": 2, "sequence_parallel": True}


@pytest.mark.slow
def test_two_stages_of_two_context_ranks():
    """Hidden states of other tokens travel between other ranks; each stage has the whole batch."""
    run_on_ranks(4, train_all, ("llama", 0, {"context": 2}), ("mistral", 1, {"context": 2}))


@pytest.mark.slow
def test_two_stages_of_two_tensor_ranks():
    cases = [(family, 0, {"tensor": 2}) for family in ("llama", "gpt2", "deepseek_v3", "qwen2_5_vl")]
    cases += [("qwen3", 1, SEQUENCES), ("mixtral", 2, SEQUENCES), ("llama", 0, SEQUENCES)]
    run_on_ranks(4, train_all, *cases)


def test_two_stages_of_two_data_parallel_ranks():
    """Both data-parallel ranks have the same batch: the mean is that of one."""
    run_on_ranks(4, train_all, ("llama", 1, {}))


# ---- weights ----


def save_and_load(folder: Path, tensor: int, dtype: torch.dtype) -> None:
    """Each stage reads its part of a checkpoint, and what the engine saves is, to the bit, the plain model."""
    model = meta_model(AutoModelForCausalLM, folder / "plain")
    topology = Topology(Degrees(pp=STAGES, dp=dist.get_world_size() // (STAGES * tensor), tp=tensor))
    own_stage(model)
    if tensor > 1:
        from ds_npu.features.build import Build

        shard_model(model, Build(topology, model).plan, topology)
    load_checkpoint(model, folder / "plain", {"tp": topology.rank("tp")})
    engine = engine_of(model, 0, dtype, {"tensor": tensor} if tensor > 1 else {})
    state = engine.whole_state_dict()
    engine.save_pretrained(folder / "ours")
    engine.save_16bit_model(str(folder / "ours"), "all.bin")
    if dist.get_rank() == 0:
        plain = AutoModelForCausalLM.from_pretrained(folder / "plain").state_dict()
        again = AutoModelForCausalLM.from_pretrained(folder / "ours").state_dict()
        stored = torch.load(folder / "ours" / "all.bin", weights_only=True)
        for found in (state, again, stored):
            assert list(found) == list(plain)
            assert all(
                torch.equal(found[name], each) and found[name].dtype == each.dtype for name, each in plain.items()
            )
    else:
        assert state == {}
    dist.barrier()


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "tensor"), [(2, 1), (4, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_saved_weights_are_the_plain_models(tmp_path, family, ranks, tensor):
    stageable(family, dtype=torch.float32).save_pretrained(tmp_path / "plain")
    run_on_ranks(ranks, save_and_load, tmp_path, tensor, torch.float32)


def adapted(model: nn.Module) -> nn.Module:
    made = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "lora_" in name:
                weight.fill_(sum(map(ord, name)))
    return made


def save_adapters(folder: Path) -> None:
    plain = adapted(stageable("llama", dtype=torch.float32))
    expected = plain.state_dict()
    for order in ("before", "after"):
        model = stageable("llama", dtype=torch.float32)
        model = own_stage(adapted(model)) if order == "before" else adapted(own_stage(model))
        engine = engine_of(model, 1, torch.float32, {})
        with pytest.raises(RuntimeError, match="would write one stage's weights as if they were all"):
            model.save_pretrained(folder / "refused")
        state = tensor_parallel_rule.shared(engine.whole_state_dict())
        assert list(state) == list(expected)
        assert all(torch.equal(state[name], each) for name, each in expected.items())
        with pytest.raises(RuntimeError, match="PeftModel writes what this stage has"):
            engine.save_pretrained(folder / order)
        engine.save_16bit_model(str(folder / order), "trained.bin", exclude_frozen_parameters=True)
        dist.barrier()
        trained = torch.load(folder / order / "trained.bin", weights_only=True)
        assert list(trained) == [name for name, each in plain.named_parameters() if each.requires_grad]


@pytest.mark.slow
def test_saved_adapters_are_those_of_all_stages(tmp_path):
    run_on_ranks(2, save_adapters, tmp_path)


# ---- checkpoints of DeepSpeed ----


def checkpoints(folder: Path, tensor: int) -> None:
    """Every stage writes and reads its own files; training goes on as if it had not stopped."""
    parallel: dict[str, object] = {"tensor": tensor} if tensor > 1 else {}
    for zero in (0, 1, 2):
        target = folder / str(zero)
        first = engine_of(own_stage(stageable("llama")), zero, torch.float32, parallel)
        one_step_of_float32(first)
        first.save_checkpoint(str(target), tag="one")
        kept = weights_of(first)
        files = {path.name for path in (target / "one").iterdir()}
        models = STAGES * tensor
        assert {f"mp_rank_{rank:02d}_model_states.pt" for rank in range(models)} <= files, files
        optimizers = {name for name in files if name.endswith("optim_states.pt")}
        assert len(optimizers) == (0 if zero == 0 else dist.get_world_size()), files
        own = torch.load(
            target / "one" / f"mp_rank_{first.topology.rank('pp', 'tp'):02d}_model_states.pt", weights_only=False
        )
        assert own["module"].keys() == kept.keys()
        one_step_of_float32(first)
        second = engine_of(own_stage(stageable("llama")), zero, torch.float32, parallel)
        second.load_checkpoint(str(target), tag="one")
        assert all(torch.equal(each, kept[name]) for name, each in weights_of(second).items())
        one_step_of_float32(second)
        expected = weights_of(first)
        assert any(not torch.equal(each, kept[name]) for name, each in expected.items())
        assert all(torch.equal(each, expected[name]) for name, each in weights_of(second).items())


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    """What this rank holds."""
    return {name: local_shard(weight).detach().clone() for name, weight in engine.module.named_parameters()}


def one_step_of_float32(engine: Any) -> None:
    one_step(engine)
    engine.step()


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "tensor"), [(2, 1), (4, 1), (4, 2)], ids=str)
def test_each_stage_writes_its_own_files(tmp_path, ranks, tensor):
    run_on_ranks(ranks, checkpoints, tmp_path, tensor)


# ---- refused ----


def refused() -> None:
    import deepspeed

    model = own_stage(stageable("llama"))
    with pytest.raises(ValueError, match=r"zero_optimization\.stage: found 3; 0, 1 or 2 with"):
        engine_of(copy.deepcopy(model), 3, torch.float32, {})
    rule.without_extension()
    whole = {"parallel": {"pipeline": 1}}
    config = tensor_parallel_rule.config(0, torch.float32, whole) | {"gradient_accumulation_steps": 1}
    with pytest.raises(ValueError, match=r"of the 1 of ds_npu\.parallel\.pipeline"):
        deepspeed.initialize(model=own_stage(stageable("llama")), config=config)


def test_what_an_engine_refuses_of_a_stage():
    run_on_ranks(2, refused)
