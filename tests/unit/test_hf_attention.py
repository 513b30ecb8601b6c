"""Hugging Face models with ds_npu's attention give the logits, losses, gradients and texts of their own "eager" one."""

import contextlib
import copy

import pytest
import torch
import transformers
from attention_formula import attention_formula
from tiny_models import FAMILIES, VOCABULARY, Float64, config_of, tiny
from transformers import masking_utils

from ds_npu.models import attention_mask as masks
from ds_npu.models.attention_function import attention_function, use_attention
from ds_npu.ops.attention import Mask

LENGTH = 12
SLIDING = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
MODELS = [*FAMILIES, "qwen2 sliding"]


def made(family):
    if family == "qwen2 sliding":
        return tiny("qwen2", **SLIDING)
    # transformers' loss of the routers knows neither masks of four dims nor left padding with a cache.
    return tiny(family, output_router_logits=False) if family in ("mixtral", "qwen3_moe") else tiny(family)


def tokens(batch=2, length=LENGTH, seed=3):
    return torch.randint(3, VOCABULARY - 4, (batch, length), generator=torch.Generator().manual_seed(seed))


def padding(kind):
    seen = torch.ones(2, LENGTH, dtype=torch.long)
    if kind in ("right", "both"):
        seen[0, 8:] = 0
    if kind in ("left", "both"):
        seen[1, :3] = 0
    if kind == "holes":
        seen[0, 4:6] = 0
    if kind == "a sample":
        seen[1, 1:] = 0
        seen[0, 5:] = 0
    return seen


def four_dims(kind):
    seen = (torch.rand(2, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.6).tril()
    seen |= torch.eye(LENGTH, dtype=torch.bool)
    return (
        seen if kind == "bool" else torch.zeros(seen.shape).double().masked_fill(~seen, torch.finfo(torch.double).min)
    )


def packed(batch):
    """Position ids of documents: 5, 1 and 6 tokens long, the other sample's 8 and 4."""
    rows = [[*range(5), 0, *range(6)], [*range(8), *range(4)]]
    return torch.tensor(rows[:batch])


CASES = {
    "plain": lambda: {},
    "all seen": lambda: {"attention_mask": padding("none")},
    **{
        f"padding {kind}": lambda kind=kind: {"attention_mask": padding(kind)}
        for kind in ("right", "left", "both", "holes")
    },
    "padding a sample": lambda: {"attention_mask": padding("a sample")},
    "packed": lambda: {"position_ids": packed(2)},
    "4d bool": lambda: {"attention_mask": four_dims("bool")},
    "4d float": lambda: {"attention_mask": four_dims("float")},
}


def step(model, options, ids=None, mode=Float64):
    """Loss, the logits that count and every gradient. Rows of padding do not count, so none of it is a label, and
    neither is the token after it."""
    ids = tokens() if ids is None else ids
    seen = options.get("attention_mask")
    labels = ids if seen is None or seen.dim() == 4 else ids.masked_fill((seen & seen.roll(1, 1)) == 0, -100)
    model.zero_grad()
    with mode():
        result = model(input_ids=ids, labels=labels, use_cache=False, **options)
        result.loss.backward()
    logits = result.logits if seen is None or seen.dim() == 4 else result.logits[seen == 1]
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": result.loss.detach(), "logits": logits.detach(), **gradients}


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-12, atol=1e-12, msg=lambda said, name=name: f"{name}: {said}"
        )


@pytest.fixture(scope="module")
def models():
    """Each family's model and the same one with ds_npu's attention."""
    pairs = {}

    def of(family):
        if family not in pairs:
            model = made(family)
            pairs[family] = (model, copy.deepcopy(model))
            use_attention(pairs[family][1])
        return pairs[family]

    return of


@pytest.fixture
def evaluated(monkeypatch):
    """How often transformers' mask was materialised."""
    calls = []
    original = masking_utils.sdpa_mask
    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda **asked: calls.append(asked) or original(**asked))
    return calls


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", MODELS)
def test_every_family_and_mask(family, case, models):
    if family == "qwen2_5_vl" and case == "packed":
        options = {"position_ids": packed(2).expand(4, -1, -1)}
    else:
        options = CASES[case]()
    eager, ours = models(family)
    # A boolean mask "eager" would add to the scores.
    same(step(ours, options), step(eager, CASES["4d float"]() if case == "4d bool" else options))


