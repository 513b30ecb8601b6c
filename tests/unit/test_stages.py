"""Models cut into pipeline stages: run one after the other they are the whole model, and what cannot be cut says so."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
import transformers
from planned_models import deepseek_v3, gpt2, llama, qwen2_5_vl
from safetensors.torch import load_file, save_file
from staged_models import chained, cut, labelled, stageable
from tiny_models import FAMILIES, Float64
from torch import nn
from transformers import AutoModelForCausalLM

from ds_npu.checkpoint.files import CheckpointError
from ds_npu.checkpoint.loading import load_checkpoint, meta_model
from ds_npu.features.build import MODEL_PLAN, Build
from ds_npu.features.modules.matched_modules import matched_modules
from ds_npu.features.pipeline.stages import cut_into_stages, run_stage, stages_of
from ds_npu.models.globs import partial_plan_for, plan_for
from ds_npu.models.plan import PlanError
from ds_npu.parallel.pipeline.pass_through import PassThrough, Side, absent_weights, stages_in

EXACT = 1e-12


def same_step(plain: nn.Module, parts: list[nn.Module], stages: list) -> None:
    """Loss, logits and every gradient of the chained ``parts`` are those of ``plain``."""
    with Float64():
        expected = plain(**labelled())
        found = chained(parts, stages, **labelled())
        expected.loss.backward()
        found.loss.backward()
    torch.testing.assert_close(found.loss, expected.loss, rtol=EXACT, atol=0)
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=EXACT)
    mine = {name: weight.grad for part in parts for name, weight in part.named_parameters()}
    theirs = {name: weight.grad for name, weight in plain.named_parameters()}
    assert mine.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert (gradient is None) == (mine[name] is None), name
        if gradient is not None:
            torch.testing.assert_close(mine[name], gradient, rtol=0, atol=EXACT, msg=name)


def check_partition(plain: nn.Module, parts: list[nn.Module]) -> None:
    """Each weight of ``plain`` is in one part, with its name; a part knows what the others hold."""
    weights = plain.state_dict()
    held = [part.state_dict() for part in parts]
    assert sorted(name for each in held for name in each) == sorted(weights)
    for part, own in zip(parts, held, strict=True):
        absent = absent_weights(part)
        assert own.keys() | absent.keys() == weights.keys() and own.keys().isdisjoint(absent)
        assert absent == {name: weights[name].shape for name in absent}
        assert [name for name, _ in part.named_modules() if name in dict(plain.named_modules())]


@pytest.mark.parametrize("split", [2, 3, [1, 0, 2], [3, 0]], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_stages_are_the_whole_model(family, split):
    plain = stageable(family)
    parts = [stageable(family) for _ in range(split if isinstance(split, int) else len(split))]
    stages = cut(parts, split)
    check_partition(plain, parts)
    same_step(plain, parts, stages)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_of_a_stage_is_its_part_of_the_plan(family):
    whole = plan_for(stageable(family), {})
    parts = [stageable(family) for _ in range(2)]
    cut(parts, 2)
    plans = [MODEL_PLAN.get(part) for part in parts]
    assert [plan_for(part, {}) for part in parts] == plans == [partial_plan_for(part, {}) for part in parts]
    assert {name: role for plan in plans for name, role in plan.roles.items()} == dict(whole.roles)
    assert sum((plan.blocks for plan in plans), ()) == whole.blocks


def test_globs_may_name_modules_of_other_stages():
    parts = [stageable("llama") for _ in range(2)]
    cut(parts, 2)
    globs = {"model.layers.*": "block", "lm_head": "head", "model.layers.*.mlp": "replicated"}
    for part in parts:
        plan = plan_for(part, globs)
        assert plan.blocks == MODEL_PLAN.get(part).blocks and plan.named("replicated")
    with pytest.raises(PlanError, match="matches no module"):
        plan_for(parts[0], {"model.layer.*": "block"})


def test_globs_of_keys_are_held_to_all_stages():
    parts = [stageable("llama") for _ in range(2)]
    cut(parts, 2)
    assert [matched_modules("swap.activations", "model.layers.0.**", part) for part in parts][1] == []
    assert matched_modules("swap.activations", "**.layers.0.mlp", parts[0]) == ["model.layers.0.mlp"]
    for part in parts:
        with pytest.raises(ValueError, match=r"ds_npu\.swap\.activations: '\*\*\.mlpp' matches no module of Llama"):
            matched_modules("swap.activations", "**.mlpp", part)


def test_modules_that_are_no_blocks():
    first, last = stages_of(plan_for(gpt2(tie_word_embeddings=False), {}), 2)
    assert first.blocks == ("transformer.h.0",) and last.blocks == ("transformer.h.1",)
    assert dict(first.absent) == {"transformer.h.1": Side.AFTER, "transformer.ln_f": Side.AFTER, "lm_head": Side.AFTER}
    embeddings = dict.fromkeys(("transformer.wte", "transformer.wpe"), Side.EMBEDDING)
    assert dict(last.absent) == embeddings | {"transformer.h.0": Side.BEFORE}
    images = stages_of(plan_for(qwen2_5_vl(), {}), 2)
    assert images[1].absent["model.visual"] is Side.INPUTS and "model.visual" not in images[0].absent
    assert [len(each.blocks) for each in stages_of(plan_for(deepseek_v3(), {}), 2)] == [2, 1]
    assert stages_of(plan_for(llama(), {}), 1)[0].absent == {}


def classifier() -> nn.Module:
    return llama("LlamaForSequenceClassification")


@pytest.mark.parametrize(
    ("make", "split", "said"),
    [
        (llama, 3, "LlamaForCausalLM has 2 blocks; found 3 stages"),
        (llama, 0, "found 0 stages"),
        (llama, [1, 2], "has 2 blocks; found stages of 1, 2"),
        (llama, [3, -1], "found stages of 3, -1"),
        (llama, [0, 2], "found no block in the first stage"),
        (classifier, 2, r"nothing says which pipeline stage holds score \(replicated\)"),
    ],
    ids=str,
)
def test_what_has_no_stages(make, split, said):
    with pytest.raises(ValueError, match=said):
        stages_of(plan_for(make(), {}), split)


def test_what_cannot_be_cut():
    model = stageable("llama")
    plan = plan_for(model, {})
    first, last = stages_of(plan, 2)
    model.model.layers[0].mlp.up_proj.weight = model.model.layers[2].mlp.up_proj.weight
    with pytest.raises(ValueError, match="are one weight in two pipeline stages"):
        cut_into_stages(model, plan, first)
    model = stageable("llama")
    model.config.output_hidden_states = True
    with pytest.raises(ValueError, match="output_hidden_states in its config"):
        cut_into_stages(model, plan, first)
    model = stageable("llama")
    model.more = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="nothing says which pipeline stage holds more"):
        cut_into_stages(model, plan, first)
    model = stageable("llama")
    before = copy.deepcopy(model.state_dict())
    cut_into_stages(model, plan, last)
    assert model.state_dict().keys() < before.keys()
    with pytest.raises(ValueError, match=r"is stage 1 of 0\.\.1 already"):
        cut_into_stages(model, plan, first)


def test_a_stage_that_is_called_as_if_it_were_whole():
    parts = [stageable("llama") for _ in range(2)]
    first, last = cut(parts, 2)
    for part in parts:
        with pytest.raises(RuntimeError, match=r"is not in stage .* What to do: call the engine"):
            part(**labelled())
    with pytest.raises(ValueError, match="is given no hidden states"):
        run_stage(parts[1], last.stage, None, **labelled())
    with pytest.raises(ValueError, match="is given output_attentions"):
        run_stage(parts[0], first.stage, None, **labelled(), output_attentions=True)
    with pytest.raises(RuntimeError, match="would write one stage's weights as if they were all"):
        parts[0].save_pretrained("nowhere")


class Twice(nn.Module):
    """A block that is more than a function of hidden states, or a norm that stands in two places."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.embed, self.head = kind, nn.Embedding(8, 4), nn.Linear(4, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2))
        self.norm = nn.LayerNorm(4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded = x = self.embed(tokens)
        if self.kind == "norm":
            x = self.norm(x)
        for layer in self.layers:
            x = layer(x) + (embedded if self.kind == "embedding" else 0)
        return self.head(self.norm(x))


GLOBS = {"embed": "embedding", "layers.*": "block", "layers.*.0": "replicated", "norm": "final_norm", "head": "head"}


def test_models_whose_stages_would_compute_something_else():
    tokens = torch.arange(6).view(2, 3)
    for kind, said in (("norm", "norm .* is called when 0 of 1 blocks have run"), ("embedding", "use the embeddings")):
        parts = [Twice(kind) for _ in range(2)]
        plan = plan_for(parts[0], GLOBS)
        stages = stages_of(plan, 2)
        for part, own in zip(parts, stages, strict=True):
            cut_into_stages(part, plan, own)
        with pytest.raises(RuntimeError, match=said):
            chained(parts, stages, tokens=tokens).sum().backward()
    model = transformers.RwkvForCausalLM(
        transformers.RwkvConfig(vocab_size=64, hidden_size=16, attention_hidden_size=16, num_hidden_layers=2)
    )
    for block in model.rwkv.blocks:
        block.__class__ = type("OtherBlock", (type(block),), {})
    plan = partial_plan_for(model, {})
    own = stages_of(plan, 2)[0]
    cut_into_stages(model, plan, own)
    with pytest.raises(TypeError, match=r"OtherBlock\) returns a tuple"):
        run_stage(model, own.stage, None, **labelled())


# ---- PEFT ----


def adapted(model: nn.Module, *targets: str) -> nn.Module:
    made = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=list(targets))).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "lora_" in name:
                # By name: a stage has a part of them.
                generator.manual_seed(sum(map(ord, name)))
                weight.copy_(torch.randn(weight.shape, generator=generator, dtype=weight.dtype))
    return made


