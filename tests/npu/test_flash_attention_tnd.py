"""npu_fusion_attention over packed documents (layout TND) agrees with each document's own attention in float64."""

from itertools import accumulate

import pytest
import torch
import torch_npu
from agreement import FLOATING, agree, layouts, numbers, on_npu, rounded
from attention_reference import attention, compressed_mask, hidden_in_mode
from hypothesis import example, given, settings
from hypothesis import strategies as st

HEADS, KEY_HEADS, SIZE, VALUE_SIZE = 4, 2, 16, 8
UNLIMITED = 2**31 - 1

lengths = st.sampled_from((0, 1, 2, 5, 33, 70))


def packed(*shape_tail: int, lengths: list[int], seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [numbers(length, *shape_tail, seed=seed + 31 * i, dtype=dtype) for i, length in enumerate(lengths)]


def ends_of(lengths: list[int]) -> list[int]:
    return list(accumulate(lengths))


def documents(rows: list[int], keys: list[int], dtype: torch.dtype, seed: int):
    """Query, key, value and the gradient of the result, each as one tensor [length, heads, size] a document."""
    return (
        packed(HEADS, SIZE, lengths=rows, seed=seed, dtype=dtype),
        packed(KEY_HEADS, SIZE, lengths=keys, seed=seed + 1, dtype=dtype),
        packed(KEY_HEADS, VALUE_SIZE, lengths=keys, seed=seed + 2, dtype=dtype),
        packed(HEADS, VALUE_SIZE, lengths=rows, seed=seed + 3, dtype=dtype),
    )


def statistics_by_document(statistics: torch.Tensor, rows: list[int], softmax_layout: str) -> list[torch.Tensor]:
    """[heads, rows, 8] of each document: by default a document's numbers lie by head, whatever the shape says."""
    parts = statistics.split(rows)
    if softmax_layout == "TND":
        return [part.transpose(0, 1) for part in parts]
    return [part.reshape(HEADS, -1, 8) for part in parts]


def check(rows, keys, dtype, seed, hidden, *, strided=(None, None, None), sink=None, tail=(), version=1, **options):
    """Run the documents packed, and compare each with itself alone. ``tail`` ends the lists of cumulative lengths.
    ``version`` is that of torch_npu's function."""
    separate = documents(rows, keys, dtype, seed)
    query, key, value = (
        on_npu(torch.cat(one), dtype, layout).requires_grad_()
        for one, layout in zip(separate[:3], strided, strict=True)
    )
    leaves = {"query": query, "key": key, "value": value}
    if sink is not None:
        leaves["sink"] = sink.float().npu().requires_grad_()
        options["sink"] = leaves["sink"]
    fused = (torch_npu.npu_fusion_attention, torch_npu.npu_fusion_attention_v2, torch_npu.npu_fusion_attention_v3)
    of_lengths = torch.tensor if version == 3 else list
    out, maximum, total, *_ = fused[version - 1](
        query,
        key,
        value,
        HEADS,
        "TND",
        scale=SIZE**-0.5,
        actual_seq_qlen=of_lengths([*ends_of(rows), *tail]),
        actual_seq_kvlen=of_lengths([*ends_of(keys), *tail]),
        **options,
    )
    gradients = torch.autograd.grad(out, list(leaves.values()), on_npu(torch.cat(separate[3]), dtype))
    found = dict(zip(leaves, gradients, strict=True))
    softmax_layout = options.get("softmax_layout", "")
    maxima, totals = (statistics_by_document(one, rows, softmax_layout) for one in (maximum, total))
    sink_gradient, sink_magnitude = torch.zeros(HEADS).double(), torch.zeros(HEADS).double()
    begin = key_begin = 0
    for i, document in enumerate(zip(*separate, strict=True)):
        if rows[i] > 0:
            alone = attention(
                *(tensor.transpose(0, 1)[None] for tensor in document),
                hidden[i],
                scale=SIZE**-0.5,
                dtype=dtype,
                sink=sink,
            )
            magnitudes, part = alone.magnitudes, slice(begin, begin + rows[i])
            key_part = slice(key_begin, key_begin + keys[i])
            agree(out[part], alone.out[0].transpose(0, 1), magnitudes["out"][0].transpose(0, 1))
            agree(
                maxima[i], alone.max[0, ..., None].expand(-1, -1, 8), magnitudes["max"][0, ..., None].expand(-1, -1, 8)
            )
            agree(totals[i], alone.sum[0, ..., None].expand(-1, -1, 8), magnitudes["sum"].expand(maxima[i].shape))
            for name, where in (("query", part), ("key", key_part), ("value", key_part)):
                wanted, magnitude = (one[name][0].transpose(0, 1) for one in (alone.gradients, magnitudes))
                agree(found[name][where], wanted, magnitude)
            if sink is not None:
                sink_gradient += alone.gradients["sink"]
                sink_magnitude += magnitudes["sink"]
        else:
            assert not found["key"][key_begin : key_begin + keys[i]].cpu().any()
        begin, key_begin = begin + rows[i], key_begin + keys[i]
    if sink is not None:
        agree(found["sink"], sink_gradient, sink_magnitude)


def all_visible(rows, keys):
    return [torch.zeros(r, k, dtype=torch.bool) for r, k in zip(rows, keys, strict=True)]


@settings(max_examples=40)
@given(
    st.lists(lengths, min_size=1, max_size=4).filter(any),
    st.sampled_from(FLOATING),
    st.sampled_from((None, 2, 3)),
    st.sampled_from(("", "TND")),
    st.tuples(*[layouts(3)] * 3),
    st.integers(0, 99),
)
@example([600, 0, 300], torch.bfloat16, 3, "", (None, None, None), 1)
def test_documents_of_any_lengths_do_not_see_each_other(rows, dtype, mode, softmax_layout, strided, seed):
    hidden, options = all_visible(rows, rows), {}
    if mode is not None:
        hidden = [hidden_in_mode(mode, length, length) for length in rows]
        options = {"atten_mask": compressed_mask().npu(), "sparse_mode": mode}
    check(rows, rows, dtype, seed, hidden, strided=strided, softmax_layout=softmax_layout, **options)


@settings(max_examples=30)
@given(
    st.lists(st.tuples(lengths, lengths), min_size=1, max_size=4).filter(lambda pairs: any(r for r, _ in pairs)),
    st.sampled_from(FLOATING),
    st.sampled_from((None, 2, 3)),
    st.integers(0, 99),
)
def test_documents_may_have_more_keys_than_rows(pairs, dtype, mode, seed):
    rows = [min(pair) for pair in pairs]
    keys = [max(pair) for pair in pairs]
    if not any(rows):
        rows = keys = [5]
    hidden, options = all_visible(rows, keys), {}
    if mode is not None:
        hidden = [hidden_in_mode(mode, r, k) for r, k in zip(rows, keys, strict=True)]
        options = {"atten_mask": compressed_mask().npu(), "sparse_mode": mode}
    check(rows, keys, dtype, seed, hidden, **options)


@pytest.mark.parametrize("version", (2, 3))
def test_the_later_versions_of_the_function_do_the_same(version):
    rows, keys = [5, 0, 33], [5, 3, 40]
    hidden = [hidden_in_mode(3, r, k) for r, k in zip(rows, keys, strict=True)]
    options = {"atten_mask": compressed_mask().npu(), "sparse_mode": 3}
    check(rows, keys, torch.bfloat16, 5, hidden, version=version, **options)
    sink = rounded(numbers(HEADS, seed=5), torch.float32)
    check(rows, keys, torch.bfloat16, 5, hidden, version=version, sink=sink, **options)


@pytest.mark.parametrize("softmax_layout", ("", "TND"))
@pytest.mark.parametrize("mode", (None, 3))
def test_a_sink_gets_the_gradient_of_all_documents(mode, softmax_layout):
    rows, keys = [5, 0, 33], [5, 3, 40]
    hidden, options = all_visible(rows, keys), {}
    if mode is not None:
        hidden = [hidden_in_mode(mode, r, k) for r, k in zip(rows, keys, strict=True)]
        options = {"atten_mask": compressed_mask().npu(), "sparse_mode": mode}
    sink = rounded(numbers(HEADS, seed=5), torch.float32)
    check(rows, keys, torch.bfloat16, 5, hidden, sink=sink, softmax_layout=softmax_layout, **options)


def test_a_mask_of_the_longest_document_serves_the_upper_left_of_each():
    rows, keys = [3, 7, 5], [4, 6, 8]
    mask = torch.rand(7, 8, generator=torch.Generator().manual_seed(2)) < 0.4
    mask[:, 0] = False
    hidden = [mask[:r, :k] for r, k in zip(rows, keys, strict=True)]
    check(rows, keys, torch.float32, 7, hidden, atten_mask=mask.npu(), sparse_mode=1)


def test_cumulative_lengths_that_end_in_zeros_leave_the_last_documents_out():
    rows = [2, 3, 4]
    check(rows, rows, torch.float32, 8, all_visible(rows, rows), tail=(0, 0))


def test_band_after_the_last_and_before_the_first_document_is_the_outer_cut_of_the_causal_modes():
    # the two cuts of CANN's documentation of sparse modes 7 and 8
    mask = {"atten_mask": compressed_mask().npu()}
    whole = hidden_in_mode(3, 4, 6)
    hidden = [hidden_in_mode(3, 3, 3), whole[:2]]
    check([3, 2], [3, 6], torch.float32, 9, hidden, sparse_mode=7, pre_tockens=6, next_tockens=-2, **mask)
    whole = hidden_in_mode(2, 5, 4)
    hidden = [whole[2:], hidden_in_mode(2, 5, 5), hidden_in_mode(2, 4, 4)]
    check([3, 5, 4], [4, 5, 4], torch.float32, 9, hidden, sparse_mode=8, pre_tockens=4, next_tockens=1, **mask)


@settings(max_examples=15)
@given(st.lists(st.tuples(lengths, lengths), min_size=1, max_size=3), st.data())
def test_each_document_has_its_own_prefix(pairs, data):
    rows, keys = [max(r, 1) for r, _ in pairs], [max(k, 1) for _, k in pairs]
    prefix = [data.draw(st.integers(max(k - r, 1), k)) for r, k in zip(rows, keys, strict=True)]
    hidden = [hidden_in_mode(6, r, k, prefix=p) for r, k, p in zip(rows, keys, prefix, strict=True)]
    mask = compressed_mask(3072).npu()
    check(rows, keys, torch.float32, 4, hidden, atten_mask=mask, sparse_mode=6, prefix=prefix)


@settings(max_examples=15)
@given(st.lists(lengths, min_size=1, max_size=3).filter(any), st.sampled_from(FLOATING), st.booleans())
def test_a_rotary_part_of_query_and_key_is_more_of_their_dims(rows, dtype, causal):
    rope = 4
    parts = documents(rows, rows, dtype, 3)
    rotary = (
        packed(HEADS, rope, lengths=rows, seed=11, dtype=dtype),
        packed(KEY_HEADS, rope, lengths=rows, seed=12, dtype=dtype),
    )
    on = [on_npu(torch.cat(one), dtype).requires_grad_() for one in (*parts[:3], *rotary)]
    query, key, value, query_rope, key_rope = on
    options = {"atten_mask": compressed_mask().npu(), "sparse_mode": 3} if causal else {}
    out, *_ = torch_npu.npu_fusion_attention_v2(
        query,
        key,
        value,
        HEADS,
        "TND",
        query_rope=query_rope,
        key_rope=key_rope,
        scale=0.25,
        actual_seq_qlen=ends_of(rows),
        actual_seq_kvlen=ends_of(rows),
        **options,
    )
    gradients = torch.autograd.grad(out, on, on_npu(torch.cat(parts[3]), dtype))
    begin = 0
    for i, length in enumerate(rows):
        if length == 0:
            continue
        joined = [torch.cat([parts[j][i], rotary[j][i]], dim=-1) for j in (0, 1)]
        hidden = hidden_in_mode(3, length, length) if causal else torch.zeros(length, length, dtype=torch.bool)
        given_ = [tensor.transpose(0, 1)[None] for tensor in (*joined, parts[2][i], parts[3][i])]
        alone = attention(*given_, hidden, scale=0.25, dtype=dtype)
        where, magnitudes = slice(begin, begin + length), alone.magnitudes
        agree(out[where], alone.out[0].transpose(0, 1), magnitudes["out"][0].transpose(0, 1))
        for name, at in (("query", 0), ("key", 1)):
            wanted, magnitude = (one[name][0].transpose(0, 1) for one in (alone.gradients, magnitudes))
            agree(gradients[at][where], wanted[..., :SIZE], magnitude[..., :SIZE])
            agree(gradients[at + 3][where], wanted[..., SIZE:], magnitude[..., SIZE:])
        begin += length
