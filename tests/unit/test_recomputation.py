"""What is computed again in backward: to the bit what was, bytes that are kept, and what is refused."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import tiny_models
import torch
import transformers
from adapted_models import ATTENTION, adapted
from memory_steps import same, step, three_backwards
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from wire import Memory

from ds_npu.config.rules import broken_rules
from ds_npu.config.sections import DsNpuConfig
from ds_npu.features.build import Build
from ds_npu.features.driver import apply_features, values_in
from ds_npu.memory import swapped_activations
from ds_npu.memory.held_tensor import ModifiedTensorError
from ds_npu.memory.recomputation import Recomputation, RecomputationError, without_outputs
from ds_npu.memory.swapped_activations import SWAPPED_FORWARD, ActivationSwap
from ds_npu.parallel.expert.overlap import SavingContext
from ds_npu.parallel.runtime.micro_batch import new_forward

ONE_RANK = SimpleNamespace(size=lambda *axes: 1, rank=lambda *axes: 0)
"""A topology without process groups."""
VARIANTS: dict[str, dict[str, object]] = {
    "all": {"layers": "all"},
    "uniform": {"layers": 2, "method": "uniform"},
    "block": {"layers": 1, "method": "block", "norm": True, "activation_function": True},
    "norm": {"norm": True},
    "activation_function": {"activation_function": True},
    "outputs": {"norm": True, "activation_function": True},
    "modules": {"modules": ["**.mlp"]},
    "matmul": {"layers": "all", "keep": ["matmul"]},
    "kept": {"layers": "all", "keep": ["matmul", "attention"]},
    "uniform, kept": {"layers": 2, "method": "uniform", "keep": ["attention"]},
    "modules behind norms": {"modules": ["**.mlp"], "norm": True},
    "some layers": {"norm": ["**.{0..0}"], "activation_function": ["**.1"]},
    "attention_core": {"attention_core": True},
    "parts": {"attention_core": True, "norm": True, "activation_function": True},
}
DROPS = {"attn_pdrop": 0.3, "embd_pdrop": 0.2, "resid_pdrop": 0.1}


def changed(model: nn.Module, recompute: dict[str, object], **section: object) -> nn.Module:
    config = DsNpuConfig.model_validate({"recompute": recompute, **section})
    apply_features(values_in(config), Build(ONE_RANK, model))
    return model


@pytest.mark.parametrize("fused", [{}, {"rms_norm": True, "swiglu": True}], ids=["", "fused"])
@pytest.mark.parametrize("family", [*tiny_models.FAMILIES, *tiny_models.SCALED])
def test_every_variant_of_every_family_to_the_bit(family, fused):
    drops = DROPS if family == "gpt2" else {"attention_dropout": 0.3}

    def model() -> nn.Module:
        return tiny_models.tiny(family, torch.float32, num_hidden_layers=3, **drops)

    expected = step(changed(model(), {}, fused_ops=fused))
    for name, recompute in VARIANTS.items():
        if family == "mixtral" and "activation_function" in recompute:
            with pytest.raises(ValueError, match=r"recompute\.activation_function: .* the role mlp\..*zero_memory$"):
                changed(model(), recompute)
        elif family != "gpt2" or name != "modules":
            assert same(step(changed(model(), recompute, fused_ops=fused)), expected), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_in_bfloat16_and_in_autocast(variant):
    expected = step(tiny_models.tiny("llama", torch.bfloat16))
    assert same(step(changed(tiny_models.tiny("llama", torch.bfloat16), VARIANTS[variant])), expected)
    with torch.autocast("cpu", torch.bfloat16):
        expected = step(tiny_models.tiny("llama", torch.float32))
        assert same(step(changed(tiny_models.tiny("llama", torch.float32), VARIANTS[variant])), expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_adapters(variant):
    expected = step(adapted("llama", ATTENTION, lora_dropout=0.2).float())
    assert same(step(changed(adapted("llama", ATTENTION, lora_dropout=0.2).float(), VARIANTS[variant])), expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_backwards_and_two_micro_batches(variant):
    models = [tiny_models.tiny("llama", torch.float32) for _ in range(2)]
    changed(models[0], VARIANTS[variant])
    assert same(*(three_backwards(each, (2, 9), (1, 12)) for each in models))


# ---- bytes ----

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 336,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_implementation": "sdpa",
}
TOKENS = 4 * 128


EAGER = {"attn_implementation": "eager"}


def kept(variant: dict[str, object], layers: int, dtype: torch.dtype, changes: dict[str, object] | None = None) -> int:
    """The bytes that a forward keeps until backward."""
    model = changed(
        tiny_models.tiny(
            "llama", dtype, num_hidden_layers=layers, max_position_embeddings=128, **SIZES | (changes or {})
        ),
        variant,
    )
    ids = tiny_models.tokens(4, 128)
    with Memory() as memory:
        loss = model(input_ids=ids, labels=ids).loss
    gc.collect()
    assert loss.requires_grad
    return memory.alive


def minimum(variant: str, element: int) -> int:
    """The fewest bytes that a Llama block of T tokens, hidden H, keys K, intermediate I and N heads must keep.

    Recomputed whole, its input: e T H, of e bytes a number. Else what its matrix products need that nothing cheap can
    be computed from: the inputs of both norms, queries, attention's output (4 e T H), keys and values (2 e T K), gate
    and up (2 e T I), and of attention the logarithms of its sums in float32 (4 T N). Without recomputing activation
    functions also SiLU of the gate and its product with up (2 e T I). Without norms, of each of the two, also its
    output, the quotient before the weight (2 e T H) and the deviation (4 T), and in bf16 its input in float32 in place
    of the input (2 T H). Attention that is recomputed keeps no logarithms. Of a block that is recomputed but for its
    matrix products there are their results, of which down's is not needed, its input, and with "attention" its output.
    Of an MLP that is recomputed whole there is its input, a norm's output, and neither gate nor up.
    """
    hidden, inner, heads = SIZES["hidden_size"], SIZES["intermediate_size"], SIZES["num_attention_heads"]
    keys = hidden // heads * SIZES["num_key_value_heads"]
    if variant == "all":
        return element * TOKENS * hidden
    inner_bytes = element * TOKENS * 2 * inner
    least = element * TOKENS * (4 * hidden + 2 * keys + 2 * inner) + 4 * TOKENS * heads
    if variant in ("kept", "matmul"):
        return least - (0 if variant == "kept" else element * TOKENS * hidden + 4 * TOKENS * heads)
    if variant == "norm":
        return least + inner_bytes
    per_norm = 2 * element * hidden + 4 + (2 * hidden if element == 2 else 0)
    more = {"attention_core": inner_bytes - 4 * TOKENS * heads, "plain": inner_bytes, "modules": -inner_bytes}
    return least + (0 if variant == "outputs" else TOKENS * 2 * per_norm + more.get(variant, 0))


def test_attention_between_its_projections_keeps_no_scores():
    """Eager attention keeps its scores, their exponentials and copies: several times T S numbers of each head."""

    def scores(variant: dict[str, object]) -> int:
        """The bytes of a block."""
        return kept(variant, 3, torch.float32, EAGER) - kept(variant, 2, torch.float32, EAGER)

    found, plain = scores({"attention_core": True}), scores({})
    heads, length = SIZES["num_attention_heads"], 128
    print(f"{found:,} bytes a block, {plain:,} without")
    assert plain - found >= 4 * TOKENS * length * heads, "at least the probabilities"
    least = minimum("attention_core", 4)
    assert abs(found - least) <= 0.02 * least, (found, least)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "variant", ["plain", "all", "norm", "activation_function", "outputs", "modules", "kept", "matmul"]
)
def test_kept_bytes_of_a_block(variant, dtype):
    """Kept, and saved, within 2 % of the formulas."""
    recompute = VARIANTS.get(variant, {})
    found = kept(recompute, 3, dtype) - kept(recompute, 2, dtype)
    least, plain = minimum(variant, dtype.itemsize), minimum("plain", dtype.itemsize)
    print(f"{variant}, {dtype}: {found:,} bytes a block, at least {least:,}; {plain:,} without")
    assert abs(found - least) <= 0.02 * min(least, plain - least or least), (found, least, plain)


def test_layers_in_runs_keep_one_input():
    inputs = TOKENS * SIZES["hidden_size"] * 4
    whole = kept(VARIANTS["all"], 4, torch.float32)
    for length, fewer in ((2, 2), (4, 3)):
        found = whole - kept({"layers": length, "method": "uniform"}, 4, torch.float32)
        assert abs(found - fewer * inputs) <= 0.02 * inputs, (length, found)


# ---- the parts ----


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.name() in ("aten::mm", "aten::addmm", "aten::bmm")
        return func(*args, **(kwargs or {}))


def test_an_output_that_is_modified_is_kept():
    """What follows may change an output in place: it is not what can be computed again, then."""
    x, w = (torch.randn(5, 5, requires_grad=True) for _ in range(2))
    ((torch.sin(x) * 2) @ w).square().sum().backward()
    expected = [x.grad, w.grad]
    x.grad = w.grad = None
    with without_outputs():
        made = Recomputation(torch.sin, "cpu", stops_early=False)
        y = made(x)
        made.forget(y)
        loss = (y.mul_(2) @ w).square().sum()
        del y
    loss.backward()
    assert same([x.grad, w.grad], expected)


def test_what_backward_needs_must_not_be_modified():
    x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    with without_outputs():
        y = x * 1
        loss = (y @ w).sum()
    y.data.add_(0)
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(ModifiedTensorError, match=r"a tensor \[4, 4\] that backward needs has been modified in place"):
        loss.backward()


@pytest.mark.parametrize("shape", [(5, 5), (2, 5, 5)], ids=str)
@pytest.mark.parametrize("is_swapped", [False, True])
def test_a_kept_result_that_is_modified_is_computed_again(is_swapped, shape, monkeypatch):
    """Of three dimensions, the product is a view of what the operator returns, which counts its own modifications."""
    monkeypatch.setattr(swapped_activations, "LEAST_BYTES", 1)
    x, w = torch.randn(shape, requires_grad=True), torch.randn(5, 5, requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        found = x @ w
        return (found.sin_() @ w).exp()

    function(x).sum().backward()
    expected = [x.grad, w.grad]
    x.grad = w.grad = None
    recomputed = Recomputation(function, "cpu", kept=["matmul"])
    if is_swapped:
        swapped = ActivationSwap("cpu", [2]).begin()
        with new_forward() as micro_batch:
            SWAPPED_FORWARD.set(micro_batch, swapped)
            with swapped.call(0, [w]):
                loss = recomputed(x).sum()
        swapped.close()
    else:
        loss = recomputed(x).sum()
    loss.backward()
    assert same([x.grad, w.grad], expected)


def test_kept_products_are_not_computed_again():
    model = changed(tiny_models.tiny("llama", torch.float32), VARIANTS["matmul"])
    ids = tiny_models.tokens(2, 9)
    loss = model(input_ids=ids, labels=ids).loss
    with Products() as products:
        loss.backward()
    plain = tiny_models.tiny("llama", torch.float32)
    loss = plain(input_ids=ids, labels=ids).loss
    with Products() as expected:
        loss.backward()
    assert products.count == expected.count > 10


def test_other_values_are_an_error():
    calls = []

    def changing(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return (x * x).sin() if len(calls) == 1 else x.sin()

    x = torch.randn(3, requires_grad=True)
    with pytest.raises(RecomputationError, match="saved fewer tensors when it was computed again"):
        Recomputation(changing, "cpu")(x).sum().backward()


def test_nothing_stays_behind():
    x, w = torch.randn(6, 6, requires_grad=True), torch.randn(6, 6, requires_grad=True)
    with without_outputs():
        made = Recomputation(functional.silu, "cpu", stops_early=False)
        y = made(x * 1)
        made.forget(y)
        held = weakref.ref(y.untyped_storage())
        gone = weakref.ref(made)
        loss = (y @ w).sum()
        del y, made
    assert held() is None and gone() is not None
    loss.backward()
    assert gone() is None


# ---- what is refused ----


@pytest.mark.parametrize(
    ("recompute", "said"),
    [
        ({"layers": 3, "method": "block"}, r"recompute\.layers: found 3; LlamaForCausalLM has 2: at most so many"),
        ({"modules": ["**.nothing"]}, r"recompute\.modules: '\*\*\.nothing' matches no module of LlamaForCausalLM"),
        (
            {"modules": ["*mlp*"]},
            r"recompute\.modules: '\*mlp\*' matches no module .*: \"\*\*\.\*mlp\*\" matches model\.",
        ),
    ],
)
def test_what_a_model_does_not_have(recompute, said):
    with pytest.raises(ValueError, match=said):
        changed(tiny_models.tiny("llama"), recompute)


@pytest.mark.parametrize(
    ("section", "path", "said"),
    [
        ({"recompute": {"layers": 2}}, "recompute.layers", "'all', or ds_npu.recompute.method beside a number"),
        ({"recompute": {"method": "block"}}, "recompute.method", "only with a number at ds_npu.recompute.layers"),
    ],
)
def test_keys_that_contradict_each_other(section, path, said):
    (problem,) = broken_rules(DsNpuConfig.model_validate(section), frozenset())
    assert problem.path == f"ds_npu.{path}" and said in problem.accepted


def test_gradient_checkpointing_is_refused():
    model = tiny_models.tiny("llama")
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=r"ds_npu\.recompute: gradient checkpointing of .* is on"):
        changed(model, {"norm": True})


def test_a_cache_that_holds_something_is_refused():
    model = changed(tiny_models.tiny("llama", torch.float32), {"layers": "all"})
    ids, cache = tiny_models.tokens(1, 4), transformers.DynamicCache()
    assert model(input_ids=ids, labels=ids, use_cache=True).loss.requires_grad
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match="is trained with keys and values in past_key_values"):
        model(input_ids=ids, labels=ids, past_key_values=cache, use_cache=True)


def test_evaluation_is_as_ever():
    model = changed(tiny_models.tiny("llama", torch.float32), VARIANTS["outputs"]).eval()
    ids = tiny_models.tokens(2, 9)
    assert torch.equal(
        model(input_ids=ids).logits, tiny_models.tiny("llama", torch.float32).eval()(input_ids=ids).logits
    )


def test_what_runs_in_a_context_from_outside_is_no_part_of_the_recomputation():
    x, other = (torch.randn(3, 3, generator=torch.Generator().manual_seed(seed)).requires_grad_() for seed in range(2))
    outside = SavingContext()
    found: list[torch.Tensor] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        if not found:
            with outside.entered():
                found.append((other @ other).exp())
        return (x @ x).exp().sin()

    made = Recomputation(function, "cpu", kept=["matmul"])
    y = made(x)
    assert [each.operator for each in made._results.results] == ["aten::mm"]
    found[0].sum().backward()
    y.sum().backward()
    expected = [each.detach().clone().requires_grad_() for each in (x, other)]
    torch.autograd.backward([(expected[0] @ expected[0]).exp().sin().sum(), (expected[1] @ expected[1]).exp().sum()])
    assert torch.equal(x.grad, expected[0].grad) and torch.equal(other.grad, expected[1].grad)
