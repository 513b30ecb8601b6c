"""The part of a predicted run that a training script has: its model, the ranks of Ulysses, the loss of a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
import transformers
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from torch import nn
from transformers.integrations import HfDeepSpeedConfig
from transformers.utils import output_capturing

from ds_npu.cli.planned_model import auto_class_of, model_without_weights
from ds_npu.cli.prediction.deepspeed_axes import expert_ranks, sequence_ranks, tensor_ranks
from ds_npu.cli.prediction.dry_run import Request
from ds_npu.config.deepspeed_keys import zero_stage
from ds_npu.config.problems import Config
from ds_npu.engine.pretrained import with_empty_parts

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FLAT_BUFFERS = (1, 2)
"""The stages of ZeRO whose weights travel over the host into a flat buffer (stage_1_and_2.py of DeepSpeed 0.19.8)."""
IGNORED = -100
"""The label of a token without a loss."""


def training_dtype(ds_config: Config) -> torch.dtype:
    """The dtype that a model is trained in."""
    return next((each for key, each in DTYPES.items() if ds_config.get(key, {}).get("enabled")), torch.float32)


def whole_model(path: Path, dtype: torch.dtype) -> Any:
    """The model of the config at ``path`` without weights, on the meta device."""
    model = model_without_weights(path, dtype, use_cache=False)
    if isinstance(model, str):
        raise ValueError(f"{path}: {model}")
    return model


def ready_model(request: Request) -> Any:
    """The model that is passed to ``deepspeed.initialize``, on this rank's NPU. Its weights have no defined values."""
    path, config = Path(request.model), request.ds_config
    if expert_ranks(config) > 1:
        _let_autoep_ask_the_registry()
    if zero_stage(config) == 3:
        model = _partitioned_model(path, training_dtype(config), config)
    else:
        model = whole_model(path, training_dtype(config))
        if zero_stage(config) in FLAT_BUFFERS:
            _share_memory_of_weights_to_be_sharded(model, config)
        with_empty_parts(model, config)
    if request.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model


def _partitioned_model(path: Path, dtype: torch.dtype, ds_config: Config) -> Any:
    """The model as transformers makes it under ZeRO 3: each weight is partitioned when it is made."""
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False, use_cache=False)
    keeps_alive = HfDeepSpeedConfig(ds_config)
    model = auto_class_of(config).from_config(config, dtype=dtype, trust_remote_code=False).train()
    del keeps_alive
    return model


def _share_memory_of_weights_to_be_sharded(model: Any, ds_config: Config) -> None:
    """Make the weights that AutoTP or AutoEP will shard; all elements of a weight share the memory of one.

    A training script has them whole on the host, which this process has no room for. DeepSpeed copies each rank's part.
    """
    for module in model.modules():
        is_linear = isinstance(module, nn.Linear)
        is_stack = "experts" in type(module).__name__.lower()
        if (tensor_ranks(ds_config) > 1 and is_linear) or (expert_ranks(ds_config) > 1 and is_stack):
            for name, weight in module.named_parameters(recurse=False):
                number = torch.empty((), dtype=weight.dtype, device=get_accelerator().current_device_name())
                setattr(module, name, nn.Parameter(number.expand(weight.shape)))


def _let_autoep_ask_the_registry() -> None:
    """Let transformers' registry of outputs take a default, which DeepSpeed 0.19.8 passes and 5.23 refuses."""
    registry = type(output_capturing._CAN_RECORD_REGISTRY)
    get = registry.get
    registry.get = lambda self, key, default=(): get(self, key) or default or {}


def ulysses_groups(model: Any, request: Request) -> Any:
    """The process groups of Ulysses, DeepSpeed's ``mpu``; None where one rank has the whole sequence."""
    ranks = sequence_ranks(request.ds_config)
    if ranks == 1 or "ds_npu" in request.ds_config:
        return None
    # Ulysses asks deepspeed.comm for its groups, which takes over the process group that is there.
    deepspeed.init_distributed(get_accelerator().communication_backend_name())
    core = model.config._attn_implementation
    return UlyssesSPAttentionHF.register_with_transformers(model, core, ranks, request.samples)


def micro_batch_loss(engine: Any, ids: torch.Tensor, mpu: Any) -> torch.Tensor:
    """The loss of the micro-batch ``ids`` [sample, token]; with ``mpu``, of this rank's part of the sequence."""
    if mpu is None:
        loss: torch.Tensor = engine(input_ids=ids, labels=ids).loss
        return loss
    labels = nn.functional.pad(ids, (0, 1), value=IGNORED)[:, 1:]
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    ranks = mpu.get_sequence_parallel_world_size()
    rank = mpu.get_sequence_parallel_rank()
    own, own_positions, own_labels = (each.chunk(ranks, dim=1)[rank].contiguous() for each in (ids, positions, labels))
    logits = engine(input_ids=own, position_ids=own_positions).logits
    words = engine.module.config.get_text_config().vocab_size
    result: torch.Tensor = engine.module.loss_function(
        logits=logits, labels=None, shift_labels=own_labels, vocab_size=words
    )
    return result
