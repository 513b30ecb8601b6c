"""What is refused of DeepSpeed's own keys is what the installed DeepSpeed refuses: compared, in both directions."""

from __future__ import annotations

import copy
import functools
import json
import logging
from importlib.metadata import version

import deepspeed_schema
import pytest
from deepspeed.runtime.config import DeepSpeedConfig
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ds_npu.config import deepspeed_schema as reader
from ds_npu.config.check import check
from ds_npu.config.deepspeed_readers import DEMANDS, deepspeed_problems
from ds_npu.config.deepspeed_schema import AFTER, BEFORE, COERCES, schema
from ds_npu.config.problems import ConfigError
from ds_npu.engine.session import world_size

INSTALLED = version("deepspeed").split("+")[0]
STRICTER = {
    "*.strict": "an argument of DeepSpeed's base model, which a section's key of that name sets",
    "*.nvme_path": "ZeRO 3 makes a path of it, and ends there, when it is made",
    "timers": "DeepSpeed looks for 'throughput' in a text or a list, too, and finds none",
    "torch_autocast.lower_precision_safe_modules": "DeepSpeed reads a text as letters, an object as its keys",
    "vocabulary_size": "DeepSpeed formats a text with %",
}
"""What is refused although DeepSpeedConfig takes it, and why."""

VALID = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 1,
    "steps_per_print": 10,
    "gradient_clipping": 1.0,
    "communication_data_type": "fp32",
    "gradient_allreduce_op": "mean",
    "wall_clock_breakdown": False,
    "vocabulary_size": 1024,
    "zero_optimization": {
        "stage": 2,
        "reduce_bucket_size": 5e8,
        "stage3_prefetch_bucket_size": 1,
        "offload_optimizer": {"device": "cpu", "ratio": 1.0},
        "offload_param": {"device": "none"},
        "zenflow": {"topk_ratio": 0.1, "update_interval": 2},
        "leaf_module": {"classes": ["a.B"]},
    },
    "bf16": {"enabled": True, "check_grad_overflow": True},
    "fp16": {"enabled": False, "loss_scale": 0, "loss_scale_window": 10, "min_loss_scale": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "max_grad_norm": 1.0}},
    "scheduler": {"type": "WarmupLR", "params": {}},
    "activation_checkpointing": {"partition_activations": True},
    "comms_logger": {"enabled": False, "prof_ops": ["all_reduce"]},
    "tensorboard": {"enabled": False, "output_path": "x"},
    "wandb": {"enabled": False, "group": None},
    "csv_monitor": {"enabled": False},
    "comet": {"enabled": False, "online": None},
    "flops_profiler": {"enabled": False},
    "autotuning": {"enabled": False, "results_dir": "a", "model_info": {"num_params": 1}},
    "hybrid_engine": {"enabled": False, "max_out_tokens": 512},
    "pipeline": {"activation_checkpoint_interval": 1},
    "data_efficiency": {
        "enabled": False,
        "data_sampling": {
            "curriculum_learning": {"enabled": True, "curriculum_metrics": {}},
            "dynamic_batching": {"enabled": True, "max_tokens": 8, "min_batch_size": 1},
        },
        "data_routing": {"random_ltd": {"enabled": False}},
    },
    "checkpoint": {
        "tag_validation": "Warn",
        "parallel_write": {"pipeline_stage": False},
        "writer": {"type": "PYTHON", "data_parallel": "REPLICA"},
    },
    "data_types": {"grad_accum_dtype": "fp32", "keep_in_fp32_modules": ["a"]},
    "aio": {"block_size": 1048576},
    "compile": {"deepcompile": False, "passes": ["z1"]},
    "timers": {"throughput": {"enabled": True}},
    "tensor_parallel": {"autotp_size": 0, "partition_config": {"a": 1}, "tensor_parallel": {"tp_size": 1}},
    "expert_parallel": {"enabled": False},
    "torch_autocast": {"enabled": False, "dtype": "bfloat16", "lower_precision_safe_modules": ["torch.nn.Linear"]},
    "weight_quantization": {"enabled": False, "q_type": "symmetric"},
}
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def keys_of(node, path=()):
    """The paths of the fields of a model, by all of their names."""
    for name, each in node.get("properties", {}).items():
        for key in {name, each.get("alias", name)}:
            yield (*path, key)
            for option in each.get("anyOf", [each]):
                yield from keys_of(option, (*path, key))


