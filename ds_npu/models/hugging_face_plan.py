"""The plan of a Hugging Face model, from its structure, its config and its own tensor-parallel plan.

Attribute names say what a module may be; sizes (``draft``) and transformers' plan must not contradict them. Where these
do not tell the order inside of a fused weight, nothing is assumed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from ds_npu.config.roles import ORDER, Role
from ds_npu.models import kinds, names
from ds_npu.models.attention_modules import configured
from ds_npu.models.draft import Draft
from ds_npu.models.hugging_face_model import HuggingFaceConfig, HuggingFaceModel, hugging_face_model
from ds_npu.models.linear_attention import linear_attention_of
from ds_npu.models.tree import Tree
from ds_npu.parallel.expert.weights import is_experts

IN_ATTENTION: dict[str, Role] = {
    "q_proj": Role.QUERY,
    "k_proj": Role.KEY,
    "v_proj": Role.VALUE,
    "qkv_proj": Role.QUERY_KEY_VALUE,
    "c_attn": Role.QUERY_KEY_VALUE,
    "q_a_proj": Role.LATENT,
    "kv_a_proj_with_mqa": Role.LATENT,
    "q_b_proj": Role.LATENT_QUERY,
    "kv_b_proj": Role.LATENT_KEY_VALUE,
    "o_proj": Role.ATTENTION_OUTPUT,
    "out_proj": Role.ATTENTION_OUTPUT,
    "c_proj": Role.ATTENTION_OUTPUT,
}
IN_MLP: dict[str, Role] = {
    "gate_proj": Role.GATE,
    "up_proj": Role.UP,
    "gate_up_proj": Role.GATE_UP,
    "c_fc": Role.UP,
    "fc1": Role.UP,
    "down_proj": Role.DOWN,
    "c_proj": Role.DOWN,
    "fc2": Role.DOWN,
}
IN_LINEAR_ATTENTION = {"in": Role.LINEAR_ATTENTION_INPUT, "out": Role.LINEAR_ATTENTION_OUTPUT}
"""Roles by the part of a linear's name before ``_proj``; the layer's other modules are its convolution and its norm."""
POSITIONS = ("wpe", "embed_positions", "position_embeddings")

STYLES: dict[str, tuple[Role, ...]] = {
    "colwise": (Role.QUERY, Role.KEY, Role.VALUE, Role.LATENT_QUERY, Role.LATENT_KEY_VALUE, Role.GATE, Role.UP),
    "rowwise": (Role.ATTENTION_OUTPUT, Role.DOWN),
    # transformers does not shard the parts of fused weights by themselves: it gathers their outputs and shards those.
    "colwise_gather_output": (Role.QUERY_KEY_VALUE, Role.GATE_UP),
    "rowwise_split_input": (Role.ATTENTION_OUTPUT, Role.DOWN),
}
"""Roles that a linear of a style in transformers' ``base_model_tp_plan`` can have."""
ORDER_UNKNOWN = "its weight holds several parts, whose order is not known"


def draft_of(model: nn.Module) -> Draft:
    """The roles and heads of the Hugging Face model that ``model`` is or holds; an empty draft where there is none."""
    draft = Draft()
    root = hugging_face_model(model)
    if root is not None and not root.config.is_encoder_decoder:
        _Assignment(Tree(model), root, draft).everything()
    return draft


