"""engine.whole_weights: each weight of the plain model on every rank, to the bit, with memory for one at a time."""

from __future__ import annotations

import deepspeed
import gradient_rule as rule
import pytest
import tiny_models
import torch
import torch.distributed as dist
from allocated import peak_bytes
from loading_models import FAMILIES, shard, tensor_holders
from ranks import run_on_ranks
from torch import nn

from ds_npu.checkpoint.saving import whole_weights
from ds_npu.parallel.tensor.sharding import Sharding

LAYOUTS = {
    "tensor": (2, {"tensor": 2}, (0, 3, 1, 2)),
    "data": (2, {}, (3, 0)),
    "tensor and data": (4, {"tensor": 2}, (3, 2)),
    "context": (2, {"context": 2}, (3, 1)),
    "stages": (2, {"pipeline": 2}, (1, 0)),
    "stages of tensor ranks": (4, {"pipeline": 2, "tensor": 2}, (0, 1)),
}
CASES = [(name, stage) for name, (_, _, stages) in LAYOUTS.items() for stage in stages]


def iterate(parallel: dict[str, int], stage: int) -> None:
    rule.without_extension()
    tied = {} if "pipeline" in parallel else {"tie_word_embeddings": True}
    plain = tiny_models.tiny("llama", torch.bfloat16, **tied)
    config = rule.config(stage, torch.bfloat16, parallel, stage3_param_persistence_threshold=0)
    config["ds_npu"] = {"parallel": parallel}
    engine, *_ = deepspeed.initialize(model=tiny_models.tiny("llama", torch.bfloat16, **tied), config=config)
    expected = dict(plain.named_parameters())
    for device in (None, "cpu"):
        kept = []
        for name, tensor in engine.whole_weights(device):
            assert torch.is_grad_enabled()
            assert type(tensor) is torch.Tensor and tensor.device.type == "cpu"
            assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, expected[name]), name
            kept.append((name, tensor.clone()))
            tensor.zero_()  # The caller's own.
        # named_parameters leaves out the second name of a tied weight as well.
        assert [name for name, _ in kept] == list(expected)
    state = engine.whole_state_dict()
    assert list(state) == (list(plain.state_dict()) if dist.get_rank() == 0 else [])
    assert all(torch.equal(state[name], each) for name, each in plain.state_dict().items() if state)
    if state and tied:
        assert state["lm_head.weight"] is state["model.embed_tokens.weight"]


@pytest.mark.slow
@pytest.mark.matrix(corners=1, drawn=2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}, ZeRO {case[1]}")
def test_each_rank_gets_the_plain_models_weights(case):
    name, stage = case
    ranks, parallel, _ = LAYOUTS[name]
    run_on_ranks(ranks, iterate, parallel, stage)


WIDE = {"hidden_size": 128, "intermediate_size": 32, "vocab_size": 1024, "num_hidden_layers": 1}
LARGEST = 1024 * 128 * 4


@pytest.mark.parametrize("rank", [0, 1])
def test_memory_is_that_of_one_weight_and_one_shard(rank, monkeypatch):
    """Without processes, as in test_memory_of_gathering: gloo frees in a thread of its own."""
    bounds = ((0, 60), (60, 80), (80, 110), (110, 128))
    rules = {r"(embed_tokens|lm_head)": lambda ranks: Sharding(1, 128, tuple((each,) for each in bounds))}
    model = shard(FAMILIES["llama"].make(**WIDE), rules, 4, rank)
    sent = []
    monkeypatch.setattr(dist, "get_rank", lambda group: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 4)
    monkeypatch.setattr(dist, "broadcast", lambda part, **options: sent.append(options["group_src"]))

    def take() -> None:
        for _, tensor in whole_weights(model, tensor_holders(None)):
            del tensor

    peak = peak_bytes(take)
    # Replicated weights are not sent: each rank copies its own.
    assert sent == 2 * [0, 1, 2, 3]
    largest_shard = 1024 * 60 * 4
    assert LARGEST < peak <= LARGEST + largest_shard + 4096


def test_the_stages_of_a_pipeline_module_are_refused():
    run_on_ranks(2, refuse)


def refuse() -> None:
    from deepspeed.pipe import PipelineModule

    rule.without_extension()
    deepspeed.init_distributed()
    layers = [nn.Linear(4, 4) for _ in range(2)]
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.MSELoss())
    config = rule.config(0, torch.float32, {"pipeline": 2})
    engine, *_ = deepspeed.initialize(model=model, config=config)
    with pytest.raises(ValueError, match=r"stages of a PipelineModule name their layers themselves\. What to do"):
        engine.whole_weights()
