"""Every kind of mistake in a config is found, all of them at once, and each says where, what and what would do."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from deepspeed.runtime.config import DeepSpeedConfig
from hypothesis import assume, given
from hypothesis import strategies as st

from ds_npu.config.batch import MICRO, STEPS, TRAIN, batch_of
from ds_npu.config.check import check
from ds_npu.config.loading import load
from ds_npu.config.problems import ConfigError
from ds_npu.config.schema import leaves, section_schema
from ds_npu.config.sections import DsNpuConfig

LEAVES = dict(leaves(section_schema()))
SECTIONS = [key for key, node in section_schema()["properties"].items() if "properties" in node]


def nested(path, value):
    """``a.b`` and 1 -> {"a": {"b": 1}}."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def mistakes(ds_config, world_size=8, **options):
    with pytest.raises(ConfigError) as caught:
        check(ds_config, world_size, **options)
    return caught.value


def with_section(section, **deepspeed):
    return {"train_micro_batch_size_per_gpu": 1, **deepspeed, "ds_npu": section}


# Of the section, the DeepSpeed keys beside it, the path named, the value found, and a part of what is accepted.
MISTAKES = [
    # Not a section at all.
    (None, {}, "ds_npu", None, "an object with some of the keys parallel, plan"),
    ([], {}, "ds_npu", [], "an object with some of the keys parallel, plan"),
    ("auto", {}, "ds_npu", "auto", "an object with some of the keys parallel, plan"),
    ({"parallel": 2}, {}, "ds_npu.parallel", 2, "an object with some of the keys tensor, sequence_parallel"),
    ({"recompute": "all"}, {}, "ds_npu.recompute", "all", "an object with some of the keys layers"),
    # Keys that do not exist.
    ({"paralel": {}}, {}, "ds_npu.paralel", {}, "no such key, did you mean ds_npu.parallel?"),
    ({"parallel": {"tensr": 2}}, {}, "ds_npu.parallel.tensr", 2, "did you mean ds_npu.parallel.tensor?"),
    ({"tensor": 2}, {}, "ds_npu.tensor", 2, "did you mean ds_npu.parallel.tensor?"),
    ({"zzz": 2}, {}, "ds_npu.zzz", 2, "no such key (keys of ds_npu: parallel, plan"),
    ({"zzz": "auto"}, {}, "ds_npu.zzz", "auto", "no such key"),
    ({1: 2}, {}, "ds_npu.1", 2, "no such key"),
    # Wrong types, strictly.
    ({"parallel": {"tensor": "2"}}, {}, "ds_npu.parallel.tensor", "2", "an integer >= 1"),
    ({"parallel": {"tensor": True}}, {}, "ds_npu.parallel.tensor", True, "an integer >= 1"),
    ({"parallel": {"tensor": 2.0}}, {}, "ds_npu.parallel.tensor", 2.0, "an integer >= 1"),
    ({"parallel": {"tensor": None}}, {}, "ds_npu.parallel.tensor", None, "an integer >= 1"),
    ({"chunked_loss": 0}, {}, "ds_npu.chunked_loss", 0, "true or false or 'planned' or an integer >= 1"),
    ({"memory_report": "true"}, {}, "ds_npu.memory_report", "true", "true or false"),
    ({"fused_ops": {"adamw": 0}}, {}, "ds_npu.fused_ops.adamw", 0, "true or false or null"),
    ({"plan": {"layers.*": 3}}, {}, "ds_npu.plan.layers.*", 3, "one of 'block', 'attention', 'query', "),
    ({"plan": {"layers.*": "quary"}}, {}, "ds_npu.plan.layers.*", "quary", "one of 'block', 'attention', 'query', "),
    ({"plan": {"": "block"}}, {}, "ds_npu.plan", {"": "block"}, "an object, each value one of 'block', "),
    ({"plan": ["block"]}, {}, "ds_npu.plan", ["block"], "an object, each value one of 'block', "),
    ({"pipeline": {"split": 4}}, {}, "ds_npu.pipeline.split", 4, "a list, each item an integer >= 0"),
    ({"pipeline": {"split": [1, "2"]}}, {}, "ds_npu.pipeline.split", [1, "2"], "a list, each item an integer >= 0"),
    ({"checkpoint": {"peer_copies": 8}}, {}, "ds_npu.checkpoint.peer_folder", None, "a folder that all ranks see"),
    (
        {"checkpoint": {"peer_copies": 1, "peer_folder": "copies"}},
        {},
        "ds_npu.checkpoint.peer_copies",
        1,
        "an integer >= 2",
    ),
    ({"recompute": {"layers": 1.0}}, {}, "ds_npu.recompute.layers", 1.0, "one of 'none', 'all' or an integer >= 1"),
    # Values out of range.
    ({"parallel": {"context": 0}}, {}, "ds_npu.parallel.context", 0, "an integer >= 1"),
    ({"parallel": {"pipeline": -2}}, {}, "ds_npu.parallel.pipeline", -2, "an integer >= 1"),
    ({"moe": {"placement_interval": -1}}, {}, "ds_npu.moe.placement_interval", -1, "an integer >= 0"),
    ({"recompute": {"budget_gib": 0}}, {}, "ds_npu.recompute.budget_gib", 0, "a number > 0 or null"),
    ({"tensor_overlap": "full"}, {}, "ds_npu.tensor_overlap", "full", "one of 'none', 'pipelined', 'fused'"),
    ({"pipeline": {"schedule": "x.txt"}}, {}, "ds_npu.pipeline.schedule", "x.txt", "a file name that ends in .csv"),
    # "auto".
    ({"parallel": {"tensor": "auto"}}, {}, "ds_npu.parallel.tensor", "auto", "leave the key out"),
    ({"plan": {"layers.*": "auto"}}, {}, "ds_npu.plan.layers.*", "auto", "leave the key out"),
    # Degrees and the world of 8.
    ({"parallel": {"tensor": 3}}, {}, "ds_npu.parallel.tensor", 3, "a divisor of the world size 8"),
    (
        {"parallel": {"tensor": 4, "context": 4}},
        {},
        "ds_npu.parallel.tensor, ds_npu.parallel.context",
        (4, 4),
        "product, 16 here, divides the world size 8",
    ),
    (
        {"parallel": {"pipeline": 4, "expert": 4}},
        {},
        "ds_npu.parallel.expert",
        4,
        "a divisor of the 2 ranks of a pipeline stage",
    ),
    # DeepSpeed's keys.
    (
        {"parallel": {"tensor": 2}},
        {"tensor_parallel": {"autotp_size": 2}},
        "tensor_parallel.autotp_size",
        2,
        "0 or 1 beside a ds_npu section (see ds_npu.parallel.tensor)",
    ),
    (
        {"parallel": {"context": 2}},
        {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}},
        "zero_optimization.zero_quantized_gradients",
        True,
        "false with ds_npu.parallel.tensor, context or pipeline > 1",
    ),
    (
        {"parallel": {"tensor": 2, "context": 2}},
        {"autotuning": {"enabled": True, "mp_size": 2}},
        "autotuning.mp_size",
        2,
        "4, the product of ds_npu.parallel.tensor, context and pipeline",
    ),
    (
        {"parallel": {"tensor": 2}},
        {"autotuning": {"enabled": True, "model_info": {"profile": True}}},
        "autotuning.model_info.profile",
        True,
        "by mp_size once more",
    ),
    (
        {"parallel": {"expert": 2}},
        {"expert_parallel": {"enabled": True, "autoep_size": 2}},
        "expert_parallel.autoep_size",
        2,
        "with ds_npu.parallel.expert 1 (found 2)",
    ),
    (
        {"parallel": {"tensor": 2}},
        {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
        "zero_optimization.zero_hpz_partition_size",
        2,
        "1 with ds_npu.parallel.tensor 2: DeepSpeed joins ranks next to each other, which are tensor ranks",
    ),
    (
        {"parallel": {"tensor": 2}},
        {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
        "zero_optimization.zero_quantized_weights",
        True,
        "false with ds_npu.parallel.tensor 2: its kernel is not there",
    ),
    (
        {"parallel": {"context": 2}},
        {"sequence_parallel_size": 4},
        "sequence_parallel_size",
        4,
        "the same as ds_npu.parallel.context, which is 2",
    ),
    ({}, {"sequence_parallel_size": 2}, "sequence_parallel_size", 2, "the same as ds_npu.parallel.context, which is 1"),
    ({}, {"data_parallel_size": 4}, "data_parallel_size", 4, "8, what the degrees in ds_npu.parallel leave"),
    (
        {"parallel": {"pipeline": 2}},
        {"pipeline": {"stages": 4}},
        "pipeline.stages",
        4,
        "the same as ds_npu.parallel.pipeline, which is 2",
    ),
    (
        {"recompute": {"norm": True}},
        {"activation_checkpointing": {"cpu_checkpointing": True}},
        "activation_checkpointing",
        {"cpu_checkpointing": True},
        "nothing at ds_npu.recompute.norm",
    ),
    # Batch sizes.
    ({}, {MICRO: "4"}, MICRO, "4", "an integer >= 1, or 'auto'"),
    ({}, {MICRO: 0}, MICRO, 0, "an integer >= 1, or 'auto'"),
    ({}, {STEPS: True}, STEPS, True, "an integer >= 1, or 'auto'"),
    ({}, {MICRO: None, STEPS: 4}, f"{TRAIN}, {MICRO}", None, "at least one of them"),
    (
        {"parallel": {"tensor": 2}},
        {TRAIN: 9, MICRO: 1, STEPS: 2},
        TRAIN,
        9,
        f"{MICRO} 1 * {STEPS} 2 * data-parallel ranks 4 = 8",
    ),
    ({}, {TRAIN: 12}, TRAIN, 12, f"a multiple of {MICRO} 1 * data-parallel ranks 8 = 8"),
    ({}, {TRAIN: 12, MICRO: "auto"}, TRAIN, 12, "a multiple of data-parallel ranks 8 = 8"),
    (
        {"parallel": {"tensor": 2}},
        {TRAIN: 8, MICRO: 1, STEPS: 1},
        TRAIN,
        8,
        f"{MICRO} 1 * {STEPS} 1 * data-parallel ranks 4 = 4, or nothing: leave the key out (or 'auto' for the Hugging "
        "Face Trainer to fill in)",
    ),
]


@pytest.mark.parametrize(("section", "deepspeed", "path", "found", "accepted"), MISTAKES)
def test_a_mistake_says_where_what_and_what_would_do(section, deepspeed, path, found, accepted):
    error = mistakes(with_section(section, **deepspeed))
    mine = [problem for problem in error.problems if problem.path == path and accepted in problem.accepted]
    assert mine and mine[0].found == found and type(mine[0].found) is type(found), error
    assert f"  {path}: found {json.dumps(found)}; " in str(error)


def test_the_table_holds_thirty_kinds():
    assert len(MISTAKES) >= 30


def test_all_mistakes_are_told_at_once():
    section = {"parallel": {"tensor": "2", "pipeline": 2}, "recompute": {"layers": "some"}, "zzz": 1, "swap": []}
    deepspeed = {"tensor_parallel": {"autotp_size": 2}, STEPS: "2"}
    assert {problem.path for problem in mistakes(with_section(section, **deepspeed)).problems} == {
        "ds_npu.parallel.tensor",
        "ds_npu.recompute.layers",
        "ds_npu.zzz",
        "ds_npu.swap",
        "tensor_parallel.autotp_size",
        STEPS,
    }


def test_each_wrong_role_is_a_mistake_of_its_own():
    plan = {"layers.*.q": "quary", "layers.*": "block", "lm_head": "Head", "norm": None}
    found = {problem.path: problem.found for problem in mistakes(with_section({"plan": plan})).problems}
    wrong = {"ds_npu.plan.layers.*.q": "quary", "ds_npu.plan.lm_head": "Head", "ds_npu.plan.norm": None}
    assert {path: value for path, value in found.items() if path != "ds_npu.plan"} == wrong


def test_a_wrong_value_makes_no_second_mistake():
    """What depends on the value that was meant is not judged with another one."""
    for parallel in ({"tensor": "2"}, {"tensr": 2}, {"tensor": "auto"}):
        config = with_section({"parallel": parallel, "tensor_overlap": "none"}, train_batch_size=4)
        assert len(mistakes(config).problems) == 1


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeeds_pipelines_know_no_zero_2_and_3(stage):
    config = with_section({"parallel": {"pipeline": 2}}, zero_optimization={"stage": stage})
    (problem,) = mistakes(config, stages=2).problems
    assert (problem.path, problem.found) == ("zero_optimization.stage", stage) and "0 or 1" in problem.accepted
    assert "zero_optimization.stage" in str(check(config, 8).warnings if stage == 2 else mistakes(config).problems)


def test_the_profiler_that_stages_refuse_is_a_warning_before_a_run():
    config = with_section({"parallel": {"pipeline": 2}}, flops_profiler={"enabled": True})
    (warning,) = check(config, 2).warnings
    assert "flops_profiler.enabled" in warning
    assert not check(config, 2, stages=2).warnings


def test_the_stages_of_a_pipeline_module_are_the_pipeline_ranks():
    config = with_section({"parallel": {"pipeline": 2}})
    (problem,) = mistakes(config, stages=4).problems
    assert (problem.path, problem.found) == ("ds_npu.parallel.pipeline", 2) and "4, the stages" in problem.accepted
    assert not check(config, 8, stages=2).warnings and not check(config, 8).warnings


def test_the_same_asked_twice_is_accepted():
    section = {"parallel": {"context": 2, "pipeline": 2}}
    deepspeed = {
        "sequence_parallel_size": 2,
        "data_parallel_size": 2,
        "pipeline": {"stages": 2},
        "tensor_parallel": {"autotp_size": 1},
        "expert_parallel": {"enabled": False, "autoep_size": 8},
        "activation_checkpointing": {"partition_activations": True},
        "zero_optimization": {"stage": 1, "zero_hpz_partition_size": 2},
        "autotuning": {"enabled": True, "mp_size": 4},
    }
    checked = check(with_section(section, **deepspeed), 8)
    assert (checked.degrees.dp, checked.degrees.cp, checked.degrees.pp, checked.zero_stage) == (2, 2, 2, 1)


def test_off_values_are_accepted():
    section = {}
    for path, node in LEAVES.items():
        *above, last = path.split(".")
        inner = section
        for each in above:
            inner = inner.setdefault(each, {})
        inner[last] = False if path.startswith("fused_ops") else node["default"]
    config = check(with_section(section), 8).config
    assert json.loads(config.model_dump_json()) == section


@pytest.mark.parametrize("name", ["dsnpu", "ds-npu", "DS_NPU", "npu", "ds_npus", "ds npu"])
def test_a_misspelt_section_is_warned_of(name):
    (warning,) = check({"train_batch_size": 8, name: {}}, 8).warnings
    assert warning == f"{name!r} is ignored: the section is called 'ds_npu'"


def test_a_config_without_the_section_is_not_judged():
    checked = check({"train_batch_size": 7, "sequence_parallel_size": 3, "tensor_parallel": {"autotp_size": 2}}, 8)
    assert checked.config == DsNpuConfig() and not checked.warnings


KEYS = st.sampled_from(sorted(LEAVES))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(["", *SECTIONS]), st.text(), JSON)
def test_unknown_keys_are_always_named(section, name, value):
    path = f"{section}.{name}" if section else name
    assume(path not in {*LEAVES, *SECTIONS})
    error = mistakes(with_section({section: {name: value}} if section else {name: value}))
    assert f"ds_npu.{path}" in {problem.path for problem in error.problems}


