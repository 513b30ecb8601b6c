"""What features declare is what they do: a model is compared, part by part, before and after it is changed."""

from __future__ import annotations

import time
from collections import Counter

import pytest
import tiny_models
import torch
import transformers
from adapted_models import ATTENTION, LATENT, MLP, adapted
from placement_types import fake_world
from torch import nn

from ds_npu.cli.planned_model import left_on, model_without_weights
from ds_npu.config.sections import DsNpuConfig
from ds_npu.engine.placements import complete_placements
from ds_npu.features.build import MODEL_PLAN, Build
from ds_npu.features.driver import CHANGED_FOR, apply_features, declare, declare_parts, values_in
from ds_npu.features.loss.model_loss import MODEL_LOSS
from ds_npu.parallel.runtime.forward_wraps import WrappedForward, innermost_forward
from ds_npu.parallel.runtime.marks import RECORD, marks_of
from ds_npu.parallel.runtime.placement import placement_of
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import PlannedTopology

FUSED = dict.fromkeys(("rms_norm", "swiglu", "rotary", "cross_entropy"), True)
OF_MODULES = {RECORD, "training", "forward", "_buffers", "_modules", "_parameters"}
"""What is compared by itself, or belongs to torch."""


class Parts:
    """What a model consists of."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self.attributes = {name: {**vars(module), **marks_of(module)} for name, module in self.modules.items()}
        self.classes = {name: type(module) for name, module in self.modules.items()}
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.innermost = {name: innermost_forward(module) for name, module in self.modules.items()}
        self.hooks = Counter(name for name, module in self.modules.items() for _ in module._forward_hooks)


def levels_of(module: nn.Module) -> list[str]:
    found, forward = [], vars(module).get("forward")
    while isinstance(forward, WrappedForward):
        found.append(forward.level.name)
        forward = forward.inner
    return found


def declared(declarations, *acts):
    return [change for each in declarations for change in each.changes if change.act in acts]


def check(model: nn.Module, before: Parts, declarations: list) -> None:
    after = Parts(model)
    assert after.modules.keys() == before.modules.keys() and after.parameters.keys() == before.parameters.keys()
    assert all(after.parameters[name] is each for name, each in before.parameters.items())
    replaced = {change.part for change in declared(declarations, "replaces")}
    assert {name for name, each in after.modules.items() if each is not before.modules[name]} == replaced
    computes = {change.part for change in declared(declarations, "computes")}
    same = {name for name in after.modules.keys() - replaced if after.classes[name] is before.classes[name]}
    assert {name for name in same if after.innermost[name] != before.innermost[name]} == computes
    found = Counter((name, level) for name, module in after.modules.items() for level in levels_of(module))
    # An operator's own forward is kept in a wrap where there is no other.
    found.subtract((name, "OPERATOR") for name in computes if (name, "OPERATOR") in found)
    wraps = Counter((change.part, change.level.name) for change in declared(declarations, "wraps"))
    assert +found == wraps
    check_attributes(before, after, replaced, declarations)
    check_parameters(after, declarations)
    losses = {name: MODEL_LOSS.get(module) for name, module in after.modules.items()}
    links = {(name, level) for name, loss in losses.items() if loss is not None for level in loss.keys}
    assert links == {(change.part, change.level) for change in declared(declarations, "links")}
    hooks = Counter(change.part for change in declared(declarations, "hooks") if change.part in after.modules)
    assert after.hooks - before.hooks <= hooks  # Some are registered in the first forward.


def check_attributes(before: Parts, after: Parts, replaced: set[str], declarations: list) -> None:
    said = {
        (change.part, attribute)
        for change in declared(declarations, "sets")
        for attribute in change.what.partition(":")[0].split(", ")
    }
    linked = {change.part for change in declared(declarations, "links")}
    said |= {(name, key) for name in linked for key in ("_loss_function", MODEL_LOSS.name)}
    changed = set()
    for name in after.modules.keys() - replaced:
        new, old = after.attributes[name], before.attributes[name]
        if after.classes[name] is not before.classes[name]:
            # A class of its own: what it needs comes with it.
            changed.add((name, "__class__"))
            continue
        differing = {key for key in new.keys() | old.keys() if new.get(key) is not old.get(key)}
        changed |= {(name, key) for key in differing - OF_MODULES if not key.endswith("_hooks")}
    changed -= {(name, key) for name, key in changed if key == "compile" and ("", "compile") in said and name}
    assert changed - {("", CHANGED_FOR.name), ("", MODEL_PLAN.name)} == said


def check_parameters(after: Parts, declarations: list) -> None:
    """Placements say what was declared; a tied weight is declared by each of its names."""
    shards = {id(after.parameters[change.part]) for change in declared(declarations, "shards")}
    sums = {id(after.parameters[c.part]) for c in declared(declarations, "hooks") if c.part in after.parameters}
    for name, parameter in after.parameters.items():
        placement = placement_of(parameter)
        assert bool(placement.sharded) == (id(parameter) in shards), name
        assert bool(placement.partial) == (id(parameter) in sums) == bool(parameter._backward_hooks), name


def changed(model: nn.Module, section: dict, degrees: Degrees) -> list:
    with fake_world(degrees) as topology:
        build = Build(topology, model)
        features = values_in(DsNpuConfig.model_validate(section))
        parts = declare_parts(features, build)
        before = Parts(model)
        declarations = declare(features, build)
        check(model, before, [])
        apply_features([(each, value) for each, value in features], build)
        check(model, before, declarations)
        return [*parts, *declarations]


TENSOR = {"tensor": 2, "probe": False}
PARTS = {"norm": True, "activation_function": True, "attention_core": True}
SECTIONS = {
    "tensor": {"parallel": TENSOR},
    "sequence_parallel": {"parallel": {**TENSOR, "sequence_parallel": True}},
    "context": {"parallel": {"context": 2}, "context_parallel": {"algorithm": "ring"}},
    "fused": {"fused_ops": {**FUSED, "flash_attention": True}},
    "chunked": {"chunked_loss": True},
    "recomputed": {"recompute": PARTS | {"layers": 1, "method": "block"}},
    "swapped": {"swap": {"activations": True}},
    "all": {
        "parallel": {**TENSOR, "sequence_parallel": True, "context": 2},
        "chunked_loss": 8,
        "recompute": {"layers": 1, "method": "uniform", "attention_core": True},
        "fused_ops": FUSED,
        "context_parallel": {"algorithm": "ulysses"},
    },
}


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
@pytest.mark.parametrize("name", SECTIONS)
def test_what_is_declared_is_what_is_done(name, family):
    parallel = SECTIONS[name].get("parallel", {})
    degrees = Degrees(tp=parallel.get("tensor", 1), cp=parallel.get("context", 1))
    section = SECTIONS[name]
    if family == "mixtral" and "recompute" in section:
        # It has experts only: there is no MLP whose activation function could be computed again.
        section = section | {"recompute": section["recompute"] | {"activation_function": False}}
    assert changed(tiny_models.tiny(family, torch.float32), section, degrees)


def acts(declarations):
    return Counter(change.act for each in declarations for change in each.changes)


@pytest.mark.parametrize("name", SECTIONS)
def test_a_llama_is_changed_as_it_should(name):
    """Numbers of changes, so that nothing is left out on both sides."""
    parallel = SECTIONS[name].get("parallel", {})
    degrees = Degrees(tp=parallel.get("tensor", 1), cp=parallel.get("context", 1))
    tensor = {"shards": 16, "replaces": 15, "links": 1}
    expected = {
        "tensor": {**tensor, "wraps": 6},
        "sequence_parallel": {**tensor, "wraps": 6 + 4 + 5 + 2 + 1 + 3, "hooks": 4},
        "context": {"wraps": 3, "links": 1, "hooks": 2},
        "fused": {"computes": 5 + 2 + 2, "links": 1},
        "chunked": {"wraps": 2, "links": 1},
        # A block; of the other its own, two norms, the MLP and its linears; the final norm.
        "recomputed": {"wraps": 1 + 1 + 2 + 4 + 1},
        # Two blocks and the model.
        "swapped": {"wraps": 3},
        "all": {**tensor, "wraps": 21 + 3 + 2 + 2, "hooks": 4 + 2, "computes": 9, "links": 4},
    }
    found = acts(changed(tiny_models.tiny("llama", torch.float32), SECTIONS[name], degrees))
    assert {act: found[act] for act in expected[name]} == expected[name]


@pytest.mark.parametrize("name", SECTIONS)
def test_check_changes_a_model_where_there_is_no_npu(name, tmp_path):
    """As for ``ds_npu check --model`` on a machine whose torch does not know the device."""
    tiny_models.tiny("llama", torch.float32).config.save_pretrained(tmp_path)
    parallel = SECTIONS[name].get("parallel", {})
    topology = PlannedTopology(Degrees(tp=parallel.get("tensor", 1), cp=parallel.get("context", 1)))
    build = Build(topology, model_without_weights(tmp_path), {}, "npu", is_planned=True)
    assert apply_features(values_in(DsNpuConfig.model_validate(SECTIONS[name])), build)


@pytest.mark.parametrize(("family", "wraps"), [("deepseek_v3", 4), ("qwen3_moe", 0)])
@pytest.mark.parametrize("tensor", [1, 2])
def test_experts_that_overlap_are_declared(family, wraps, tensor):
    section = {"parallel": {"expert": 2, "tensor": tensor, "probe": False}, "moe": {"overlap": True}}
    found = changed(tiny_models.tiny(family, torch.float32), section, Degrees(dp=2 // tensor, tp=tensor, ep=2))
    assert len([each for each in declared(found, "wraps") if "tokens travel" in each.what]) == wraps // 2
    beside = "beside shared_experts" if wraps else "in two halves"
    assert [each for each in declared(found, "computes") if each.what.endswith(beside)]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    ("family", "targets"), [("llama", ATTENTION + MLP), ("gpt2", ["c_attn", "c_fc"]), ("deepseek_v3", LATENT)]
)
def test_adapters_are_declared(family, targets, sequence_parallel):
    section = {"parallel": {**TENSOR, "sequence_parallel": sequence_parallel}}
    model = adapted(family, targets, lora_dropout=0.1)
    found = changed(model, section, Degrees(tp=2))
    assert [each for each in declared(found, "wraps") if "lora_A" in each.part]


def test_a_trained_copy_of_the_head_is_declared():
    model = adapted("llama", ATTENTION, modules_to_save=["lm_head", "embed_tokens"])
    found = changed(model, {"parallel": TENSOR}, Degrees(tp=2))
    assert len(declared(found, "links")) == 1


def test_a_model_of_7b_is_planned_declared_and_placed_within_a_second(tmp_path):
    config = transformers.LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32)
    config.save_pretrained(tmp_path)
    section = {
        "parallel": {"tensor": 2, "context": 2, "sequence_parallel": True},
        "context_parallel": {"algorithm": "ring"},
    }
    features = values_in(DsNpuConfig.model_validate(section))
    taken = []
    for _ in range(3):
        model = model_without_weights(tmp_path)
        begin = time.process_time()
        build = Build(PlannedTopology(Degrees(dp=2, cp=2, tp=2)), model, {}, "npu", is_planned=True)
        declarations = declare(features, build)
        for declaration in declarations:
            declaration.apply()
        complete_placements(model, build.topology, (), 3)
        taken.append(time.process_time() - begin)
    assert [each.key for each in declarations] == ["parallel", "context_parallel", "fused_ops"]
    assert placement_of(model.get_parameter("lm_head.weight")).shape == (32000, 4096)
    assert min(taken) <= 1, taken


def test_what_is_left_on_a_model_is_shown():
    model = tiny_models.tiny("llama", torch.float32)
    assert list(left_on(model)) == ["nothing"]
    changed(model, {"parallel": {"tensor": 2}}, Degrees(tp=2))
    rows = [line.split("  ") for line in left_on(model)]
    found = {tuple(filter(None, map(str.strip, row))) for row in rows}
    assert ("record", "sharded model", "ShardedModel", "the model") in found
    assert ("forward", "wraps, outermost first", "REGION", "model.layers.{0..1}.mlp") in found
    assert ("parameter", "placement", "Placement", "model.layers.{0..1}.self_attn.q_proj.weight") in found
