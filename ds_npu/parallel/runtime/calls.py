"""The types of a call that wrappers pass on unchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Operation = Callable[..., Any]
"""A function of torch, as ``__torch_function__`` and ``__torch_dispatch__`` get it."""
Arguments = tuple[Any, ...]
"""The arguments of a call in their order."""
Keywords = Mapping[str, Any]
"""The arguments of a call by name; of a model's forward also those that are given in order."""
