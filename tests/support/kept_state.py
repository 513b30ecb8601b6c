"""Training in bf16 with ``ds_npu.optimizer_memory``, to be compared with the same training without."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import deepspeed
import gradient_rule as rule
import tiny_models
import torch
from torch import nn
from torch.nn import functional

from ds_npu.memory import state_chunks
from ds_npu.parallel.tensor.shard_access import local_shard

LENGTH, STEPS = 10, 3
CHUNK = 4096
"""Elements, so that a tiny model has several chunks."""


class Words(nn.Module):
    """A model of few, large weights, so that what an allocator rounds up does not count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        inner = [layer for _ in range(3) for layer in (nn.Linear(256, 256, bias=False), nn.Tanh())]
        self.layers = nn.Sequential(nn.Embedding(64, 256), *inner, nn.Linear(256, 64, bias=False)).to(torch.bfloat16)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=functional.cross_entropy(self.layers(input_ids).flatten(0, 1), labels.flatten()))


@dataclass(frozen=True)
class Case:
    """Where the state is: one of DeepSpeed's optimizers for bf16."""

    stage: int
    accumulated: str | None = None
    parallel: tuple[tuple[str, int], ...] = ()
    family: str = "llama"
    fused: bool = False
    """Whether the optimizer is DeepSpeed's FusedAdam, not torch's."""
    torch_fused: bool = False
    """Whether torch's AdamW is told to be fused, as the Trainer's is."""
    weight_decay: float = 0.1

    def config(self, memory: dict[str, object], **more: object) -> dict[str, object]:
        section: dict[str, object] = {"parallel": dict(self.parallel)}
        adam = {"lr": 1e-2, "weight_decay": self.weight_decay, "torch_adam": not self.fused}
        adam |= {"fused": True} if self.torch_fused else {}
        config: dict[str, object] = {
            "train_micro_batch_size_per_gpu": rule.MICRO,
            "gradient_accumulation_steps": rule.ACCUMULATION,
            "gradient_clipping": rule.CLIP,
            "optimizer": {"type": "AdamW", "params": adam},
            "zero_optimization": {"stage": self.stage, "stage3_param_persistence_threshold": 0, **more},
            "bf16": {"enabled": True},
            "ds_npu": section | ({"optimizer_memory": memory} if memory else {}),
        }
        return config | ({"data_types": {"grad_accum_dtype": self.accumulated}} if self.accumulated else {})


def engine_of(case: Case, memory: dict[str, object], model: nn.Module | None = None, **more: object):
    """An engine of a tiny model of the family, or of ``model``, whose shards are of several chunks."""
    model = tiny_models.tiny(case.family, torch.float32).to(torch.bfloat16) if model is None else model
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    with mock.patch.object(state_chunks, "CHUNK", CHUNK):
        return deepspeed.initialize(model=model, model_parameters=weights, config=case.config(memory, **more))[0]


def train(engine, first: int = 0, steps: int = STEPS) -> list[torch.Tensor]:
    """The losses, and the norm of each step, from step ``first`` on."""
    found = []
    for index in range(first * rule.ACCUMULATION, (first + steps) * rule.ACCUMULATION):
        seed = torch.Generator().manual_seed(100 * index + engine.topology.rank("dp"))
        ids = torch.randint(0, tiny_models.VOCABULARY, (rule.MICRO, LENGTH), generator=seed).to(engine.device)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.detach().clone())
    return [*found, torch.as_tensor(engine.get_global_grad_norm())]


def weights_of(engine) -> list[torch.Tensor]:
    """Of this rank: whole where ZeRO 3 has parts, parts where tensor ranks have."""
    weights = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(weights):
        return [local_shard(weight).detach().clone() for weight in weights]


def arrays(state: object) -> list[torch.Tensor]:
    """The tensors of more than one element in an optimizer's state dict, in order."""
    if isinstance(state, torch.Tensor):
        return [state] if state.numel() > 1 else []
    each = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return [found for value in each for found in arrays(value)]


def alike(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def live_bytes() -> int:
    """Of all storages that tensors of this process have.

    A thread of gloo keeps the tensors of a message a moment longer than its wait, so it is asked until it says the same
    twice.
    """
    found, before = _live_bytes(), -1
    while found != before:
        time.sleep(0.05)
        found, before = _live_bytes(), found
    return found


def _live_bytes() -> int:
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())
