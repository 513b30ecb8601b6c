"""Weights of a Llama or Qwen that Megatron-Core has trained, under the names and in the shapes of Hugging Face.

Megatron keeps queries, keys and values in one weight (for each group its queries, then its key and value), gates and
ups in another, and may stack a weight of all layers in one tensor. Source: Megatron-Core 0.16.1
core/models/gpt/gpt_model.py, core/transformer/{transformer_block,attention,mlp}.py (sharded_state_dict).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ds_npu.checkpoint.distributed_files import DistributedFiles, listed_objects
from ds_npu.checkpoint.files import CheckpointError

FAMILIES = ("llama", "qwen2", "qwen3")
"""Values of model_type in config.json whose models compute what Megatron's GPTModel does."""
COMMON = "common.pt"
OUTSIDE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
"""Weights outside of the layers: Megatron's name, and that in Hugging Face's model."""
OF_LAYERS = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.weight_w": "mlp.gate_proj.weight",
    "mlp.linear_fc1.weight_v": "mlp.up_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.linear_fc2.bias": "mlp.down_proj.bias",
}
"""Weights of a layer: Megatron's name behind ``decoder.layers.N.``, Hugging Face's behind ``model.layers.N.``."""
QKV, GATE_AND_UP = "self_attention.linear_qkv.", "mlp.linear_fc1."
IN_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")
NO_WEIGHT = re.compile(r"(chained_\d+\.)?optimizer\.|.*\._extra_state(/|$)|rng_state|rerun_state_machine_state")
"""Names of tensors that are no weights: states of optimizers, of FP8, of random numbers."""
VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
LISTED = 6


class RunArguments:
    """The arguments of a run by name, loaded in place of the argparse.Namespace that Megatron saves."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.values = dict(state)


@dataclass(frozen=True)
class MegatronModel:
    """The sizes in a Hugging Face model's config that tell how Megatron stores it."""

    heads: int
    groups: int
    """The number of heads of keys and values."""
    vocabulary: int

    @staticmethod
    def of(config: Any) -> MegatronModel:
        """Raises CheckpointError for a model of another family."""
        if config.model_type not in FAMILIES:
            raise CheckpointError(
                f"model_type of config.json: found {config.model_type}; from Megatron-Core's folders "
                f"{', '.join(FAMILIES)} are converted. What to do: convert it with Megatron's own tools"
            )
        heads = config.num_attention_heads
        return MegatronModel(heads, config.to_dict().get("num_key_value_heads") or heads, config.vocab_size)


