"""The section ``fused_ops``: what is put into the model on NPUs and on the CPU, and what is refused."""

import importlib
import logging
from types import SimpleNamespace

import gradient_rule as rule
import pytest
import tensor_parallel_rule as tensor_rule
import tiny_models
import torch
import torch.distributed as dist
import transformers
from fused_cases import KEYS, ONE_RANK, counted, tiny
from ranks import run_on_ranks
from torch import nn

from ds_npu.config.check import check
from ds_npu.config.fused_ops import FusedOpsSection
from ds_npu.config.problems import ConfigError
from ds_npu.features.build import Build
from ds_npu.features.driver import apply_features, unmet
from ds_npu.features.fused_ops import fused_operators as fused_ops
from ds_npu.features.fused_ops.fused_model import fuse
from ds_npu.features.fused_ops.fused_operators import FUSED_OPS, OPERATORS_OF_KEY
from ds_npu.log import logger
from ds_npu.models.globs import plan_for
from ds_npu.models.plan import PlanError
from ds_npu.ops.adamw import adamw_
from ds_npu.ops.operator import Operator

EVERY = dict.fromkeys(KEYS, True)


@pytest.fixture
def said(monkeypatch):
    """What is logged."""
    lines = []
    monkeypatch.setattr(logger(), "info", lambda message, *args: lines.append(message % args))
    return lines


@pytest.fixture
def npu(monkeypatch):
    """Kernels that pass their check, except those that a test puts here with what is wrong with them."""
    wrong = {}
    monkeypatch.setattr(Operator, "check", lambda self, device: wrong.get(self.name))
    monkeypatch.setattr(adamw_, "_refusal", None)
    monkeypatch.setattr(adamw_, "_on_npu", adamw_._first_call)
    fused_ops._wrong.cache_clear()
    yield wrong
    fused_ops._wrong.cache_clear()


def fused(section, device_type, model=None):
    """Which operators a step calls of a model that was built with ``section``."""
    model = model or tiny("llama")
    apply_features([(FUSED_OPS, FusedOpsSection(**section))], Build(ONE_RANK, model, {}, device_type))
    with counted() as calls:
        model(input_ids=torch.arange(6)[None], labels=torch.arange(6)[None])
    return set(calls)


CALLED = {"attention_forward", "rms_norm", "swiglu", "rotary", "cross_entropy"}


@pytest.mark.parametrize(
    ("section", "device_type", "found"),
    [
        ({}, "cpu", set()),
        ({"rms_norm": False}, "cpu", set()),
        ({"rms_norm": True}, "cpu", {"rms_norm"}),
        (EVERY, "cpu", CALLED),
        ({}, "npu", CALLED),
        ({"rms_norm": False}, "npu", CALLED - {"rms_norm"}),
        (dict.fromkeys(KEYS, False) | {"swiglu": True}, "npu", {"swiglu"}),
    ],
)
def test_what_is_put_in(section, device_type, found, npu, said):
    assert fused(section, device_type) == found
    assert bool(said) == bool(found)


def test_a_kernel_that_fails_its_check_is_left_out_and_said(npu, said):
    npu["rotary"] = "the NPU kernel of rotary is wrong"
    npu["attention_backward"] = "the NPU kernel of attention_backward is wrong"
    assert fused({"rotary": True}, "npu") == {"rms_norm", "swiglu", "cross_entropy"}
    assert [line for line in said if "left" in line] == [
        "fused_ops: flash_attention is left as it is: the NPU kernel of attention_backward is wrong",
        "fused_ops: rotary is left as it is: the NPU kernel of rotary is wrong",
    ]


def test_each_kernel_is_checked_once_in_a_process(monkeypatch, npu):
    checked = []
    monkeypatch.setattr(Operator, "check", lambda self, device: checked.append((self.name, device)))
    fused({"adamw": False}, "npu")
    fused({}, "npu")
    names = [operator.name for key in OPERATORS_OF_KEY for operator in OPERATORS_OF_KEY[key]]
    assert sorted(checked) == sorted((name, "npu") for name in names)


def test_a_model_that_has_them_needs_no_plan(said):
    model = tiny("llama")
    apply_features([(FUSED_OPS, FusedOpsSection(**EVERY))], Build(ONE_RANK, model, {}, "cpu"))
    count = len(said)
    build = Build(ONE_RANK, model, {}, "cpu")
    apply_features([(FUSED_OPS, FusedOpsSection(**EVERY))], build)
    assert len(said) == count + 1 and "already" in said[-1] and "plan" not in vars(build)


