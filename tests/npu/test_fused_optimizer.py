"""AdamW in one operator a tensor: torch's fused one, and ds_npu's FusedAdam on it, against the formula in float64."""

from dataclasses import dataclass, field

import pytest
import torch
from agreement import FLOATING, agree, layouts, numbers, on_npu
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_npu.ops.builders.fused_adam import FusedAdamBuilder


def as_float(value: float) -> float:
    """``value`` as it crosses CANN's interface, where hyperparameters are float32."""
    return float(torch.tensor(value, dtype=torch.float32))


@dataclass
class Adam:
    """Parameters and moments in float64, and what their rounding is measured by."""

    param: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor
    largest: torch.Tensor | None = None
    moved: torch.Tensor = field(init=False)
    m_size: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.moved = torch.zeros_like(self.param)
        self.m_size = self.m.abs()

    def step(
        self,
        grad: torch.Tensor,
        number: int | None,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        decay: float,
        decoupled: bool = True,
    ) -> None:
        """Step ``number`` (from 1) as CANN's documentation writes AdamW; None is without bias correction."""
        if not decoupled:
            grad = grad + decay * self.param
        self.m = betas[0] * self.m + (1 - betas[0]) * grad
        self.m_size = betas[0] * self.m_size + (1 - betas[0]) * grad.abs()
        self.v = betas[1] * self.v + (1 - betas[1]) * grad.pow(2)
        used = self.v
        if self.largest is not None:
            used = self.largest = torch.maximum(self.largest, self.v)
        correction1, correction2 = (1.0, 1.0) if number is None else (1 - betas[0] ** number, 1 - betas[1] ** number)
        scale = lr / correction1 / ((used / correction2).sqrt() + eps)
        self.moved = self.moved + scale * self.m_size + decoupled * lr * decay * self.param.abs()
        self.param = self.param - scale * self.m - decoupled * lr * decay * self.param


SHAPES = st.lists(st.sampled_from((1, 3, 17)), min_size=1, max_size=3)


@settings(max_examples=60)
@given(
    SHAPES,
    st.sampled_from(FLOATING),
    st.integers(1, 2000),
    st.sampled_from((torch.int64, torch.float32)),
    st.sampled_from((0.0, 0.1)),
    st.data(),
)
def test_a_fused_step_follows_the_formula(shape, dtype, number, step_dtype, decay, data):
    amsgrad, maximize = data.draw(st.booleans()), data.draw(st.booleans())
    param, m, grad = (numbers(*shape, seed=seed, dtype=dtype) for seed in (1, 2, 3))
    v, largest = (numbers(*shape, seed=seed, dtype=dtype).abs() for seed in (4, 5))
    on = [on_npu(value, dtype, data.draw(layouts(len(shape)))) for value in (param, grad, m, v, largest)]
    lr, betas, eps = 0.05, (0.9, 0.95), 1e-3
    step = torch.tensor(number, dtype=step_dtype).npu()
    torch._fused_adamw_(
        *([value] for value in on[:4]),
        [on[4]] if amsgrad else [],
        [step],
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=decay,
        eps=eps,
        amsgrad=amsgrad,
        maximize=maximize,
    )
    adam = Adam(param, m, v, largest if amsgrad else None)
    adam.step(
        -grad if maximize else grad,
        number,
        lr=as_float(lr),
        betas=(as_float(betas[0]), as_float(betas[1])),
        eps=as_float(eps),
        decay=as_float(decay),
    )
    # About a dozen float32 operations; for bf16 and fp16 only the result's own rounding is seen.
    roundings = 12 if dtype == torch.float32 else 1.05
    agree(on[0], adam.param, param.abs() + adam.moved, roundings)
    agree(on[2], adam.m, adam.m_size, roundings)
    agree(on[3], adam.v, roundings=roundings)
    if amsgrad:
        agree(on[4], adam.largest, roundings=roundings)
    assert int(step.cpu()) == number


