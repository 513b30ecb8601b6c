"""Roles by globs: of people's own models, on top of Hugging Face's, and everything that can be wrong with them."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from planned_models import llama, made
from torch import nn

from ds_npu.config.roles import ORDERS, STRUCTURAL, Role
from ds_npu.models.globs import plan_for
from ds_npu.models.names import abbreviated, matches, suggestion
from ds_npu.models.plan import AttentionShape, PlanError

KNOWN = "linear_attention, linear_attention_input, linear_attention_output, linear_attention_part, "
ROLES = (
    "block, attention, query, key, value, query_key_value, query_key_value_by_group, attention_gate, attention_output, "
    f"latent, latent_query, latent_key_value, {KNOWN}head_norm, indexer, sharded_norm, pointwise, mlp, gate, up, "
    "gate_up, down, moe, router, experts, norm, final_norm, rotary, embedding, position_embedding, head, column, row, "
    "replicated, lora_a, lora_b"
)
OWN_ROLES = ROLES.replace(KNOWN, "")


class Attention(nn.Module):
    def __init__(self, heads=4, kv_heads=2, head_dim: int | None = 8):
        super().__init__()
        if head_dim:
            self.head_dim = head_dim
        self.q = nn.Linear(32, heads * 8)
        self.k = nn.Linear(32, kv_heads * 8)
        self.v = nn.Linear(32, kv_heads * 8)
        self.out = nn.Linear(heads * 8, 32)


class Fused(nn.Module):
    def __init__(self, num_heads=4, kv_heads=2):
        super().__init__()
        self.head_dim, self.num_heads = 8, num_heads
        self.qkv = nn.Linear(32, (num_heads + 2 * kv_heads) * 8)


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.attention = attention
        self.mlp = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))


class Net(nn.Module):
    """Somebody's own model."""

    def __init__(self, attention=Attention, layers=2):
        super().__init__()
        self.embed = nn.Embedding(96, 32)
        self.layers = nn.ModuleList(Block(attention()) for _ in range(layers))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 96)


OF_ATTENTION = {"q": "query", "k": "key", "v": "value", "out": "attention_output"}
GLOBS = {
    "embed": "embedding",
    "layers.*": "block",
    "layers.*.norm?": "norm",
    "layers.*.attention": "attention",
    **{f"layers.*.attention.{name}": role for name, role in OF_ATTENTION.items()},
    "layers.*.mlp": "mlp",
    "layers.*.mlp.0": "up",
    "layers.*.mlp.2": "down",
    "norm": "final_norm",
    "head": "head",
}


def of_block(index):
    return {
        f"layers.{index}": "block",
        f"layers.{index}.norm1": "norm",
        f"layers.{index}.norm2": "norm",
        f"layers.{index}.attention": "attention",
        **{f"layers.{index}.attention.{name}": role for name, role in OF_ATTENTION.items()},
        f"layers.{index}.mlp": "mlp",
        f"layers.{index}.mlp.0": "up",
        f"layers.{index}.mlp.2": "down",
    }


def refused(model, globs):
    with pytest.raises(PlanError) as caught:
        plan_for(model, globs)
    return caught.value


# ---- what a glob matches ----

MATCHES = [
    ("layers.*", ["layers.0", "layers.11", "layers.x"], ["layers", "layers.0.mlp", "a.layers.0"]),
    ("layers.*.mlp", ["layers.0.mlp"], ["layers.mlp", "layers.0.1.mlp", "layers.0.mlp.up"]),
    ("**.mlp", ["mlp", "a.mlp", "a.b.mlp"], ["mlp.up", "a.xmlp"]),
    ("layers.**", ["layers", "layers.0", "layers.0.mlp.up"], ["layersx", "a.layers"]),
    ("a.**.b", ["a.b", "a.x.b", "a.x.y.b"], ["a", "b", "a.x.bb", "ab"]),
    ("**", ["", "a", "a.b"], []),
    ("*", ["a", "a1"], ["", "a.b"]),
    ("norm?", ["norm1"], ["norm", "norm12", "norm.1"]),
    ("norm[12]", ["norm1", "norm2"], ["norm3", "norm[12]"]),
    ("norm[!12]", ["norm3"], ["norm1"]),
    ("q_proj", ["q_proj"], ["Q_proj", "q_proj.x", "qxproj"]),
    ("a.b", ["a.b"], ["axb"]),
    ("w(1)+", ["w(1)+"], ["w11"]),
    ("[z-a]", [], ["z"]),
    # Also by the name that the module has without PEFT.
    ("lm.q", ["lm.q", "base_model.model.lm.q", "base_model.model.lm.q.base_layer"], ["base_model.model.lm.q.lora_A"]),
    ("score", ["base_model.model.score.original_module", "base_model.model.score.modules_to_save.default"], ["scores"]),
    ("base_model.**", ["base_model.model.lm"], ["lm"]),
]