@pytest.mark.parametrize("case", ("plain", "all seen", "padding right", "padding left", "packed"))
@pytest.mark.parametrize("family", ("llama", "mistral", "qwen2 sliding"))
def test_what_is_expressible_is_not_materialised(family, case, models, evaluated):
    step(models(family)[1], CASES[case]())
    # A window over samples with padding at the right is no band of their documents.
    assert bool(evaluated) == (case == "padding right" and family != "llama")


@pytest.mark.parametrize("kind", ("right", "left", "both", "holes", "a sample"))
@pytest.mark.parametrize("family", ("llama", "gpt2"))
def test_rows_of_padding_are_those_of_sdpa_too(family, kind, models):
    """All logits and gradients, though all are labels: for a row that sees no key transformers' "sdpa" gives 0."""
    eager, ours = models(family)
    reference = copy.deepcopy(eager)
    reference.set_attn_implementation("sdpa")
    found = []
    for model in (ours, reference):
        model.zero_grad()
        with Float64():
            result = model(input_ids=tokens(), labels=tokens(), attention_mask=padding(kind), use_cache=False)
            result.loss.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        found.append({"loss": result.loss.detach(), "logits": result.logits.detach(), **gradients})
    same(*found)


@pytest.mark.parametrize("left", (0, 3))
@pytest.mark.parametrize("family", MODELS)
def test_generation_with_a_cache(family, left, models):
    seen = torch.ones(2, 7, dtype=torch.long)
    seen[1, :left] = 0
    options = {"max_new_tokens": 9, "do_sample": False, "min_new_tokens": 9, "output_logits": True, "use_cache": True}
    results = []
    for model in models(family):
        with Float64():
            model.eval()
            results.append(
                model.generate(tokens(length=7), attention_mask=seen, return_dict_in_generate=True, **options)
            )
            model.train()
    assert torch.equal(results[0].sequences, results[1].sequences)
    for one, other in zip(*(result.logits for result in results), strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", ("llama", "mistral"))
def test_several_tokens_after_a_cache_and_a_static_one(family, models):
    ids, found = tokens(), []
    for model in models(family):
        logits = []
        with Float64(), torch.no_grad():
            for cache in (
                transformers.DynamicCache(config=model.config),
                transformers.StaticCache(config=model.config, max_cache_len=16),
            ):
                for part in ids.split((7, 4, 1), 1):
                    logits.append(model(input_ids=part, past_key_values=cache, use_cache=True).logits)
        found.append(torch.cat(logits, 1))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reentrant", (True, False))
@pytest.mark.parametrize("case", ("plain", "padding right", "padding holes", "packed"))
def test_checkpointed_layers_get_their_mask_again(case, reentrant, models):
    _, ours = models("llama")
    checkpointed = copy.deepcopy(ours)
    checkpointed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    checkpointed.enable_input_require_grads()
    # Not in float64: what is computed again in the backward pass is out of the mode's reach.
    same(*(step(model, CASES[case](), mode=contextlib.nullcontext) for model in (checkpointed, ours)))


def test_cu_seq_lens_are_packed_documents(models):
    """As transformers' DataCollatorWithFlattening gives them, with and without position ids."""
    eager, ours = models("llama")
    ends = torch.tensor([0, 5, 6, 12], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 6, "max_length_k": 6}
    wanted = step(eager, {"position_ids": packed(1)}, tokens(1))
    same(step(ours, {"position_ids": packed(1), **lengths}, tokens(1)), wanted)
    # Rotary positions are relative: without position ids the documents are the same but for their shift.
    shifted = {name: value for name, value in step(ours, lengths, tokens(1)).items() if name in ("loss", "logits")}
    same({"loss": shifted["loss"]}, {"loss": wanted["loss"]})
    with pytest.raises(ValueError, match="batch of 2"):
        step(ours, lengths)


def test_dropout_goes_to_the_kernel(models):
    _, ours = models("llama")
    for layer in ours.model.layers:
        layer.self_attn.attention_dropout = 0.5
    torch.manual_seed(1)
    first = step(ours, {})
    torch.manual_seed(1)
    second = step(ours, {})
    third = step(ours, {})
    ours.eval()
    without = step(ours, {})
    ours.train()
    for layer in ours.model.layers:
        layer.self_attn.attention_dropout = 0.0
    same(second, first)
    same(without, step(ours, {}))
    assert len({float(one["loss"]) for one in (first, third, without)}) == 3


def test_autocast_computes_in_its_dtype_like_torchs_own(models):
    _, ours = models("llama")
    ours = copy.deepcopy(ours).float()
    reference = copy.deepcopy(ours)
    reference.set_attn_implementation("sdpa")
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = (model(input_ids=tokens(), use_cache=False).logits for model in (ours, reference))
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)


