"""Earlier engines of a model, whose hooks DeepSpeed leaves on its weights and modules."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from torch import nn

from ds_npu.zero_ext.method_wraps import MethodLevel, replace_method, without_nvtx


def let_gradients_go_to(optimizer: Any, model: nn.Module) -> None:
    """Remove the hooks by which DeepSpeed's earlier optimizers take the gradients of ``model``; their step then raises.

    Such a hook copies a gradient into the earlier optimizer's bucket, on a stream for which that of ``optimizer`` does
    not wait, and drops it where that bucket is full (DeepSpeed 0.19.8 runtime/zero/stage3.py:1509). On simulated
    NPUs, plain DeepSpeed's second engine of a model had other losses in each run.
    """
    for earlier in _optimizers_of(model):
        if earlier is not optimizer:
            for hook in (*earlier._grad_acc_hooks, *getattr(earlier, "_leaf_module_hooks", ())):
                hook.remove()
            replace_method(earlier, "step", _refuse, MethodLevel.RECORDED_STEP)


def offloads_of(model: nn.Module) -> Iterator[DeepSpeedZeRoOffload]:
    """DeepSpeed's objects that fetch weights of ZeRO 3 for the engines of ``model``."""
    for hook in model._forward_pre_hooks.values():
        offload = _owner_of(hook)
        if isinstance(offload, DeepSpeedZeRoOffload):
            yield offload


def _optimizers_of(model: nn.Module) -> list[Any]:
    weights: Any = model.parameters()
    hooks = [hook for weight in weights for hook in (weight._post_accumulate_grad_hooks or {}).values()]
    owners = {id(owner): owner for owner in map(_owner_of, hooks)}
    return [owner for owner in owners.values() if hasattr(owner, "_grad_acc_hooks")]


def _owner_of(hook: Any) -> Any:
    """The object in whose method DeepSpeed has defined ``hook``; None where there is none."""
    function = without_nvtx(hook)
    return inspect.getclosurevars(function).nonlocals.get("self") if inspect.isfunction(function) else None


def _refuse(*_: object, **__: object) -> None:
    raise RuntimeError(
        "engine.step: another engine was made of this model behind this one, and gets its gradients. What to do: step "
        "with the later engine, or make each engine of a model of its own (copy.deepcopy)"
    )
