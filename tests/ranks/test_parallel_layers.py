"""Models that people write themselves: with parallel layers, and split by a plan of globs; against plain PyTorch."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

import pytest
import tiny_models
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from torch import nn
from torch.nn import functional

from ds_npu.features.tensor_parallel.sharded_model import shard_model
from ds_npu.models.globs import plan_for
from ds_npu.parallel.runtime.placement import sharding_of
from ds_npu.parallel.tensor.axis import tensor_axis
from ds_npu.parallel.tensor.cross_entropy import VocabParallelLoss, vocab_parallel_cross_entropy
from ds_npu.parallel.tensor.embedding import VocabParallelEmbedding
from ds_npu.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from ds_npu.parallel.tensor.sequence_shards import SequenceShards
from ds_npu.parallel.tensor.weight_gradient import sum_gradient
from ds_npu.topology.degrees import Degrees
from ds_npu.topology.topology import Topology

pytestmark = pytest.mark.slow

B, S, H, F, V = 2, 10, 8, 14, 13  # of which 4 ranks divide none but H


class Plain(nn.Module):
    def __init__(self, bias):
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(V, H, dtype=torch.float64)
        self.norm = nn.LayerNorm(H, dtype=torch.float64)
        self.wide = nn.Linear(H, F, bias, dtype=torch.float64)
        self.narrow = nn.Linear(F, H, bias, dtype=torch.float64)
        self.head = nn.Linear(H, V, bias, dtype=torch.float64)

    def forward(self, ids, labels):
        x = self.embed(ids)
        x = x + self.narrow(functional.gelu(self.wide(self.norm(x))))
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)


class Parallel(nn.Module):
    """The same, written with parallel layers."""

    def __init__(self, bias, topology, sequence_parallel):
        super().__init__()
        torch.manual_seed(3)
        layers = {"bias": bias, "dtype": torch.float64, "topology": topology}
        self.embed = VocabParallelEmbedding(V, H, topology, dtype=torch.float64)
        self.norm = nn.LayerNorm(H, dtype=torch.float64)
        self.wide = ColumnParallelLinear(H, F, sequence_parallel=sequence_parallel, **layers)
        self.narrow = RowParallelLinear(F, H, sequence_parallel=sequence_parallel, **layers)
        self.head = ColumnParallelLinear(H, V, **layers)
        self.axis = tensor_axis(topology, sequence_parallel)
        self.group = topology.group("tp")
        if sequence_parallel:
            for parameter in self.norm.parameters():
                sum_gradient(parameter, self.group)

    def forward(self, ids, labels):
        x = self.embed(ids)
        if self.axis.sequence_parallel:
            shards = SequenceShards(self.axis, x.shape[1])
            x = shards.shard(x)
            x = x + self.narrow(functional.gelu(shards.unpad(self.wide(self.norm(x)))))
            x = shards.collect(x)
        else:
            x = x + self.narrow(functional.gelu(self.wide(self.norm(x))))
        words = sharding_of(self.head.weight).ranges[dist.get_rank()]
        losses = vocab_parallel_cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), words[0][0], self.group)
        return losses.sum() / (labels != -100).sum()


def batch():
    generator = torch.Generator().manual_seed(5)
    ids, labels = torch.randint(0, V, (2, B, S), generator=generator)
    labels[0, :3] = -100
    return ids, labels


def tensor_world():
    return Topology(Degrees(tp=dist.get_world_size()))


def assert_same_gradients(model, reference):
    expected = dict(reference.named_parameters())
    assert expected.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        sharding, whole = sharding_of(parameter), expected[name].grad
        wanted = whole if sharding is None else sharding.take(whole, dist.get_rank())
        assert (parameter.grad - wanted).norm() < 1e-12 * whole.norm(), name


def layers_body():
    topology = tensor_world()
    for bias in (True, False):
        reference = Plain(bias)
        drawn = torch.rand(1)
        loss = reference(*batch())
        loss.backward()
        for sequence_parallel in (False, True):
            model = Parallel(bias, topology, sequence_parallel)
            assert torch.equal(torch.rand(1), drawn), "new layers draw what plain ones draw"
            found = model(*batch())
            found.backward()
            assert abs(found - loss) < 1e-12
            assert_same_gradients(model, reference)
            assert {name for name, each in model.named_parameters() if sharding_of(each) is None} == {
                "norm.weight",
                "norm.bias",
            } | ({"narrow.bias"} if bias else set())


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_model_of_parallel_layers(size):
    run_on_ranks(size, layers_body)


def loss_body():
    topology = tensor_world()
    torch.manual_seed(3)
    head = ColumnParallelLinear(H, V, topology, dtype=torch.float64)
    whole = nn.Linear(H, V, dtype=torch.float64)
    torch.manual_seed(3)
    whole.reset_parameters()
    x, (_, labels) = torch.randn(B, S, H, dtype=torch.float64), batch()
    found = VocabParallelLoss(topology, sharding_of(head.weight))(head(x), labels, V)
    expected = functional.cross_entropy(whole(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    assert abs(found - expected) < 1e-12


def test_the_loss_of_a_head_that_is_split():
    run_on_ranks(2, loss_body)


def too_small_body():
    topology = tensor_world()
    for make, said in [
        (lambda: ColumnParallelLinear(H, 3, topology), "3 columns cannot be sharded over 4 tensor ranks"),
        (lambda: RowParallelLinear(2, H, topology), "2 columns cannot be sharded over 4 tensor ranks"),
        (lambda: VocabParallelEmbedding(3, H, topology), "3 columns cannot be sharded over 4 tensor ranks"),
    ]:
        with pytest.raises(ValueError, match=said):
            make()


def test_layers_with_less_than_one_column_a_rank_are_refused():
    run_on_ranks(4, too_small_body)


class Attention(nn.Module):
    def __init__(self, heads, kv_heads, head_dim=4):
        super().__init__()
        self.head_dim = head_dim
        self.q = nn.Linear(H, heads * head_dim)
        self.k = nn.Linear(H, kv_heads * head_dim, bias=False)  # softmax would not see one
        self.v = nn.Linear(H, kv_heads * head_dim)
        self.out = nn.Linear(heads * head_dim, H)

    def forward(self, x):
        q, k, v = (each(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in (self.q, self.k, self.v))
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, heads, kv_heads, width):
        super().__init__()
        self.attention = Attention(heads, kv_heads)
        self.mlp = nn.Sequential(nn.Linear(H, width), nn.GELU(), nn.Linear(width, H))
        self.norm1, self.norm2 = nn.LayerNorm(H), nn.LayerNorm(H)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Own(nn.Module):
    def __init__(self, heads=4, kv_heads=2, width=F, words=V):
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(words, H)
        self.layers = nn.ModuleList(Block(heads, kv_heads, width) for _ in range(2))
        self.norm = nn.LayerNorm(H)
        self.head = nn.Linear(H, words)
        self.double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))

    def forward(self, ids, labels):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten(), ignore_index=-100)


GLOBS = {
    "embed": "embedding",
    "layers.*": "block",
    "layers.*.norm?": "norm",
    "layers.*.attention": "attention",
    "layers.*.attention.q": "query",
    "layers.*.attention.k": "key",
    "layers.*.attention.v": "value",
    "layers.*.attention.out": "attention_output",
    "layers.*.mlp": "mlp",
    "layers.*.mlp.0": "up",
    "layers.*.mlp.2": "down",
    "norm": "final_norm",
    "head": "head",
}


OTHER_ROLES = {
    "grouped": {},
    "whole vocabulary": {"embed": "replicated", "head": "replicated"},
    "whole mlp": {"layers.*.mlp.**": "replicated"},
    "columns and rows": {"layers.*.mlp.0": "column", "layers.*.mlp.2": "row"},
    "no region around them": {"layers.*.mlp.**": "replicated", "**.mlp.0": "column", "**.mlp.2": "row"},
}
"""Ways to say something else of some modules."""


def planned_body():
    topology = tensor_world()
    for what, roles in OTHER_ROLES.items():
        for heads in ((4, 2), (4, 1), (4, 4), (6, 2)):
            reference = Own(*heads)
            loss = reference(*batch())
            loss.backward()
            for sequence_parallel in (False, True):
                model = Own(*heads)
                shard_model(model, plan_for(model, {**GLOBS, **roles}), topology, sequence_parallel)
                found = model(*batch())
                found.backward()
                assert abs(found - loss) < 1e-12, (what, heads, sequence_parallel)
                assert_same_gradients(model, reference)
                assert (sharding_of(model.head.weight) is None) == ("head" in roles)
            if heads[0] == 4 and what != "grouped":
                break


@pytest.mark.parametrize("size", [2, 4])
def test_a_model_that_is_split_by_globs(size):
    run_on_ranks(size, planned_body)


def refused_body():
    for sizes, said in [
        ({"heads": 3, "kv_heads": 1}, "layers.{0..1}.attention.q (query, 12 wide): 3 heads cannot be sharded over 4"),
        ({"heads": 3, "kv_heads": 1}, "layers.{0..1}.attention.out (attention_output, 12 wide): 3 heads cannot be"),
        ({"width": 2}, "layers.{0..1}.mlp.0 (up, 2 wide): 2 columns cannot be sharded over 4 tensor ranks"),
        ({"width": 2}, "layers.{0..1}.mlp.2 (down, 2 wide): 2 columns cannot be sharded over 4 tensor ranks"),
        ({"words": 3}, "embed (embedding, 3 wide): 3 words cannot be sharded over 4 tensor ranks"),
        ({"words": 3}, "head (head, 3 wide): 3 words cannot be sharded over 4 tensor ranks"),
    ]:
        model = Own(**sizes)
        before = {name: each.shape for name, each in model.named_parameters()}
        with pytest.raises(ValueError, match="found 4; these modules of Own cannot be sharded") as caught:
            shard_model(model, plan_for(model, GLOBS), tensor_world())
        assert said in str(caught.value), str(caught.value)
        assert {name: each.shape for name, each in model.named_parameters()} == before


def test_what_is_too_small_for_the_ranks_is_named():
    run_on_ranks(4, refused_body)


DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "tensor_parallel.md"


def page_body(folder):
    os.chdir(folder)
    text = PAGE.read_text()
    configs, scripts = (re.findall(rf"^```{kind}\n(.*?)^```$", text, re.M | re.S) for kind in ("json", "python"))
    if dist.get_rank() == 0:
        tiny_models.tiny("llama", torch.float32).save_pretrained("llama")
        for name, config in zip(("ds_config.json", "own.json"), configs, strict=True):
            Path(name).write_text(config)
    dist.barrier()
    scripts += re.findall(r"^```python\n(.*?)^```$", (DOCS / "own_model.md").read_text(), re.M | re.S)[:1]
    for script in scripts:
        names = {}
        exec(compile(script, PAGE.name, "exec"), names)
        assert math.isfinite(names["loss"]) and isinstance(names["engine"].topology, Topology)
        assert any(sharding_of(each) is not None for each in names["model"].parameters())
        dist.barrier()
    assert len(scripts) == 4


@pytest.mark.slow
def test_the_scripts_of_the_page_run(tmp_path):
    # The first that runs them compiles DeepSpeed's extension.
    run_on_ranks(2, page_body, tmp_path, deadline_s=600.0)