@pytest.mark.parametrize(("glob", "yes", "no"), MATCHES)
def test_what_a_glob_matches(glob, yes, no):
    assert [name for name in yes if not matches(glob, name)] == []
    assert [name for name in no if matches(glob, name)] == []


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["lm_head"], "lm_head"),
        (["a.0", "a.1", "a.2"], "a.{0..2}"),
        (["a.0", "a.2", "a.3", "a.10"], "a.{0,2..3,10}"),
        (["a.0.x.0", "a.0.x.1", "a.1.x.0", "a.1.x.1"], "a.{0..1}.x.{0..1}"),
        (["a.0.x.0", "a.1.x.0", "a.1.x.1"], "a.0.x.0, a.1.x.{0..1}"),
        ([""], ""),
    ],
)
def test_names_that_differ_in_indices_are_abbreviated(names, expected):
    assert abbreviated(names) == expected


# ---- plans ----


@pytest.mark.parametrize(
    ("glob", "wider", "found"),
    [
        ("*mlp*", "**.*mlp*", "model.layers.*.mlp"),
        ("down_proj", "**.down_proj", "model.layers.*.mlp.down_proj"),
        ("model.*mlp", "model.**.*mlp", "model.layers.*.mlp"),
        ("layers.*norm", "**.layers.**.*norm", "model.layers.*.input_layernorm, model.layers.*.post_attention_layer"),
    ],
)
def test_a_glob_is_told_what_stars_do_and_what_is_near(glob, wider, found):
    known = dict(tiny_models.tiny("llama").named_modules())
    said = suggestion(glob, known)
    assert ', did you mean "**.mlp"' in suggestion("**.mpl", known)
    begins = "; * stands for characters of one part of a name, and ends at a dot, ** for any number of parts"
    assert said.startswith(f'{begins}: "{wider}" matches {found}')
    # What is suggested matches what the message names.
    assert all(matches(wider, name.replace("*", "1")) for name in said.partition(" matches ")[2].split(", "))


def test_a_model_of_somebodys_own():
    model = Net()
    plan = plan_for(model, GLOBS)
    outside = {"embed": "embedding", "norm": "final_norm", "head": "head"}
    assert dict(plan.roles) == outside | of_block(0) | of_block(1)
    assert plan.blocks == ("layers.0", "layers.1") and plan.embedding == "embed" and plan.head == "head"
    assert plan.attentions == dict.fromkeys(("layers.0.attention", "layers.1.attention"), AttentionShape(4, 2, 8, 8))
    assert not plan.tied
    model.head.weight = model.embed.weight
    assert plan_for(model, GLOBS).tied


def test_columns_and_rows_are_enough():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    plan = plan_for(model, {"0": "column", "2": "row"})
    assert dict(plan.roles) == {"0": "column", "2": "row"}
    assert plan.blocks == () and dict(plan.attentions) == {} and plan.embedding is None and plan.head is None


def test_attentions_that_do_not_say_how_wide_a_head_is():
    assert dict(plan_for(Net(lambda: Attention(head_dim=None)), GLOBS).attentions) == {}


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
def test_heads_of_a_fused_projection(heads, kv_heads):
    globs = {key: role for key, role in GLOBS.items() if not key.startswith("layers.*.attention.")}
    globs["layers.*.attention.qkv"] = "query_key_value"
    plan = plan_for(Net(lambda: Fused(heads, kv_heads)), globs)
    assert plan.attentions["layers.1.attention"] == AttentionShape(heads, kv_heads, 8, 8)


def test_the_last_glob_decides():
    model = Net()
    plan = plan_for(model, {"**": "replicated", **GLOBS, "head": "replicated"})
    assert plan.of("head") is Role.REPLICATED and plan.of("embed") is Role.EMBEDDING
    whole = plan_for(model, {**GLOBS, "**": "replicated"})
    assert set(whole.roles.values()) == {Role.REPLICATED} and whole.blocks == ()


def test_replicated_holds_for_all_inside():
    model = Net()
    model.vision = nn.Sequential(nn.Conv2d(3, 8, 2), nn.Sequential(nn.Linear(8, 8)))
    plan = plan_for(model, {**GLOBS, "vision": "replicated"})
    assert plan.inside("vision") == ["vision.0", "vision.1.0"]
    assert plan.named(Role.REPLICATED) == ["vision.0", "vision.1.0"]


def test_globs_match_modules_without_parameters_by_the_way():
    """layers.*.mlp.* is the activation, too."""
    globs = {"layers.*.mlp.*": "up", **GLOBS}
    del globs["layers.*.mlp.0"]
    plan = plan_for(Net(), globs)
    assert dict(plan.roles) == dict(plan_for(Net(), GLOBS).roles)


