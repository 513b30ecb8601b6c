"""Mixture of experts: tokens to the experts and back, and the choice of experts, against plain PyTorch in float64."""

import pytest
import torch
import torch_npu
from agreement import FLOATING, agree, layouts, numbers, on_npu
from hypothesis import given, settings
from hypothesis import strategies as st

DTYPES = st.sampled_from(FLOATING)
TOKENS = st.integers(1, 9)
EXPERTS = st.integers(2, 6)
HIDDEN = st.sampled_from((1, 3, 16))
SUM = {torch.float32: 12, torch.bfloat16: 1.1, torch.float16: 1.1}
"""Roundings of a sum of at most six products."""


def chosen_experts(tokens: int, experts: int, choices: int, seed: int) -> torch.Tensor:
    """[tokens, choices] different experts for each token, in no order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(experts, generator=generator)[:choices] for _ in range(tokens)])


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(found.cpu().long(), expected.long()), (found.cpu(), expected)


def probabilities(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return numbers(*shape, seed=7, dtype=torch.float32).sigmoid().to(dtype).double()


def expert_order(indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For [tokens, choices]: the flat places in the order of experts, and where each flat place went."""
    order = indices.reshape(-1).argsort(stable=True)
    return order, order.argsort()


@settings(max_examples=60)
@given(TOKENS, EXPERTS, HIDDEN, DTYPES, st.integers(1, 3), st.data())
def test_tokens_permuted_by_expert_are_sorted_and_dropped_beyond_the_number_asked_for(
    tokens, experts, hidden, dtype, choices, data
):
    index_dtype = data.draw(st.sampled_from((torch.int32, torch.int64)))
    choices = min(choices, experts)
    indices = chosen_experts(tokens, experts, choices, seed=1)
    kept = data.draw(st.integers(-tokens * choices + 1, tokens * choices))
    rows = tokens * choices if kept == 0 else kept % (tokens * choices) or tokens * choices
    x = numbers(tokens, hidden, seed=2, dtype=dtype).requires_grad_()
    order, positions = expert_order(indices)
    expected = x[(order // choices)[:rows]]
    grad = numbers(rows, hidden, seed=3, dtype=dtype)
    expected.backward(grad)
    on_x = on_npu(x.detach(), dtype, data.draw(layouts(2))).requires_grad_()
    flat = choices == 1 and data.draw(st.booleans())
    on_indices = (indices.reshape(-1) if flat else indices).to(index_dtype).npu()
    found, found_positions = torch_npu.npu_moe_token_permute(on_x, on_indices, kept or None)
    agree(found, expected.detach(), roundings=0)
    assert found_positions.dtype == torch.int32
    same(found_positions, positions)
    found.backward(on_npu(grad, dtype, data.draw(layouts(2))))
    terms = torch.zeros_like(x).index_add(0, (order // choices)[:rows], grad.abs())
    agree(on_x.grad, x.grad, terms, SUM[dtype])


@settings(max_examples=60)
@given(TOKENS, EXPERTS, HIDDEN, DTYPES, st.integers(1, 3), st.data())
def test_unpermuted_tokens_are_the_sum_of_their_choices_weighted_with_probs(
    tokens, experts, hidden, dtype, choices, data
):
    weighted = data.draw(st.booleans())
    choices = min(choices, experts) if weighted else 1
    rows = data.draw(st.integers(1, tokens * choices))
    _, positions = expert_order(chosen_experts(tokens, experts, choices, seed=1))
    permuted = numbers(rows, hidden, seed=2, dtype=dtype).requires_grad_()
    probs = probabilities(tokens, choices, dtype=dtype).requires_grad_() if weighted else None
    grad = numbers(tokens, hidden, seed=3, dtype=dtype)
    padded = torch.cat([permuted, torch.zeros(tokens * choices - rows, hidden)])
    terms = padded[positions].view(tokens, choices, hidden) * (1 if probs is None else probs.unsqueeze(2))
    expected = terms.sum(1)
    expected.backward(grad)
    on = on_npu(permuted.detach(), dtype, data.draw(layouts(2))).requires_grad_()
    on_probs = None if probs is None else on_npu(probs.detach(), dtype, data.draw(layouts(2))).requires_grad_()
    found = torch_npu.npu_moe_token_unpermute(on, positions.int().npu(), probs=on_probs)
    found.backward(on_npu(grad, dtype))
    agree(found, expected.detach(), terms.detach().abs().sum(1), SUM[dtype])
    agree(on.grad, permuted.grad, roundings=2 if dtype == torch.float32 else 1.1)
    if probs is not None:
        picked = padded.detach()[positions].view(tokens, choices, hidden)
        magnitude = (picked * grad.unsqueeze(1)).abs().sum(2)
        agree(on_probs.grad, probs.grad, magnitude, 4 + hidden if dtype == torch.float32 else 1.1)


def routing_map(indices: torch.Tensor, experts: int) -> torch.Tensor:
    return torch.zeros(len(indices), experts, dtype=torch.bool).scatter(1, indices, True)


def check_the_way_back(rows, weighted, routes, sizes, permuted, lies, **mode):
    """Unpermute ``rows`` rows that went the ``routes`` (token, expert), and its gradients.

    ``permuted`` is the order and the routing map that permute gave; ``lies`` the layouts of rows and weights.
    """
    (token, expert), (tokens, experts, hidden, dtype), (order, on_map) = routes, sizes, permuted
    back_in = numbers(rows, hidden, seed=5, dtype=dtype).requires_grad_()
    back_grad = numbers(tokens, hidden, seed=6, dtype=dtype)
    weights = probabilities(tokens, experts, dtype=dtype).requires_grad_()
    terms = back_in * weights[token, expert].unsqueeze(1) if weighted else back_in
    back = torch.zeros(tokens, hidden, dtype=torch.float64).index_add(0, token, terms)
    back.backward(back_grad)
    on_back = on_npu(back_in.detach(), dtype, lies[0]).requires_grad_()
    on_weights = on_npu(weights.detach(), dtype, lies[1]).requires_grad_() if weighted else None
    found = torch_npu.npu_moe_token_unpermute_with_routing_map(
        on_back, order, [tokens, hidden], probs=on_weights, routing_map=on_map, **mode
    )
    found.backward(on_npu(back_grad, dtype))
    with torch.no_grad():
        agree(found, back, torch.zeros_like(back).index_add(0, token, terms.abs()), SUM[dtype])
        agree(on_back.grad, back_in.grad, roundings=2 if dtype == torch.float32 else 1.1)
        if weighted:
            sums = torch.zeros_like(weights)
            sums[token, expert] = (back_in * back_grad[token]).abs().sum(1)
            agree(on_weights.grad, weights.grad, sums, 4 + hidden if dtype == torch.float32 else 1.1)


@settings(max_examples=50)
@given(TOKENS, EXPERTS, HIDDEN, DTYPES, st.integers(1, 3), st.data())
def test_a_routing_map_permutes_and_unpermutes_tokens_with_their_gradients(
    tokens, experts, hidden, dtype, choices, data
):
    weighted, map_dtype = data.draw(st.booleans()), data.draw(st.sampled_from((torch.bool, torch.int8)))
    choices = min(choices, experts)
    chosen = routing_map(chosen_experts(tokens, experts, choices, seed=1), experts)
    x = numbers(tokens, hidden, seed=2, dtype=dtype).requires_grad_()
    probs = probabilities(tokens, experts, dtype=dtype).requires_grad_()
    expert, token = chosen.t().nonzero(as_tuple=True)
    expected, expected_probs = x[token], probs[token, expert]
    grad = numbers(tokens * choices, hidden, seed=3, dtype=dtype)
    grad_probs = numbers(tokens * choices, seed=4, dtype=dtype)
    torch.autograd.backward([expected, expected_probs], [grad, grad_probs])
    on_map = chosen.to(map_dtype).npu()
    on_x, on_probs = (on_npu(v.detach(), dtype, data.draw(layouts(2))).requires_grad_() for v in (x, probs))
    found, found_probs, order = torch_npu.npu_moe_token_permute_with_routing_map(
        on_x, on_map, probs=on_probs, num_out_tokens=tokens * choices
    )
    agree(found, expected.detach(), roundings=0)
    agree(found_probs, expected_probs.detach(), roundings=0)
    same(order, token.argsort(stable=True))
    torch.autograd.backward([found, found_probs], [on_npu(grad, dtype), on_npu(grad_probs, dtype)])
    agree(on_x.grad, x.grad, torch.zeros_like(x).index_add(0, token, grad.abs()), SUM[dtype])
    agree(on_probs.grad, probs.grad, roundings=0)

    lies = (data.draw(layouts(2)), None)
    check_the_way_back(
        tokens * choices, weighted, (token, expert), (tokens, experts, hidden, dtype), (order, on_map), lies
    )


@settings(max_examples=50)
@given(st.integers(2, 9), EXPERTS, HIDDEN, DTYPES, st.integers(1, 3), st.data())
def test_with_capacity_each_expert_gets_as_many_tokens_and_gradients_return(
    tokens, experts, hidden, dtype, choices, data
):
    weighted = data.draw(st.booleans())
    choices = min(choices, experts)
    capacity = data.draw(st.integers(1, tokens))
    chosen = routing_map(chosen_experts(tokens, experts, choices, seed=1), experts)
    token = chosen.t().to(torch.int8).sort(dim=-1, descending=True, stable=True).indices[:, :capacity].reshape(-1)
    expert = torch.arange(experts).repeat_interleave(capacity)
    x = numbers(tokens, hidden, seed=2, dtype=dtype).requires_grad_()
    probs = probabilities(tokens, experts, dtype=dtype).requires_grad_()
    grad = numbers(experts * capacity, hidden, seed=3, dtype=dtype)
    grad_probs = numbers(experts * capacity, seed=4, dtype=dtype)
    expected, expected_probs = x[token], probs[token, expert]
    torch.autograd.backward([expected, expected_probs], [grad, grad_probs])
    on_map = chosen.npu()
    on_x, on_probs = (on_npu(v.detach(), dtype, data.draw(layouts(2))).requires_grad_() for v in (x, probs))
    found, found_probs, order = torch_npu.npu_moe_token_permute_with_routing_map(
        on_x, on_map, probs=on_probs, num_out_tokens=experts * capacity, drop_and_pad=True
    )
    agree(found, expected.detach(), roundings=0)
    agree(found_probs, expected_probs.detach(), roundings=0)
    same(order, token)
    torch.autograd.backward([found, found_probs], [on_npu(grad, dtype), on_npu(grad_probs, dtype)])
    agree(on_x.grad, x.grad, torch.zeros_like(x).index_add(0, token, grad.abs()), SUM[dtype])
    agree(on_probs.grad, probs.grad, roundings=0)

    lies = (None, data.draw(layouts(2)) if weighted else None)
    check_the_way_back(
        experts * capacity,
        weighted,
        (token, expert),
        (tokens, experts, hidden, dtype),
        (order, on_map),
        lies,
        drop_and_pad=True,
    )


@settings(max_examples=40)
@given(TOKENS, EXPERTS, DTYPES, st.integers(1, 3), st.booleans(), st.data())
def test_gating_takes_the_largest_softmax_and_the_first_of_equal_ones(
    tokens, experts, dtype, choices, some_finished, data
):
    choices = min(choices, experts)
    # Few different values: many experts are equal.
    x = torch.randint(0, 3, (tokens, experts), generator=torch.Generator().manual_seed(1)).double()
    finished = torch.arange(tokens) % 2 == 0 if some_finished else None
    softmax = x.softmax(-1)
    scores, indices = softmax.sort(dim=-1, descending=True, stable=True)
    scores, indices = scores[:, :choices], indices[:, :choices]
    if finished is not None:
        indices = indices.masked_fill(finished.unsqueeze(1), experts)
    on_x = on_npu(x, dtype, data.draw(layouts(2)))
    on_finished = None if finished is None else finished.npu()
    roundings = 12 if dtype == torch.float32 else 1.1
    y, expert, row = torch_npu.npu_moe_gating_top_k_softmax(on_x, on_finished, choices)
    agree(y, scores, roundings=roundings)
    same(expert, indices)
    same(row, torch.arange(tokens).unsqueeze(1) + tokens * torch.arange(choices))
    y, expert, result = torch_npu.npu_moe_gating_top_k_softmax_v2(
        on_x, k=choices, finished=on_finished, renorm=0, output_softmax=True
    )
    agree(y, scores, roundings=roundings)
    same(expert, indices)
    agree(result, softmax, roundings=12)
    y, expert, _ = torch_npu.npu_moe_gating_top_k_softmax_v2(on_x, k=choices, finished=on_finished, renorm=1)
    agree(y, x.sort(-1, descending=True).values[:, :choices].softmax(-1), roundings=roundings)
    same(expert, indices)


@settings(max_examples=40)
@given(TOKENS, EXPERTS, HIDDEN, DTYPES, st.integers(1, 3), st.data())
def test_init_routing_and_finalize_routing_carry_tokens_there_and_back(tokens, experts, hidden, dtype, choices, data):
    choices = min(choices, experts)
    x = numbers(tokens, hidden, seed=1, dtype=dtype)
    expert = chosen_experts(tokens, experts, choices, seed=2)
    row = torch.arange(tokens * choices).view(choices, tokens).t()
    order = expert.reshape(-1).argsort(stable=True)
    active = data.draw(st.integers(1, tokens))
    found, rows, experts_found = torch_npu.npu_moe_init_routing(
        on_npu(x, dtype, data.draw(layouts(2))), row.int().contiguous().npu(), expert.int().npu(), active
    )
    sorted_rows = row.reshape(-1)[order]
    agree(found, x[sorted_rows[: active * choices] % tokens], roundings=0)
    same(rows, sorted_rows.argsort())
    same(experts_found, expert.reshape(-1)[order])
    ends = torch_npu.npu_moe_compute_expert_tokens(experts_found, experts)
    same(ends, expert.reshape(-1).bincount(minlength=experts).cumsum(0))

    expanded = numbers(tokens * choices, hidden, seed=3, dtype=dtype)
    skip1, skip2 = (numbers(tokens, hidden, seed=seed, dtype=dtype) for seed in (4, 5))
    bias = numbers(experts, hidden, seed=6, dtype=dtype)
    scales = numbers(tokens, choices, seed=7, dtype=dtype)
    on = [on_npu(value, dtype) for value in (expanded, skip1, skip2, bias, scales)]
    out = torch_npu.npu_moe_finalize_routing(*on, rows, expert.int().npu())
    terms = scales.unsqueeze(2) * (expanded[sorted_rows.argsort()[row]] + bias[expert])
    size = scales.abs().unsqueeze(2) * (expanded[sorted_rows.argsort()[row]].abs() + bias[expert].abs())
    agree(out, skip1 + skip2 + terms.sum(1), skip1.abs() + skip2.abs() + size.sum(1), SUM[dtype])
    out = torch_npu.npu_moe_finalize_routing(on[0], None, None, None, None, rows, None, 0, choices)
    picked = expanded[sorted_rows.argsort()[row]]
    agree(out, picked.sum(1), picked.abs().sum(1), SUM[dtype])


@settings(max_examples=40)
@given(TOKENS, EXPERTS, HIDDEN, DTYPES, st.integers(1, 3), st.data())
def test_init_routing_v2_expands_the_tokens_of_the_active_experts(tokens, experts, hidden, dtype, choices, data):
    count_type, index_type = data.draw(st.sampled_from((0, 1, 2))), data.draw(st.sampled_from((0, 1)))
    choices = min(choices, experts)
    first = data.draw(st.integers(0, experts - 1))
    last = data.draw(st.integers(first + 1, experts))
    x = numbers(tokens, hidden, seed=1, dtype=dtype)
    expert = chosen_experts(tokens, experts, choices, seed=2).reshape(-1)
    inside = (first <= expert) & (expert < last)
    order = torch.where(inside, expert, experts).argsort(stable=True)
    number = int(inside.sum())
    found, rows, counts, scales = torch_npu.npu_moe_init_routing_v2(
        on_npu(x, dtype),
        expert.view(tokens, choices).int().npu(),
        scale=torch.arange(tokens).float().npu(),
        active_num=tokens * choices,
        expert_num=experts,
        drop_pad_mode=0,
        expert_tokens_num_type=count_type,
        expert_tokens_num_flag=True,
        active_expert_range=[first, last],
        quant_mode=-1,
        row_idx_type=index_type,
    )
    agree(found[:number], x[order[:number] // choices], roundings=0)
    agree(scales[:number], (order[:number] // choices).double(), roundings=0)
    if index_type == 0:
        same(rows, torch.full_like(order, -1).scatter(0, order[:number], torch.arange(number)))
    else:
        same(rows[:number], order[:number])
    expected = expert[inside].bincount(minlength=experts)[first:last]
    if count_type == 2:
        pairs = [[first + index, int(count)] for index, count in enumerate(expected) if count]
        same(counts, torch.tensor(pairs + [[0, 0]] * (experts - len(pairs))))
    else:
        same(counts, expected.cumsum(0) if count_type == 0 else expected)


@settings(max_examples=20)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=1, max_size=3), st.sampled_from(FLOATING[1:])
)
def test_re_routing_brings_tokens_of_all_ranks_into_the_order_of_experts(counts, dtype):
    total = sum(map(sum, counts))
    tokens = numbers(total, 4, seed=1, dtype=dtype)
    scales = torch.arange(total).float()
    expert = torch.tensor([e for rank in counts for e, n in enumerate(rank) for _ in range(n)], dtype=torch.int64)
    order = expert.argsort(stable=True)
    found, found_scales, indices, per_expert = torch_npu.npu_moe_re_routing(
        on_npu(tokens, dtype), torch.tensor(counts).npu(), per_token_scales=scales.npu()
    )
    agree(found, tokens[order], roundings=0)
    agree(found_scales, scales[order].double(), roundings=0)
    same(indices, order)
    same(per_expert, torch.tensor(counts).sum(0))


@pytest.mark.parametrize("choices", [1, 2])
def test_a_layer_of_experts_is_the_weighted_sum_of_its_experts(choices):
    """Permute, a grouped product, unpermute: gradients reach tokens, experts' outputs and probs."""
    tokens, experts, hidden, dtype = 12, 4, 8, torch.float32
    x = numbers(tokens, hidden, seed=1, dtype=dtype).requires_grad_()
    weight = numbers(experts, hidden, hidden, seed=2, dtype=dtype)
    probs = probabilities(tokens, choices, dtype=dtype).requires_grad_()
    expert = chosen_experts(tokens, experts, choices, seed=3)
    expected = (torch.einsum("th,tchk->tck", x, weight[expert]) * probs.unsqueeze(2)).sum(1)
    expected.backward(torch.ones_like(expected))
    on_x, on_probs = (on_npu(value.detach(), dtype).requires_grad_() for value in (x, probs))
    permuted, positions = torch_npu.npu_moe_token_permute(on_x, expert.npu())
    counts = {"group_list": expert.reshape(-1).bincount(minlength=experts).npu(), "group_list_type": 1}
    options = {"split_item": 3, "group_type": 0, **counts}
    (product,) = torch_npu.npu_grouped_matmul([permuted.detach()], [on_npu(weight, dtype)], **options)
    product.requires_grad_()
    found = torch_npu.npu_moe_token_unpermute(product, positions, probs=on_probs)
    found.backward(torch.ones(tokens, hidden).npu())
    (dpermuted,) = torch_npu.npu_grouped_matmul([product.grad], [on_npu(weight.transpose(1, 2), dtype)], **options)
    permuted.backward(dpermuted)
    size = (hidden * choices * x.detach().abs().max() * weight.abs().max()).expand(tokens, hidden)
    agree(found, expected.detach(), size, 8)
    agree(on_x.grad, x.grad, size + choices * hidden * weight.abs().max(), 8)
    agree(on_probs.grad, probs.grad, size.amax() * hidden * torch.ones_like(probs), 8)
