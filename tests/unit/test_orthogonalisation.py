"""The iteration of Muon against singular values, DeepSpeed's own functions and counted FLOP."""

from __future__ import annotations

import muon_reference
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ds_npu.operator_costs import Shape, orthogonalisation_cost
from ds_npu.ops.orthogonalisation import COEFFICIENTS, orthogonalised, steps_on_gram_matrices, update_scale

SHAPES = [(3, 8, 8), (1, 5, 9), (2, 9, 5), (4, 1, 6), (2, 6, 1), (1, 1, 1), (2, 64, 24)]
METHODS = ("gram", "standard")


def drawn(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", COEFFICIENTS)
def test_it_maps_singular_values_only(method, name):
    for shape in SHAPES:
        for steps in (1, 2, 3, len(COEFFICIENTS[name])):
            x, coefficients = drawn(shape), COEFFICIENTS[name][:steps]
            found = orthogonalised(x, method, torch.float64, coefficients)
            expected = muon_reference.orthogonal(x, coefficients)
            assert (found - expected).norm() <= 1e-12 * expected.norm(), (shape, steps)


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_singular_values_come_near_1(name):
    values = torch.linalg.svdvals(orthogonalised(drawn((1, 48, 96)), "gram", torch.float64, COEFFICIENTS[name]))
    assert values.min() > 0.65 and values.max() < 1.25, values
    assert name == "jordan" or (values - 1).abs().max() < 0.25


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_as_deepspeed_in_its_dtypes(method, dtype, monkeypatch):
    from deepspeed.runtime.zero.muon import original_muon

    monkeypatch.setattr(original_muon, "ns_compute_dtype", lambda name: dtype)
    name = "zeropower_via_gram_newtonschulz" if method == "gram" else "zeropower_via_newtonschulz5"
    theirs = getattr(original_muon, name)
    theirs = getattr(theirs, "__wrapped__", theirs)
    for shape in SHAPES:
        x = drawn(shape, torch.float32)
        found, other = orthogonalised(x, method, dtype), theirs(x, steps=5)
        exact = orthogonalised(x.double(), method, torch.float64)
        assert found.dtype == other.dtype == dtype
        # As near to what is exact as theirs, which rounds once more in each step.
        assert (found - exact).norm() <= 1.5 * (other - exact).norm() + 1e-6 * exact.norm(), shape


@pytest.mark.parametrize("method", METHODS)
def test_zeros_stay_zeros_and_what_is_not_finite_stays_in_its_matrix(method):
    x = drawn((3, 4, 6))
    x[0], x[1, 2, 3] = 0, torch.inf
    found = orthogonalised(x, method, torch.float64)
    assert not found[0].any() and not found[1].isfinite().all()
    assert torch.allclose(found[2], orthogonalised(x[2:], method, torch.float64)[0], atol=1e-14)


def test_large_gradients_do_not_leave_float16():
    x = drawn((1, 4, 6), torch.float32)
    found, expected = (orthogonalised(each, "gram", torch.float16) for each in (1e9 * x, x))
    assert torch.allclose(found, expected, atol=1e-2)


def test_scales():
    assert [update_scale("aspect", *each) for each in ((4, 8), (8, 8), (32, 8))] == [1.0, 1.0, 2.0]
    assert [update_scale("rms", *each) for each in ((25, 9), (9, 25))] == [1.0, 1.0]
    # The root mean square of an orthogonal matrix of that shape times the factor is 0.2.
    u, _, vh = torch.linalg.svd(drawn((1, 30, 12)), full_matrices=False)
    assert ((u @ vh) * update_scale("rms", 30, 12)).square().mean().sqrt() == pytest.approx(0.2)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8])
def test_costs_are_counted(method, steps):
    for shape in SHAPES:
        x = drawn(shape, torch.float32)
        with FlopCounterMode(display=False) as counter:
            found = orthogonalised(x, method, torch.bfloat16, COEFFICIENTS["polar_express"][:steps])
        cost = orthogonalisation_cost(Shape(shape, 4), 2, steps_on_gram_matrices(steps), method == "gram")
        assert (cost.flop, cost.read_bytes, cost.written_bytes) == (counter.get_total_flops(), x.nbytes, found.nbytes)
