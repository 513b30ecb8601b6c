"""Runs with Muon that are saved and go on, here and at other layouts; steps that are skipped; frozen weights."""

from __future__ import annotations

import copy
from dataclasses import replace
from unittest import mock

import deepspeed
import gradient_rule as rule
import muon_rule
import pytest
import tiny_models
import torch
import torch.distributed as dist
from muon_reference import OPTIMIZER, WholeMuon, is_muon
from muon_rule import MuonCase, engine_of, tokens, train, weights_of
from tensor_parallel_rule import EXACT, SINGLE
from wire import Wire

from ds_npu.parallel.whole_matrices import exchange
from ds_npu.zero_ext import matrix_holdings
from ds_npu.zero_ext.matrix_optimizer import MOMENTUM, MatrixOptimizer


def engine_for(case: MuonCase):
    return engine_of(case, tiny_models.tiny(case.family, torch.float32).to(case.dtype))


def resume_to_the_bit(cases: list[MuonCase], folder: str) -> None:
    rule.without_extension()
    for index, case in enumerate(cases):
        first = engine_for(case)
        batches = tokens(first.topology.size("dp"), 4)
        train(first, case, batches[:2])
        first.save_checkpoint(f"{folder}/{index}")
        train(first, case, batches[2:])
        second = engine_for(case)
        train(second, case, batches[3:])
        assert second.load_checkpoint(f"{folder}/{index}")[0] is not None
        train(second, case, batches[2:])
        found, expected = weights_of(second), weights_of(first)
        assert all(torch.equal(found[name], expected[name]) for name in expected), case


def go_on_elsewhere(chain: list[MuonCase], folder: str) -> None:
    """One step at each layout, from a checkpoint of the one before, against one process that is not interrupted.

    All have the same samples: ``dp`` of them is 2, or both ranks of others have what two would.
    """
    rule.without_extension()
    muon_rule.iterate_in_float64()
    batches = tokens(2, len(chain))
    expected, _ = muon_rule.expected(chain[0], batches)
    for step, case in enumerate(chain):
        engine = engine_for(replace(case, zero={**case.zero}))
        if step:
            assert engine.load_checkpoint(folder)[0] is not None
        own = batches[step : step + 1]
        if engine.topology.size("dp") == 1:
            own = own.transpose(2, 3).flatten(2, 3).unsqueeze(2)
        train(engine, case, own)
        engine.save_checkpoint(folder)
    error = rule.relative(weights_of(engine), expected)
    is_exact = all(case.stage == 0 for case in chain)
    assert error <= (EXACT if is_exact else SINGLE), (chain, error)


def momenta(engine) -> list[torch.Tensor]:
    states = engine.basic_optimizer.state.values()
    return [state[MOMENTUM].clone() for state in states if MOMENTUM in state]


def skip_steps(cases: list[tuple[MuonCase, dict[str, object]]]) -> None:
    """A step whose gradients are not finite leaves weights and momenta as they were, and the next one counts."""
    rule.without_extension()
    for case, keys in cases:
        engine = engine_of(case, tiny_models.tiny(case.family, torch.float32).to(case.dtype), **keys)
        batches = tokens(engine.topology.size("dp"), 3)
        train(engine, case, batches[:1])
        before, weights = momenta(engine), weights_of(engine)
        assert before and any(each.any() for each in before)
        for micro in batches[1, :, engine.topology.rank("dp")]:
            micro = micro.to(engine.device)
            loss = engine(input_ids=micro, labels=micro).loss
            # On one rank only.
            engine.backward(loss * (torch.inf if dist.get_rank() == 0 else 1.0))
            engine.step()
        assert engine.skipped_steps == 1
        found = weights_of(engine)
        assert all(torch.equal(found[name], weights[name]) for name in weights), case
        assert all(map(torch.equal, momenta(engine), before)), case
        train(engine, case, batches[2:])
        assert all(each.isfinite().all() for each in weights_of(engine).values())


def sent(cases: list[tuple[MuonCase, int]]) -> None:
    """The elements that leave a rank in a step, both ways, and the matrices that the world iterates: each once."""
    rule.without_extension()
    for case, expected in cases:
        engine = engine_for(case)
        batches = tokens(engine.topology.size("dp"), 1)
        iterated, original = [], exchange.MatrixExchange._iterated

        def counted(self, wave, *args, iterated=iterated, original=original):
            iterated.extend(wave.matrices)
            return original(self, wave, *args)

        exchange.MatrixExchange._iterated = counted
        with Wire() as wire:
            train(engine, case, batches)
        exchange.MatrixExchange._iterated = original
        everyones: list = [None] * dist.get_world_size()
        leaving = sum(size for (kind, _), size in wire.leaving.items() if kind == "exchange")
        dist.all_gather_object(everyones, (iterated, leaving))
        matrices = [matrix for own, _ in everyones for matrix in own]
        model = tiny_models.tiny(case.family, torch.float32)
        muon = [weight for name, weight in model.named_parameters() if is_muon(name, weight)]
        assert len(set(matrices)) == len(matrices) == sum(len(each) if each.dim() == 3 else 1 for each in muon)
        assert sum(size for _, size in everyones) == expected, (case, everyones, sum(each.numel() for each in muon))


