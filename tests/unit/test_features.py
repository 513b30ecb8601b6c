"""What features demand of each other and of the machine, and how they share a build."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
from torch import nn

from ds_npu.config.check import check
from ds_npu.config.problems import ConfigError
from ds_npu.config.rules import broken_rules
from ds_npu.config.sections import DsNpuConfig
from ds_npu.features.build import Build, Feature
from ds_npu.features.declaration import Change, ConflictError, Phase, table
from ds_npu.features.driver import FEATURES, apply_features, declare, unmet

# Rules between keys, most of them of features that are not built yet: key paths, and the one that is named.
RULES = [
    ({"parallel.sequence_parallel": True}, "parallel.sequence_parallel"),
    ({"tensor_overlap": "fused"}, "tensor_overlap"),
    ({"context_parallel.algorithm": "ring"}, "context_parallel.algorithm"),
    ({"context_parallel.kv_cache": "half"}, "context_parallel.kv_cache"),
    ({"pipeline.schedule": "gpipe"}, "pipeline.schedule"),
    ({"pipeline.split": [1, 2]}, "pipeline.split"),
    ({"moe.placement_interval": 10}, "moe.placement_interval"),
    ({"moe.replica_rows": 4000}, "moe.replica_rows"),
    ({"parallel.expert": 2, "parallel.pipeline": 2, "moe.placement_interval": 10}, "moe.placement_interval"),
    ({"parallel.context": 4, "context_parallel.ulysses": 3}, "context_parallel.ulysses"),
    ({"parallel.context": 4, "context_parallel.algorithm": "hybrid"}, "context_parallel.ulysses"),
    (
        {"parallel.context": 4, "context_parallel.algorithm": "ring", "context_parallel.ulysses": 2},
        "context_parallel.ulysses",
    ),
    ({"parallel.context": 4, "context_parallel.window": 3}, "context_parallel.window"),
    (
        {"parallel.context": 4, "context_parallel.ulysses": 2, "context_parallel.window": 4},
        "context_parallel.window",
    ),
    (
        {"parallel.context": 4, "context_parallel.algorithm": "ulysses", "context_parallel.window": 2},
        "context_parallel.window",
    ),
    (
        {"parallel.context": 4, "context_parallel.algorithm": "allgather", "context_parallel.window": 2},
        "context_parallel.window",
    ),
    (
        {"parallel.context": 4, "context_parallel.algorithm": "ulysses", "context_parallel.ulysses": 2},
        "context_parallel.ulysses",
    ),
    (
        {"parallel.context": 4, "context_parallel.algorithm": "hybrid", "context_parallel.ulysses": 4},
        "context_parallel.ulysses",
    ),
    ({"parallel.context": 3, "context_parallel.algorithm": "hybrid"}, "context_parallel.algorithm"),
    ({"parallel.context": 2, "fused_ops.flash_attention": False}, "fused_ops.flash_attention"),
    (
        {"parallel.pipeline": 4, "pipeline.schedule": "1f1b", "pipeline.virtual_stages": 2},
        "pipeline.virtual_stages",
    ),
    (
        {"parallel.pipeline": 4, "pipeline.schedule": "zb_v", "pipeline.virtual_stages": 3},
        "pipeline.virtual_stages",
    ),
    ({"parallel.expert_tensor": 2, "moe.tp_extends_ep": True}, "moe.tp_extends_ep"),
    ({"moe.dispatcher": "alltoall"}, "moe.dispatcher"),
    ({"moe.overlap": True}, "moe.overlap"),
    ({"parallel.tensor": 2, "moe.zero_memory": "level0"}, "moe.zero_memory"),
    ({"parallel.tensor": 2, "moe.grouped_matmul": True}, "moe.grouped_matmul"),
    ({"parallel.expert": 2, "moe.grouped_matmul": False}, "moe.grouped_matmul"),
]
ALLOWED = [
    {"parallel.tensor": 2, "parallel.sequence_parallel": True, "tensor_overlap": "fused"},
    {"parallel.context": 4, "context_parallel.algorithm": "hybrid", "context_parallel.ulysses": 2},
    {"parallel.context": 8, "context_parallel.ulysses": 2, "context_parallel.window": 2},
    {"parallel.context": 4, "context_parallel.algorithm": "ulysses", "context_parallel.ulysses": 4},
    {"parallel.context": 4, "context_parallel.algorithm": "ulysses", "context_parallel.kv_cache": "half"},
    {"parallel.context": 4, "context_parallel.algorithm": "ring", "context_parallel.window": 4},
    {"parallel.context": 2, "fused_ops.flash_attention": True},
    {"fused_ops.flash_attention": False},
    {"parallel.pipeline": 4, "pipeline.schedule": "interleaved", "pipeline.virtual_stages": 2},
    {"parallel.pipeline": 4, "pipeline.schedule": "mine.csv", "pipeline.virtual_stages": 2},
    {"parallel.pipeline": 4, "pipeline.schedule": "dualpipe_v", "pipeline.virtual_stages": 2},
    {"parallel.expert": 2, "moe.tp_extends_ep": True, "moe.placement_interval": 10},
    {"parallel.tensor": 2, "moe.tp_extends_ep": True, "moe.dispatcher": "allgather", "moe.zero_memory": "level1"},
    {"parallel.tensor": 2, "moe.tp_extends_ep": True, "moe.placement_interval": 10},
    {"moe.zero_memory": "level0", "moe.grouped_matmul": True},
    {"parallel.expert": 2, "moe.overlap": True},
]


def broken(keys, doubtful=()):
    section = {}
    for path, value in keys.items():
        *above, last = path.split(".")
        (section.setdefault(above[0], {}) if above else section)[last] = value
    return [problem.path for problem in broken_rules(DsNpuConfig.model_validate(section), frozenset(doubtful))]


@pytest.mark.parametrize(("keys", "named"), RULES)
def test_keys_that_contradict_each_other(keys, named):
    assert broken(keys) == [f"ds_npu.{named}"]


@pytest.mark.parametrize("keys", ALLOWED)
def test_keys_that_go_together(keys):
    assert broken(keys) == []


def test_a_rule_about_a_doubtful_key_says_nothing():
    assert broken({"tensor_overlap": "fused"}, doubtful=["parallel.tensor"]) == []


def test_a_machine_that_lacks_something_is_refused_where_it_matters(monkeypatch):
    unable = tuple(dataclasses.replace(feature, unmet=lambda value: ["no such kernel"]) for feature in FEATURES[:2])
    monkeypatch.setattr("ds_npu.features.driver.FEATURES", unable)
    config = {"train_batch_size": 8, "ds_npu": {}}
    check(config, 8)
    with pytest.raises(ConfigError) as caught:
        check(config, 8, unmet=unmet)
    assert [(problem.path, problem.accepted) for problem in caught.value.problems] == [
        (f"ds_npu.{feature.key}", "no such kernel") for feature in FEATURES[:2]
    ]


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(2, 2), nn.ReLU())


def declaring(key, phase, *changes):
    """A feature that declares ``changes``, of which each is noted in ``made`` when it is made."""
    made = []
    changes = [Change(*change, make=partial(made.append, (key, *change))) for change in changes]
    return Feature(key, phase, declare=lambda value, build: changes), made


CONFLICTS = [
    (
        (("swap", Phase.SHARDS, ("replaces", "layer.0", "a")), ("moe", Phase.SHARDS, ("replaces", "layer.0", "b"))),
        r"both ds_npu\.swap and ds_npu\.moe want what only one can: replaces layer\.0: b",
    ),
    (
        (("swap", Phase.OPERATORS, ("computes", "layer.0", "a")), ("moe", Phase.SHARDS, ("computes", "layer.0", "b"))),
        r"both ds_npu\.moe and ds_npu\.swap want",
    ),
    (
        (("swap", Phase.SHARDS, ("wraps", "layer.0", "a")), ("moe", Phase.SEQUENCES, ("replaces", "layer", "b"))),
        r"ds_npu\.swap wraps layer\.0, and ds_npu\.moe replaces layer afterwards",
    ),
]


@pytest.mark.parametrize(("declared", "said"), CONFLICTS)
def test_features_that_contradict_each_other_are_named_before_anything_is_changed(declared, said):
    features, made = zip(*(declaring(*each) for each in declared), strict=True)
    with pytest.raises(ConflictError, match=said):
        apply_features([(each, None) for each in features], Build(topology=None, model=Parts()))
    assert not any(made)


def test_features_are_applied_by_phases_whatever_their_order():
    late, _ = declaring("swap", Phase.OPERATORS, ("wraps", "layer.0", "a"), ("computes", "layer.1", "b"))
    early, _ = declaring("moe", Phase.SHARDS, ("replaces", "layer.0", "c"))
    build = Build(topology=None, model=Parts())
    assert [each.key for each in declare([(late, None), (early, None)], build)] == ["moe", "swap"]
    assert list(table(declare([(late, None), (early, None)], build))) == [
        "moe   replaces  layer.0  c",
        "swap  wraps     layer.0  a",
        "swap  computes  layer.1  b",
    ]


def test_a_change_of_what_is_not_there_is_a_mistake():
    feature, _ = declaring("moe", Phase.SHARDS, ("wraps", "layer.7", "a"))
    with pytest.raises(ValueError, match=r"ds_npu\.moe declares a change of layer\.7, which is not there"):
        apply_features([(feature, None)], Build(topology=None, model=Parts()))


def test_a_model_that_was_changed_for_something_else_is_refused(caplog):
    feature, made = declaring("moe", Phase.SHARDS, ("wraps", "layer.0", "a"))
    feature = dataclasses.replace(feature, asked=lambda value, build: value)
    model = Parts()
    apply_features([(feature, "four experts")], Build(topology=None, model=model))
    with caplog.at_level("INFO", logger="ds_npu"):
        apply_features([(feature, "four experts")], Build(topology=None, model=nn.Sequential(model)))
    assert len(made) == 1
    for asked, said in (("five", "five"), ("", "nothing of it")):
        with pytest.raises(ValueError, match=rf"ds_npu\.moe: .* changed for four experts, and .* asks for {said}"):
            apply_features([(feature, asked)], Build(topology=None, model=model))