NAMES = sorted(
    {path[-1] for node in schema().sections.values() for path in keys_of(node)}
    | {part for demand in DEMANDS for part in demand.path.split(".")}
    | {*schema().top_level, *schema().removed, *schema().removed_from_zero, "strict", "zzz", "max_tokens", "enabled"}
    - {*BATCH, "ds_npu"}
)
SCALARS = [
    *(None, True, False, 0, 1, 2, 3, 4, 9, -1, 0.5, 1.0, 1e30, 10**30, float("inf")),
    *("", "1", "1.0", " 2 ", "1e3", "-1", "nan", "true", "off", "x", "auto", "cpu", "fp16", "FP32", "float16", "sum"),
    *("epoch", "Ignore", "FAST", "liger", "socket", "symmetric", "throughput"),
]
LISTS = [[], {}, ["a"], [1], ["z1"], {"a": 1}, {"enabled": True}, {"device": "cpu"}, {"throughput": 5}]
VALUES = st.recursive(
    st.sampled_from(SCALARS),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=4,
)


def places(config, path=()):
    """The paths of all values, those of objects included."""
    for key, value in config.items():
        if key not in BATCH:
            yield (*path, key)
            if isinstance(value, dict):
                yield from places(value, (*path, key))


@st.composite
def configs(draw):
    """A valid config, or a part of one, with some values replaced, taken out or added."""
    config = copy.deepcopy(VALID)
    if draw(st.booleans()):
        kept = draw(st.sets(st.sampled_from(sorted(VALID)), max_size=4)) | {*BATCH}
        config = {key: value for key, value in config.items() if key in kept}
    for _ in range(draw(st.integers(0, 3))):
        path = draw(st.sampled_from([(), *sorted(places(config))]))
        if path and draw(st.booleans()):
            holder = at(config, path[:-1])
            if draw(st.integers(0, 4)):
                holder[path[-1]] = draw(VALUES)
            else:
                del holder[path[-1]]
        elif isinstance(holder := at(config, path), dict):
            node = schema().sections.get(".".join(path))
            names = sorted(path[-1] for path in keys_of(node)) if node and draw(st.integers(0, 3)) else NAMES
            holder[draw(st.sampled_from(names))] = draw(VALUES)
    return config


def at(config, path):
    for part in path:
        config = config[part]
    return config


def refused_by_deepspeed(config):
    """Its error, or None."""
    try:
        DeepSpeedConfig(copy.deepcopy(config))
    except Exception as error:
        return error
    return None


def is_stricter(path):
    return path in STRICTER or f"*.{path.rsplit('.', 1)[-1]}" in STRICTER


def assert_one_verdict(config):
    problems = [*deepspeed_problems(config)]
    error = refused_by_deepspeed(config)
    if error is not None:
        assert problems, f"{config}: DeepSpeed: {type(error).__name__}: {error}"
    else:
        assert all(is_stricter(problem.path) for problem in problems), (config, problems)
    return bool(problems)


@given(configs())
@settings(max_examples=200)
@example(VALID)
def test_deepspeed_and_the_check_give_one_verdict(config):
    assert_one_verdict(config)


def every_path():
    """Each key that DeepSpeed knows, and one that it does not in each section."""
    for section, node in schema().sections.items():
        path = tuple(section.split("."))
        yield from (path, (*path, "zzz"), *((*path, *keys) for keys in keys_of(node)))
    yield from (tuple(demand.path.split(".")) for demand in DEMANDS)
    yield from ((key,) for key in (*schema().top_level, *schema().removed))
    yield from (("zero_optimization", key) for key in schema().removed_from_zero)


PATHS = sorted({path for path in every_path() if path[0] not in (*BATCH, "ds_npu")})