def kinds(value):
    """The JSON types of a value; true and false are no numbers."""
    names = {bool: "boolean", float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
    return {"integer", "number"} if type(value) is int else {names[type(value)]}


def allowed_kinds(node):
    return {option["type"] for option in node.get("anyOf", [node])}


@given(KEYS, JSON)
def test_values_of_a_wrong_type_are_always_named(path, value):
    assume(not kinds(value) & allowed_kinds(LEAVES[path]))
    error = mistakes(with_section(nested(path, value)))
    assert f"ds_npu.{path}" in {problem.path for problem in error.problems}


@given(st.dictionaries(st.sampled_from([*SECTIONS, *LEAVES, "zzz"]), JSON) | JSON, st.integers() | st.none())
def test_whatever_is_given_there_is_no_other_exception(section, world_size):
    try:
        check({"ds_npu": section}, world_size)
    except ConfigError as error:
        assert error.problems and str(error)


DEGREE = st.sampled_from([1, 2, 3, 4])


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(("tensor", "context", "pipeline"), DEGREE)), DEGREE, DEGREE)
def test_right_configs_come_back_as_they_are(parallel, dp, micro):
    world_size = dp
    for degree in parallel.values():
        world_size *= degree
    checked = check({"train_micro_batch_size_per_gpu": micro, "ds_npu": {"parallel": parallel}}, world_size)
    assert checked.config.model_dump(exclude_unset=True) == {"parallel": parallel}
    assert checked.degrees.dp == dp and checked.degrees.world_size == world_size
    assert checked.batch.train == micro * dp


SIZE = st.none() | st.integers(1, 24)


@given(SIZE, SIZE, SIZE, st.integers(1, 4))
def test_batch_sizes_are_those_of_deepspeed(train, micro, steps, dp):
    theirs = SimpleNamespace(
        train_batch_size=train, train_micro_batch_size_per_gpu=micro, gradient_accumulation_steps=steps, world_size=dp
    )
    batch, problems = batch_of({TRAIN: train, MICRO: micro, STEPS: steps}, dp)
    try:
        DeepSpeedConfig._set_batch_related_parameters(theirs)
        DeepSpeedConfig._batch_assertion(theirs)
    except AssertionError:
        assert problems
    else:
        assert not problems
        found = theirs.train_batch_size, theirs.train_micro_batch_size_per_gpu, theirs.gradient_accumulation_steps
        assert found == (batch.train, batch.micro, batch.steps)


def test_a_config_is_loaded_from_a_file_or_a_dict(tmp_path):
    config = {"train_batch_size": 8, "ds_npu": {"parallel": {"tensor": 2}}}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    assert load(path) == load(str(path)) == load(config) == config
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(path)
