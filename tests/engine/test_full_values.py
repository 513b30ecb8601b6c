"""DeepSpeed's safe_get_full_* and safe_set_full_* give and take whole weights, gradients and moments over all axes."""

from __future__ import annotations

import deepspeed
import gradient_rule as rule
import pytest
import tensor_parallel_rule as tensor_rule
import tiny_models
import torch
from deepspeed import utils
from ranks import run_on_ranks

from ds_npu.parallel.runtime.placement import placement_of

BOUND = 1e-5
"""Of a gradient in float32, relative to its largest element."""
ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}


def whole(cases: list[tuple[str, int, dict[str, object]]]) -> None:
    rule.without_extension()
    for family, stage, parallel in cases:
        model = tiny_models.tiny(family, torch.float32)
        config = tensor_rule.config(stage, torch.float32, {"parallel": parallel}) | {"optimizer": ADAM}
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        topology = engine.topology
        dp = topology.size("dp")
        expected = tensor_rule.reference(family, dp, torch.float64, torch.float32)
        shape = rule.ACCUMULATION, dp, rule.MICRO, tensor_rule.LENGTH
        tokens = tensor_rule.batches(rule.MICRO * rule.ACCUMULATION * dp).view(shape)[:, topology.rank("dp")]
        for place, ids in enumerate(tokens):
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            if place < len(tokens) - 1:
                engine.step()
        named = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        sharded = 0
        for name, weight in named.items():
            found, reference = utils.safe_get_full_grad(weight), expected.gradients[name]
            assert found.shape == reference.shape, (family, stage, parallel, name)
            error = (found.double() - reference).abs().max() / reference.abs().max()
            assert error < BOUND, (family, stage, parallel, name, error)
            sharded += bool(placement_of(weight).sharded)
        assert sharded >= 2, (family, stage, parallel)
        for name, weight in named.items():
            utils.safe_set_full_grad(weight, torch.full_like(utils.safe_get_full_grad(weight), 0.5))
            assert (utils.safe_get_full_grad(weight) == 0.5).all(), name
        utils.safe_update_full_grad_vectorized(list(named.values()), lambda gradient, weight: gradient * 4)
        assert all((utils.safe_get_full_grad(weight) == 2).all() for weight in named.values())
        engine.step()
        values = dict(engine.whole_weights())
        for name, weight in named.items():
            where = (family, stage, parallel, name)
            assert torch.equal(utils.safe_get_full_fp32_param(weight), values[name]), where
            value = torch.randn(values[name].shape, generator=torch.Generator().manual_seed(3))
            utils.safe_set_full_fp32_param(weight, value)
            assert torch.equal(utils.safe_get_full_fp32_param(weight), value), where
            moments = utils.safe_get_full_optimizer_state(weight, "exp_avg")
            # The first moment of gradients that are clipped, and all of one size.
            assert moments.shape == value.shape and len(moments.unique()) == 1 and moments.all(), where
            utils.safe_set_full_optimizer_state(weight, value, "exp_avg")
            assert torch.equal(utils.safe_get_full_optimizer_state(weight, "exp_avg"), value), where
            if placement_of(weight).sharded:
                with pytest.raises(ValueError, match="found a value of shape"):
                    utils.safe_set_full_fp32_param(weight, value[:1, :1])


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["tensor", "expert"])
def test_whole_over_ranks_that_shard_weights(axis):
    family, parallel = {"tensor": ("llama", {"tensor": 2}), "expert": ("qwen3_moe", {"expert": 2})}[axis]
    run_on_ranks(2, whole, [(family, stage, parallel) for stage in (1, 2, 3)])
