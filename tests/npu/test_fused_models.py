"""Hugging Face models with every fused operator on an NPU: which kernels a training step runs, and what it computes."""

from collections import Counter

import pytest
import tiny_models
import torch
from fused_cases import CALLS, KEYS, ONE_RANK
from ranks import run_on_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from ds_npu.config.fused_ops import FusedOpsSection
from ds_npu.features.build import Build
from ds_npu.features.driver import apply_features
from ds_npu.features.fused_ops import fused_operators as fused_ops
from ds_npu.features.fused_ops.fused_model import fuse
from ds_npu.features.fused_ops.fused_operators import FUSED_OPS
from ds_npu.features.tensor_parallel.sharded_model import shard_model
from ds_npu.log import logger
from ds_npu.models.globs import plan_for
from ds_npu.ops.operator import Operator
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology

KERNELS = {
    "flash_attention": ("npu_fusion_attention", "npu_fusion_attention_grad"),
    "rms_norm": ("npu_rms_norm", "npu_rms_norm_backward"),
    "swiglu": ("npu_swiglu", "npu_swiglu_backward"),
    "rotary": ("npu_rotary_mul", "npu_rotary_mul_backward"),
    "cross_entropy": ("npu_cross_entropy_loss", "npu_cross_entropy_loss_backward"),
}
"""By key, what runs forward and backward."""
UNFUSED = {
    "flash_attention": {"_softmax", "_softmax_backward_data", "softmax", "bmm", "baddbmm"},
    "rms_norm": {"rsqrt", "pow", "mean", "square"},
    "swiglu": {"silu", "silu_backward", "sigmoid"},
    "rotary": {"neg"},
    "cross_entropy": {"_log_softmax", "_log_softmax_backward_data", "nll_loss_forward", "nll_loss_backward"},
}
"""What PyTorch's operators for the same run; what multiplies, adds or joins is counted by its size besides."""
ELEMENTWISE = {"mul", "cat", "stack"}
BATCH, LENGTH, HIDDEN = 2, 16, 32
FAMILIES = {family: CALLS[family] for family in ("llama", "qwen3", "mistral", "gemma", "phi3")} | {
    # Of these experts each is computed by itself.
    "deepseek_v3": CALLS["deepseek_v3"] | {"swiglu": 2}
}


