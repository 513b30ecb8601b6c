"""The roles of a model's modules in a plan, by the names that users write in ``ds_npu.plan``.

They need neither torch nor a model: the check of a config knows roles, too.
"""

from __future__ import annotations

from enum import Enum


class Role(str, Enum):
    """The role of one module. *Sharded* is over the tensor ranks; what is not sharded is whole on each rank."""

    BLOCK = "block"
    """A layer of the stack: attention and MLP with their norms."""
    ATTENTION = "attention"
    """Holds the projections of one attention."""
    QUERY = "query"
    KEY = "key"
    VALUE = "value"
    """Linears whose outputs are heads, sharded by heads."""
    QUERY_KEY_VALUE = "query_key_value"
    """One linear for queries, keys and values, in the order that ORDER tells."""
    QUERY_KEY_VALUE_BY_GROUP = "query_key_value_by_group"
    """One linear for queries, keys and values: for each head of keys the queries that share it, the key, the value."""
    ATTENTION_GATE = "attention_gate"
    """A linear with outputs for each query head (one, or as many as the head has values), sharded by heads."""
    ATTENTION_OUTPUT = "attention_output"
    """The linear over all heads' results, sharded by heads along its input."""
    LATENT = "latent"
    """A down projection of multi-head latent attention; not sharded."""
    LATENT_QUERY = "latent_query"
    """The up projection from a latent to queries, sharded by heads."""
    LATENT_KEY_VALUE = "latent_key_value"
    """The up projection from a latent to keys (without rotary part) and values, by heads, in the order of ORDER."""
    LINEAR_ATTENTION = "linear_attention"
    """A layer of linear attention of transformers (gated delta net, Mamba 2, a short convolution); its own weights are
    sharded by heads or channels."""
    LINEAR_ATTENTION_INPUT = "linear_attention_input"
    LINEAR_ATTENTION_OUTPUT = "linear_attention_output"
    """The linears into linear attention and out of it, sharded by heads."""
    LINEAR_ATTENTION_PART = "linear_attention_part"
    """The convolution and the norm of linear attention, sharded by heads where each head has weights."""
    HEAD_NORM = "head_norm"
    """A norm inside of attention, over one head or over a latent; not sharded."""
    INDEXER = "indexer"
    """Anything in an attention that chooses keys for all heads, without a gradient; not sharded."""
    SHARDED_NORM = "sharded_norm"
    """An RMS norm over all heads of an attention or all columns of an MLP; sharded like them, its mean is over all."""
    POINTWISE = "pointwise"
    """Anything in an MLP that does the same to each column (a trained activation); not sharded."""
    MLP = "mlp"
    """Holds a dense MLP; also one of shared experts."""
    GATE = "gate"
    UP = "up"
    """Linears from the hidden to the intermediate size, sharded along their output."""
    GATE_UP = "gate_up"
    """Gate and up in one linear: all gates, then all ups along its output."""
    DOWN = "down"
    """The linear back to the hidden size, sharded along its input."""
    MOE = "moe"
    """Holds a router and experts."""
    ROUTER = "router"
    """Scores tokens for experts; not sharded."""
    EXPERTS = "experts"
    """All experts' weights: gate_up_proj [E, 2I, H] (gates, then ups) and down_proj [E, H, I]; or a list of MLPs."""
    NORM = "norm"
    """A norm on the residual stream; not sharded."""
    FINAL_NORM = "final_norm"
    """The norm after the last block; not sharded."""
    ROTARY = "rotary"
    """Makes the rotary angles."""
    EMBEDDING = "embedding"
    """The table of tokens, sharded by vocabulary."""
    POSITION_EMBEDDING = "position_embedding"
    """The table of learned positions; not sharded."""
    HEAD = "head"
    """The linear to the logits, sharded by vocabulary."""
    COLUMN = "column"
    """Any other linear that opens a region in which ranks hold different columns; sharded along its output."""
    ROW = "row"
    """Any other linear that closes such a region; sharded along its input."""
    REPLICATED = "replicated"
    """Anything (with all inside of it) that is whole on each rank and outside of such regions."""
    LORA_A = "lora_a"
    LORA_B = "lora_b"
    """The first and the second factor of a LoRA adapter, sharded as the linear that they belong to asks for."""

    def __str__(self) -> str:
        return self.value


