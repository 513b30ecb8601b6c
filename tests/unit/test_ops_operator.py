"""Which of its two an operator runs, and how a wrong kernel is found; a tensor on an NPU is played by a subclass."""

from __future__ import annotations

import types

import npu_double
import pytest
import torch

from ds_npu.operator_costs import Cost
from ds_npu.ops import operator as module
from ds_npu.ops.all import OPERATORS, report
from ds_npu.ops.operator import Operator
from ds_npu.ops.self_check import difference

CALLS: list[str] = []


def reference(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    """x · factor."""
    CALLS.append("reference")
    return x * factor


def right(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    CALLS.append("kernel")
    return x * factor


def sample(dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    return torch.linspace(-1, 1, 8).to(dtype).requires_grad_(), 3.0


def cost(x: torch.Tensor) -> Cost:
    return Cost(0, x.nbytes, x.nbytes)


class NpuTensor(torch.Tensor):
    """A CPU tensor that says that it is on an NPU."""

    @property
    def device(self):
        return types.SimpleNamespace(type="npu")


@pytest.fixture
def here(monkeypatch):
    """A torch_npu that can be imported, and no record of a call."""
    npu_double.install(monkeypatch)
    monkeypatch.setattr(module, "warn_once", lambda message: CALLS.append(message))
    CALLS.clear()


def on_npu(value: float = 1.0, dtype=torch.float32):
    return torch.full((2,), value, dtype=dtype).as_subclass(NpuTensor)


def made(kernel: str = "right", **others):
    return Operator("scale", reference, kernel=f"{__name__}:{kernel}", sample=sample, cost=cost, **others)


def test_the_device_of_the_first_tensor_decides(here):
    scale = made()
    scale(torch.ones(2))
    scale(on_npu())
    scale(factor=1.0, x=on_npu())
    scale(on_npu(), 2.0)
    assert CALLS == ["reference", "kernel", "kernel", "kernel"]


def test_the_first_of_a_list_of_tensors_decides(here):
    total = Operator(
        "total", lambda xs: CALLS.append("reference"), kernel=f"{__name__}:right", sample=sample, cost=cost
    )
    total([torch.ones(2)])
    total([])
    with pytest.raises(TypeError):
        total([on_npu()])  # the kernel, which cannot multiply a list
    assert CALLS == ["reference", "reference", "kernel"]


def test_a_dtype_without_kernel_goes_to_the_reference(here):
    made()(on_npu(dtype=torch.float64))
    made(dtypes=(torch.float64,))(on_npu(dtype=torch.float64))
    assert CALLS == ["reference", "kernel"]


def test_a_kernel_is_looked_for_once(here, monkeypatch):
    scale = made()
    scale(on_npu())
    monkeypatch.setattr(module.capability, "torch_npu_importable", lambda: pytest.fail("asked in every call"))
    monkeypatch.setattr(module.importlib, "import_module", lambda _: pytest.fail("imported in every call"))
    scale(on_npu())
    assert CALLS == ["kernel", "kernel"]


def test_a_torch_npu_that_lacks_a_function_leaves_the_reference_and_says_which(here):
    scale = made(needs=("npu", "npu_of_tomorrow"))
    assert "has no npu_of_tomorrow" in scale.why_unavailable().reason and scale.why_unavailable().advice
    scale(on_npu())
    scale(on_npu())
    said, *calls = CALLS
    assert said.startswith("scale runs without its NPU kernel") and "npu_of_tomorrow" in said
    assert calls == ["reference", "reference"]
    assert "npu_of_tomorrow" in scale.check(torch.device("cpu"))


def test_without_torch_npu_every_operator_says_so(monkeypatch):
    unavailable = module.Unavailable("torch_npu is not installed", "install it")
    monkeypatch.setattr(module.capability, "torch_npu_importable", lambda: unavailable)
    assert made().why_unavailable() == unavailable
    assert report() == [(operator.name, str(unavailable)) for operator in OPERATORS]


def test_a_right_kernel_is_kept(here):
    scale = made()
    assert scale.check(torch.device("cpu")) is None
    assert scale.why_unavailable() is None
    CALLS.clear()
    scale(on_npu())
    assert CALLS == ["kernel"]


def wrong(x, factor=2.0):
    CALLS.append("kernel")
    return x * factor * 1.2


def test_a_wrong_kernel_is_refused_for_good(here):
    scale = made("wrong")
    scale(on_npu())
    message = scale.check(torch.device("cpu"))
    assert message == scale.why_unavailable().reason == scale.check(torch.device("cpu"))
    assert message.startswith("the NPU kernel of scale is wrong on cpu: in torch.float32 result 0 is off by 6.0e-01")
    assert "slower, not wrong" in scale.why_unavailable().advice
    assert message in CALLS[-1]
    CALLS.clear()
    scale(on_npu())
    assert CALLS == ["reference"]


def test_what_the_user_has_set_does_not_reach_the_check(here):
    with torch.device("meta"), torch.no_grad():
        assert made().check(torch.device("cpu")) is None
        assert "gradient of argument 0" in made("wrong_gradient").check(torch.device("cpu"))


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 3.0

    @staticmethod
    def backward(ctx, grad):
        return grad


def wrong_gradient(x, factor):
    return WrongGradient.apply(x)


def raises(x, factor):
    raise RuntimeError("call aclnnScale failed\nand more")


def nan_in_bf16(x, factor):
    return x * (factor if x.dtype == torch.float32 else torch.nan)


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (wrong_gradient, "gradient of argument 0 is off by"),
        (
            lambda x, factor: x.detach() * factor,
            "it gives result 0, argument 0, and the reference result 0, argument 0",
        ),
        (lambda x, factor: (x * factor).unsqueeze(0), r"result 0 has shape \(1, 8\), and \(8,\) is right"),
        (lambda x, factor: (x * factor, x), "it gives result 0, result 1,"),
        (raises, "in torch.float32 it raises RuntimeError: call aclnnScale failed$"),
        (nan_in_bf16, "in torch.bfloat16 result 0 is off by nan"),
    ],
)
def test_what_can_be_wrong_with_a_kernel_is_said(kernel, said):
    found = [difference(kernel, reference, sample(dtype), dtype, "cpu") for dtype in module.KERNEL_DTYPES]
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(next(filter(None, found)))


def test_a_kernel_that_writes_where_the_reference_does_not_is_found():
    assert "argument 0 is off" in difference(
        lambda x: x.add_(1).mul(1), lambda x: x + 1, (torch.ones(2),), torch.float32, "cpu"
    )


def test_a_rounding_more_is_no_difference():
    for dtype in (torch.bfloat16, torch.float16):
        assert difference(lambda x, f: (x * f) * 1.0 + 0.0, reference, sample(dtype), dtype, "cpu") is None
        kernel = lambda x, f: (x.float() * (1 + torch.finfo(x.dtype).eps) * f).to(x.dtype)  # noqa: E731
        assert difference(kernel, reference, sample(dtype), dtype, "cpu") is None


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_each_operator_passes_its_own_check(operator):
    for dtype in operator.dtypes:
        assert difference(operator.reference, operator.reference, operator.sample(dtype), dtype, "cpu") is None
        assert difference(wrong_twice(operator.reference), operator.reference, operator.sample(dtype), dtype, "cpu")


def wrong_twice(function):
    """``function``, of which every result and every tensor that it writes to is off by a tenth."""

    def spoilt(*args):
        results = function(*args)
        spoil = lambda x: x * 1.1 if isinstance(x, torch.Tensor) else x  # noqa: E731
        if results is None:
            args[0][0].mul_(1.1)
        elif results is args[0]:
            results.mul_(1.1)
        return tuple(map(spoil, results)) if isinstance(results, tuple) else spoil(results)

    return spoilt