@pytest.mark.parametrize("part", range(4))
def test_each_key_alone_with_each_kind_of_value(part):
    """All keys, in a config with nothing else in it but the batch."""
    logging.disable(logging.WARNING)
    verdicts = set()
    for path in PATHS[part::4]:
        for value in (*SCALARS, *LISTS):
            inner = functools.reduce(lambda held, key: {key: held}, reversed(path), copy.deepcopy(value))
            verdicts.add(assert_one_verdict({key: VALID[key] for key in BATCH} | inner))
    logging.disable(logging.NOTSET)
    assert verdicts == {True, False}


@given(st.data())
@settings(max_examples=150)
def test_the_keys_of_a_section_together(data):
    """Most of them right, as what they demand of each other is judged where they are."""
    zero = st.fixed_dictionaries(
        {"stage": st.integers(0, 3)},
        optional={
            "compute_grad_norm": st.booleans(),
            "cpu_offload": st.booleans() | st.none(),
            "cpu_offload_param": st.booleans(),
            "offload_optimizer": st.sampled_from([None, {}, {"ratio": 0.5}, {"ratio": "1"}, {"device": "cpu"}]),
            "zenflow": st.sampled_from([None, {}, {"update_interval": 0}, {"select_strategy": "x"}]),
            "stage3_gather_16bit_weights_on_model_save": st.booleans(),
            "gather_16bit_weights_on_model_save": st.booleans(),
            "stage3_gather_fp16_weights_on_model_save": st.booleans(),
        },
    )
    half = st.fixed_dictionaries(
        {"enabled": st.booleans()},
        optional={
            "fp16_master_weights_and_grads": st.booleans(),
            "loss_scale": st.sampled_from([0, 1, "0", -1]),
            "loss_scale_window": st.sampled_from([0, 1, "2", 2.0, -5]),
            "min_loss_scale": st.sampled_from([0, 1, 0.0]),
        },
    )
    brain = st.fixed_dictionaries(
        {"enabled": st.booleans()},
        optional={"bf16_master_weights_and_grads": st.booleans(), "bf16_optimizer_states": st.booleans()},
    )
    parts = {
        "zero_optimization": zero | st.booleans(),
        "fp16": half,
        "bf16": brain | st.none(),
        "bfloat16": brain | st.none(),
        "compile": st.fixed_dictionaries({"deepcompile": st.booleans()}),
        "gradient_allreduce_op": st.sampled_from(["sum", "Mean"]),
        "allgather_size": st.sampled_from([1, "x", -1]),
    }
    config = data.draw(st.fixed_dictionaries({}, optional=parts))
    assert_one_verdict({key: VALID[key] for key in BATCH} | config)


def test_the_file_of_the_installed_version_is_what_its_models_say():
    """If not: look at what has changed, then run ``python tests/support/deepspeed_schema.py``."""
    assert schema().is_installed and schema().version == INSTALLED
    assert json.loads(deepspeed_schema.file_of(INSTALLED).read_text()) == json.loads(
        json.dumps(deepspeed_schema.schema())
    )


def test_each_validator_of_a_model_is_known():
    def names(node):
        yield from node.get("validators", ())
        for each in node.get("properties", {}).values():
            for option in each.get("anyOf", [each]):
                yield from names(option)

    found = {name for node in schema().sections.values() for name in names(node)}
    assert found == {*AFTER, *BEFORE, COERCES}


def test_an_unknown_version_refuses_no_unknown_keys(monkeypatch):
    """A key may be new; wrong values of known ones stay wrong."""
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 4, "zzz": 1}, "ds_npu": {}}
    for installed, known in (("0.19.9", "0.19.8"), ("0.19.1", "0.19.8"), ("0.19.7", "0.19.7")):
        monkeypatch.setattr(reader, "version", lambda _, installed=installed: installed)
        schema.cache_clear()
        found = {problem.path for problem in deepspeed_problems(config)}
        assert schema().version == known and "zero_optimization.stage" in found
        assert ("zero_optimization.zzz" in found) == (known == installed)
    monkeypatch.undo()
    schema.cache_clear()