@pytest.fixture
def machine(monkeypatch):
    """An NPU machine whose torch_npu lacks what rms_norm needs."""
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    state = SimpleNamespace(usable=True)
    monkeypatch.setattr(fused_ops.capability, "torch_npu_state", lambda: state)
    monkeypatch.setattr(
        Operator, "why_unavailable", lambda self: "torch_npu has it not" if self.name == "rms_norm" else None
    )
    return state


def refusals(section):
    try:
        check({"train_batch_size": 8, "ds_npu": {"fused_ops": section}}, 8, unmet=unmet)
    except ConfigError as error:
        return [(problem.path, problem.accepted) for problem in error.problems]
    return []


def test_what_is_asked_for_and_not_there_is_an_error(machine):
    unavailable = ("ds_npu.fused_ops", "rms_norm: kernel not available: torch_npu has it not")
    assert refusals({"rms_norm": True, "swiglu": True}) == [unavailable]
    assert refusals({}) == refusals({"rms_norm": False}) == refusals({"swiglu": True}) == []


def test_on_the_cpu_the_reference_is_what_true_means(machine, monkeypatch):
    machine.usable = False
    assert refusals({"rms_norm": True}) == []
    machine.usable = True
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert refusals({"rms_norm": True}) == []


def test_a_model_that_is_not_known(npu, said):
    class Projection(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

    model = nn.Sequential(Projection())
    apply_features([(FUSED_OPS, FusedOpsSection())], Build(ONE_RANK, model, {}, "npu"))
    assert len(said) == 1 and said[0].startswith("fused_ops: none in Sequential, whose modules are not known (0 ")
    with pytest.raises(PlanError):
        apply_features([(FUSED_OPS, FusedOpsSection(rms_norm=True))], Build(ONE_RANK, model, {}, "cpu"))


def test_adamw_false_is_pytorchs_operators(npu):
    build = Build(ONE_RANK, nn.Identity(), {}, "cpu")
    apply_features([(FUSED_OPS, FusedOpsSection(adamw=True))], build)
    assert adamw_._on_npu != adamw_.reference
    apply_features([(FUSED_OPS, FusedOpsSection(adamw=False))], build)
    assert adamw_._on_npu == adamw_.reference
    assert adamw_.why_unavailable().reason == "ds_npu.fused_ops.adamw is false"


def engine_steps(tensor, stages):
    """DeepSpeed's engine with every operator in the model, against one process of the model as it is."""
    rule.without_extension()
    logging.getLogger("ds_npu").setLevel(logging.WARNING)
    expected = tensor_rule.reference("llama", dist.get_world_size() // tensor, torch.float64, torch.float64)
    for sequence_parallel in (False, True) if tensor > 1 else (False,):
        parallel = {"tensor": tensor, "sequence_parallel": sequence_parallel}
        for stage in stages:
            with counted() as calls:
                section = {"parallel": parallel, "fused_ops": EVERY}
                errors = tensor_rule.engine_step("llama", stage, torch.float64, section, expected)
            assert set(calls) >= CALLED - ({"cross_entropy"} if tensor > 1 else set())
            assert max(errors.loss, errors.gradient) <= 1e-12, (stage, sequence_parallel, errors)


def partitioned():
    """With zero.Init weights are sharded over the data ranks before anything is fused."""
    import deepspeed

    rule.without_extension()
    # transformers imports this at a model's first weight, and cannot while zero.Init is on.
    importlib.import_module("torch._dynamo.polyfills.loader")
    with deepspeed.zero.Init():
        model = transformers.LlamaForCausalLM(tiny_models.config_of("llama", pad_token_id=None))
    assert model.model.norm.weight.numel() == 0
    lines = fuse(model, plan_for(model, {}), KEYS)
    assert len(lines) == len(KEYS) and not [line for line in lines if "not" in line.split()]


@pytest.mark.slow
def test_weights_that_zero_has_partitioned():
    run_on_ranks(2, partitioned)


@pytest.mark.slow
@pytest.mark.parametrize("tensor", (1, 2))
def test_an_engine_with_every_operator(tensor):
    run_on_ranks(2, engine_steps, tensor, (1, 3))