TARGETS = ("q_proj", "down_proj", "lm_head")


@pytest.mark.parametrize("before", [True, False], ids=["adapters, then stages", "stages, then adapters"])
def test_adapters_on_a_stage(before):
    plain = adapted(stageable("llama"), *TARGETS)
    if before:
        parts = [adapted(stageable("llama"), *TARGETS) for _ in range(2)]
        stages = cut(parts, 2)
        assert [MODEL_PLAN.get(part) for part in parts] == [plan_for(part, {}) for part in parts]
        check_partition(plain, parts)
    else:
        parts = [stageable("llama") for _ in range(2)]
        stages = cut(parts, 2)
        parts = [adapted(parts[0], *TARGETS[:2]), adapted(parts[1], *TARGETS)]
    assert [stages_in(part)[0] for part in parts] == [own.stage for own in stages]
    whole = plan_for(plain, {})
    assert {name: role for part in parts for name, role in plan_for(part, {}).roles.items()} == dict(whole.roles)
    same_step(plain, parts, stages)


# ---- loading ----


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "deepseek_v3"])
def test_each_stage_reads_its_part(family, tmp_path):
    plain = stageable(family, dtype=torch.float32)
    plain.save_pretrained(tmp_path)
    weights = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    parts = [meta_model(AutoModelForCausalLM, tmp_path) for _ in range(3)]
    cut(parts, 3)
    for part in parts:
        load_checkpoint(part, tmp_path, {"tp": 0})
        assert part.state_dict() and all(torch.equal(each, weights[name]) for name, each in part.state_dict().items())
        assert not any(each.is_meta for each in (*part.parameters(), *part.buffers()))


