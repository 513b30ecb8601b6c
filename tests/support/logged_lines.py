"""What ds_npu logs in this process."""

from __future__ import annotations

import logging

from ds_npu.log import logger


def logged_lines() -> list[str]:
    """A list to which each message of ds_npu's logger is added from now on."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger().addHandler(handler)
    return lines