def test_one_model_is_switched_and_no_other(models):
    config = config_of("llama")
    one, other = (transformers.LlamaForCausalLM(config) for _ in range(2))
    use_attention(one)
    assert one.config._attn_implementation == one.model.layers[0].self_attn.config._attn_implementation == "ds_npu"
    assert other.config._attn_implementation == config._attn_implementation == "eager"
    assert one.config is one.model.config is one.model.layers[0].self_attn.config


def test_a_layer_with_a_config_of_its_own_is_switched_too():
    """Tensor parallelism gives an attention its own config, with fewer heads."""
    model = tiny("llama")
    layer = model.model.layers[1].self_attn
    layer.config = copy.deepcopy(layer.config)
    use_attention(model)
    assert layer.config._attn_implementation == "ds_npu" and layer.config is not model.config


def refuses(model, said):
    with pytest.raises((ValueError, TypeError), match=said):
        use_attention(model)


def test_what_cannot_be_computed_is_refused():
    from_config = transformers.AutoModelForCausalLM.from_config
    bloom = from_config(transformers.BloomConfig(vocab_size=32, hidden_size=32, n_layer=1, n_head=2))
    before = bloom.config._attn_implementation
    refuses(bloom, "computes its attention itself")
    assert bloom.config._attn_implementation == before
    refuses(torch.nn.Linear(2, 2), "no model of transformers")


@pytest.mark.parametrize(
    ("asked", "said"),
    (
        ({"position_bias": torch.zeros(1, 2, 3, 3)}, "bias"),
        ({"output_attentions": True}, "output_attentions"),
        ({"sliding_window": 2, "is_causal": False}, "not causal"),
        ({"attention_mask": torch.full((1, 1, 3, 3), -0.5)}, "bias of the scores"),
        ({"attention_mask": torch.ones(1, 1, 3, 3).bool(), "cu_seq_lens_q": torch.tensor([0, 3])}, "either"),
    ),
)
def test_a_call_that_cannot_be_honoured_says_so(asked, said):
    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match=said):
        attention_function(torch.nn.Module(), x, x, x, **asked)


def test_a_mask_that_was_changed_in_place_is_read_again():
    x = torch.randn(1, 1, 3, 4)
    seen = torch.ones(1, 1, 3, 3).bool().tril()
    first, _ = attention_function(torch.nn.Module(), x, x, x, attention_mask=seen)
    again, _ = attention_function(torch.nn.Module(), x, x, x, attention_mask=seen)
    seen.fill_(True)
    full, _ = attention_function(torch.nn.Module(), x, x, x, attention_mask=seen)
    torch.testing.assert_close(again, first)
    torch.testing.assert_close(full, torch.nn.functional.scaled_dot_product_attention(x, x, x).transpose(1, 2))


# ---- the mask function, against transformers' own evaluation of the same mask ----

