"""Random numbers of NPUs: distributed as they should be, the same for the same seed, independent otherwise."""

import math

import pytest
import torch
import torch_npu
from agreement import FLOATING, agree, layouts, numbers, on_npu
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

MANY = 2**16
SIGMAS = 5  # by chance once in two million


@pytest.fixture(autouse=True)
def seed():
    torch.npu.manual_seed(2024)


def assert_mean(found: torch.Tensor, mean: float, deviation: float) -> None:
    """Assert that the mean of independent numbers of this mean and deviation is as near to it as chance allows."""
    found = found.cpu().double()
    assert abs(float(found.mean()) - mean) <= SIGMAS * deviation / math.sqrt(found.numel())


def assert_independent(a: torch.Tensor, b: torch.Tensor) -> None:
    """Assert that the correlation of two samples is as near to 0 as chance allows."""
    pair = torch.stack([a.cpu().double().flatten(), b.cpu().double().flatten()])
    assert abs(float(torch.corrcoef(pair)[0, 1])) <= SIGMAS / math.sqrt(a.numel())


def assert_uniform(found: torch.Tensor) -> None:
    """Kolmogorov and Smirnov's test for numbers between 0 and 1."""
    ordered = found.cpu().double().flatten().sort().values
    steps = torch.arange(1, ordered.numel() + 1, dtype=torch.float64) / ordered.numel()
    assert float((ordered - steps).abs().max()) <= 2.6 / math.sqrt(ordered.numel())  # by chance once in 400 000


DRAWS = {
    "rand": lambda: torch.rand(1000, device="npu"),
    "randn": lambda: torch.randn(1000, device="npu"),
    "randint": lambda: torch.randint(0, 2**31, (1000,), device="npu"),
    "randperm": lambda: torch.randperm(1000, device="npu"),
    "bernoulli": lambda: torch.empty(1000, device="npu").bernoulli_(0.5),
    "bernoulli of a tensor": lambda: torch.bernoulli(torch.full((1000,), 0.5, device="npu")),
    "multinomial": lambda: torch.multinomial(torch.ones(1000, device="npu"), 1000, replacement=True),
    "normal": lambda: torch.normal(0.0, 1.0, (1000,), device="npu"),
    "exponential": lambda: torch.empty(1000, device="npu").exponential_(),
    "dropout": lambda: functional.dropout(torch.ones(1000, device="npu"), 0.5),
    "dropout mask": lambda: torch_npu._npu_dropout(torch.ones(1024, device="npu"), 0.5)[1],
}


@pytest.mark.parametrize("name", DRAWS)
def test_the_same_seed_and_offset_give_the_same_numbers_and_others_do_not(name):
    first, second = DRAWS[name](), DRAWS[name]()
    assert not torch.equal(first, second)
    torch.npu.manual_seed(2024)
    assert torch.equal(DRAWS[name](), first)
    state = torch.npu.get_rng_state()
    again = DRAWS[name]()
    assert torch.equal(again, second)
    torch.npu.set_rng_state(state)
    assert torch.equal(DRAWS[name](), second)
    torch.npu.manual_seed(2025)
    assert not torch.equal(DRAWS[name](), first)


@pytest.mark.parametrize("name", sorted(set(DRAWS) - {"dropout mask"}))
def test_numbers_drawn_one_after_the_other_are_independent(name):
    draws = [DRAWS[name]().float().cpu() for _ in range(40)]
    assert_independent(torch.stack(draws[:-1]), torch.stack(draws[1:]))
    # Element by element over the draws as well: not the same numbers in another place.
    assert_independent(torch.stack(draws[:-1])[:, 1:], torch.stack(draws[1:])[:, :-1])


