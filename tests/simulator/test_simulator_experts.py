"""A block of experts on NPUs whose streams are recorded: which kernels may run while its messages travel."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import simulated
from stream_trace import Trace

pytestmark = pytest.mark.slow  # the libraries are compiled first, if they are not yet

PRODUCTS = {"aclnnMatmul": "shared", "aclnnGroupedMatmulV5": "experts"}
MESSAGE = "HcclAlltoAllV"
MESSAGES = ("tokens", "routing", "sums", "gradients of sums", "gradients of tokens", "gradients of routing")


def beside(folder: Path, *arguments: str) -> dict[str, list[str]]:
    """By message of the last forward and backward, what ``products_beside`` says."""
    last = products_beside(folder, "tests/npu/expert_overlap.py", *arguments)[-len(MESSAGES) :]
    return dict(zip(MESSAGES, last, strict=True))


def products_beside(folder: Path, script: str, *arguments: str) -> list[list[str]]:
    """By message on the first NPU, the products that are handed over behind it, and need not wait for it, before the
    first one that has to."""
    command = (sys.executable, script, *arguments)
    path = os.pathsep.join([str(simulated.ROOT), str(simulated.ROOT / "tests" / "support")])
    options = ("--devices", "2", "--trace", str(folder), "--")
    done = simulated.sim(*options, *command, timeout=300, DS_ACCELERATOR="npu", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    trace = Trace(folder)
    tasks = trace.of_device(0)
    found = []
    for message in (task for task in tasks if task.name == MESSAGE):
        waiting = {task for task, _ in trace.after(message)}
        behind = [task for task in tasks if task.place > message.place and task.name in PRODUCTS]
        first = next((place for place, task in enumerate(behind) if task in waiting), len(behind))
        found.append([PRODUCTS[task.name] for task in behind[:first]])
    return found


def test_messages_travel_beside_shared_experts(tmp_path):
    found = beside(tmp_path)
    assert found["tokens"] == found["routing"] == ["shared"] * 2
    assert found["sums"][:1] == ["shared"]
    assert found["gradients of sums"] == ["shared"] * 2
    # Products of the experts' weight gradients, then those of the shared experts' first layers.
    assert found["gradients of tokens"][:6] == ["experts"] * 2 + ["shared"] * 4


def test_without_overlap_only_weight_gradients_are_beside_a_message(tmp_path):
    found = beside(tmp_path, "off")
    assert found["tokens"] == found["sums"] == found["gradients of sums"] == []
    assert found["gradients of tokens"][:2] == ["experts"] * 2


PAIRED = "tests/npu/paired_overlap.py"
LAYERS = 2


def test_messages_of_a_forward_travel_beside_a_backward_and_the_other_way_round(tmp_path):
    """Two layers: each sends tokens, routing and sums; backward gradients of sums, of tokens and of routing."""
    tokens, routing, *others = products_beside(tmp_path, PAIRED)[-len(MESSAGES) * LAYERS :]
    # The backward begins with the gradients of sums: before them this model has no products.
    assert tokens == routing == []
    assert all(len(products) >= 2 for products in others), others


def test_one_after_the_other_only_weight_gradients_are_beside_a_message(tmp_path):
    found = products_beside(tmp_path, PAIRED, "off")[-len(MESSAGES) * LAYERS :]
    assert all(not each for each in found[: 3 * LAYERS]), found
    assert [bool(each) for each in found[3 * LAYERS :]] == [False, True, True] * LAYERS, found