def test_globs_on_top_of_a_hugging_face_model():
    model = llama()
    plain = dict(plan_for(model, {}).roles)
    changed = dict(plan_for(model, {"lm_head": "replicated", "model.layers.*.mlp": "replicated"}).roles)
    mlps = [name for name in plain if ".mlp" in name]
    linears = [name for name in mlps if not name.endswith(".mlp")]
    assert changed == {
        **{name: role for name, role in plain.items() if name not in mlps},
        **dict.fromkeys(linears, "replicated"),
        "lm_head": "replicated",
    }


def test_a_hugging_face_model_inside_of_somebodys_own():
    class Reward(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = llama("LlamaModel")
            self.value = nn.Linear(32, 1)

    model = Reward()
    (problem,) = refused(model, {}).problems
    assert problem == "value (Linear, weight [1, 32], bias [1]): nothing says what it is"
    plan = plan_for(model, {"value": "replicated"})
    inner = plan_for(model.trunk, {})
    assert dict(plan.roles) == {f"trunk.{name}": role for name, role in inner.roles.items()} | {"value": "replicated"}
    assert plan.blocks == ("trunk.layers.0", "trunk.layers.1")
    assert plan.attentions == {f"trunk.{name}": shape for name, shape in inner.attentions.items()}


def test_a_family_that_is_not_known_can_be_said():
    model = made(
        "OPTForCausalLM", hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=96
    )
    layers = "model.decoder.layers.*"
    plan = plan_for(model, {f"{layers}.fc1": "column", f"{layers}.fc2": "row"})
    assert plan.of("model.decoder.layers.1.fc1") is Role.COLUMN
    assert plan.of("model.decoder.layers.1.self_attn.out_proj") is Role.ATTENTION_OUTPUT
    assert plan.of("model.decoder.embed_positions") is Role.POSITION_EMBEDDING


# ---- mistakes ----


def test_a_model_without_any_plan():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8, bias=False))
    assert (
        str(refused(model, {}))
        == f"""\
Sequential is a model of your own: ds_npu knows the parts of Hugging Face's decoders only.
2 mistakes in the plan of Sequential:
  0 (Linear, weight [16, 8], bias [16]): nothing says what it is
  2 (Linear, weight [8, 16]): nothing says what it is
Say in the DeepSpeed config what they are, as in
  "ds_npu": {{"plan": {{"embed": "embedding", "layers.*": "block", "layers.*.norm?": "norm",
                      "layers.*.attention": "attention", "layers.*.attention.q": "query", "layers.*.attention.k": "key",
                      "layers.*.attention.v": "value", "layers.*.attention.out": "attention_output",
                      "layers.*.mlp": "mlp", "layers.*.mlp.wide": "up", "layers.*.mlp.narrow": "down",
                      "norm": "final_norm", "head": "head", "vision": "replicated"}}}}
* stands for any part of a name, ** for any number of parts; the last glob that matches decides. {{"**": "replicated"}}
shards nothing, on purpose: the ranks are replicas. Roles: {OWN_ROLES}
{ORDERS}"""
    )


def test_everything_that_is_wrong_is_said_at_once():
    globs = {
        **GLOBS,
        "layer.*.mlp": "mlp",
        "zzz": "row",
        "head": "haed",
        "layers.*.mlp": "mpl",
        "norm": "query",
        "layers.*.norm1": "block",
        "layers.*.mlp.1": "column",
        "layers.*.mlp.0": "embedding",
    }
    del globs["layers.*.attention.q"]
    assert (
        str(refused(Net(), globs))
        == f"""\
Net is a model of your own: ds_npu knows the parts of Hugging Face's decoders only.
9 mistakes in the plan of Net:
  "layers.*.mlp": 'mpl' is no role, did you mean 'mlp'? (roles: {ROLES})
  "head": 'haed' is no role, did you mean 'head'? (roles: {ROLES})
  "layer.*.mlp": matches no module, did you mean "layers.*.mlp" or "layers.*.mlp.*"?
  "zzz": matches no module
  "layers.*.mlp.1": column is for modules with parameters; what matches, as layers.0.mlp.1 (GELU), has none of its own
  layers.{{0..1}}.attention.q (Linear, weight [32, 32], bias [32]): nothing says what it is
  layers.{{0..1}}.norm1 (LayerNorm, weight [32], bias [32]): block is for a module that holds others
  layers.{{0..1}}.mlp.0 (Linear, weight [48, 32], bias [48]): embedding is for an embedding, a single table of two dims
  norm (LayerNorm, weight [32], bias [32]): query is for a linear, which has a weight of two dims
Say what a module is in the DeepSpeed config, * standing for any part of a name and ** for any number of parts:
  "ds_npu": {{"plan": {{"layers.*.attention.q": "<role>"}}}}
Roles: {ROLES}
{ORDERS}"""
    )