FUNCTIONS = {
    "causal": lambda: masking_utils.causal_mask_function,
    "sliding": lambda: masking_utils.sliding_window_causal_mask_function(3),
    "bidirectional": lambda: masking_utils.bidirectional_mask_function,
    "bidirectional sliding": lambda: masking_utils.sliding_window_bidirectional_mask_function(2),
    "chunked": lambda: masking_utils.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.long)),
    "of a user": lambda: masking_utils.and_masks(
        masking_utils.causal_mask_function, lambda batch, head, q, kv: (kv + batch) % 3 != 1
    ),
}
if hasattr(masking_utils, "blockwise_overlay"):  # Later than the oldest release that is supported.
    FUNCTIONS["with blocks"] = lambda: masking_utils.or_masks(
        masking_utils.causal_mask_function,
        masking_utils.blockwise_overlay(torch.tensor([[-1, 0, 0, 0] + [-1] * 12] * 2)),
    )
KNOWN = {"causal", "sliding", "bidirectional", "bidirectional sliding"}


def hidden(found, rows, keys):
    """[B or 1, rows, keys], True where hidden, of what the mask function returned."""
    if found is None:
        found = Mask(after=0)
    if isinstance(found, torch.Tensor):
        return ~found[:, 0]
    everything = found.band(rows, keys).hidden(range(rows), range(keys), torch.device("cpu"))
    return torch.zeros(1, rows, keys).bool() if everything is None else everything[None]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("sizes", ((7, 7, 0, 0), (1, 8, 7, 0), (3, 8, 5, 0), (3, 8, 0, 0), (2, 6, 9, 5)), ids=str)
def test_the_mask_function_says_what_transformers_evaluates(name, sizes):
    rows, keys, q_offset, kv_offset = sizes
    asked = {"batch_size": 2, "q_length": rows, "kv_length": keys, "q_offset": q_offset, "kv_offset": kv_offset}
    asked |= {"mask_function": FUNCTIONS[name](), "attention_mask": None, "use_vmap": False}
    found = masks.attention_mask(**asked)
    whole = masking_utils.sdpa_mask(**asked, allow_is_causal_skip=False)
    assert torch.equal(hidden(found, rows, keys).expand(2, -1, -1), ~whole[:, 0])
    assert isinstance(found, torch.Tensor) == (name not in KNOWN)
    assert (found is None) == (name == "causal" and q_offset + rows == kv_offset + keys)


@pytest.mark.parametrize("kind", ("none", "right", "left", "both", "holes", "a sample"))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_padding_is_what_transformers_evaluates(name, kind):
    asked = {"batch_size": 2, "q_length": LENGTH, "kv_length": LENGTH, "mask_function": FUNCTIONS[name]()}
    asked |= {"attention_mask": padding(kind).bool(), "use_vmap": False}
    found = masks.attention_mask(**asked)
    q, k, v = (torch.randn(2, heads, LENGTH, 8).double() for heads in (4, 2, 2))
    out, _ = attention_function(torch.nn.Module(), q, k, v, found, scaling=0.3)
    wanted, _ = attention_formula(q, k, v, ~masking_utils.sdpa_mask(**asked, allow_is_causal_skip=False), 0.3)
    torch.testing.assert_close(out.transpose(1, 2), wanted, rtol=1e-12, atol=1e-12)
    if name in ("causal", "bidirectional") and kind != "holes":
        assert not isinstance(found, torch.Tensor)


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_a_mask_that_transformers_goes_on_to_work_with_is_a_tensor(name):
    asked = {"batch_size": 1, "q_length": 4, "kv_length": 4, "mask_function": FUNCTIONS[name](), "attention_mask": None}
    assert isinstance(masks.attention_mask(**asked, allow_is_causal_skip=False), torch.Tensor)


def test_a_long_causal_mask_is_nothing():
    """At a length whose mask would be 4 GiB."""
    asked = {"batch_size": 1, "q_length": 65536, "kv_length": 65536, "attention_mask": torch.ones(1, 65536).bool()}
    assert masks.attention_mask(mask_function=masking_utils.causal_mask_function, **asked) is None
    sliding = masks.attention_mask(mask_function=masking_utils.sliding_window_causal_mask_function(4096), **asked)
    assert (sliding.before, sliding.after, sliding.dense) == (4095, 0, None)
