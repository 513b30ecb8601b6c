"""docs/context_parallel.md's picture of tokens, and docs/own_model.md's context attention against one process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from torch import nn
from torch.nn import functional

from ds_npu.config.context_algorithm import algorithm_of
from ds_npu.parallel.context.load_balance import shard_evenly

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "context_parallel.md"
OWN_MODEL = DOCS / "own_model.md"


def test_the_picture_of_tokens():
    rows = re.findall(r"^    (\w+) {3,}((?:\d+ +){15}\d+)$", PAGE.read_text(), re.M)
    assert [name for name, _ in rows] == ["token", "ulysses", "ring", "allgather", "hybrid"]
    for name, shown in rows[1:]:
        algorithm = algorithm_of(name, 4, ulysses=2 if name == "hybrid" else None)
        tokens = shard_evenly(16, algorithm)
        owners = {int(token): rank for rank in range(4) for token in tokens.index(rank)[0]}
        assert [int(rank) for rank in shown.split()] == [owners[token] for token in range(16)], name


def alone(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The loss of the page's model in one process, written out."""
    x = model.embed(ids) + model.positions.weight
    q, k, v = (each.unflatten(-1, (4, 8)).transpose(1, 2) for each in model.attention.qkv(x).chunk(3, -1))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    logits = model.head(x + model.attention.out(out))
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def script_body() -> None:
    _, script = re.findall(r"^```python\n(.*?)^```$", OWN_MODEL.read_text(), re.M | re.S)
    before_step, step = script.split("engine.step()")
    names: dict[str, object] = {}
    exec(compile(before_step, OWN_MODEL.name, "exec"), names)
    loss, model, ids = names["loss"].detach(), names["model"], names["ids"]
    assert dist.get_world_size() == names["engine"].topology.size("cp") == 2
    dist.all_reduce(loss)
    torch.testing.assert_close(loss, alone(model, ids).detach())
    exec(compile(f"engine.step(){step}", OWN_MODEL.name, "exec"), names)


@pytest.mark.slow
def test_the_script_runs_and_its_loss_is_that_of_one_process():
    run_on_ranks(2, script_body)
