"""A draft of a ModelPlan, and the checks that it passes to become one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from ds_npu.config.roles import OF_KNOWN_LAYERS, ORDERS, PARENT, Role
from ds_npu.models import kinds, names
from ds_npu.models.attention_modules import Linears, counted, wrong_heads, wrong_widths
from ds_npu.models.hugging_face_model import hugging_face_model
from ds_npu.models.plan import AttentionShape, ModelPlan, PlanError
from ds_npu.models.tree import adapters

ROLE_REMEDY = """\
Say what a module is in the DeepSpeed config, * standing for any part of a name and ** for any number of parts:
  "ds_npu": {"plan": {"%s": "<role>"}}
Roles: %s"""
NEEDED = """\
Say in the DeepSpeed config what they are, as in
  "ds_npu": {"plan": {"embed": "embedding", "layers.*": "block", "layers.*.norm?": "norm",
                      "layers.*.attention": "attention", "layers.*.attention.q": "query", "layers.*.attention.k": "key",
                      "layers.*.attention.v": "value", "layers.*.attention.out": "attention_output",
                      "layers.*.mlp": "mlp", "layers.*.mlp.wide": "up", "layers.*.mlp.narrow": "down",
                      "norm": "final_norm", "head": "head", "vision": "replicated"}}
* stands for any part of a name, ** for any number of parts; the last glob that matches decides. {"**": "replicated"}
shards nothing, on purpose: the ranks are replicas. Roles: %s"""

Fault = tuple[str, str]
"""A module's name, and what is wrong with it."""


@dataclass
class Draft:
    """The roles and heads found so far, by module name."""

    roles: dict[str, Role] = field(default_factory=dict)
    attentions: dict[str, AttentionShape] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    """Why a module has no role."""
    doubtful: set[str] = field(default_factory=set)
    """Modules that the user gave a role that does not exist; they are reported once."""
    given: set[str] = field(default_factory=set)


def finished(model: nn.Module, draft: Draft, problems: Iterable[str] = ()) -> ModelPlan:
    """The complete plan of ``draft``; raises PlanError with ``problems`` and everything else that is wrong with it."""
    modules = dict(model.named_modules())
    plan = _without_heads(model, draft.roles)
    misfits = _misfits(modules, plan) | dict(_foreign(modules, plan))
    silent = misfits.keys() | draft.doubtful
    # The role of experts in a list is that of the module around them.
    listed = [name for name in plan.named(Role.EXPERTS) if not kinds.own_shapes(modules[name])]
    missing = [
        name
        for name in modules
        if plan.of(name) is None
        and kinds.own_shapes(modules[name])
        and name not in silent
        and not any(names.is_inside(name, each) for each in listed)
    ]
    unplaced = [(name, draft.notes.get(name, "nothing says what it is")) for name in missing]
    linears = _linears(modules, plan, leave_out=misfits)
    plan = _with_heads(modules, plan, draft, linears)
    misplaced = [fault for fault in _misplaced(plan) if silent.isdisjoint((fault[0], *names.ancestors(fault[0])))]
    sizes = [(name, why + _replicated_note(name, plan, draft)) for name, why in _wrong_sizes(modules, plan, linears)]
    told = [
        *problems,
        *_told(modules, [*unplaced, *misfits.items(), *misplaced, *sizes, *_different_blocks(modules, plan)]),
    ]
    if told:
        raise PlanError(plan.model, told, _kind(model, plan), _remedy(plan, unplaced))
    return plan


def partial_plan(model: nn.Module, draft: Draft, problems: Iterable[str]) -> ModelPlan:
    """The plan of ``draft`` with what is known; raises PlanError with ``problems`` and misfits among the user's roles.

    An attention whose linears contradict its heads counts as one of unknown heads.
    """
    modules = dict(model.named_modules())
    plan = _without_heads(model, draft.roles)
    misfits = _misfits(modules, plan)
    told = [*problems, *_told(modules, [fault for fault in misfits.items() if fault[0] in draft.given])]
    if told:
        raise PlanError(plan.model, told, _kind(model, plan))
    plan = replace(plan, roles={name: role for name, role in plan.roles.items() if name not in misfits})
    linears = _linears(modules, plan, leave_out=())
    plan = _with_heads(modules, plan, draft, linears)
    fitting = {name: shape for name, shape in plan.attentions.items() if not any(wrong_heads(shape, linears[name]))}
    return replace(plan, attentions=fitting, is_partial=True)


def _with_heads(
    modules: dict[str, nn.Module], plan: ModelPlan, draft: Draft, linears: Mapping[str, Linears]
) -> ModelPlan:
    shapes = {
        name: draft.attentions.get(name) or counted(modules[name], linears[name]) for name in plan.named(Role.ATTENTION)
    }
    return replace(plan, attentions={name: shape for name, shape in shapes.items() if shape is not None})


def _without_heads(model: nn.Module, given: dict[str, Role]) -> ModelPlan:
    """The plan without attentions, which are not known yet; LoRA's factors of a replicated layer are replicated."""
    modules = dict(model.named_modules())
    factors = adapters(model)
    layers = {name: f"{name.rpartition('.lora_')[0]}.{names.BASE_LAYER}" for name in factors}
    whole = {name: Role.REPLICATED for name in factors if given.get(layers[name]) is Role.REPLICATED}
    given = factors | whole | given
    roles = {
        name: given[name] for name, module in modules.items() if name in given and kinds.counts(module, given[name])
    }
    blocks = tuple(name for name, role in roles.items() if role is Role.BLOCK)
    plan = ModelPlan(type(modules[""]).__name__, roles, blocks, attentions={})
    return replace(plan, tied=_tied(modules, plan))


