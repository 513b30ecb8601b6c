"""The type of a row of the patch table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Patch:
    """One name of DeepSpeed, accelerate, transformers or TRL that ds_npu replaces."""

    module: str
    name: str
    """Attribute path in ``module``, as ``DeepSpeedConfig.__init__``."""
    factory: str
    """``module:function`` of ds_npu, called with the original, returning what replaces it."""
    parameters: tuple[str, ...]
    """Names with which the original's parameters must begin."""
    what: str
    why: str
    upstream: str
    until: str
    parameters_of: str = ""
    """The function of a replaced class to which ``parameters`` belong; "" is the original itself."""
    optional: bool = False
    """Whether the result is the same without it, and only dearer: no reason to refuse a config."""
    also: tuple[str, ...] = ()
    """``module:name`` of copies that ``from ... import`` made, for an ``import ds_npu`` after ``import deepspeed``."""

    @property
    def target(self) -> str:
        return f"{self.module}.{self.name}"