def test_the_first_number_of_many_seeds_is_uniform():
    first = []
    for seed in range(1500):
        torch.npu.manual_seed(seed)
        first.append(torch.rand(1, device="npu").item())
    assert_uniform(torch.tensor(first))


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_uniform_numbers_fill_their_interval(dtype):
    found = torch.empty(MANY, dtype=dtype, device="npu").uniform_(-3, 5)
    assert bool((found.cpu() >= -3).all())
    assert bool((found.cpu() <= 5).all())  # rounding to 16 bits reaches the end
    assert_mean(found, 1, 8 / math.sqrt(12))
    if dtype == torch.float32:
        assert_uniform((found + 3) / 8)
        assert_uniform(torch.rand(MANY, device="npu"))


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_normal_numbers_have_their_mean_and_deviation(dtype):
    found = torch.empty(MANY, dtype=dtype, device="npu").normal_(2, 3)
    assert_mean(found, 2, 3)
    assert_mean((found.double() - 2) ** 2 / 9, 1, math.sqrt(2))
    if dtype == torch.float32:
        assert_uniform(torch.special.ndtr((found.cpu().double() - 2) / 3))
    assert_mean(torch.randn(MANY, dtype=dtype, device="npu"), 0, 1)


def test_normal_numbers_around_a_tensor_of_means():
    mean = torch.tensor([0.0, 1.0, 2.0, 30.0], device="npu")
    found = torch.normal(mean.expand(MANY, 4).contiguous(), 2.0)
    for column, expected in enumerate((0, 1, 2, 30)):
        assert_mean(found[:, column], expected, 2)


def test_normal_numbers_with_a_tensor_of_deviations():
    mean, deviation = torch.full((MANY,), 3.0, device="npu"), torch.tensor([0.5, 4.0]).repeat(MANY // 2).npu()
    around_zero, around_mean = torch.normal(0.0, deviation).cpu(), torch.normal(mean, deviation).cpu()
    for found, expected in ((around_zero, 0), (around_mean, 3)):
        assert_mean(found[::2], expected, 0.5)
        assert_mean(found[1::2], expected, 4)
        assert_mean(((found - expected) / deviation.cpu()) ** 2, 1, math.sqrt(2))
    assert_independent(around_zero / deviation.cpu(), around_mean / deviation.cpu())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32], ids=str)
def test_whole_numbers_are_drawn_evenly_from_their_range(dtype):
    found = torch.randint(-3, 5, (MANY,), dtype=dtype, device="npu").cpu()
    counts = torch.stack([(found == value).sum() for value in range(-3, 5)])
    assert int(counts.sum()) == MANY
    assert float(((counts - MANY / 8) ** 2 / (MANY / 8)).sum()) < 40  # chi squared of 7 degrees: once in 800 000
    drawn = torch.empty(100, dtype=dtype, device="npu").random_(7).cpu()
    assert set(drawn.tolist()) == set(range(7))


@given(st.integers(0, 300), st.sampled_from((torch.int64, torch.int32)))
def test_a_permutation_has_every_number_once(count, dtype):
    found = torch.randperm(count, dtype=dtype, device="npu")
    assert found.dtype == dtype
    assert sorted(found.tolist()) == list(range(count))