def test_a_tensor_without_elements_is_left_alone():
    empty = [[torch.empty(0).npu()] for _ in range(4)]
    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
    torch._fused_adamw_(*empty, [], [torch.ones(()).npu()], amsgrad=False, maximize=False, **options)
    torch.npu.synchronize()
    assert empty[0][0].shape == (0,)


def unrounded_betas(adam: Adam, betas: tuple[float, float]) -> torch.Tensor:
    """What a parameter's error is measured by when the reference has betas that float32 has not.

    1 - beta has then a relative error of half an eps times beta / (1 - beta), and m and v are proportional to it.
    """
    return adam.param.abs() + adam.moved * (1 + betas[0] / (1 - betas[0]) + betas[1] / (1 - betas[1]))


@pytest.mark.parametrize("amsgrad", [False, True])
def test_torch_adamw_fused_takes_five_steps_of_adamw(amsgrad):
    betas, options = (0.9, 0.99), {"lr": 0.05, "eps": 1e-8}
    start, zeros = numbers(7, 9, seed=1, dtype=torch.float32), torch.zeros(7, 9, dtype=torch.float64)
    adam = Adam(start, zeros, zeros, zeros if amsgrad else None)
    weight = torch.nn.Parameter(on_npu(start, torch.float32))
    optimizer = torch.optim.AdamW([weight], betas=betas, weight_decay=0.1, amsgrad=amsgrad, fused=True, **options)
    for number in range(1, 6):
        grad = numbers(7, 9, seed=10 + number, dtype=torch.float32)
        weight.grad = on_npu(grad, torch.float32)
        optimizer.step()
        adam.step(grad, number, betas=betas, decay=0.1, **options)
    agree(weight.detach(), adam.param, unrounded_betas(adam, betas), roundings=8)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("corrected", [True, False])
def test_ds_npu_fused_adam_takes_five_steps_of_adam(decoupled, corrected):
    kernel = FusedAdamBuilder().load()
    betas, options = (0.9, 0.99), {"lr": 0.05, "eps": 1e-8}
    shapes = ((7, 9), (1,), (130,))
    zeros = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
    starts = [numbers(*shape, seed=i, dtype=torch.float32) for i, shape in enumerate(shapes)]
    adams = [Adam(start, zero, zero) for start, zero in zip(starts, zeros, strict=True)]
    params, exp_avgs, exp_avg_sqs = ([on_npu(v, torch.float32) for v in values] for values in (starts, zeros, zeros))
    no_overflow = torch.zeros(1, dtype=torch.int32).npu()
    for number in range(1, 6):
        grads = [numbers(*shape, seed=100 * number + i, dtype=torch.float32) for i, shape in enumerate(shapes)]
        lists = [[on_npu(grad, torch.float32) for grad in grads], params, exp_avgs, exp_avg_sqs]
        kernel.multi_tensor_adam(
            65536,
            no_overflow,
            lists,
            options["lr"],
            *betas,
            options["eps"],
            number,
            int(decoupled),
            int(corrected),
            0.1,
        )
        for adam, grad in zip(adams, grads, strict=True):
            adam.step(grad, number if corrected else None, betas=betas, decay=0.1, decoupled=decoupled, **options)
    for param, m, v, adam in zip(params, exp_avgs, exp_avg_sqs, adams, strict=True):
        agree(param, adam.param, unrounded_betas(adam, betas), roundings=8)
        agree(m, adam.m, adam.m_size / (1 - betas[0]), roundings=8)
        agree(v, adam.v, adam.v / (1 - betas[1]), roundings=8)


def test_ds_npu_fused_adam_does_nothing_on_overflow():
    kernel = FusedAdamBuilder().load()
    values = [numbers(5, seed=seed, dtype=torch.float32) for seed in range(4)]
    lists = [[on_npu(value, torch.float32)] for value in values]
    overflow = torch.ones(1, dtype=torch.int32).npu()
    kernel.multi_tensor_adam(65536, overflow, lists, 0.1, 0.9, 0.99, 1e-8, 1, 1, 1, 0.1)
    for found, value in zip(lists, values, strict=True):
        agree(found[0], value, roundings=0)