def frozen(cases: list[MuonCase]) -> None:
    """Weights that are not trained have no matrices, and the others are as in one process with them frozen."""
    rule.without_extension()
    muon_rule.iterate_in_float64()
    for case in cases:
        models = [tiny_models.tiny(case.family, torch.float32).to(torch.float64) for _ in range(2)]
        for model in models:
            for name, weight in model.named_parameters():
                weight.requires_grad_(".0." not in name)
        engine = engine_of(case, models[0])
        assert isinstance(engine.basic_optimizer, MatrixOptimizer)
        batches = tokens(engine.topology.size("dp"), 3)
        train(engine, case, batches)
        one, muon = models[1], WholeMuon(models[1])
        for batch in batches:
            for micro in batch.flatten(0, 1):
                (muon_rule.tensor_rule.loss_of(one, micro, torch.float64) / batch.flatten(0, 1).shape[0]).backward()
            muon.step(rule.CLIP)
        want = {name: each.detach() for name, each in one.named_parameters()}
        error = rule.relative(weights_of(engine), want)
        assert error <= (EXACT if case.stage == 0 else SINGLE), (case, error)


def own_optimizer(cases: list[MuonCase]) -> None:
    """A MuonWithAuxAdam that a client makes, with groups of other rates, and a schedule of it."""
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    rule.without_extension()
    muon_rule.iterate_in_float64()
    for case in cases:
        found = []
        for by_config in (True, False):
            model = tiny_models.tiny(case.family, torch.float32).to(case.dtype)
            if by_config:
                engine = engine_of(case, model)
            else:
                params = OPTIMIZER["params"]
                halves = {True: [], False: []}
                for name, weight in model.named_parameters():
                    halves[is_muon(name, weight)].append(weight)
                shared = {"weight_decay": params["weight_decay"]}
                given = [
                    {"params": halves[True], "use_muon": True, "lr": 1.0, "momentum": params["momentum"], **shared},
                    {"params": halves[False], "use_muon": False, "lr": 1.0, "betas": (0.9, 0.95), **shared},
                ]
                optimizer = MuonWithAuxAdam(given, adam_optimizer=torch.optim.AdamW)
                rates = {True: params["muon_lr"], False: params["adam_lr"]}
                factors = [lambda step, rate=rates[group["use_muon"]]: rate for group in optimizer.param_groups]
                schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factors)
                config = muon_rule.tensor_rule.config(case.stage, case.dtype, copy.deepcopy(case.section))
                del config["optimizer"]
                engine = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)[0]
            train(engine, case, tokens(engine.topology.size("dp"), 3))
            found.append(weights_of(engine))
        assert all(torch.equal(found[0][name], found[1][name]) for name in found[0]), case


def refusals(cases: list[tuple[MuonCase, dict[str, object], str]]) -> None:
    rule.without_extension()
    for case, keys, said in cases:
        with pytest.raises(ValueError, match=said):
            engine_of(case, tiny_models.tiny(case.family, torch.float32).to(case.dtype), **keys)


def go_on_from_deepspeed(cases: list[MuonCase], folder: str) -> None:
    """From a checkpoint of plain DeepSpeed's Muon, whose steps without clipping are ours but for rounding."""
    torch._dynamo.config.disable = True
    rule.without_extension()
    rule.pretend_fp16(False)  # With it both iterate in fp16, whose rounding would hide all else.
    for case in cases:
        plain = {"gradient_clipping": 0.0}
        model = tiny_models.tiny(case.family, torch.float32)
        config = muon_rule.tensor_rule.config(case.stage, torch.float32, {}) | plain | {"optimizer": OPTIMIZER}
        del config["ds_npu"]
        config["zero_optimization"] |= {"reduce_scatter": False}
        first = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
        assert type(first.basic_optimizer).__name__ == "MuonWithAuxAdam"
        batches = tokens(2, 4)

        def steps(engine, own):
            for batch in own[:, :, dist.get_rank()]:
                for micro in batch:
                    engine.backward(engine(input_ids=micro, labels=micro).loss)
                    engine.step()

        steps(first, batches[:2])
        first.save_checkpoint(f"{folder}/{case.stage}")
        steps(first, batches[2:])
        engine = engine_of(case, tiny_models.tiny(case.family, torch.float32), **plain)
        steps(engine, batches[3:])
        assert engine.load_checkpoint(f"{folder}/{case.stage}")[0] is not None
        steps(engine, batches[2:])
        weights = dict(model.named_parameters())
        with deepspeed.zero.GatheredParameters(list(weights.values())):
            expected = {name: each.detach().double().clone() for name, each in weights.items()}
        error = rule.relative(weights_of(engine), expected)
        assert error <= 1e-6, (case, error)


def hold_what_is_expected(cases: list[MuonCase]) -> None:
    """What each rank holds is what the rules of partitions say, which plans without ranks go by."""
    rule.without_extension()
    for case in cases:
        engine, planned = engine_for(case), matrix_holdings.plan_of_portion
        with mock.patch.object(matrix_holdings, "plan_of_portion", wraps=planned) as spy:
            matrix_holdings.plan_whole_matrices(engine, engine.topology.stage_group("matrices"))
        found = [call.args[0] for call in spy.call_args_list]
        expected = matrix_holdings.expected_holdings(engine)
        for rank, held in enumerate(expected):
            own = [weight for portion in found for weight in portion[rank]]
            assert sorted(own, key=repr) == sorted(held, key=repr), (case, rank)
