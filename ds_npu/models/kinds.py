"""The kind of a module, by its class and its own parameters, and the roles that it can have."""

from __future__ import annotations

import re

from torch import nn

from ds_npu.config.roles import STRUCTURAL, Role
from ds_npu.models.attributes import attribute
from ds_npu.models.linear_attention import linear_attention_of
from ds_npu.models.zero3 import unpartitioned_shape
from ds_npu.parallel.expert.weights import is_experts
from ds_npu.parallel.pipeline.pass_through import PassThrough

DENSE_CLASSES = re.compile("MLP|Mlp|FeedForward|FFN")
SPARSE_CLASSES = re.compile("M[oO][eE]|Expert|Router|Gate$")
"""Parts of the class names of transformers' MLPs, and of modules that send tokens to experts or hold them."""
OVER_A_DIM = (nn.MultiheadAttention, nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin)
"""Activations of torch that may run over the sequence dim."""
ON_TOKENS = {
    *("DbrxNormAttentionNorm", "Gemma3nTextAltUp", "Gemma3nTextLaurelBlock", "JetMoeParallelExperts", "MoshiLinear"),
    *("Llama4TextL2Norm", "ModernBertDecoderEmbeddings", "ModernBertDecoderPredictionHead"),
}
"""Further classes of transformers that compute each token from that token alone, apart from attentions in them."""
CALLING_FOR_EACH_EXPERT = {"DbrxExperts"}
"""Classes of modules that call an inner one, which holds all experts, once for each expert that has a token."""
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterDict, nn.Sequential)
LORA = ("peft.tuners.lora.", "peft.tuners._buffer_dict", "peft.utils.other")

Shape = tuple[int, ...]


def own_shapes(module: nn.Module) -> dict[str, Shape]:
    """Shapes of the parameters that ``module`` itself holds, by name; the whole ones under ZeRO-3."""
    # A parameter is used once: under the name of its first owner in this module.
    return {name: unpartitioned_shape(each) for name, each in module.named_parameters(recurse=False)}


def described(module: nn.Module) -> str:
    """``module`` as messages name it: ``Linear, weight [96, 32]``."""
    return ", ".join([type(module).__name__, *[f"{name} {list(shape)}" for name, shape in own_shapes(module).items()]])


def is_norm(module: nn.Module) -> bool:
    """Whether the class of ``module`` says that it is a norm."""
    return type(module).__name__.endswith(("RMSNorm", "LayerNorm")) or isinstance(module, nn.LayerNorm)


def is_attention(module: nn.Module) -> bool:
    """Whether the class of ``module`` says that it is an attention."""
    name = type(module).__name__
    return "Attention" in name or name.endswith("MLA")


def is_linear(module: nn.Module) -> bool:
    """Whether ``module`` has a weight of two dims and is no embedding."""
    return len(own_shapes(module).get("weight", ())) == 2 and not isinstance(module, nn.Embedding)


def is_transposed(experts: nn.Module) -> bool:
    """Whether the weights of ``experts`` are [E, inputs, outputs]: as transformers says, or by shapes (Llama 4)."""
    known = attribute(experts, "is_transposed", bool)
    if known is not None:
        return known
    shapes = own_shapes(experts)
    return shapes.keys() == {"gate_up_proj", "down_proj"} and shapes["gate_up_proj"][1] == shapes["down_proj"][2]


def holds_list(module: nn.Module) -> bool:
    """Whether ``module`` is, or directly holds, a list of modules."""
    return any(isinstance(each, nn.ModuleList) for each in (module, *module.children()))


def counts(module: nn.Module, role: Role) -> bool:
    """Whether a plan holds ``module`` with ``role``; a norm counts without parameters, too."""
    is_list = role is Role.EXPERTS and holds_list(module)
    return role in (*STRUCTURAL, Role.LINEAR_ATTENTION) or is_list or is_norm(module) or bool(own_shapes(module))


def is_sparse(module: nn.Module) -> bool:
    """Whether the class of ``module`` says that it routes tokens to experts or holds experts."""
    return SPARSE_CLASSES.search(type(module).__name__) is not None


