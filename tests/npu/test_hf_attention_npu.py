"""Hugging Face models with ds_npu's attention on NPUs: one kernel for each layer and pass, no mask of the length."""

import copy

import pytest
import torch
import torch_npu
from tiny_models import Float64, tiny

from ds_npu.models.attention_function import use_attention

LENGTH = 40
NAMES = ("npu_fusion_attention", "npu_fusion_attention_grad")


def padding(kind):
    seen = torch.ones(2, LENGTH, dtype=torch.long)
    if kind == "right":
        seen[0, 30:] = 0
    if kind == "left":
        seen[1, :9] = 0
    return seen


CASES = {
    "plain": {},
    "padding right": {"attention_mask": padding("right")},
    "padding left": {"attention_mask": padding("left")},
    "packed": {"position_ids": torch.tensor([[*range(15), *range(25)], [*range(39), 0]])},
}


def step(model, options, device):
    """Loss and gradients in float64. No row of padding is a label, nor the token after it."""
    ids = torch.randint(3, 60, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    seen = options.get("attention_mask", torch.ones_like(ids))
    labels = ids.masked_fill((seen & seen.roll(1, 1)) == 0, -100)
    inputs = {name: x.to(device) for name, x in (options | {"input_ids": ids, "labels": labels}).items()}
    result = model(**inputs, use_cache=False)
    result.loss.backward()
    values = [result.loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return [x.cpu().double() for x in values]


def error(values, wanted):
    """Of all of them together, each relative to its size."""
    return sum(float((one - true).norm() / true.norm()) ** 2 for one, true in zip(values, wanted, strict=True)) ** 0.5


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", ("llama", "mistral", "deepseek_v3"))
def test_a_step_runs_the_kernel_and_is_as_exact_as_eager(family, case, monkeypatch):
    seen = []

    def counted(name):
        function = getattr(torch_npu, name)

        def call(*args, **options):
            seen.append((name, options.get("atten_mask")))
            return function(*args, **options)

        return call

    for name in NAMES:
        monkeypatch.setattr(torch_npu, name, counted(name))
    exact = tiny(family)
    eager, ours = copy.deepcopy(exact).float(), copy.deepcopy(exact).float().npu()
    use_attention(ours)
    with Float64():
        wanted = step(exact, CASES[case], "cpu")
    plain, found = step(eager, CASES[case], "cpu"), step(ours, CASES[case], "npu")
    layers = ours.config.num_hidden_layers
    assert [name for name, _ in seen] == [NAMES[0]] * layers + [NAMES[1]] * layers
    if (family, case) != ("mistral", "padding right"):
        assert {tuple(mask.shape) for _, mask in seen} == {(2048, 2048)}
    assert error(found, wanted) <= 2 * error(plain, wanted)
