"""The plan of a Hugging Face model, from its structure, its config and its own tensor-parallel plan.

Attribute names say what a module may be; sizes (``draft``) and transformers' plan must not contradict them. Where these
do not tell the order inside of a fused weight, nothing is assumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import nn

from ds_npu.config.roles import Role
from ds_npu.models import kinds, names
from ds_npu.models.attention_modules import configured, over_all_heads
from ds_npu.models.draft import Draft
from ds_npu.models.feed_forward_roles import IN_MLP, pair_roles
from ds_npu.models.feed_forwards import FeedForwards
from ds_npu.models.hugging_face_model import hugging_face_model
from ds_npu.models.linear_attention import INPUTS, OUTPUTS, linear_attention_of
from ds_npu.models.role_assigner import FUSED_ORDERS, RoleAssigner
from ds_npu.models.tree import Tree

IN_ATTENTION: dict[str, Role] = {
    "q_proj": Role.QUERY,
    "k_proj": Role.KEY,
    "v_proj": Role.VALUE,
    "qkv_proj": Role.QUERY_KEY_VALUE,
    "c_attn": Role.QUERY_KEY_VALUE,
    "query_key_value": Role.QUERY_KEY_VALUE,
    "Wqkv": Role.QUERY_KEY_VALUE,
    "Wq": Role.QUERY,
    "Wk": Role.KEY,
    "Wv": Role.VALUE,
    "gate_proj": Role.ATTENTION_GATE,
    "g_proj": Role.ATTENTION_GATE,
    "q_a_proj": Role.LATENT,
    "kv_a_proj_with_mqa": Role.LATENT,
    "q_b_proj": Role.LATENT_QUERY,
    "q_gate_proj": Role.LATENT_QUERY,
    "kv_b_proj": Role.LATENT_KEY_VALUE,
    "o_proj": Role.ATTENTION_OUTPUT,
    "out_proj": Role.ATTENTION_OUTPUT,
    "c_proj": Role.ATTENTION_OUTPUT,
    "dense": Role.ATTENTION_OUTPUT,
    "Wo": Role.ATTENTION_OUTPUT,
}
POSITIONS = ("wpe", "embed_positions", "position_embeddings", "positions_embed")


def draft_of(model: nn.Module) -> Draft:
    """The roles and heads of the Hugging Face model that ``model`` is or holds; an empty draft where there is none."""
    draft = Draft()
    root = hugging_face_model(model)
    if root is not None and not root.config.is_encoder_decoder:
        _Assignment(Tree(model), root, draft).everything()
    return draft


def in_linear_attention(attribute: str) -> Role:
    """The role of a part of linear attention; what is no linear is its convolution or its norm."""
    if attribute in OUTPUTS:
        return Role.LINEAR_ATTENTION_OUTPUT
    return Role.LINEAR_ATTENTION_INPUT if INPUTS.match(attribute) else Role.LINEAR_ATTENTION_PART


@dataclass(frozen=True)
class _Assignment(RoleAssigner):
    """Assigns the roles of the whole model."""

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
        self.replicate_others()

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
        module = self.tree.module(name)
        attribute = name.rpartition(".")[2]
        inner = self.tree.within(name).values()
        if any(self.tree.module(each) is self.embedding for each in inner):
            for each in inner:
                self.outside_blocks(each)
        elif module is self.embedding:
            self.assign(name, Role.EMBEDDING)
        elif isinstance(module, nn.Embedding) and attribute in POSITIONS:
            self.assign(name, Role.POSITION_EMBEDDING)
        elif self.is_rotary(name):
            self.assign(name, Role.ROTARY)
        elif kinds.is_norm(module):
            # OPT makes its final norm before its blocks.
            after = attribute.startswith("final") or any(role is Role.BLOCK for role in self.draft.roles.values())
            self.assign(name, Role.FINAL_NORM if after else Role.NORM)

    @cached_property
    def embedding(self) -> nn.Module:
        module = self.root.get_input_embeddings()
        name = self.tree.find(module)
        return self.tree.module(name) if name in self.tree.reals else module

    @cached_property
    def feed_forwards(self) -> FeedForwards:
        return FeedForwards(self.tree, self.root, self.draft)

    def is_rotary(self, name: str) -> bool:
        return "Rotary" in type(self.tree.module(name)).__name__

    def replicate_others(self) -> None:
        """Replicate modules without a role outside of attentions and MLPs, where hidden states are whole."""
        whole = (Role.ATTENTION, Role.LINEAR_ATTENTION, Role.MLP, Role.EXPERTS)
        regions = [name for name, reals in self.tree.reals.items() if self.draft.roles.get(reals[-1]) in whole]
        for name, reals in self.tree.reals.items() if regions else ():
            inside = names.is_inside(name, self.decoder) and not any(names.is_inside(name, each) for each in regions)
            known = any(each in self.draft.roles or each in self.draft.notes for each in reals)
            if name and inside and not known and kinds.own_shapes(self.tree.module(name)):
                self.assign(name, Role.REPLICATED)

    def in_block(self, block: str) -> None:
        direct = {name: self.tree.module(each) for name, each in self.tree.within(block).items() if name in IN_MLP}
        pair = pair_roles({name: each for name, each in direct.items() if kinds.is_linear(each)}, self.hidden)
        of_pair = {Role.UP: Role.COLUMN, Role.GATE: Role.COLUMN, Role.DOWN: Role.ROW}
        for attribute, name in self.tree.within(block).items():
            if attribute in pair:
                self.assign(name, of_pair[pair[attribute]])
            elif self.holds_sublayers(name):
                self.in_block(name)
            elif self.is_attention(name):
                self.assign(name, Role.ATTENTION)
                self.in_attention(name)
            elif linear_attention_of(self.tree.module(name)) is not None:
                self.assign(name, Role.LINEAR_ATTENTION)
                for attribute, part in self.tree.within(name).items():
                    self.assign(part, in_linear_attention(attribute))
            elif kinds.is_norm(self.tree.module(name)):
                self.assign(name, Role.NORM)
            else:
                self.feed_forwards.in_feed_forward(name)

    def holds_sublayers(self, name: str) -> bool:
        """Whether ``name`` holds attentions, or is a list of sublayers."""
        inner = [self.tree.module(each) for each in self.tree.within(name).values()]
        is_list = isinstance(self.tree.module(name), nn.ModuleList) and not any(map(kinds.is_linear, inner))
        return is_list or any(self.is_attention(each) for each in self.tree.within(name).values())

    def in_attention(self, attention: str) -> None:
        shape = configured(self.tree.module(attention), self.config)
        is_latent = shape is not None and shape.latent_key_dim > 0
        if shape is not None:
            self.draft.attentions.update(dict.fromkeys(self.tree.reals[attention], shape))
        for attribute, name in self.tree.within(attention).items():
            if kinds.is_norm(self.tree.module(name)):
                over = {size for sizes in kinds.own_shapes(self.tree.module(name)).values() for size in sizes}
                whole = shape is not None and bool(over) and over <= over_all_heads(shape) - {shape.head_dim}
                self.assign(name, Role.SHARDED_NORM if whole and not is_latent else Role.HEAD_NORM)
            elif self.is_rotary(name):
                self.assign(name, Role.ROTARY)
            elif "Indexer" in type(self.tree.module(name)).__name__:
                for each in self.tree.reals:
                    if names.is_inside(each, name) and kinds.own_shapes(self.tree.module(each)):
                        self.assign(each, Role.INDEXER)
            elif attribute in IN_ATTENTION:
                self.linear(self.innermost(name), self.in_order(attention, IN_ATTENTION[attribute]))

    def innermost(self, name: str) -> str:
        """The only linear that ``name`` holds, where it has no weights of its own (Moshi); else ``name``."""
        inner = list(self.tree.within(name).values())
        is_holder = not kinds.own_shapes(self.tree.module(name)) and len(inner) == 1
        return inner[0] if is_holder and kinds.is_linear(self.tree.module(inner[0])) else name

    def in_order(self, attention: str, role: Role) -> Role:
        order = FUSED_ORDERS.get(type(self.tree.module(attention)).__name__)
        if role is not Role.QUERY_KEY_VALUE or order is None:
            return role
        shape = self.draft.attentions.get(self.tree.reals[attention][-1])
        return Role.QUERY_KEY_VALUE if shape is not None and shape.kv_heads == 1 else order