def megatron_weights(folder: Path, model: MegatronModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights in ``folder``, one after the other, by Hugging Face's names, in the dtype that they have there.

    Rows that Megatron has added to the vocabulary are left out. Raises CheckpointError for what cannot be read and,
    before anything is read, for tensors that are not known.
    """
    files = DistributedFiles(folder)
    names = [name for name in files.shapes if not NO_WEIGHT.match(name)]
    unknown = [name for name in names if not _is_known(name)]
    if unknown:
        more = f", and {len(unknown) - LISTED} more" if len(unknown) > LISTED else ""
        raise CheckpointError(
            f"{folder} has weights that are not known: {', '.join(unknown[:LISTED])}{more}. What to do: "
            f"Megatron-Core's GPTModel is converted, as {', '.join(FAMILIES)}, without experts; use Megatron's "
            "own tools for others"
        )
    for name in names:
        tensor = files.tensor(name)
        in_layer = IN_LAYER.fullmatch(name)
        if in_layer is None:
            target = OUTSIDE[name]
            yield target, tensor[: model.vocabulary] if target in VOCABULARY else tensor
        elif in_layer[1] is not None:
            yield from _of_layer(int(in_layer[1]), in_layer[2], tensor, model)
        else:
            for index, each in enumerate(tensor):
                yield from _of_layer(index, in_layer[2], each, model)


def _is_known(name: str) -> bool:
    in_layer = IN_LAYER.fullmatch(name)
    if in_layer is None:
        return name in OUTSIDE
    joined = [f"{prefix}{kind}" for prefix in (QKV, GATE_AND_UP) for kind in ("weight", "bias")]
    return in_layer[2] in OF_LAYERS or in_layer[2] in joined


def _of_layer(index: int, name: str, tensor: torch.Tensor, model: MegatronModel) -> Iterator[tuple[str, torch.Tensor]]:
    prefix = f"model.layers.{index}."
    if name in OF_LAYERS:
        yield prefix + OF_LAYERS[name], tensor
        return
    kind = name.rpartition(".")[2]
    if name.startswith(QKV):
        parts = dict(zip(("q_proj", "k_proj", "v_proj"), _queries_keys_values(tensor, model), strict=True))
        yield from ((f"{prefix}self_attn.{part}.{kind}", each) for part, each in parts.items())
    else:
        gate, up = tensor.chunk(2)
        yield f"{prefix}mlp.gate_proj.{kind}", gate
        yield f"{prefix}mlp.up_proj.{kind}", up


def _queries_keys_values(tensor: torch.Tensor, model: MegatronModel) -> list[torch.Tensor]:
    """Rows of queries, keys and values of a weight [groups * (queries of a group + 2) * head, ...], or of a bias."""
    queries = model.heads // model.groups
    rest = tensor.shape[1:]
    blocks = model.groups * (queries + 2)
    if tensor.shape[0] % blocks:
        raise CheckpointError(
            f"{QKV}* has {tensor.shape[0]} rows, which are not those of {model.heads} heads and {model.groups} heads "
            "of keys and values. What to do: give the config.json of this model"
        )
    by_group = tensor.view(model.groups, queries + 2, -1, *rest)
    parts = by_group[:, :queries], by_group[:, queries], by_group[:, queries + 1]
    return [each.reshape(-1, *rest) for each in parts]


def differences_of_run(folder: Path, config: Any) -> list[str] | None:
    """Arguments of the run that wrote ``folder`` which ``config`` contradicts, in words; None where none were saved.

    They tell formulas that weights do not: norms, positions, activations. Raises CheckpointError for a damaged file.
    """
    if not (folder / COMMON).is_file():
        return None
    found = listed_objects(folder / COMMON, {("argparse", "Namespace"): RunArguments})
    arguments = found.get("args") if isinstance(found, Mapping) else None
    if not isinstance(arguments, RunArguments):
        return None
    given = arguments.values
    return [
        f"{name} {given[name]!r} (the config: {wanted!r})"
        for name, wanted_of in ARGUMENTS.items()
        if name in given and given[name] != (wanted := wanted_of(config)) and not _is_left_out(name, given)
    ]


def _is_left_out(name: str, given: Mapping[str, Any]) -> bool:
    """Whether the run does not use an argument."""
    if name == "num_query_groups":
        return not given.get("group_query_attention", True)
    return name in ("kv_channels", "ffn_hidden_size") and given[name] is None


def _rope(config: Any) -> Mapping[str, Any]:
    found = config.to_dict().get("rope_parameters") or config.to_dict().get("rope_scaling") or {}
    return found if isinstance(found, Mapping) else {}


ARGUMENTS: Mapping[str, Callable[[Any], Any]] = {
    "normalization": lambda config: "RMSNorm",
    "apply_layernorm_1p": lambda config: False,
    "swiglu": lambda config: True,
    "position_embedding_type": lambda config: "rope",
    "rotary_interleaved": lambda config: False,
    "rotary_percent": lambda config: 1.0,
    "num_experts": lambda config: None,
    "multi_latent_attention": lambda config: False,
    "num_layers": lambda config: config.num_hidden_layers,
    "hidden_size": lambda config: config.hidden_size,
    "ffn_hidden_size": lambda config: config.intermediate_size,
    "num_attention_heads": lambda config: config.num_attention_heads,
    "num_query_groups": lambda config: config.to_dict().get("num_key_value_heads") or config.num_attention_heads,
    "kv_channels": lambda config: config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads,
    "norm_epsilon": lambda config: config.rms_norm_eps,
    "rotary_base": lambda config: _rope(config).get("rope_theta", config.to_dict().get("rope_theta", 10000)),
    "use_rope_scaling": lambda config: _rope(config).get("rope_type", "default") != "default",
    "untie_embeddings_and_output_weights": lambda config: not config.tie_word_embeddings,
}
"""Arguments of Megatron's training, each with the value that a Hugging Face config requires."""