@dataclass(frozen=True)
class _Assignment:
    """Assigns roles in ``draft`` to the modules of the Hugging Face model ``root``, which is somewhere in ``tree``."""

    tree: Tree
    root: HuggingFaceModel
    draft: Draft

    @cached_property
    def decoder(self) -> str:
        """The plain name of the language part."""
        stated = self.tree.find(self.root.get_decoder())
        # Llama4ForCausalLM returns itself: its base_model_prefix is not the name that its decoder has.
        inner = [name for name in self.tree.within(stated).values() if self.stacks_in(name)]
        return inner[0] if not self.stacks_in(stated) and len(inner) == 1 else stated

    def stacks_in(self, name: str) -> list[str]:
        return [each for each in self.tree.within(name).values() if self.is_stack(each)]

    @cached_property
    def config(self) -> HuggingFaceConfig:
        return self.root.config.get_text_config()

    def assign(self, name: str, role: Role) -> None:
        self.draft.roles.update(dict.fromkeys(self.tree.reals[name], role))

    def refuse(self, name: str, why: str) -> None:
        self.draft.notes.update(dict.fromkeys(self.tree.reals[name], why))

    def style(self, name: str) -> str | None:
        """The style of a module or parameter of the language part in transformers' plan."""
        return (self.config.base_model_tp_plan or {}).get(names.generic(name.removeprefix(f"{self.decoder}.")))

    def everything(self) -> None:
        stacks = self.stacks_in(self.decoder)
        if len(stacks) != 1:
            return
        self.outside()
        for name in self.tree.within(self.decoder).values():
            if name == stacks[0]:
                for block in self.tree.within(name).values():
                    self.assign(block, Role.BLOCK)
                    self.in_block(block)
            else:
                self.outside_blocks(name)

    def is_stack(self, name: str) -> bool:
        """Whether ``name`` is a list of blocks, which are modules with attentions."""
        blocks = self.tree.within(name).values()
        with_attention = (any(self.mixes_tokens(each) for each in self.tree.within(block).values()) for block in blocks)
        return isinstance(self.tree.module(name), nn.ModuleList) and any(with_attention)

    def is_attention(self, name: str) -> bool:
        return "Attention" in type(self.tree.module(name)).__name__ and bool(self.tree.within(name))

    def mixes_tokens(self, name: str) -> bool:
        return self.is_attention(name) or linear_attention_of(self.tree.module(name)) is not None

    def outside(self) -> None:
        """Assign the head; replicate all else around the language part (a vision tower, a score)."""
        output = self.root.get_output_embeddings()
        head = None if output is None else self.tree.find(output)
        root = self.tree.find(self.root)
        for name in self.tree.reals:
            if name == head:
                self.assign(name, Role.HEAD)
            elif names.is_inside(name, root) and not names.is_inside(name, self.decoder):
                self.assign(name, Role.REPLICATED)

    def outside_blocks(self, name: str) -> None:
        module, attribute = self.tree.module(name), name.rpartition(".")[2]
        if module is self.embedding:
            self.assign(name, Role.EMBEDDING)
        elif isinstance(module, nn.Embedding) and attribute in POSITIONS:
            self.assign(name, Role.POSITION_EMBEDDING)
        elif self.is_rotary(name):
            self.assign(name, Role.ROTARY)
        elif kinds.is_norm(module):
            after = any(role is Role.BLOCK for role in self.draft.roles.values())
            self.assign(name, Role.FINAL_NORM if after else Role.NORM)

    @cached_property
    def embedding(self) -> nn.Module:
        module = self.root.get_input_embeddings()
        name = self.tree.find(module)
        return self.tree.module(name) if name in self.tree.reals else module

    def is_rotary(self, name: str) -> bool:
        return "Rotary" in type(self.tree.module(name)).__name__

    def in_block(self, block: str) -> None:
        for name in self.tree.within(block).values():
            if self.is_attention(name):
                self.assign(name, Role.ATTENTION)
                self.in_attention(name)
            elif linear_attention_of(self.tree.module(name)) is not None:
                self.assign(name, Role.LINEAR_ATTENTION)
                for attribute, part in self.tree.within(name).items():
                    kind = attribute.partition("_proj")[0]
                    self.assign(part, IN_LINEAR_ATTENTION.get(kind, Role.LINEAR_ATTENTION_PART))
            elif kinds.is_norm(self.tree.module(name)):
                self.assign(name, Role.NORM)
            else:
                self.in_feed_forward(name)

    def in_attention(self, attention: str) -> None:
        shape = configured(self.tree.module(attention), self.config)
        if shape is not None:
            self.draft.attentions.update(dict.fromkeys(self.tree.reals[attention], shape))
        for attribute, name in self.tree.within(attention).items():
            if kinds.is_norm(self.tree.module(name)):
                self.assign(name, Role.HEAD_NORM)
            elif self.is_rotary(name):
                self.assign(name, Role.ROTARY)
            elif attribute in IN_ATTENTION:
                self.linear(name, IN_ATTENTION[attribute])

    def in_feed_forward(self, name: str) -> None:
        """Assign an MLP, or a router with experts, some of which may be shared ones in an MLP of their own."""
        inner = self.tree.within(name)
        experts = [each for each in inner.values() if is_experts(self.tree.module(each))]
        if experts:
            self.assign(name, Role.MOE)
            for each in experts:
                self.experts(each)
            count = len(next(iter(self.tree.module(experts[0]).parameters(recurse=False))))
            for each in inner.values():
                module = self.tree.module(each)
                if kinds.is_linear(module) and kinds.sizes(module)[1] == count:
                    self.assign(each, Role.ROUTER)
                elif each not in experts:
                    self.in_feed_forward(each)
        elif linears := list(self.mlp_roles(name)):
            self.assign(name, Role.MLP)
            for linear, role in linears:
                self.linear(linear, role)

    def mlp_roles(self, mlp: str) -> Iterator[tuple[str, Role]]:
        by_style = {"colwise": Role.COLUMN, "rowwise": Role.ROW}
        for attribute, name in self.tree.within(mlp).items():
            role = IN_MLP.get(attribute) or by_style.get(self.style(name) or "")
            if role and kinds.is_linear(self.tree.module(name)):
                yield name, role

    def experts(self, name: str) -> None:
        # A packed gate_up_proj has all gates before all ups.
        styles = self.style(f"{name}.gate_up_proj"), self.style(f"{name}.down_proj")
        # Transposed experts have an axis of their own, or are refused.
        if styles == ("packed_colwise", "rowwise") or kinds.is_transposed(self.tree.module(name)):
            self.assign(name, Role.EXPERTS)
        else:
            self.refuse(name, f"{ORDER_UNKNOWN}; {Role.EXPERTS} means {ORDER[Role.EXPERTS]}")

    def linear(self, name: str, role: Role) -> None:
        style = self.style(name)
        # All of transformers' models with Conv1D (the first GPTs) have queries, then keys, then values in one.
        known = style is not None or kinds.output_dim(self.tree.module(name)) == 1
        if role in (Role.QUERY_KEY_VALUE, Role.GATE_UP) and not known:
            self.refuse(name, f"{ORDER_UNKNOWN}; {role} means {ORDER[role]}")
        elif style in STYLES and role not in STYLES[style] and role not in (Role.COLUMN, Role.ROW):
            self.refuse(name, f"its name says {role}, but transformers shards it {style}")
        else:
            self.assign(name, role)
