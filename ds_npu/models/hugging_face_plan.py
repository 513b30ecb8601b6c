"""The plan of a Hugging Face model, from its structure, its config and its own tensor-parallel plan.

Attribute names say what a module may be; sizes (``draft``) and transformers' plan must not contradict them. Where these
do not tell the order inside of a fused weight, nothing is assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from ds_npu.config.roles import ORDER, Role
from ds_npu.models import kinds, names
from ds_npu.models.attention_modules import configured, over_all_heads
from ds_npu.models.attributes import has_attribute
from ds_npu.models.draft import Draft
from ds_npu.models.feed_forward_roles import GATES_FIRST, IN_MLP, mlp_roles, pair_roles
from ds_npu.models.hugging_face_model import HuggingFaceConfig, HuggingFaceModel, hugging_face_model, setting
from ds_npu.models.linear_attention import linear_attention_of
from ds_npu.models.tree import Tree
from ds_npu.parallel.expert.weights import is_experts

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
    "kv_b_proj": Role.LATENT_KEY_VALUE,
    "o_proj": Role.ATTENTION_OUTPUT,
    "out_proj": Role.ATTENTION_OUTPUT,
    "c_proj": Role.ATTENTION_OUTPUT,
    "dense": Role.ATTENTION_OUTPUT,
    "Wo": Role.ATTENTION_OUTPUT,
}
FUSED_ORDERS: dict[str, Role] = {
    "GPTNeoXAttention": Role.QUERY_KEY_VALUE_BY_GROUP,
    "GPTNeoXJapaneseAttention": Role.QUERY_KEY_VALUE_BY_GROUP,
    "BloomAttention": Role.QUERY_KEY_VALUE_BY_GROUP,
    "FalconAttention": Role.QUERY_KEY_VALUE_BY_GROUP,
    "PersimmonAttention": Role.QUERY_KEY_VALUE_BY_GROUP,
    "GPTBigCodeAttention": Role.QUERY_KEY_VALUE_BY_GROUP,
    "MptAttention": Role.QUERY_KEY_VALUE,
    "DbrxAttention": Role.QUERY_KEY_VALUE,
}
"""The order inside of the fused linear of attentions of transformers, by class; with one head of keys all are alike."""
IN_LINEAR_ATTENTION = {"in": Role.LINEAR_ATTENTION_INPUT, "out": Role.LINEAR_ATTENTION_OUTPUT}
"""Roles by the part of a linear's name before ``_proj``; the layer's other modules are its convolution and its norm."""
POSITIONS = ("wpe", "embed_positions", "position_embeddings", "positions_embed")

STYLES: dict[str, tuple[Role, ...]] = {
    "colwise": (
        *(Role.QUERY, Role.KEY, Role.VALUE, Role.LATENT_QUERY, Role.LATENT_KEY_VALUE, Role.GATE, Role.UP),
        *(Role.ATTENTION_GATE, Role.QUERY_KEY_VALUE_BY_GROUP),
    ),
    "rowwise": (Role.ATTENTION_OUTPUT, Role.DOWN),
    # transformers does not shard the parts of fused weights by themselves: it gathers their outputs and shards those.
    # It gathers the queries and keys of norms over all heads, too.
    "colwise_gather_output": (
        *(Role.QUERY_KEY_VALUE, Role.QUERY_KEY_VALUE_BY_GROUP, Role.GATE_UP, Role.QUERY, Role.KEY, Role.VALUE),
        Role.ATTENTION_GATE,
    ),
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
        # Llama4ForCausalLM returns itself, and ModernBertDecoderForCausalLM its head: the names are not what they say.
        around = (stated, self.tree.find(self.root))
        inner = [name for each in around for name in self.tree.within(each).values() if self.stacks_in(name)]
        return inner[0] if not self.stacks_in(stated) and len(inner) == 1 else stated

    def stacks_in(self, name: str) -> list[str]:
        """The lists of blocks in ``name``: with attentions, or else with as many modules as the config says."""
        inner = self.tree.within(name).values()
        count = setting(self.config, "num_hidden_layers", int)
        lists = (each for each in inner if isinstance(self.tree.module(each), nn.ModuleList))
        return [each for each in inner if self.is_stack(each)] or [
            each for each in lists if len(self.tree.within(each)) == count
        ]

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
        self.replicate_others()

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
            # OPT makes its final norm before its blocks.
            after = attribute.startswith("final") or any(role is Role.BLOCK for role in self.draft.roles.values())
            self.assign(name, Role.FINAL_NORM if after else Role.NORM)

    @cached_property
    def embedding(self) -> nn.Module:
        module = self.root.get_input_embeddings()
        name = self.tree.find(module)
        return self.tree.module(name) if name in self.tree.reals else module

    def is_rotary(self, name: str) -> bool:
        return "Rotary" in type(self.tree.module(name)).__name__

    def replicate_others(self) -> None:
        """Replicate what nothing else was said of, outside of attentions and MLPs: hidden states are whole there."""
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
            elif any(self.is_attention(each) for each in self.tree.within(name).values()):
                self.in_block(name)
            elif self.is_attention(name):
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
                self.linear(name, self.in_order(attention, IN_ATTENTION[attribute]))

    def in_order(self, attention: str, role: Role) -> Role:
        order = FUSED_ORDERS.get(type(self.tree.module(attention)).__name__)
        if role is not Role.QUERY_KEY_VALUE or order is None:
            return role
        shape = self.draft.attentions.get(self.tree.reals[attention][-1])
        return Role.QUERY_KEY_VALUE if shape is not None and shape.kv_heads == 1 else order

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
        elif linears := self.mlp_roles(name):
            self.in_mlp(name, linears)

    def in_mlp(self, name: str, linears: Mapping[str, Role]) -> None:
        inner = self.tree.within(name)
        norms = (self.tree.module(each) for each in inner.values() if kinds.is_norm(self.tree.module(each)))
        if any(self.hidden in shape for norm in norms for shape in kinds.own_shapes(norm).values()):
            return  # A norm of hidden states stands behind its output (Gemma 3n): it is replicated as a whole.
        self.assign(name, Role.MLP)
        for attribute, role in linears.items():
            self.linear(inner[attribute], role)
        for attribute, each in inner.items():
            if attribute not in linears:
                self.next_to_linears(each)

    def mlp_roles(self, mlp: str) -> dict[str, Role]:
        inner = self.tree.within(mlp)
        fused = GATES_FIRST.get(type(self.tree.module(mlp)).__name__)
        if fused is not None:
            return dict(zip(fused, (Role.GATE_UP, Role.DOWN), strict=True))
        styles = {attribute: self.style(name) for attribute, name in inner.items()}
        return mlp_roles({attribute: self.tree.module(name) for attribute, name in inner.items()}, styles, self.hidden)

    def next_to_linears(self, name: str) -> None:
        """Assign a norm over the columns of an MLP, or a trained activation."""
        module = self.tree.module(name)
        if kinds.is_norm(module):
            self.assign(name, Role.SHARDED_NORM)
        elif kinds.own_shapes(module) and all(sum(sizes) <= len(sizes) for sizes in kinds.own_shapes(module).values()):
            self.assign(name, Role.POINTWISE)

    @cached_property
    def hidden(self) -> int:
        """The width of hidden states; 0 where the config does not tell."""
        return setting(self.config, "hidden_size", int) or 0

    def experts(self, name: str) -> None:
        # A packed gate_up_proj has all gates before all ups.
        styles = self.style(f"{name}.gate_up_proj"), self.style(f"{name}.down_proj")
        # transformers' experts say themselves how they are stored.
        module = self.tree.module(name)
        known = has_attribute(module, "is_transposed") or kinds.is_transposed(module)
        if styles == ("packed_colwise", "rowwise") or known:
            self.assign(name, Role.EXPERTS)
        else:
            self.refuse(name, f"{ORDER_UNKNOWN}; {Role.EXPERTS} means {ORDER[Role.EXPERTS]}")

    def linear(self, name: str, role: Role) -> None:
        style = self.style(name)
        # All of transformers' models with Conv1D (the first GPTs) have queries, then keys, then values in one.
        known = style is not None or kinds.output_dim(self.tree.module(name)) == 1
        known = known or type(self.tree.module(names.parent(name))).__name__ in {*FUSED_ORDERS, *GATES_FIRST}
        if role in (Role.QUERY_KEY_VALUE, Role.GATE_UP) and not known:
            self.refuse(name, f"{ORDER_UNKNOWN}; {role} means {ORDER[role]}")
        elif style in STYLES and role not in STYLES[style] and role not in (Role.COLUMN, Role.ROW):
            self.refuse(name, f"its name says {role}, but transformers shards it {style}")
        else:
            self.assign(name, role)
