"""Calls of modules that are computed again in backward: single calls, and runs of blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ds_npu.memory.recomputation import Recomputation
from ds_npu.models.attributes import attribute
from ds_npu.parallel.runtime.calls import Keywords
from ds_npu.parallel.runtime.forward_wraps import Forward, P, R, first_parameter_name
from ds_npu.parallel.runtime.micro_batch import Fact, closing_over_micro_batch, new_forward, running

KEY = "recompute"
CACHES = ("past_key_values", "past_key_value", "layer_past")
"""Arguments of a block to which it would write keys and values twice."""


def is_recomputed(module: nn.Module) -> bool:
    """Whether this forward of ``module`` will have a backward.

    Raises ValueError where transformers' checkpointing recomputes the forward already.
    """
    if not (module.training and torch.is_grad_enabled()):
        return False
    check_not_checkpointed(module)
    return True


def check_not_checkpointed(model: nn.Module) -> None:
    """Raise ValueError where transformers' checkpointing of ``model``, or of a module in it, is on."""
    for module in model.modules():
        if attribute(module, "gradient_checkpointing", bool):
            raise ValueError(
                f"ds_npu.{KEY}: gradient checkpointing of {type(module).__name__} is on, and activations would be "
                "computed twice again. What to do: leave out gradient_checkpointing (of the Trainer, or "
                f"model.gradient_checkpointing_enable()), or ds_npu.{KEY}"
            )


def recomputation_of(
    function: Callable[..., Any], device_type: str, whole: bool = False, kept: Sequence[str] = ()
) -> Recomputation:
    """The Recomputation of a call of ``function``, to its end if ``whole``; results of the operators ``kept`` are kept.

    Blocks must not be ``whole``: ZeRO-3 gathers the last layer's weight for its backward, which starts the
    recomputation, and would release the weight behind the recomputed forward of the layer.
    """
    return Recomputation(closing_over_micro_batch(function), device_type, stops_early=not whole, kept=kept)


def without_cache(module: nn.Module, kwargs: Keywords) -> dict[str, Any]:
    """``kwargs`` without a cache, which is empty in training; raises ValueError where it is not."""
    changed = {name: None for name in CACHES if kwargs.get(name) is not None}
    for name in changed:
        if kwargs[name].get_seq_length() > 0:
            raise ValueError(
                f"ds_npu.{KEY}: {type(module).__name__} is trained with keys and values in {name}, which computing it "
                f"again would write once more. What to do: give it none (use_cache false), or leave ds_npu.{KEY} out"
            )
    return {**kwargs, **changed, **({"use_cache": False} if "use_cache" in kwargs else {})}


def recompute_module(
    device_type: str, kept: Sequence[str], module: nn.Module, forward: Forward, *args: Any, **kwargs: Any
) -> Any:
    """Wrap a module's forward: only its arguments, and results of the operators ``kept``, are kept for backward."""
    if not is_recomputed(module):
        return forward(*args, **kwargs)
    return recomputation_of(forward, device_type, kept=kept)(*args, **without_cache(module, kwargs))


@dataclass
class _Run:
    """The calls of consecutive blocks in one forward; only the first one's input is kept."""

    stack: ExitStack
    """The context in which tensors that the blocks save are not kept."""
    calls: list[Callable[[torch.Tensor], Any]] = field(default_factory=list)
    """Each block's call, from its hidden states to its output."""
    last: torch.Tensor | None = None
    """The hidden states that the last block has returned."""

    def again(self, hidden: torch.Tensor) -> None:
        for call in self.calls:
            hidden = _hidden_states(call(hidden))

    def close(self) -> None:
        """End the run behind its last block."""
        self.stack.close()
        self.last = None

    def goes_on_with(self, hidden: torch.Tensor) -> bool:
        """Whether ``hidden`` are those that the last block returned; ZeRO-3 returns an alias."""
        last = self.last
        return (
            last is not None
            and (hidden.data_ptr(), hidden.shape, hidden.stride()) == (last.data_ptr(), last.shape, last.stride())
            and hidden._version == last._version
        )


class RecomputedRuns:
    """Recomputes ``blocks``, which a model calls one after another, in runs of ``length``.

    A run ends early where the model does something with the hidden states between two blocks.
    """

    def __init__(self, length: int, device_type: str, kept: Sequence[str] = ()) -> None:
        self.length, self.device_type, self.kept = length, device_type, kept
        self._run: Fact[_Run | None] = Fact(while_running=True)

    def around(self, _caller: nn.Module, forward: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the module that calls the blocks, and then end the run of blocks that is still open, if any."""
        with new_forward() as micro_batch:
            try:
                return forward(*args, **kwargs)
            finally:
                run = self._run.of(micro_batch)
                if run is not None:
                    run.close()

    def block(self, is_last: bool, module: nn.Module, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        """Run a block as part of a run of blocks.

        The run ends after ``length`` blocks, or where the block ``is_last`` in the model.
        """
        micro_batch = running()
        if micro_batch is None or not is_recomputed(module):
            return forward(*args, **kwargs)
        name = first_parameter_name(module)
        hidden, others = (args[0], args[1:]) if args else (kwargs[name], ())
        kwargs = without_cache(module, {key: value for key, value in kwargs.items() if args or key != name})
        run = self._run.of(micro_batch)
        if run is not None and not run.goes_on_with(hidden):
            run.close()
            run = None
        if run is None:
            run = self._begin(hidden)
            self._run.set(micro_batch, run)
        run.calls.append(lambda states: forward(states, *others, **kwargs))
        out = forward(hidden, *others, **kwargs)
        run.last = _hidden_states(out)
        if is_last or len(run.calls) == self.length:
            run.close()
            self._run.set(micro_batch, None)
        return out

    def _begin(self, hidden: torch.Tensor) -> _Run:
        run = _Run(ExitStack())
        made = recomputation_of(run.again, self.device_type, kept=self.kept)
        made.hold(hidden)
        run.stack.enter_context(made.saving())
        return run


def _hidden_states(out: Any) -> torch.Tensor:
    """The hidden states in a block's output: ``out``, or the first item of a tuple."""
    found: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return found