class Ops(TorchDispatchMode):
    """Counts what is dispatched, forward and backward; of elementwise products and joins those of activations."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in ELEMENTWISE or result.numel() >= BATCH * LENGTH * HIDDEN:
            self.seen[name] += 1
        return result


def batch(number):
    return tiny_models.tokens((number + 1) * BATCH, LENGTH)[-BATCH:]


def on_npu(family, section):
    """The model in bf16 as the feature makes it."""
    model = tiny_models.tiny(family, torch.bfloat16).npu()
    apply_features([(FUSED_OPS, FusedOpsSection(**section))], Build(ONE_RANK, model, {}, "npu"))
    return model


def counted(model):
    ids = batch(0).npu()
    with Ops() as ops:
        model(input_ids=ids, labels=ids).loss.backward()
    return ops.seen


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_runs_each_kernel_and_nothing_in_its_place(family):
    seen = counted(on_npu(family, {}))
    for key in KEYS:
        count = FAMILIES[family][key]
        assert [seen[name] for name in KERNELS[key]] == [count, count], key
    # The gate of Gemma is a GELU; routers of experts have sigmoids, quotients and sums of their own.
    left = set().union(*(names for key, names in UNFUSED.items() if FAMILIES[family][key]))
    if family == "deepseek_v3":
        left = left - {"bmm"} - UNFUSED["swiglu"] - UNFUSED["rotary"]
    assert {name for name in left if seen[name]} == set()


def test_a_llama_step_has_no_elementwise_product_of_activations_left():
    seen = counted(on_npu("llama", {}))
    # Two plain linears' outputs are copied into one tensor, once for each MLP.
    assert {name: seen[name] for name in ELEMENTWISE} == {"mul": 0, "cat": 0, "stack": 2}


@pytest.mark.parametrize("key", KEYS)
def test_what_is_switched_off_runs_pytorchs_operators(key):
    seen = counted(on_npu("llama", {key: False}))
    assert [seen[name] for name in KERNELS[key]] == [0, 0]
    assert {name for name in UNFUSED[key] if seen[name]}
    for other in set(KEYS) - {key}:
        assert [seen[name] for name in KERNELS[other]] == [CALLS["llama"][other]] * 2
        assert not {name for name in UNFUSED[other] - UNFUSED[key] if seen[name]}, other


def steps(model, device, count=8):
    """The losses of ``count`` batches, and the sum of their gradients."""
    losses = []
    for number in range(count):
        ids = batch(number).to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.detach().cpu().double())
    gradients = [weight.grad.cpu().double() for weight in model.parameters() if weight.grad is not None]
    return torch.stack(losses), torch.cat([gradient.flatten() for gradient in gradients])


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_are_as_exact_as_pytorchs_in_bf16(family):
    start = tiny_models.tiny(family, torch.bfloat16)
    with tiny_models.Float64():
        exact = steps(tiny_models.tiny(family, torch.bfloat16).double(), "cpu")
    plain, found = steps(start, "cpu"), steps(on_npu(family, {}), "npu")
    for mine, own, true in zip(found, plain, exact, strict=True):
        assert float((mine - true).norm()) <= 2 * float((own - true).norm())


def on_two_npus(sequence_parallel):
    model = tiny_models.tiny("llama", torch.bfloat16)
    plan = plan_for(model, {})
    shard_model(model, plan, Topology(Degrees(tp=2)), sequence_parallel)
    fuse(model, plan, KEYS)
    seen = counted(model.npu())
    for key in set(KEYS) - {"cross_entropy"}:
        assert [seen[name] for name in KERNELS[key]] == [CALLS["llama"][key]] * 2, key
    assert not {name for key in set(KEYS) - {"cross_entropy"} for name in UNFUSED[key] if seen[name]}
    assert seen["stack"] == 0
    model.zero_grad()
    found = steps(model, "npu")
    with tiny_models.Float64():
        exact = steps(tiny_models.tiny("llama", torch.bfloat16).double(), "cpu")
    plain = steps(tiny_models.tiny("llama", torch.bfloat16), "cpu")
    assert float((found[0] - exact[0]).norm()) <= 2 * float((plain[0] - exact[0]).norm())


@pytest.mark.parametrize("sequence_parallel", (False, True), ids=("all-reduce", "sequence parallel"))
def test_split_over_two_npus(sequence_parallel):
    run_on_ranks(2, on_two_npus, sequence_parallel, backend="hccl")


def test_a_wrong_kernel_is_found_at_the_start_and_its_operator_left_out(monkeypatch):
    from ds_npu.ops.layers import rotary

    monkeypatch.setattr(rotary, "_refusal", None)
    monkeypatch.setattr(rotary, "_on_npu", rotary._on_npu)
    right = Operator._import_kernel
    monkeypatch.setattr(
        Operator,
        "_import_kernel",
        lambda self: (lambda x, cos, sin: right(self)(x, cos, -sin)) if self is rotary else right(self),
    )
    fused_ops._wrong.cache_clear()
    lines = []
    monkeypatch.setattr(logger(), "info", lambda message, *args: lines.append(message % args))
    seen = counted(on_npu("llama", {"rotary": True}))
    fused_ops._wrong.cache_clear()
    assert [seen[name] for name in KERNELS["rotary"]] == [0, 0] and seen["neg"]
    assert seen["npu_rms_norm"] == 5
    (line,) = [line for line in lines if "left as it is" in line]
    assert "rotary is left as it is: the NPU kernel of rotary is wrong" in line