def calls_for_each_expert(module: nn.Module) -> bool:
    """Whether ``module`` calls an inner one, which holds all experts, once for each expert that has a token.

    Data ranks then call it unequally often, and ZeRO-3, which gathers weights at each call, would wait forever.
    """
    return type(module).__name__ in CALLING_FOR_EACH_EXPERT


def works_on_tokens(module: nn.Module) -> bool:
    """Whether ``module``, without its children, is known to compute each token from that token alone."""
    name = type(module).__name__
    origin = type(module).__module__
    dims = {len(shape) for shape in own_shapes(module).values()}
    if isinstance(module, (*CONTAINERS, nn.Identity, nn.Dropout, nn.Embedding, PassThrough)) or origin.startswith(LORA):
        return True
    if origin in ("torch.nn.modules.activation", "transformers.activations"):
        return not isinstance(module, OVER_A_DIM)
    if origin.startswith("transformers.models.") and name in ON_TOKENS:
        return True
    if is_norm(module) or DENSE_CLASSES.search(name):
        return dims <= {1}
    if is_sparse(module) and (dims <= {1, 2} or is_experts(module)):
        return True
    return name.endswith(("Linear", "Conv1D")) if is_linear(module) else "Rotary" in name and not dims


def output_dim(module: nn.Module) -> int:
    """The dim of a linear's weight that its outputs index: 0, or 1 for transformers' Conv1D."""
    return 1 if type(module).__name__ == "Conv1D" else 0


def sizes(module: nn.Module) -> tuple[int, int]:
    """(inputs, outputs) of a linear."""
    weight = own_shapes(module)["weight"]
    out = output_dim(module)
    return weight[1 - out], weight[out]


def _misfit_of_holder(role: Role, module: nn.Module) -> str | None:
    if role is Role.LINEAR_ATTENTION_PART:
        right = bool(own_shapes(module)) or is_norm(module)
        return None if right else f"{role} is for a convolution, a norm, or another module with weights"
    if role is Role.LINEAR_ATTENTION:
        known = linear_attention_of(module) is not None
        return None if known else f"{role} is for a gated delta net, a Mamba 2 or a short convolution of transformers"
    if any(len(shape) > 1 for shape in own_shapes(module).values()):
        return f"{role} is for a module without matrices of its own: put them into modules inside of it"
    return None if any(True for _ in module.children()) else f"{role} is for a module that holds others"


def misfit(role: Role, module: nn.Module) -> str | None:
    """Why ``module`` cannot have ``role``; None where it can."""
    shapes = own_shapes(module).values()
    dims = {len(shape) for shape in shapes}
    if role in (Role.REPLICATED, Role.ROTARY, Role.INDEXER):
        return None
    if role in (*STRUCTURAL, Role.LINEAR_ATTENTION, Role.LINEAR_ATTENTION_PART):
        return _misfit_of_holder(role, module)
    if role in (Role.NORM, Role.FINAL_NORM, Role.HEAD_NORM, Role.SHARDED_NORM, Role.POINTWISE):
        # Learned numbers of an activation may have no dim.
        what = "an activation" if role is Role.POINTWISE else "a norm"
        right = dims <= ({0, 1} if role is Role.POINTWISE else {1})
        return None if right else f"{role} is for {what}, whose parameters have one dim"
    if role in (Role.EMBEDDING, Role.POSITION_EMBEDDING):
        right = dims == {2} and not isinstance(module, nn.Linear)
        return None if right else f"{role} is for an embedding, a single table of two dims"
    if role is Role.EXPERTS:
        why = f"{role} is for a module whose parameters have three dims, the first the experts, or with a list of them"
        # Biases have two.
        return None if (3 in dims and dims <= {2, 3}) or (not dims and holds_list(module)) else why
    if role in (Role.LORA_A, Role.LORA_B):
        # PEFT's lora_bias gives the second factor one.
        right = 2 in dims and dims <= {1, 2}
        return None if right else f"{role} is for a factor of an adapter, which has two dims"
    return None if is_linear(module) else f"{role} is for a linear, which has a weight of two dims"
