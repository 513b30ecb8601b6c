"""The Hugging Face Trainer's label smoothing where no logits exist: the model's own loss smooths its targets.

The Trainer takes the labels out of a batch, and computes the smoothed loss of the logits that the model returns. Read
in transformers 5.23.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from ds_npu.engine.clients.accelerate import Function
from ds_npu.features.chunked_loss.chunked_model import smoothed


def compute_loss(original: Function) -> Function:
    """For ``Trainer.compute_loss``: the model is given the labels, as without smoothing."""

    @functools.wraps(original)
    def computed(self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        smoother = self.label_smoother
        if smoother is None or self.compute_loss_func is not None:
            return original(self, model, *args, **kwargs)
        with smoothed(model, smoother.epsilon) as is_done_here:
            self.label_smoother = None if is_done_here else smoother
            try:
                return original(self, model, *args, **kwargs)
            finally:
                self.label_smoother = smoother

    return computed
