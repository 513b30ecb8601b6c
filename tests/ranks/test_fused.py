"""Fused operators in Hugging Face models: the same losses and gradients, and only where they belong."""

import copy

import peft
import pytest
import tiny_models
import torch
import torch.distributed as dist
import transformers
from fused_cases import CALLS, KEYS, counted, expected_calls, step, tiny, worst
from ranks import run_on_ranks
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from ds_npu.config.roles import Role
from ds_npu.features.fused_ops.fused_model import fuse
from ds_npu.features.tensor_parallel.sharded_model import shard_model
from ds_npu.models.globs import plan_for
from ds_npu.models.plan import ModelPlan
from ds_npu.parallel.runtime.placement import sharding_of
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology


@pytest.fixture(scope="module")
def plain():
    """The step of each family's model as it is."""
    made = {}

    def of(family):
        if family not in made:
            made[family] = step(tiny(family))
        return made[family]

    return of


@pytest.mark.parametrize("wanted", [*((key,) for key in KEYS), KEYS], ids=[*KEYS, "all"])
@pytest.mark.parametrize("family", CALLS)
def test_a_step_is_the_plain_models(family, wanted, plain):
    model = tiny(family)
    names, classes = list(model.state_dict()), [type(module) for module in model.modules()]
    fuse(model, plan_for(model, {}), wanted)
    with counted() as calls:
        loss, gradients = step(model)
    assert calls == expected_calls(family, wanted)
    assert loss == pytest.approx(plain(family)[0], rel=1e-12)
    assert worst(gradients, plain(family)[1]) <= 1e-12
    assert (list(model.state_dict()), [type(module) for module in model.modules()]) == (names, classes)


def on_two_ranks(sequence_parallel, fuse_first, families):
    for family in families:
        true_loss, true = step(tiny(family))
        model = tiny(family)
        plan = plan_for(model, {})
        if fuse_first:
            fuse(model, plan, KEYS)
        shard_model(model, plan, Topology(Degrees(tp=2)), sequence_parallel)
        if not fuse_first:
            said = fuse(model, plan, KEYS)
            assert any("cross_entropy is in the model" in line and "vocabulary-parallel" in line for line in said)
        with counted() as calls:
            loss, gradients = step(model)
        # The loss of a sharded vocabulary is not the operator's.
        assert calls == expected_calls(family, set(KEYS) - {"cross_entropy"}), family
        for name, weight in model.named_parameters():
            sharding = sharding_of(weight)
            if sharding is not None and name in true:
                true[name] = sharding.take(true[name], dist.get_rank())
        assert loss == pytest.approx(true_loss, rel=1e-12), family
        assert worst(gradients, true) <= 1e-12, family
        model.eval()
        with counted() as calls, torch.no_grad():
            model(input_ids=tiny_models.tokens(3, 10), labels=tiny_models.tokens(3, 10))
        assert calls["cross_entropy"] == 1, "of whole logits"


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", (False, True), ids=("all-reduce", "sequence parallel"))
@pytest.mark.parametrize("fuse_first", (False, True), ids=("split first", "fused first"))
def test_split_models_too(sequence_parallel, fuse_first):
    run_on_ranks(2, on_two_ranks, sequence_parallel, fuse_first, list(CALLS))


@pytest.mark.slow
def test_a_split_model_too():
    run_on_ranks(2, on_two_ranks, True, False, ["llama"])


def with_adapters():
    """A Llama whose projections PEFT has put an adapter around."""
    torch.manual_seed(3)
    targets = ["q_proj", "gate_proj", "up_proj", "down_proj"]
    options = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    return peft.get_peft_model(tiny("llama"), options).double().train()


def test_adapters_stay_around_what_is_fused():
    true_loss, true = step(with_adapters())
    model = with_adapters()
    fuse(model, plan_for(model, {}), KEYS)
    with counted() as calls:
        loss, gradients = step(model)
    assert calls == expected_calls("llama", KEYS)
    assert loss == pytest.approx(true_loss, rel=1e-12)
    assert worst(gradients, true) <= 1e-12


