"""Models of which one module gives what is not finite, in forward or backward, on one rank, in one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import gradient_rule
import tiny_models
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_unflatten

from ds_npu.parallel.runtime.forward_wraps import Level, wrap_forward

BAD = 63
"""A token that no other sequence has: its micro-batch is the wrong one."""


class InfiniteGradient(torch.autograd.Function):
    """The identity, whose gradient is divided by zero."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / torch.zeros_like(gradient)


@dataclass
class Planted:
    """A module that is wrong in the micro-batch with BAD on ``rank`` (-1: on all)."""

    name: str
    backward: bool = False
    rank: int = 1
    family: str = "llama"
    section: dict = field(default_factory=dict)
    stage: int = 1
    changes: dict = field(default_factory=dict)
    config: dict = field(default_factory=dict)

    def plant(self, model: Any) -> None:
        flag = SimpleNamespace(is_set=False)

        def look(module, args, kwargs) -> None:
            ids = kwargs["input_ids"]
            flag.is_set = self.rank in (-1, dist.get_rank()) and bool((ids == BAD).any())

        def wrong(forward, *args, **kwargs):
            out = forward(*args, **kwargs)
            if not flag.is_set:
                return out
            leaves, tree = tree_flatten(out)
            first = next(index for index, leaf in enumerate(leaves) if leaf is not None and leaf.is_floating_point())
            value = leaves[first]
            leaves[first] = InfiniteGradient.apply(value) if self.backward else value / torch.zeros_like(value)
            return tree_unflatten(leaves, tree)

        model.register_forward_pre_hook(look, with_kwargs=True)
        module = dict(model.named_modules()).get(self.name)
        if module is not None and type(module).__name__ != "PassThrough":  # Else another stage holds it.
            wrap_forward(module, wrong, Level.MODEL)

    def engine(self, folder: str, prepared=lambda model: model) -> Any:
        import deepspeed

        gradient_rule.without_extension()
        model = prepared(tiny_models.tiny(self.family, torch.float32, **self.changes))
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "torch_adam": True}},
            "zero_optimization": {"stage": self.stage},
            "ds_npu": {**self.section, "watch": {"finite": folder}},
            **self.config,
        }
        trained = [each for each in model.parameters() if each.requires_grad]
        return deepspeed.initialize(model=model, model_parameters=trained, config=config)[0]

    def text(self, folder: str, prepared=lambda model: model) -> str:
        """The error of the second step, of whose micro-batches the second has BAD."""
        engine = self.engine(folder, prepared)
        self.plant(engine.module)
        take_step(engine, bad=False)
        try:
            take_step(engine, bad=True)
        except FloatingPointError as error:
            return str(error)
        raise AssertionError(f"no error: {self}")


def take_step(engine: Any, *, bad: bool) -> None:
    for micro in range(2):
        ids = tiny_models.tokens(2, 8)
        if bad and micro == 1:
            ids[-1, 3] = BAD
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