@pytest.mark.parametrize("probability", [0.0, 0.03, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [*FLOATING, torch.bool, torch.int64], ids=str)
def test_bernoulli_draws_ones_with_its_probability(probability, dtype):
    deviation = math.sqrt(probability * (1 - probability))
    found = torch.empty(MANY, dtype=dtype, device="npu").bernoulli_(probability)
    assert_mean(found, probability, deviation)
    if dtype.is_floating_point:
        wanted = torch.full((MANY,), probability, dtype=dtype, device="npu")
        assert_mean(torch.bernoulli(wanted), float(wanted[0]), deviation + 1e-2)


def test_multinomial_draws_with_the_weights_given():
    weights = torch.tensor([[1.0, 2.0, 0.0, 5.0], [0.0, 0.0, 1.0, 1.0]], device="npu")
    found = torch.multinomial(weights, MANY, replacement=True)
    for row, probabilities in enumerate((weights / weights.new_tensor([[8.0], [2.0]])).tolist()):
        for value, probability in enumerate(probabilities):
            assert_mean(found[row] == value, probability, math.sqrt(probability * (1 - probability)))
    once = torch.multinomial(torch.ones(50, 6, device="npu"), 6).cpu()
    assert torch.equal(once.sort().values, torch.arange(6).expand(50, 6))


@settings(max_examples=15)
@given(st.sampled_from(FLOATING), st.data())
def test_a_tensor_of_any_layout_is_filled_and_nothing_around_it(dtype, data):
    placed = on_npu(torch.full((20, 30), 7.0), dtype, data.draw(layouts(2)))
    around = torch.zeros(0, dtype=dtype, device="npu").set_(placed.untyped_storage()).cpu()
    for fill in (lambda: placed.uniform_(-1, 1), lambda: placed.normal_(0, 1), lambda: placed.bernoulli_(0.5)):
        found = fill().cpu().double()
        assert abs(float(found.mean())) <= 0.5 + SIGMAS / math.sqrt(600)
        assert found.unique().numel() > 1
        assert 7 not in found
        after = torch.zeros(0, dtype=dtype, device="npu").set_(placed.untyped_storage()).cpu()
        assert int((after != around).sum()) <= 600


def bits_of(mask: torch.Tensor, count: int) -> torch.Tensor:
    """The first ``count`` bits of a mask of bytes, each byte from its lowest bit on."""
    return ((mask.cpu().int()[:, None] >> torch.arange(8)) & 1).flatten()[:count].bool()


@settings(max_examples=30)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.sampled_from((0.1, 0.5, 0.9)),
    st.sampled_from(FLOATING),
    st.data(),
)
def test_dropout_keeps_and_scales_what_its_mask_says(shape, probability, dtype, data):
    value = numbers(*shape, seed=11, dtype=dtype)
    placed = on_npu(value, dtype, data.draw(layouts(len(shape)))).requires_grad_()
    result, mask = torch_npu._npu_dropout(placed, probability)
    assert mask.dtype == torch.uint8
    assert mask.numel() == math.ceil(value.numel() / 128) * 16
    kept = bits_of(mask, value.numel()).reshape(shape)
    agree(result, value * kept / (1 - probability))
    weights = numbers(*shape, seed=12, dtype=dtype)
    result.backward(on_npu(weights, dtype, data.draw(layouts(len(shape)))))
    agree(placed.grad, weights * kept / (1 - probability))


@pytest.mark.parametrize("probability", [0.02, 0.1, 0.5, 0.9])
def test_dropout_drops_with_its_probability_and_without_a_pattern(probability):
    ones = torch.ones(MANY * 4, device="npu")
    deviation = math.sqrt(probability * (1 - probability))
    first, second = ((functional.dropout(ones, probability) == 0).float().cpu() for _ in range(2))
    assert_mean(first, probability, deviation)
    assert_independent(first, second)
    for distance in (1, 2, 3, 8, 64, 128):
        assert_independent(first[distance:], first[:-distance])
        assert_independent(first[distance:], second[:-distance])
    for bit in range(8):
        assert_mean(first[bit::8], probability, deviation)


def test_an_element_of_a_mask_depends_on_its_place_alone():
    masks = []
    for count in (100, 1000, 5000):
        torch.npu.manual_seed(5)
        masks.append(bits_of(torch_npu._npu_dropout(torch.ones(count, device="npu"), 0.3)[1], 100))
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], masks[2])


def test_dropout_of_nothing_and_of_all():
    value = torch.ones(100, device="npu", requires_grad=True)
    assert torch.equal(functional.dropout(value, 0.0), value)
    assert torch.equal(functional.dropout(value, 0.5, training=False), value)
    assert not functional.dropout(value, 1.0).cpu().any()
    assert functional.dropout(torch.ones(0, 3, device="npu"), 0.5).shape == (0, 3)


def test_dropped_infinities_are_zero():
    value = torch.full((64,), math.inf, device="npu")
    assert set(functional.dropout(value, 0.5).tolist()) == {0.0, math.inf}


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_is_recomputed_drops_the_same_elements(reentrant):
    def layer(value):
        return functional.dropout(torch.tanh(functional.dropout(value, 0.4)), 0.3)

    gradients = []
    for run in (layer, lambda value: checkpoint(layer, value, use_reentrant=reentrant)):
        torch.npu.manual_seed(9)
        value = torch.linspace(-2, 2, 5000, device="npu").requires_grad_()
        run(value).backward(torch.ones(5000, device="npu"))
        gradients.append(value.grad)
    assert torch.equal(*gradients)
    assert 0.3 < float((gradients[0] == 0).cpu().float().mean()) < 0.8
