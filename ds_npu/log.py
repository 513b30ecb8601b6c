"""The project's logger (one line a message, on the first rank of each node only), and tables for people."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Iterator, Sequence


@functools.lru_cache(maxsize=1)
def logger() -> logging.Logger:
    """The ``ds_npu`` logger, writing to stderr, silent below ERROR on every rank but the first of a node."""
    log = logging.getLogger("ds_npu")
    if not log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[ds_npu] %(levelname)s: %(message)s"))
        log.addHandler(handler)
        log.propagate = False
    log.setLevel(logging.INFO if os.environ.get("LOCAL_RANK", "0") == "0" else logging.ERROR)
    return log


@functools.cache
def warn_once(message: str) -> None:
    """Warn with ``message``, once in this process."""
    logger().warning(message)


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table: each column is as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
