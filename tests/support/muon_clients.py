"""Runs with Muon as clients make them: adapters, weights that are trained later, ``no_sync``, groups added later."""

from __future__ import annotations

import copy

import deepspeed
import gradient_rule as rule
import muon_reference
import muon_rule
import peft
import pytest
import tiny_models
import torch
from muon_reference import OPTIMIZER, WholeMuon, is_muon
from muon_rule import MuonCase, engine_of, tokens, train, weights_of
from tensor_parallel_rule import EXACT, SINGLE
from torch import nn

STEPS = 4
LATER = ("layers.0.self_attn", "layers.1.mlp.up_proj")
"""Parts of names of weights that are frozen at first."""


def model_of(case: MuonCase) -> nn.Module:
    return tiny_models.tiny(case.family, torch.float32).to(case.dtype)


def one_step(muon: WholeMuon, model: nn.Module, batch: torch.Tensor) -> None:
    micros = batch.flatten(0, 1)
    for micro in micros:
        (muon_rule.tensor_rule.loss_of(model, micro, torch.float64) / len(micros)).backward()
    muon.step(rule.CLIP)


def hold(engine, case: MuonCase, model: nn.Module) -> None:
    """Hold what is trained to ``model``."""
    want = {name: each.detach() for name, each in model.named_parameters() if each.requires_grad}
    error = rule.relative(weights_of(engine), want)
    assert error <= (EXACT if case.stage == 0 else SINGLE), (case, error)


def with_adapters(case: MuonCase) -> nn.Module:
    model = tiny_models.tiny(case.family, torch.float32)
    torch.manual_seed(7)
    settings = {"r": 4, "target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"], "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(**settings)).to(case.dtype).train()


def adapters(cases: list[MuonCase]) -> None:
    """PEFT's LoRA: the matrices are those of the adapters."""
    rule.without_extension()
    muon_rule.iterate_in_float64()
    for case in cases:
        engine, one = engine_of(case, with_adapters(case)), with_adapters(case).double()
        batches, muon = tokens(engine.topology.size("dp"), STEPS), WholeMuon(one)
        train(engine, case, batches)
        for batch in batches:
            one_step(muon, one, batch)
        hold(engine, case, one)


def no_sync(cases: list[MuonCase]) -> None:
    """All but the last micro-batch inside of ``no_sync``, and a step behind it."""
    rule.without_extension()
    muon_rule.iterate_in_float64()
    for case in cases:
        engine = engine_of(case, model_of(case), gradient_accumulation_steps=1)
        batches = tokens(engine.topology.size("dp"), STEPS)
        for batch in batches[:, :, engine.topology.rank("dp")]:
            losses = (muon_rule.tensor_rule.loss_of(engine, micro, case.dtype) / len(batch) for micro in batch)
            with engine.no_sync():
                for _ in range(len(batch) - 1):
                    engine.backward(next(losses))
            engine.backward(next(losses))
            engine.step()
        want, _ = muon_rule.expected(case, batches)
        error = rule.relative(weights_of(engine), want)
        assert error <= (EXACT if case.stage == 0 else SINGLE), (case, error)


def own_muon(model: nn.Module, names: list[str]):
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    params, weights = OPTIMIZER["params"], dict(model.named_parameters())
    shared = {"weight_decay": params["weight_decay"]}
    halves = {half: [weights[each] for each in names if is_muon(each, weights[each]) == half] for half in (True, False)}
    matrices = {"use_muon": True, "lr": params["muon_lr"], "momentum": params["momentum"], **shared}
    others = {"use_muon": False, "lr": params["adam_lr"], "betas": (0.9, 0.95), "eps": 1e-10, **shared}
    groups = [{"params": halves[True], **matrices}, {"params": halves[False], **others}]
    return MuonWithAuxAdam([group for group in groups if group["params"]], adam_optimizer=torch.optim.AdamW)


def engine_with(case: MuonCase, model: nn.Module, optimizer):
    config = muon_rule.tensor_rule.config(case.stage, case.dtype, copy.deepcopy(case.section))
    del config["optimizer"]
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def trained_later(cases: list[MuonCase]) -> None:
    """Weights that the optimizer has from the beginning, and that are frozen in the first steps.

    As in torch and DeepSpeed their gradients are zeros until then, and they decay.
    """
    rule.without_extension()
    muon_rule.iterate_in_float64()
    for case in cases:
        models = [model_of(case), model_of(case)]
        engine = engine_with(case, models[0], own_muon(models[0], [name for name, _ in models[0].named_parameters()]))
        frozen = [
            {name: each for name, each in model.named_parameters() if any(part in name for part in LATER)}
            for model in (engine.module, models[1])
        ]
        assert frozen[0] and frozen[0].keys() == frozen[1].keys()
        muon, batches = WholeMuon(models[1]), tokens(engine.topology.size("dp"), STEPS)
        for step, batch in enumerate(batches):
            for each in (weight for weights in frozen for weight in weights.values()):
                each.requires_grad_(step >= STEPS // 2)
            train(engine, case, batch.unsqueeze(0))
            for each in frozen[1].values():
                each.grad = torch.zeros_like(each)
            one_step(muon, models[1], batch)
        hold(engine, case, models[1])


def groups_added_later(cases: list[MuonCase]) -> None:
    """Weights that the optimizer is given behind the first step are an error of the next, on every rank."""
    rule.without_extension()
    for case in cases:
        model = model_of(case)
        names = [name for name, _ in model.named_parameters()]
        engine = engine_with(case, model, own_muon(model, names[:-4]))
        batches = tokens(engine.topology.size("dp"), 2)
        train(engine, case, batches[:1])
        late = [weight for name, weight in engine.module.named_parameters() if name in names[-4:] and weight.dim() == 2]
        group = {"params": late, "use_muon": True, "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0}
        engine.optimizer.add_param_group(group | {"ns_method": "gram"})
        with pytest.raises(RuntimeError, match=r"add_param_group.*deepspeed\.initialize again"):
            train(engine, case, batches[1:])


def sharded_heads(folder: str) -> None:
    """DeepSpeed counts heads in whole projections, which a model read by ``ds_npu.from_pretrained`` does not have."""
    import json

    import transformers

    import ds_npu

    rule.without_extension()
    case = MuonCase("llama", 1, {"parallel": {"tensor": 2}}, params={"per_head_muon": True})
    config = muon_rule.tensor_rule.config(case.stage, torch.float32, case.section)
    config["optimizer"] = {**muon_reference.OPTIMIZER, "params": {**OPTIMIZER["params"], "per_head_muon": True}}
    model = ds_npu.from_pretrained(transformers.LlamaForCausalLM, folder, config=json.loads(json.dumps(config)))
    with pytest.raises(ValueError, match="no attention projection could be tagged"):
        deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