MISTAKES = [
    ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: found 4; one of 0, 1, 2, 3"),
    ({"zero_optimization": {"stage": 9}}, "zero_optimization.stage: found 9; one of 0, 1, 2, 3"),
    ({"zero_optimization": {"stag": 1}}, "zero_optimization.stag: found 1; no such key in DeepSpeed"),
    ({"zero_optimization": {"stag": 1}}, "did you mean zero_optimization.stage?"),
    ({"zero_optimization": {"mics_shard_size": 1}}, "MiCS ZeRO-3 sharding has been removed"),
    ({"zero_optimization": "x"}, 'zero_optimization: found "x"; an object with some of the keys stage, '),
    ({"zero_optimization": {"offload_optimizer": {"device": "gpu"}}}, "one of 'none', 'cpu', 'nvme'"),
    (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
        "zero_optimization.offload_param.nvme_path: found null; the path of a folder on the disk",
    ),
    ({"zero_optimization": {"reduce_bucket_size": 0}}, "reduce_bucket_size: found 0; an integer > 0"),
    ({"bf16": 0.5}, "bf16: found 0.5; an object with some of the keys enabled, "),
    ({"bf16": {"enabled": "maybe"}}, 'bf16.enabled: found "maybe"; true or false'),
    ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "fp16.enabled, bf16.enabled: found [true, true]; true"),
    ({"optimizer": 5}, "optimizer: found 5; an object"),
    ({"pipeline": 5}, "pipeline: found 5; an object"),
    ({"amp": {"enabled": True}}, "NVIDIA Apex AMP integration has been removed"),
    ({"communication_data_type": "fp64"}, "one of 'fp16', 'bf16', 'fp32' or null"),
    ({"tensor_parallel": {"dtype": "fp16"}}, "a torch.dtype, which no file can hold"),
]


@pytest.mark.parametrize(("keys", "said"), MISTAKES)
def test_what_deepspeed_would_refuse_later_is_refused_now(keys, said):
    with pytest.raises(ConfigError) as caught:
        check({"train_batch_size": 8, "ds_npu": {}} | keys, 8)
    assert said in str(caught.value)


def test_what_the_trainer_fills_in_is_accepted():
    """The config of the Trainer's documentation, "auto" in it."""
    auto = "auto"
    zero = {"stage": 3, "reduce_bucket_size": auto, "stage3_prefetch_bucket_size": auto, "overlap_comm": True}
    params = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), auto)
    config = {
        "fp16": {"enabled": auto, "loss_scale": 0, "initial_scale_power": 16},
        "bf16": {"enabled": auto},
        "optimizer": {"type": "AdamW", "params": params},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": auto}},
        "zero_optimization": zero | {"stage3_param_persistence_threshold": auto},
        "gradient_accumulation_steps": auto,
        "gradient_clipping": auto,
        "train_batch_size": auto,
        "train_micro_batch_size_per_gpu": auto,
        "steps_per_print": float("inf"),
        "ds_npu": {},
    }
    assert not check(config, 8).warnings


def test_a_key_that_deepspeed_would_ignore_is_warned_of():
    config = {"train_batch_size": 8, "gradient_cliping": 1, "my_tool": {}, "ds_npu": {}}
    assert check(config, 8).warnings == ("'gradient_cliping' is ignored: did you mean 'gradient_clipping'?",)


@pytest.mark.parametrize(("stage", "read"), [(True, 1), (2.0, 2), ("3", 3), (0, 0)])
def test_a_stage_is_read_as_deepspeed_reads_it(stage, read):
    config = {"train_batch_size": 8, "zero_optimization": {"stage": stage}, "ds_npu": {}}
    assert check(config, 8).zero_stage == read == DeepSpeedConfig(config | {"train_batch_size": 1}).zero_config.stage
    assert check(config | {"zero_optimization": True}, 8).zero_stage == 1


@pytest.mark.parametrize(("text", "size"), [("8", 8), ("0", 0), ("", None), ("two", None), ("9" * 5000, None)])
def test_the_launchers_world_size_is_a_number_or_not_known(monkeypatch, text, size):
    monkeypatch.setenv("WORLD_SIZE", text)
    assert world_size() == size