def test_blocks_that_differ():
    error = refused(Net(layers=4), {**GLOBS, "layers.2.mlp.0": "column", "layers.3.norm2": "replicated"})
    assert error.problems == (
        "layers.2.mlp.0 (Linear, weight [48, 32], bias [48]): column, where layers.0.mlp.0 is up; blocks must not "
        "differ",
        "layers.3.norm2 (LayerNorm, weight [32], bias [32]): replicated, where layers.0.norm2 is norm; blocks must not "
        "differ",
    )


def test_projections_stand_in_what_holds_them():
    globs = {**GLOBS, "layers.*.mlp": "moe"}
    del globs["layers.*.attention"]
    problems = refused(Net(), globs).problems
    linear = "(Linear, weight [32, 32], bias [32])"
    assert (
        f"layers.{{0..1}}.attention.q {linear}: query is for a module inside of one whose role is attention" in problems
    )
    linear = "(Linear, weight [48, 32], bias [48])"
    assert f"layers.{{0..1}}.mlp.0 {linear}: up is for a module inside of one whose role is mlp" in problems
    assert len(problems) == 6


def test_a_factor_of_lora_belongs_to_a_layer():
    (problem,) = refused(nn.Sequential(nn.Linear(8, 2, bias=False)), {"0": "lora_a"}).problems
    assert problem == "0 (Linear, weight [2, 8]): lora_a is for what PEFT adds to a layer, which it calls base_layer"


def test_sizes_that_are_not_those_of_the_heads():
    model = Net(lambda: Attention(heads=5))
    model.layers[0].attention.out = nn.Linear(32, 32)
    model.layers[1].attention.v = nn.Linear(32, 20)
    assert refused(model, GLOBS).problems == (
        "layers.0.attention.out (Linear, weight [32, 32], bias [32]): the attention_output of 5 heads of 8, 2 for keys "
        "and values has 40 inputs, not 32",
        "layers.{0..1}.attention.k (Linear, weight [16, 32], bias [16]): 5 heads cannot share 2 heads of keys and "
        "values evenly",
        "layers.1.attention.out (Linear, weight [32, 40], bias [32]): the attention_output of 5 heads of 8, values of "
        "10, 2 for keys and values has 50 inputs, not 40",
    )


def test_heads_that_are_not_whole():
    model = Net(lambda: Attention(head_dim=12))
    (problem,) = {text.partition(": ")[2] for text in refused(model, GLOBS).problems if ".q " in text}
    assert problem == "the query of 2 heads of 12, values of 16, 1 for keys and values has 24 outputs, not 32"


def experts():
    module = nn.Module()
    module.gate_up_proj = nn.Parameter(torch.zeros(4, 96, 32))
    module.down_proj = nn.Parameter(torch.zeros(4, 32, 48))
    return module


KINDS = {
    "linear": (lambda: nn.Linear(8, 8), "query head column row router replicated rotary indexer"),
    "embedding": (lambda: nn.Embedding(8, 8), "embedding position_embedding replicated rotary indexer"),
    "norm": (lambda: nn.LayerNorm(8), "norm final_norm head_norm sharded_norm pointwise replicated rotary indexer"),
    "experts": (experts, "experts replicated rotary indexer"),
    "convolution": (lambda: nn.Conv2d(3, 8, 2), "replicated rotary indexer"),
    "container": (lambda: nn.Sequential(nn.ReLU()), "block attention mlp moe replicated rotary"),
}


@pytest.mark.parametrize("role", list(Role), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_which_roles_a_module_can_have(kind, role):
    make, able = KINDS[kind]
    linears = {"query", "key", "value", "query_key_value", "attention_output", "latent", "latent_query", "gate", "up"}
    linears |= {"latent_key_value", "gate_up", "down", "query_key_value_by_group", "attention_gate"}
    able = set(able.split()) | (linears if kind == "linear" else set())
    model = nn.Sequential(make())
    # Inside of an attention, an MLP and a MoE, so that only the module itself decides.
    model = nn.Sequential(nn.Sequential(nn.Sequential(model)))
    globs = {"0": "attention", "0.0": "mlp", "0.0.0": "moe", "0.0.0.0": role.value}
    if role in able:
        trained = role in STRUCTURAL or bool(list(model.parameters()))
        assert plan_for(model, globs).of("0.0.0.0") is (role if trained else None)
    else:
        (problem, *_) = refused(model, globs).problems
        assert "0.0.0.0" in problem and role.value in problem
