"""An operator: its reference in plain PyTorch, its NPU kernel, and which of the two a call runs."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from ds_npu import capability
from ds_npu.capability import Unavailable
from ds_npu.log import warn_once
from ds_npu.operator_costs import Cost
from ds_npu.ops.self_check import Sample, difference

P = ParamSpec("P")
R = TypeVar("R")

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def sample_numbers(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Normal random numbers on the CPU, the same at every call, for a ``Sample``."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def npu_kernels(module: str) -> Any:
    """The ``module`` with calls of torch_npu, which can be imported only where torch_npu can."""
    return importlib.import_module(module)


@dataclass(eq=False)
class Operator(Generic[P, R]):
    """A callable with the signature of ``reference``: the kernel on NPU tensors of ``dtypes``, else the reference.

    The first tensor among the arguments decides (a list of tensors counts as its first). The kernel is imported at its
    first call, unless torch_npu misses some of ``needs``; it may pass calls whose shapes or options it does not support
    to ``reference``. Where it cannot be used at all, ``why_unavailable`` says why.
    """

    name: str
    reference: Callable[P, R]
    kernel: str
    """``module:function``, with exactly the signature and the result of the reference."""
    sample: Sample
    """Makes small arguments on the CPU for ``check``, in a dtype; differentiated ones require gradients."""
    cost: Callable[..., Cost]
    """FLOP and bytes of a call, from the shapes and dtypes of its tensors: ``ds_npu.operator_costs``."""
    needs: Sequence[str] = ()
    """Functions of torch_npu that the kernel calls."""
    dtypes: Sequence[torch.dtype] = KERNEL_DTYPES
    _refusal: Unavailable | None = field(default=None, init=False)
    # NPU tensors call ``_first_call`` at first, then the kernel or the reference.
    _on_npu: Callable[P, R] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._on_npu = self._first_call

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        for value in itertools.chain(args, kwargs.values()):
            tensor = value[0] if isinstance(value, (list, tuple)) and value else value
            if isinstance(tensor, torch.Tensor):
                if tensor.device.type == "npu" and tensor.dtype in self.dtypes:
                    return self._on_npu(*args, **kwargs)
                break
        return self.reference(*args, **kwargs)

    def why_unavailable(self) -> Unavailable | None:
        """Why the kernel is not used on NPUs, None if it is. Imports torch_npu, and asks for no device."""
        return self._refusal or capability.torch_npu_importable() or capability.missing_functions(self.needs)

    def check(self, device: torch.device | str) -> str | None:
        """Compare the kernel with the reference on ``device``, once for each dtype; a wrong kernel is no longer used.

        Returns why the kernel is not used, None if it is right. Waits for the device: call it at the start, not in a
        step.
        """
        if reason := self.why_unavailable():
            return reason.reason
        kernel = self._import_kernel()
        for dtype in self.dtypes:
            # Samples are made on the CPU and gradients recorded, whatever the user has set by now.
            with torch.device("cpu"), torch.enable_grad():
                found = difference(kernel, self.reference, self.sample(dtype), dtype, device)
            # A dry run has no numbers to compare.
            if found and not capability.is_dry_run():
                message = f"the NPU kernel of {self.name} is wrong on {device}: {found}"
                self.refuse(message)
                return message
        return None

    def refuse(self, reason: str) -> None:
        """Use the reference from now on and warn: the kernel is wrong, because of ``reason``."""
        advice = f"report it to ds_npu with the versions ds_report prints; until then {self.name} is slower, not wrong"
        self.set_aside(reason, advice)
        warn_once(str(self._refusal))

    def set_aside(self, reason: str, advice: str) -> None:
        """Use the reference from now on, in all of this process, because of ``reason``."""
        self._refusal = Unavailable(reason, advice)
        self._on_npu = self.reference

    def _first_call(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if reason := self.why_unavailable():
            warn_once(f"{self.name} runs without its NPU kernel: {reason}")
            self._on_npu = self.reference
        else:
            self._on_npu = self._import_kernel()
        return self._on_npu(*args, **kwargs)

    def _import_kernel(self) -> Callable[P, R]:
        module, function = self.kernel.split(":")
        kernel: Callable[P, R] = vars(npu_kernels(module))[function]
        return kernel