def _tied(modules: dict[str, nn.Module], plan: ModelPlan) -> bool:
    if plan.embedding is None or plan.head is None:
        return False
    weights = dict(modules[plan.head].named_parameters(recurse=False)).values()
    return any(weight is other for weight in weights for other in modules[plan.embedding].parameters(recurse=False))


def _misfits(modules: dict[str, nn.Module], plan: ModelPlan) -> dict[str, str]:
    found = {name: kinds.misfit(role, modules[name]) for name, role in plan.roles.items()}
    return {name: why for name, why in found.items() if why}


def _foreign(modules: dict[str, nn.Module], plan: ModelPlan) -> Iterator[Fault]:
    """Modules that PEFT adds to a sharded layer, except LoRA's factors of linears and embeddings."""
    for name, module in modules.items():
        layer = plan.adapted(name) if kinds.own_shapes(module) else None
        role = plan.of(layer) if layer else None
        if role not in (None, Role.REPLICATED) and plan.of(name) not in (Role.LORA_A, Role.LORA_B):
            yield name, f"of what PEFT adds to a {role}, only the two factors of LoRA can be sharded"


def _misplaced(plan: ModelPlan) -> Iterator[Fault]:
    for name, role in plan.roles.items():
        if role in PARENT and plan.around(name, *PARENT[role]) is None:
            yield name, f"{role} is for a module inside of one whose role is {' or '.join(PARENT[role])}"
        elif role in (Role.LORA_A, Role.LORA_B) and plan.adapted(name) is None:
            yield name, f"{role} is for what PEFT adds to a layer, which it calls {names.BASE_LAYER}"


def _linears(modules: dict[str, nn.Module], plan: ModelPlan, leave_out: Collection[str]) -> Mapping[str, Linears]:
    found: defaultdict[str, defaultdict[Role, list[nn.Module]]] = defaultdict(lambda: defaultdict(list))
    for name, role in plan.roles.items():
        holder = plan.around(name, *PARENT[role]) if role in PARENT else None
        if holder is not None and name not in leave_out:
            found[holder][role].append(modules[name])
    return found


def _wrong_sizes(modules: dict[str, nn.Module], plan: ModelPlan, linears: Mapping[str, Linears]) -> Iterator[Fault]:
    by_module = {id(module): name for name, module in modules.items()}
    for name, role in plan.roles.items():
        if name in plan.attentions:
            found = wrong_heads(plan.attentions[name], linears[name])
        elif role is Role.MLP:
            found = wrong_widths(linears[name])
        else:
            continue
        yield from ((by_module[id(module)], why) for module, why in found)


def _replicated_note(name: str, plan: ModelPlan, draft: Draft) -> str:
    """A note for an error about ``name``: the modules in its attention or MLP that the user has replicated."""
    holder = plan.around(name, Role.ATTENTION, Role.MLP)
    whole = [each for each in plan.inside(holder, Role.REPLICATED) if each in draft.given] if holder else []
    named = ", ".join(each.rpartition(".")[2] for each in whole)
    return f'; "plan" says that {named}, beside it, is {Role.REPLICATED}' if named else ""


def _different_blocks(modules: dict[str, nn.Module], plan: ModelPlan) -> Iterator[Fault]:
    """Modules whose role differs from that of the same module, by name and class, in another block."""
    first: dict[tuple[str, type], str] = {}
    for name, role in plan.roles.items():
        block = plan.block(name)
        if block is None:
            continue
        inside = names.plain(name).removeprefix(f"{names.plain(block)}.")
        other = first.setdefault((inside, type(modules[name])), name)
        if plan.roles[other] is not role:
            yield name, f"{role}, where {other} is {plan.roles[other]}; blocks must not differ"


def _told(modules: dict[str, nn.Module], faults: Iterable[Fault]) -> Iterator[str]:
    """A line for each fault; faults of modules that differ only in indices share one."""
    groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for name, why in dict.fromkeys(faults):
        groups[names.generic(name), kinds.described(modules[name]), why].append(name)
    for (_, described, why), found in groups.items():
        yield f"{names.abbreviated(found) or 'the model itself'} ({described}): {why}"


def _kind(model: nn.Module, plan: ModelPlan) -> str:
    """A sentence that tells how ds_npu knows ``model``."""
    found = hugging_face_model(model)
    if found is None:
        return f"{plan.model} is a model of your own: ds_npu knows the parts of Hugging Face's decoders only."
    held = "" if found is model else f", which holds {type(found).__name__} of transformers,"
    if found.config.is_encoder_decoder:
        return f"{plan.model}{held} is an encoder-decoder of transformers, of which ds_npu knows no part."
    if not plan.blocks:
        return f"{plan.model}{held} is a model of transformers in which ds_npu finds no one stack of blocks."
    return f"{plan.model}{held} is a decoder of transformers, which ds_npu knows but for what is named here."


def _remedy(plan: ModelPlan, unplaced: list[Fault]) -> str:
    if not unplaced:
        return ""
    accepted = [role for role in Role if plan.roles or role not in OF_KNOWN_LAYERS]
    named = f"{', '.join(accepted)}\n{ORDERS}"
    return ROLE_REMEDY % (names.generic(names.plain(unplaced[0][0])) or "**", named) if plan.roles else NEEDED % named