STRUCTURAL = (Role.BLOCK, Role.ATTENTION, Role.MLP, Role.MOE, Role.ROTARY)
"""Roles of modules that hold other modules, or nothing that is trained."""

OF_KNOWN_LAYERS = (
    Role.LINEAR_ATTENTION,
    Role.LINEAR_ATTENTION_INPUT,
    Role.LINEAR_ATTENTION_OUTPUT,
    Role.LINEAR_ATTENTION_PART,
)
"""Roles that only layers of transformers can have, whose classes ds_npu knows."""

PARENT: dict[Role, tuple[Role, ...]] = {
    Role.QUERY: (Role.ATTENTION,),
    Role.KEY: (Role.ATTENTION,),
    Role.VALUE: (Role.ATTENTION,),
    Role.QUERY_KEY_VALUE: (Role.ATTENTION,),
    Role.QUERY_KEY_VALUE_BY_GROUP: (Role.ATTENTION,),
    Role.ATTENTION_GATE: (Role.ATTENTION,),
    Role.ATTENTION_OUTPUT: (Role.ATTENTION,),
    Role.LATENT: (Role.ATTENTION,),
    Role.LATENT_QUERY: (Role.ATTENTION,),
    Role.LATENT_KEY_VALUE: (Role.ATTENTION,),
    Role.HEAD_NORM: (Role.ATTENTION,),
    Role.INDEXER: (Role.ATTENTION,),
    Role.LINEAR_ATTENTION_INPUT: (Role.LINEAR_ATTENTION,),
    Role.LINEAR_ATTENTION_OUTPUT: (Role.LINEAR_ATTENTION,),
    Role.LINEAR_ATTENTION_PART: (Role.LINEAR_ATTENTION,),
    Role.SHARDED_NORM: (Role.ATTENTION, Role.MLP),
    Role.POINTWISE: (Role.MLP,),
    Role.GATE: (Role.MLP,),
    Role.UP: (Role.MLP,),
    Role.GATE_UP: (Role.MLP,),
    Role.DOWN: (Role.MLP,),
    Role.ROUTER: (Role.MOE,),
    Role.EXPERTS: (Role.MOE,),
}
"""For each role, the roles of which a module around it must have one."""

HEADS = "one head after another"
ORDER: dict[Role, str] = {
    Role.QUERY: f"{HEADS}; those that share a head of keys and values stand together",
    Role.KEY: HEADS,
    Role.VALUE: HEADS,
    Role.QUERY_KEY_VALUE: "all heads' queries, then all keys, then all values; not head by head",
    Role.QUERY_KEY_VALUE_BY_GROUP: "for each head of keys its queries, then the key, then the value",
    Role.ATTENTION_GATE: HEADS,
    Role.LATENT_QUERY: HEADS,
    Role.LATENT_KEY_VALUE: "for each head its keys, then its values",
    Role.ATTENTION_OUTPUT: f"along its input, {HEADS}",
    Role.GATE_UP: "all gates, then all ups; not by turns",
    Role.EXPERTS: "gate_up_proj [E, 2I, H], all gates, then all ups; down_proj [E, H, I]",
}
"""Order of the parts in a weight of each role, which its shape does not tell."""
FUSED = (Role.QUERY_KEY_VALUE, Role.QUERY_KEY_VALUE_BY_GROUP, Role.LATENT_KEY_VALUE, Role.GATE_UP, Role.EXPERTS)
ORDERS = "\n".join(
    [
        "Of a weight that holds several parts, the role says the order along its output:",
        *(f"  {role}: {ORDER[role]}" for role in FUSED),
        "In any other order: give the module around it (the attention, the MLP) the role replicated.",
    ]
)