class Joins(TorchDispatchMode):
    """Records what joins tensors into one."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.stack, torch.ops.aten.cat):
            self.seen.append(func)
        return func(*args, **(kwargs or {}))


def joined(model):
    x = torch.ones(2, 4, 32, dtype=torch.float64)
    with Joins() as joins:
        model.model.layers[0].mlp(x)
    return len(joins.seen)


def gates_beside_ups():
    model, whole = tiny("llama", mlp_bias=True), tiny("llama", mlp_bias=True)
    plan = plan_for(model, {})
    shard_model(model, plan, Topology(Degrees(tp=2)))
    for each in (model, whole):
        fuse(each, plan, ["swiglu"])
    assert (joined(model), joined(whole)) == (0, 1)


@pytest.mark.slow
def test_parallel_linears_write_gates_and_ups_into_one_tensor():
    run_on_ranks(2, gates_beside_ups)


class Halved(nn.Module):
    """A gated MLP like Llama's, up to what a test changes."""

    def __init__(self, act=functional.silu, dropout=0.0, swapped=False):
        super().__init__()
        self.up_proj, self.gate_proj = nn.Linear(8, 12), nn.Linear(8, 12)
        self.down_proj = nn.Linear(12, 8)
        self.act, self.drop, self.swapped = act, nn.Dropout(dropout), swapped

    def forward(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.swapped:
            gate, up = up, gate
        return self.down_proj(self.drop(self.act(gate) * up))


class OddRMSNorm(nn.Module):
    """A norm with the parameter of an RMS norm, of which ``function`` makes something else."""

    def __init__(self, function, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.eps, self.function = eps, function

    def forward(self, x):
        return self.function(x, self.weight, self.eps)


def rms(x, weight, eps):
    return weight * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


NORMS = {
    "right": (rms, True),
    "of the sum": (lambda x, weight, eps: weight * x * (x.square().sum(-1, keepdim=True) + eps).rsqrt(), False),
    "centred": (lambda x, weight, eps: rms(x - x.mean(-1, keepdim=True), weight, eps), False),
    "eps outside": (lambda x, weight, eps: weight * x / (x.square().mean(-1, keepdim=True).sqrt() + eps), False),
    "another eps": (lambda x, weight, eps: rms(x, weight, 10 * eps), False),
    "offset 2": (lambda x, weight, eps: rms(x, weight + 2, eps), False),
    "no gradient of the scale": (
        lambda x, weight, eps: weight * x * (x.detach().square().mean(-1, keepdim=True) + eps).rsqrt(),
        False,
    ),
}
MLPS = {
    "right": ({}, True),
    "gelu": ({"act": functional.gelu}, False),
    "relu": ({"act": functional.relu}, False),
    "dropout": ({"dropout": 0.5}, False),
    "gate and up swapped": ({"swapped": True}, False),
}


def holding(module, roles):
    """A model with ``module`` in it, and its plan."""
    model = nn.ModuleDict({"it": module})
    return model, ModelPlan("Holder", roles, (), {})


@pytest.mark.parametrize("case", NORMS)
def test_a_module_that_only_looks_like_an_rms_norm_is_left_alone(case):
    function, right = NORMS[case]
    module = OddRMSNorm(function)
    (line,) = fuse(*holding(module, {"it": Role.NORM}), ["rms_norm"])
    assert line == ("rms_norm is in it" if right else f"rms_norm is not in it: OddRMSNorm {OTHER} an RMS norm")
    assert ("forward" in vars(module)) == right


OTHER = "computes something else than"


@pytest.mark.parametrize("case", MLPS)
def test_a_module_that_only_looks_like_swiglu_is_left_alone(case):
    options, right = MLPS[case]
    module = Halved(**options)
    roles = {
        "it": Role.MLP,
        "it.up_proj": Role.UP,
        "it.gate_proj": Role.GATE,
        "it.down_proj": Role.DOWN,
    }
    (line,) = fuse(*holding(module, roles), ["swiglu"])
    assert line == ("swiglu is in it" if right else f"swiglu is not in it: Halved {OTHER} SwiGLU")
    assert ("forward" in vars(module)) == right


def test_norms_with_more_arguments_or_parameters_or_another_forward():
    class Gated(OddRMSNorm):
        def forward(self, x, gate=None):
            return rms(x, self.weight, self.eps)

    reasons = {}
    by_dtype = nn.RMSNorm(8)
    wrapped = OddRMSNorm(rms)
    wrapped.forward = lambda x: rms(x, wrapped.weight, wrapped.eps)
    for name, module in {"gated": Gated(rms), "layer": nn.LayerNorm(8), "wrapped": wrapped, "torch": by_dtype}.items():
        (reasons[name],) = fuse(*holding(module, {"it": Role.NORM}), ["rms_norm"])
    assert reasons == {
        "gated": "rms_norm is not in it: its forward takes 2 arguments, where the operator takes one",
        "layer": "rms_norm is not in it: LayerNorm has weight and bias, where an RMS norm has a weight",
        "wrapped": "rms_norm is not in it: it has been given a forward of its own already",
        "torch": "rms_norm is not in it: RMSNorm has no number that could be its eps",
    }


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    """Turns the queries only."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    first, second = q.chunk(2, -1)
    return q * cos + torch.cat((-second, first), -1) * sin, k


def apply_rotary_backwards(q, k, cos, sin, turns):
    return q, k


class OddAttention(nn.Module):
    def forward(self, q, k, cos, sin):
        return apply_rotary_pos_emb(q, k, cos, sin)


class OtherArguments(nn.Module):
    def forward(self, q, k, cos, sin):
        return apply_rotary_backwards(q, k, cos, sin, 1)


class NoRotary(nn.Module):
    def forward(self, q):
        return q


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (OddAttention(), f"apply_rotary_pos_emb {OTHER} a rotary embedding"),
        (OtherArguments(), "apply_rotary_backwards takes other arguments than are known: q, k, cos, sin, turns"),
        (NoRotary(), "NoRotary.forward calls no apply_rotary_pos_emb of its file"),
    ],
)
def test_another_rotary_embedding_is_left_alone(module, reason):
    model, _ = holding(module, {})
    model["rotary"] = nn.Identity()
    plan = ModelPlan("Holder", {"it": Role.ATTENTION, "rotary": Role.ROTARY}, (), {})
    assert fuse(model, plan, ["rotary"]) == [f"rotary is not in it: {reason}"]
    assert "forward" not in vars(module)


def test_neither_classes_nor_files_of_functions_are_changed():
    model, other = tiny("llama"), tiny("llama")
    kind = type(model.model.layers[0].self_attn)
    before = {name: id(value) for name, value in kind.forward.__globals__.items()}
    fuse(model, plan_for(model, {}), KEYS)
    assert {name: id(value) for name, value in kind.forward.__globals__.items()} == before
    with counted() as calls:
        step(other)
    assert not calls


def test_another_loss_is_left_alone(plain):
    model = tiny("llama")
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.square().mean()
    said = fuse(model, plan_for(model, {}), ["cross_entropy"])
    assert said == ["cross_entropy is not in the model: its loss_function has been set already"]
    model = tiny("llama")
    model.loss_type = "ForSequenceClassification"
    said = fuse(model, plan_for(model, {}), ["cross_entropy"])
    assert said == [
        "cross_entropy is not in the model: LlamaForCausalLM computes another loss than transformers' ForCausalLMLoss"
    ]


def test_attention_that_cannot_be_exchanged_says_why():
    model = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=64, hidden_size=16, n_layer=2, n_head=2))
    (line,) = fuse(model, plan_for(model, {}), ["flash_attention"])
    assert "flash_attention is not in transformer.h.{0..1}.self_attention" in line and "its attention itself" in line


def test_experts_that_are_computed_one_by_one_say_so():
    model = tiny("mixtral", experts_implementation="eager")
    (line,) = fuse(model, plan_for(model, {}), ["swiglu"])
    assert line.startswith("swiglu is not in model.layers.{0..1}.mlp.experts: each expert is computed by itself")


def test_weights_may_come_later(plain):
    trained = tiny("qwen3")
    with torch.device("meta"):
        model = type(trained)(trained.config).double()
    fuse(model, plan_for(model, {}), KEYS)
    model.to_empty(device="cpu").load_state_dict(trained.state_dict())
    model.model.rotary_emb = copy.deepcopy(trained.model.rotary_emb)
    with counted() as calls:
        loss, gradients = step(model.train())
    assert calls == expected_calls("qwen3", KEYS)
    assert loss == pytest.approx(plain("qwen3")[0], rel=1e-12)
    assert worst(gradients, plain("qwen3")[1]) <= 1e-12


def test_no_random_number_is_used_up():
    model = tiny("qwen3")
    plan = plan_for(model, {})
    state = torch.random.get_rng_state()
    fuse(model, plan, KEYS)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_copy_of_a_fused_model_is_its_own(plain):
    model = tiny("phi3")
    fuse(model, plan_for(model, {}), KEYS)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    loss, gradients = step(other)
    assert loss == pytest.approx(plain("phi3")[0], rel=1e-12)
    assert worst(gradients, plain("phi3")[1]) <= 1e-12


def test_what_is_fused_is_not_fused_again():
    model = tiny("llama")
    plan = plan_for(model, {})
    assert len(fuse(model, plan, ["rms_norm"])) == 1
    forward = model.model.norm.forward
    assert fuse(model, plan, ["rms_norm"]) == []
    assert model.model.norm.forward is forward


@pytest.mark.parametrize("family", ("llama", "gemma"))
def test_a_norms_result_keeps_its_dtype(family):
    model, same = tiny(family).float(), tiny(family).float()
    fuse(model, plan_for(model, {}), ["rms_norm"])
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
        assert model.model.norm(x).dtype == same.model.norm(x).dtype


def test_hooks_of_modules_stay_around():
    model = tiny("llama")
    seen = []
    norm = model.model.norm
    norm.register_forward_hook(lambda module, args, result: seen.append(result))
    fuse(model, plan_for(model, {}), KEYS)
    result = norm(torch.ones(1, 2, 32, dtype=torch.float64))
    assert seen == [result]
