"""Runs that are saved at one layout and go on at another, against one process that is not interrupted."""

from __future__ import annotations

from pathlib import Path

import deepspeed
import gradient_rule as rule
import numpy
import peft
import pytest
import tensor_parallel_rule as dense
import tiny_models
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

from ds_npu.checkpoint.files import CheckpointError

SAMPLES, LENGTH = 8, 8
ADAM = {"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.1}
"""An eps at which Adam does not make large steps of rounding errors."""
BOUND = 1e-5
"""Of losses in float32, summed in other orders; without the optimizer's state they are off by 1e-3."""


def model_of(family: str, dtype: torch.dtype, adapters: dict | None = None) -> nn.Module:
    changes = {"n_layer": 4} if family == "gpt2" else {"num_hidden_layers": 4}
    if family in tiny_models.OF_EXPERTS:
        changes["output_router_logits"] = False
    model = tiny_models.tiny(family, torch.float32, **changes)
    if adapters:
        torch.manual_seed(7)
        model = peft.get_peft_model(model, peft.LoraConfig(**adapters))
    return model.to(dtype).train()


def tokens(step: int) -> torch.Tensor:
    return torch.randint(3, 60, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(step))


def engine_of(family: str, stage: int, section: dict, dtype: torch.dtype, adapters: dict | None = None, **keys: object):
    """``section``: with its key ``zero``, what is added to zero_optimization."""
    rule.without_extension()
    parallel, section = section.get("parallel", {}), {**section}
    zero = section.pop("zero", {})
    shared = parallel.get("tensor", 1) * parallel.get("pipeline", 1) * parallel.get("context", 1)
    config = dense.config(stage, dtype, section) | keys
    config |= {"optimizer": {"type": "AdamW", "params": ADAM | {"torch_adam": True}}}
    config |= {"train_micro_batch_size_per_gpu": SAMPLES * shared // dist.get_world_size()}
    config["gradient_accumulation_steps"] = 1
    config["zero_optimization"] = {**config["zero_optimization"], **zero}
    model = model_of(family, dtype, adapters)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=trained, config=config)[0]


def step_of(engine, step: int, dtype: torch.dtype) -> float:
    """The mean loss over all ranks, on the same samples whatever the layout."""
    topology = engine.topology
    share = SAMPLES // topology.size("dp")
    ids = tokens(step)[share * topology.rank("dp") :][:share].to(engine.device)
    loss = dense.loss_of(engine, ids, dtype)
    engine.backward(loss)
    engine.step()
    return rule.mean_loss(loss.item() / topology.size("cp"), topology)


def go_on(
    family: str, layouts: list, begin: int, folder: str, expected: list[float], adapters: dict | None = None
) -> None:
    """One step at each layout, from a checkpoint of the one before; ``begin``: the first step, 0 from no checkpoint."""
    for step, (stage, section) in enumerate(layouts, begin):
        engine = engine_of(family, stage, section, torch.float32, adapters)
        if step:
            path, _ = engine.load_checkpoint(folder)
            assert path is not None and engine.global_steps == step
        mean = step_of(engine, step, torch.float32)
        assert abs(mean / expected[step] - 1) <= BOUND, (step, stage, section, mean, expected[step])
        engine.save_checkpoint(folder)


def moved_experts(family: str, layouts: list, folder: str, expected: list[float]) -> None:
    """Experts that have moved in the former run begin in the plain order in this one, and move on."""
    for step, (stage, section) in enumerate(layouts):
        engine = engine_of(family, stage, section | {"moe": {"placement_interval": 1}}, torch.float32)
        # What was trained before, at moved places, is no matter.
        step_of(engine, 50, torch.float32)
        step_of(engine, 51, torch.float32)
        if step:
            assert engine.load_checkpoint(folder)[0] is not None
        else:
            again = engine_of(family, stage, section | {"moe": {"placement_interval": 1}}, torch.float32)
            engine = again
        mean = step_of(engine, step, torch.float32)
        assert abs(mean / expected[step] - 1) <= BOUND, (step, stage, section, mean, expected[step])
        engine.save_checkpoint(folder)


def states_of(engine) -> dict[str, torch.Tensor]:
    """The float32 weights and moments of this rank's parts, as DeepSpeed tells them."""
    link = getattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state", None)
    if link is not None:  # Else it is done by the next step.
        link()
    found = {}
    for name, weight in engine.module.named_parameters():
        for key in (None, "exp_avg", "exp_avg_sq"):
            value = safe_get_full_fp32_param(weight) if key is None else safe_get_full_optimizer_state(weight, key)
            found[f"{name}/{key}"] = value.cpu()
    return found


def in_16_bits(dtype: torch.dtype, layouts: list, folder: str) -> None:
    """Through all ``layouts``, of which the first is the last, too, float32 weights and moments stay bit for bit."""
    keys = {"bf16": {"enabled": True}} if dtype == torch.bfloat16 else {"fp16": {"enabled": True, "loss_scale": 8}}
    first = engine_of("llama", *layouts[0], dtype, **keys)
    for step in range(2):
        step_of(first, step, dtype)
    expected = states_of(first), dense.shared(first.whole_state_dict())
    first.save_checkpoint(folder)
    for layout in layouts[1:]:
        last = engine_of("llama", *layout, dtype, **keys)
        assert last.load_checkpoint(folder)[0] is not None
        found = dense.shared(last.whole_state_dict())
        assert all(torch.equal(found[name], expected[1][name]) for name in found), layout
        last.save_checkpoint(folder)
    found = states_of(last)
    assert expected[0].keys() == found.keys()
    assert all(torch.equal(found[name], expected[0][name]) for name in found)


def masters_in_16_bits(folder: str) -> None:
    """Masters and moments go over to a run that keeps them in bf16, rounded, and from there to float32 as they are."""
    wide, narrow = {"enabled": True}, {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    expected: dict[str, torch.Tensor] = {}
    layouts = [(1, {}, wide), (2, {"parallel": {"tensor": 2}}, wide | narrow), (3, {}, wide), (1, {}, wide | narrow)]
    for index, (stage, section, keys) in enumerate(layouts):
        engine = engine_of("llama", stage, section, torch.bfloat16, bf16=keys)
        if index:
            assert engine.load_checkpoint(folder)[0] is not None
        else:
            step_of(engine, 0, torch.bfloat16)
        found = {name: each.float() for name, each in states_of(engine).items()}
        assert all(torch.equal(found[name], each) for name, each in expected.items()), (stage, section, keys)
        expected = {name: each.bfloat16().float() for name, each in found.items()}
        step_of(engine, 1, torch.bfloat16) if index == len(layouts) - 1 else engine.save_checkpoint(folder)


def parts_of_a_load(folder: str) -> None:
    """Weights alone, or all but the optimizer's state; files that are missing; a run's own state."""
    layouts = [(1, {}), (1, {"parallel": {"tensor": 2}}), (0, {"parallel": {"tensor": 2}}), (3, {})]
    first = engine_of("llama", *layouts[0], torch.float32)
    step_of(first, 0, torch.float32)
    first.save_checkpoint(folder, client_state={"mine": 7, "random": numpy.random.get_state()})
    expected = dense.shared(first.whole_state_dict())
    for layout in layouts[1:]:
        for keys in ({"load_module_only": True}, {"load_optimizer_states": False}):
            engine = engine_of("llama", *layout, torch.float32)
            _, client_state = engine.load_checkpoint(folder, **keys)
            found = dense.shared(engine.whole_state_dict())
            assert all(torch.equal(found[name], expected[name]) for name in expected), (layout, keys)
            assert client_state["mine"] == 7 and client_state["random"][1].dtype == numpy.uint32
            assert engine.global_steps == (0 if "load_module_only" in keys else 1)
    engine = engine_of("llama", 3, {}, torch.float32)
    dist.barrier()
    (last,) = Path(folder).glob("*/*rank_1_*optim_states.pt")
    damages = {
        last: (last.read_bytes()[:999], r"rank_1_.* cannot be read: .*copy the whole folder again"),
        last.parent / "ds_npu_layout_rank_00001.json": (
            None,
            r"1 of the manifests of 2 ranks .* none of rank 1 .*copy the",
        ),
    }
    for path, (content, said) in damages.items():
        dist.barrier()
        if dist.get_rank() == 0:
            path.unlink()
            if content is not None:
                path.write_bytes(content)
        dist.barrier()
        engine = engine_of("llama", *layouts[1], torch.float32)
        with pytest.raises(CheckpointError, match=said):
            engine.load_checkpoint(folder)


def random_states(folder: str) -> None:
    """A script restores states of ranks that did not share samples: those that do now draw the same numbers again."""
    engine_of("gpt2", 1, {}, torch.float32).save_checkpoint(folder)
    for axis in ("tensor", "pipeline", "context"):
        engine = engine_of("gpt2", 1, {"parallel": {axis: 2}}, torch.float32)
        for dropout in [each for each in engine.module.modules() if isinstance(each, nn.Dropout)]:
            dropout.p = 0.5
        for _ in range(2):
            assert engine.load_checkpoint(folder)[0] is not None
            assert [agree_behind_a_forward(engine) for _ in range(2)] == [True, False], axis
        assert engine.load_checkpoint(folder)[0] is not None
        torch.manual_seed(dist.get_rank())
        losses = [0.0, 0.0]
        dist.all_gather_object(losses, dense.loss_of(engine, tokens(0), torch.float32).item())
        assert losses[0] == losses[1] or axis == "context", (axis, losses)


def agree_behind_a_forward(engine) -> bool:
    """Whether both ranks, which had other random states before a forward without dropout, have the same behind it."""
    torch.manual_seed(dist.get_rank())
    engine.eval()
    with torch.no_grad():
        dense.loss_of(engine, tokens(0), torch.float32)
    engine.train()
    states = [torch.get_rng_state()] * 2
    dist.all_gather_object(states, torch.get_rng_state())
    return torch.equal(*states)


def expected_of(family: str, steps: int, adapters: dict | None = None) -> list[float]:
    """The losses of one process."""
    model, found = model_of(family, torch.float32, adapters), []
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, **ADAM)
    for step in range(steps):
        loss = dense.loss_of(model, tokens(step), torch.float32)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, rule.CLIP)
        optimizer.step()
        found.append(loss.item())
    return found
