"""What modules save for backward, on the host until then: to the bit what was, how many bytes, and what is refused."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import tiny_models
import torch
from adapted_models import ATTENTION, adapted
from memory_steps import same, step, three_backwards
from torch import nn
from wire import Memory

from ds_npu.config.sections import DsNpuConfig
from ds_npu.features.build import Build
from ds_npu.features.driver import apply_features, values_in
from ds_npu.memory import swapped_activations
from ds_npu.memory.held_tensor import ModifiedTensorError
from ds_npu.memory.host_storage import host_pool
from ds_npu.memory.swapped_activations import SWAPPED_FORWARD, ActivationSwap, SwappedStorage
from ds_npu.planner.swap_pattern import stage_ends

ONE_RANK = SimpleNamespace(size=lambda *axes: 1, rank=lambda *axes: 0)
"""A topology without process groups."""
RECOMPUTE: list[dict[str, object]] = [
    {},
    {"layers": "all"},
    {"layers": 2, "method": "uniform"},
    {"norm": True, "activation_function": True},
    {"attention_core": True, "norm": True},
]
DROPS = {"attn_pdrop": 0.3, "embd_pdrop": 0.2, "resid_pdrop": 0.1}


@pytest.fixture(autouse=True)
def swaps_everything(monkeypatch):
    monkeypatch.setattr(swapped_activations, "LEAST_BYTES", 1)


@pytest.fixture
def swaps(monkeypatch) -> list[ActivationSwap]:
    """Those that are made."""
    made: list[ActivationSwap] = []
    begin = ActivationSwap.__init__
    monkeypatch.setattr(
        ActivationSwap, "__init__", lambda self, *args, **more: (made.append(self), begin(self, *args, **more))[1]
    )
    return made


def changed(model: nn.Module, section: dict[str, object]) -> nn.Module:
    apply_features(values_in(DsNpuConfig.model_validate(section)), Build(ONE_RANK, model))
    return model


def swapping(model: nn.Module, activations: object = True, **section: object) -> nn.Module:
    return changed(model, {"swap": {"activations": activations}, **section})


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_every_family_to_the_bit(family, swaps):
    drops = DROPS if family == "gpt2" else {"attention_dropout": 0.3}

    def model() -> nn.Module:
        return tiny_models.tiny(family, torch.float32, num_hidden_layers=4, **drops)

    expected = step(model())
    for recompute in RECOMPUTE:
        if family == "mixtral":
            # It has experts only, and no MLP.
            recompute = recompute | {"activation_function": False}
        assert same(step(swapping(model(), recompute=recompute)), expected), recompute
        assert swaps.pop().host.pool.size > 0
    blocks = "transformer.h.*" if family == "gpt2" else "**.layers.*"
    assert same(step(swapping(model(), [f"{blocks}.mlp", f"{blocks}.*attn*"])), expected)


def test_adapters_bfloat16_and_autocast():
    expected = step(adapted("llama", ATTENTION, lora_dropout=0.2).float())
    assert same(step(swapping(adapted("llama", ATTENTION, lora_dropout=0.2).float())), expected)
    with torch.autocast("cpu", torch.bfloat16):
        expected = step(tiny_models.tiny("llama", torch.float32))
        assert same(step(swapping(tiny_models.tiny("llama", torch.float32))), expected)


def test_two_backwards_and_two_micro_batches():
    models = tiny_models.tiny("llama", torch.float32), swapping(tiny_models.tiny("llama", torch.float32))
    assert same(*(three_backwards(each, (2, 9), (1, 12)) for each in models))


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_models_own_checkpointing_is_honoured(reentrant, swaps):
    """Its hooks are inside: of what it computes again only the inputs are swapped."""
    found = []
    for swapped in (False, True):
        model = tiny_models.tiny("llama", torch.float32, num_hidden_layers=4, attention_dropout=0.3)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        found.append(step(swapping(model) if swapped else model))
    hidden = 4 * 3 * 13 * 32
    assert same(*found) and 3 * hidden <= swaps[0].host.pool.size <= 1.125 * 3 * hidden


# ---- bytes ----

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 336,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_implementation": "sdpa",
    "max_position_embeddings": 128,
}
TOKENS = 4 * 128


def kept_and_swapped(
    swaps: list[ActivationSwap], layers: int, dtype: torch.dtype, recompute: object
) -> tuple[int, int]:
    """Bytes that a forward keeps on the device until backward, and those on the host."""
    model = tiny_models.tiny("llama", dtype, num_hidden_layers=layers, **SIZES)
    model = swapping(model, recompute=recompute)
    ids = tiny_models.tokens(4, 128)
    with Memory() as memory:
        loss = model(input_ids=ids, labels=ids).loss
    gc.collect()
    assert loss.requires_grad
    # On the CPU the pool is of the same memory.
    size = swaps.pop().host.pool.size
    return memory.alive - size, size


def arithmetic(element: int, variant: str) -> int:
    """The bytes that a Llama block of T tokens, hidden H, keys K, intermediate I and N heads saves.

    Recomputed whole, its input: e T H, of e bytes a number. With norms and activation functions recomputed, the inputs
    of both norms, queries, attention's output (4 e T H), keys and values (2 e T K), gate and up (2 e T I), and of
    attention the logarithms of its sums in float32 (4 T N). Else also the activation function's result and its product
    (2 e T I), and of each norm its output, the quotient before the weight (2 e T H) and the deviation (4 T), and in
    bf16 its input in float32 in place of the input (2 T H).
    """
    hidden, inner, heads = SIZES["hidden_size"], SIZES["intermediate_size"], SIZES["num_attention_heads"]
    keys = hidden // heads * SIZES["num_key_value_heads"]
    if variant == "all":
        return element * TOKENS * hidden
    least = element * TOKENS * (4 * hidden + 2 * keys + 2 * inner) + 4 * TOKENS * heads
    if variant == "outputs":
        return least
    per_norm = 2 * element * hidden + 4 + (2 * hidden if element == 2 else 0)
    return least + element * TOKENS * 2 * inner + TOKENS * 2 * per_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", ["plain", "outputs", "all"])
def test_bytes_of_a_block(variant, dtype, swaps):
    recompute = {"plain": {}, "outputs": RECOMPUTE[3], "all": RECOMPUTE[1]}[variant]
    more, fewer = (kept_and_swapped(swaps, layers, dtype, recompute) for layers in (4, 3))
    on_device, on_host = (after - before for after, before in zip(more, fewer, strict=True))
    expected = arithmetic(dtype.itemsize, variant)
    print(f"{variant}, {dtype}: a block has {on_host:,} bytes on the host ({expected:,}), {on_device:,} on the device")
    # Buffers are up to an eighth larger than what is in them.
    assert 0.98 * expected <= on_host <= 1.125 * expected and abs(on_device) <= 0.02 * expected


# ---- the parts ----


def in_forward(call) -> tuple[ActivationSwap, torch.Tensor]:
    """``call`` as the first of three modules, of which one behind it has been called; what it returns."""
    swap = ActivationSwap("cpu", [3])
    forward = swap.begin()
    with torch.autograd.graph.saved_tensors_hooks(forward.hold, lambda held: held.get()):
        with forward.call(0, []):
            out = call()
        with forward.call(1, []):
            pass
    forward.close()
    return swap, out


def test_tensors_of_one_storage_are_copied_once():
    x = torch.randn(6, 8, requires_grad=True)

    def call() -> torch.Tensor:
        y = x * 1
        first, second = y.chunk(2)
        return (first * second).sum() + (y.t() @ y).square().sum() + y.exp()[1:].square().sum()

    call().backward()
    expected, x.grad = x.grad, None
    swap, loss = in_forward(call)
    # y, and its exponentials, their slice, and the product of y with itself.
    assert swap.host.pool.size == 4 * (48 + 48 + 64)
    loss.backward()
    assert torch.equal(x.grad, expected)


def test_only_what_is_hidden_is_copied_the_largest_first(swaps):
    sizes = [SimpleNamespace(size=size) for size in (100, 300, 40, 200)]
    swap = ActivationSwap("cpu", [3], hidden_only=True)
    swap.timed((0, 0), (1, 1), (2, 2), SimpleNamespace(bytes=lambda: 1000, copied_bytes=1000))
    swap.set_speed(2.0, 1.0)
    assert swap.chosen(sizes) == sizes and swap.depth == 1
    swap.set_speed(1.0, 4.0)
    assert [each.size for each in swap.chosen(sizes)] == [200, 40]

    def model() -> nn.Module:
        return tiny_models.tiny("llama", torch.float32, num_hidden_layers=4)

    expected, whole = step(model()), swapping(model())
    assert same(step(whole), expected)
    partly = swapping(model())
    swaps[2].budget = 12_000
    assert same(step(partly), expected) and 0 < swaps[2].host.pool.size < 0.6 * swaps[1].host.pool.size


@pytest.mark.parametrize("waiting", [(4, 3, 2, 1), (8, 8), (11, 9, 7, 5)], ids=str)
def test_later_pipeline_ranks_swap_less(waiting):
    """So much that no rank keeps more on the device than the one with most forwards that wait."""
    kept, copied = [], []
    for count in waiting:
        swap = ActivationSwap("cpu", [3], hidden_only=True, share=count / max(waiting))
        swap.timed((0, 0), (1, 1), (2, 2), SimpleNamespace(bytes=lambda: 1000, copied_bytes=1000))
        swap.set_speed(3.0, 5.0)
        copied.append(swap.budget)
        kept.append(count * (1000 - swap.budget))
    assert copied[0] == 600 and copied == sorted(copied, reverse=True)
    alike = [each for each, budget in zip(kept, copied, strict=True) if budget]
    assert alike == pytest.approx([kept[0]] * len(alike), abs=max(waiting)) and max(kept) <= kept[0] + max(waiting)


def test_buffers_are_used_again_and_weights_stay():
    weight, x = nn.Parameter(torch.randn(8, 8)), torch.randn(4, 8, requires_grad=True)
    swap = ActivationSwap("cpu", [3])
    for _ in range(3):
        forward = swap.begin()
        hooks = torch.autograd.graph.saved_tensors_hooks(forward.hold, lambda held: held.get())
        with hooks, forward.call(0, [weight]):
            y = (x * 1) @ weight.t() @ weight.detach()
        forward.close()
        assert swap.host.pool.size == 4 * 4 * 8, "what enters the first product"
        y.sum().backward()
        del y, forward
    assert sum(map(len, swap.host.pool._free.values())) == 1


def test_what_backward_needs_must_not_be_modified():
    for when in ("at once", "before it is released"):
        x, swap = torch.randn(4, 4, requires_grad=True), ActivationSwap("cpu", [4])
        forward = swap.begin()
        with torch.autograd.graph.saved_tensors_hooks(forward.hold, lambda held: held.get()):
            with forward.call(0, []):
                y = x * 1
                loss = (y @ x).sum()
                if when == "at once":
                    y.data.add_(0)
                    with torch.no_grad():
                        y.add_(1)
            if when != "at once":
                with torch.no_grad():
                    y.add_(1)
        forward.close()
        with pytest.raises(ModifiedTensorError, match=r"a tensor \[4, 4\] that backward needs has been modified"):
            loss.backward()


def test_what_is_modified_later_is_as_it_was_saved():
    x = torch.randn(4, 4, requires_grad=True)
    held = []

    def call() -> torch.Tensor:
        held.append(x * 1)
        return (held[0] @ held[0]).sum()

    call().backward()
    expected, x.grad = x.grad, None
    held.clear()
    _, loss = in_forward(call)
    with torch.no_grad():
        held[0].add_(1)
    loss.backward()
    assert torch.equal(x.grad, expected)


def test_the_last_ones_and_what_lives_anyway_stay():
    swap, shared = ActivationSwap("cpu", [2]), torch.randn(5)
    x = torch.randn(5, requires_grad=True)
    forward = swap.begin()
    with torch.autograd.graph.saved_tensors_hooks(forward.hold, lambda held: held.get()):
        with forward.call(0, [shared]):
            y = x * shared
        with forward.call(1, []):
            y = (y * 2).exp().sum()
        y = (y * 3).exp()
    forward.close()
    assert swap.host.pool.size == 0
    y.backward()


def test_the_last_ones_of_each_stage_stay():
    swap = ActivationSwap("cpu", [3, 5], depth=1)
    assert [place for place in range(5) if swap.remains(place)] == [2, 4]
    deep = ActivationSwap("cpu", [3, 4], depth=4)
    assert deep.depth == 2 and [place for place in range(4) if deep.remains(place)] == [1, 2, 3]
    names = [f"model.layers.{place}.{part}" for place in (0, 1, 6, 7) for part in ("self_attn", "mlp")]
    blocks = [["model.layers.0", "model.layers.1"], ["model.layers.6", "model.layers.7"]]
    assert stage_ends(names, blocks) == [4, 8] and stage_ends(names, ()) == [8]
    assert stage_ends(names[:4], blocks) == [4] == stage_ends(names[4:], blocks)


def test_a_forward_that_fails_keeps_nothing(swaps):
    model = swapping(tiny_models.tiny("llama", torch.float32))
    ids = tiny_models.tokens(2, 9)
    handle = model.model.norm.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(input_ids=ids, labels=ids)
    handle.remove()
    gc.collect()
    pool = swaps[0].host.pool
    assert not [each for each in gc.get_objects() if type(each) is SwappedStorage and each._host.pool is pool]
    assert sum(size * len(free) for size, free in pool._free.items()) == pool.size > 0
    assert same(step(model), step(tiny_models.tiny("llama", torch.float32)))


def test_sizes_are_rounded_up_by_an_eighth_at_most():
    pool = host_pool(is_pinned=False)
    for size in (1, 2, 3, 9, 1000, 2**20, 2**20 + 1, 3 * 2**18 + 5, 123_456_789):
        taken = pool.take(size).data.numel()
        assert size <= taken <= max(size * 1.125, size + 1), (size, taken)


@pytest.mark.parametrize(
    ("activations", "said"),
    [
        (["**.nothing"], r"swap\.activations: '\*\*\.nothing' matches no module of LlamaForCausalLM"),
        (
            ["lm_head"],
            r"swap\.activations: found \['lm_head'\], which is 1 of the modules of LlamaForCausalLM; at least 2",
        ),
    ],
)
def test_what_a_model_does_not_have(activations, said):
    with pytest.raises(ValueError, match=said):
        swapping(tiny_models.tiny("llama"), activations)


def test_evaluation_is_as_ever():
    model = swapping(tiny_models.tiny("llama", torch.float32)).eval()
    ids = tiny_models.tokens(2, 9)
    plain = tiny_models.tiny("llama", torch.float32).eval()
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    assert SWAPPED_FORWARD.of(None) is None
