"""The classes, given by name, whose objects checkpoint files may hold besides tensors and plain Python values."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Iterator

AllowedClass = Callable[..., object]
"""A class or function whose objects checkpoint files may hold."""


def named_classes(names: Iterable[str]) -> Iterator[AllowedClass]:
    """The class or function of each name, as ``package.module.Class``; raises ValueError where there is none."""
    for name in names:
        try:
            found = pkgutil.resolve_name(name)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"{name} is no class that can be imported: {error}") from error
        if not callable(found):
            raise ValueError(f"{name} is no class that can be imported: it is of type {type(found).__name__}")
        yield found