@pytest.mark.parametrize("layer", [0, 1])
def test_every_stage_says_the_same_of_a_checkpoint_that_does_not_fit(layer, tmp_path):
    stageable("llama", 2, torch.float32).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    name = f"model.layers.{layer}.mlp.up_proj.weight"
    stored[f"model.layers.{layer}.more.weight"] = stored.pop(name)
    stored["lm_head.weight"] = stored["lm_head.weight"][:-1].clone()
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    whole = meta_model(AutoModelForCausalLM, tmp_path)
    parts = [meta_model(AutoModelForCausalLM, tmp_path) for _ in range(2)]
    cut(parts, 2)
    said = []
    for model in (whole, *parts):
        with pytest.raises(CheckpointError) as error:
            load_checkpoint(model, tmp_path, {"tp": 0})
        said.append(sorted(str(error.value).splitlines()))
    assert said[0] == said[1] == said[2] and name in "".join(said[0])


def test_a_build_of_another_stage():
    from types import SimpleNamespace

    parts = [stageable("llama") for _ in range(2)]
    cut(parts, 2)
    place = {"rank": lambda axis: 0, "size": lambda axis: 2}
    assert Build(SimpleNamespace(**place), parts[0]).is_cut_into_stages
    assert not Build(SimpleNamespace(**place), stageable("llama")).is_cut_into_stages
    with pytest.raises(ValueError, match=r"is stage 1 of 0\.\.1, and this is rank 0 of the 2"):
        assert Build(SimpleNamespace(**place), parts[1]).is_cut_into_stages


def test_pass_throughs_hold_nothing():
    parts = [stageable("llama") for _ in range(2)]
    cut(parts, 2)
    found = [each for each in parts[1].modules() if isinstance(each, PassThrough)]
    assert found and not any([*each.parameters(), *each.buffers()] for each in found)
    assert "model.embed_tokens (Embedding) of another stage" in repr(parts[1])
