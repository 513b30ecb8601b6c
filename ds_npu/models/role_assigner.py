"""Roles for the modules of a Hugging Face model: what every part of the assignment reads and writes.

transformers' plan and class names tell what they tell; where neither tells the order inside of a fused weight, nothing
is assumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import nn

from ds_npu.config.roles import ORDER, Role
from ds_npu.models import kinds, names
from ds_npu.models.draft import Draft
from ds_npu.models.feed_forward_roles import GATES_FIRST
from ds_npu.models.hugging_face_model import HuggingFaceConfig, HuggingFaceModel, setting
from ds_npu.models.linear_attention import linear_attention_of
from ds_npu.models.tree import Tree

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
"""The order of queries, keys and values in transformers' fused linears, by the class of the attention. With one head of
keys, all orders are the same."""
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


@dataclass(frozen=True)
class RoleAssigner:
    """Assigns roles in ``draft`` to the modules of the Hugging Face model ``root``, which is somewhere in ``tree``."""

    tree: Tree
    root: HuggingFaceModel
    draft: Draft

    @cached_property
    def decoder(self) -> str:
        """The plain name of the language part."""
        stated = self.tree.find(self.root.get_decoder())
        # Llama4ForCausalLM returns itself, and ModernBertDecoderForCausalLM its head: the names are not what they say.
        around = dict.fromkeys((stated, self.tree.find(self.root)))
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

    def is_stack(self, name: str) -> bool:
        """Whether ``name`` is a list of blocks, which are modules with attentions."""
        blocks = self.tree.within(name).values()
        parts = [each for block in blocks for each in self.tree.within(block).values()]
        # A block may hold a list of attentions (LongCat-Flash).
        lists = [each for each in parts if isinstance(self.tree.module(each), nn.ModuleList)]
        parts += [each for inner in lists for each in self.tree.within(inner).values()]
        return isinstance(self.tree.module(name), nn.ModuleList) and any(map(self.mixes_tokens, parts))

    def is_attention(self, name: str) -> bool:
        return kinds.is_attention(self.tree.module(name)) and bool(self.tree.within(name))

    def mixes_tokens(self, name: str) -> bool:
        return self.is_attention(name) or linear_attention_of(self.tree.module(name)) is not None

    @cached_property
    def config(self) -> HuggingFaceConfig:
        return self.root.config.get_text_config()

    @cached_property
    def hidden(self) -> int:
        """The width of hidden states; 0 where the config does not tell."""
        return setting(self.config, "hidden_size", int) or 0

    def assign(self, name: str, role: Role) -> None:
        self.draft.roles.update(dict.fromkeys(self.tree.reals[name], role))

    def refuse(self, name: str, why: str) -> None:
        self.draft.notes.update(dict.fromkeys(self.tree.reals[name], why))

    def style(self, name: str) -> str | None:
        """The style of a module or parameter of the language part in transformers' plan."""
        return (self.config.base_model_tp_plan or {}).get(names.generic(name.removeprefix(f"{self.decoder}.")))

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
