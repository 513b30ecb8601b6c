"""Parts for a model of one's own: the grid of ranks, tensor-parallel layers and losses, context attention.

``docs/own_model.md`` shows a model made of these. Each is imported at its first use, since they need torch.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ds_npu.config.context_algorithm import ContextAlgorithm, algorithm_of
    from ds_npu.parallel.context.attention import context_attention, ulysses_plan
    from ds_npu.parallel.context.axis import ContextAxis, context_axis
    from ds_npu.parallel.context.load_balance import Tokens, shard_documents, shard_evenly
    from ds_npu.parallel.context.ulysses import post_to_heads, post_to_tokens
    from ds_npu.parallel.expert.replay import RoutingRecord, record_routing, replay_routing
    from ds_npu.parallel.runtime.placement import sharding_of
    from ds_npu.parallel.tensor.axis import TensorAxis, tensor_axis
    from ds_npu.parallel.tensor.cross_entropy import VocabParallelLoss, gather_vocabulary, vocab_parallel_cross_entropy
    from ds_npu.parallel.tensor.embedding import VocabParallelEmbedding
    from ds_npu.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
    from ds_npu.parallel.tensor.log_probs import LogitTransform, VocabParallelLogProbs
    from ds_npu.parallel.tensor.sequence_shards import SequenceShards
    from ds_npu.parallel.tensor.weight_gradient import sum_gradient
    from ds_npu.parallel.tensor.whole_weight import whole_weight
    from ds_npu.topology.degrees import Degrees
    from ds_npu.topology.topology import Topology

HOMES = {
    "ColumnParallelLinear": "ds_npu.parallel.tensor.linear",
    "ContextAlgorithm": "ds_npu.config.context_algorithm",
    "ContextAxis": "ds_npu.parallel.context.axis",
    "Degrees": "ds_npu.topology.degrees",
    "LogitTransform": "ds_npu.parallel.tensor.log_probs",
    "RoutingRecord": "ds_npu.parallel.expert.replay",
    "RowParallelLinear": "ds_npu.parallel.tensor.linear",
    "SequenceShards": "ds_npu.parallel.tensor.sequence_shards",
    "TensorAxis": "ds_npu.parallel.tensor.axis",
    "Tokens": "ds_npu.parallel.context.load_balance",
    "Topology": "ds_npu.topology.topology",
    "VocabParallelEmbedding": "ds_npu.parallel.tensor.embedding",
    "VocabParallelLogProbs": "ds_npu.parallel.tensor.log_probs",
    "VocabParallelLoss": "ds_npu.parallel.tensor.cross_entropy",
    "algorithm_of": "ds_npu.config.context_algorithm",
    "context_attention": "ds_npu.parallel.context.attention",
    "context_axis": "ds_npu.parallel.context.axis",
    "gather_vocabulary": "ds_npu.parallel.tensor.cross_entropy",
    "post_to_heads": "ds_npu.parallel.context.ulysses",
    "post_to_tokens": "ds_npu.parallel.context.ulysses",
    "record_routing": "ds_npu.parallel.expert.replay",
    "replay_routing": "ds_npu.parallel.expert.replay",
    "shard_documents": "ds_npu.parallel.context.load_balance",
    "shard_evenly": "ds_npu.parallel.context.load_balance",
    "sharding_of": "ds_npu.parallel.runtime.placement",
    "sum_gradient": "ds_npu.parallel.tensor.weight_gradient",
    "tensor_axis": "ds_npu.parallel.tensor.axis",
    "ulysses_plan": "ds_npu.parallel.context.attention",
    "vocab_parallel_cross_entropy": "ds_npu.parallel.tensor.cross_entropy",
    "whole_weight": "ds_npu.parallel.tensor.whole_weight",
}
"""The module that defines each name."""

__all__ = [
    "ColumnParallelLinear",
    "ContextAlgorithm",
    "ContextAxis",
    "Degrees",
    "LogitTransform",
    "RoutingRecord",
    "RowParallelLinear",
    "SequenceShards",
    "TensorAxis",
    "Tokens",
    "Topology",
    "VocabParallelEmbedding",
    "VocabParallelLogProbs",
    "VocabParallelLoss",
    "algorithm_of",
    "context_attention",
    "context_axis",
    "gather_vocabulary",
    "post_to_heads",
    "post_to_tokens",
    "record_routing",
    "replay_routing",
    "shard_documents",
    "shard_evenly",
    "sharding_of",
    "sum_gradient",
    "tensor_axis",
    "ulysses_plan",
    "vocab_parallel_cross_entropy",
    "whole_weight",
]


def __getattr__(name: str) -> object:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = vars(importlib.import_module(HOMES[name]))[name]
    return found
