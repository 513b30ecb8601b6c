"""Writes down which keys the installed DeepSpeed accepts: ``python tests/support/deepspeed_schema.py`` writes one file.

An older version's file is written with that version in front: ``PYTHONPATH=<its source> python tests/...``.
"""

from __future__ import annotations

import enum
import hashlib
import inspect
import json
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import deepspeed
import torch
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.inference.config import WeightQuantConfig
from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.runtime import config as runtime
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig
from pydantic import BaseModel

FOLDER = Path(__file__).parents[2] / "ds_npu" / "config" / "deepspeed_versions"
SECTIONS = {
    "zero_optimization": DeepSpeedZeroConfig,
    "bf16": DeepSpeedBF16Config,
    "bfloat16": DeepSpeedBF16Config,
    "fp16": DeepSpeedFP16Config,
    "tensorboard": TensorBoardConfig,
    "wandb": WandbConfig,
    "csv_monitor": CSVConfig,
    "comet": CometConfig,
    "comms_logger": CommsLoggerConfig,
    "hybrid_engine": runtime.HybridEngineConfig,
    "weight_quantization": WeightQuantConfig,
    "compile": runtime.CompileConfig,
    "timers.throughput": DeepSpeedThroughputTimerConfig,
    "tensor_parallel": TPTrainingConfig,
}
"""The closed sections, which DeepSpeed reads with models of pydantic."""
READERS = (
    "DeepSpeedConfig._initialize_params",
    "DeepSpeedConfig._do_error_check",
    "DeepSpeedConfig._do_warning_check",
    "get_checkpoint_parallel_write_pipeline",
    "get_checkpoint_tag_validation_mode",
    "get_checkpoint_config",
    "get_communication_data_type",
    "get_data_efficiency_config",
    "get_expert_parallel_config",
    "get_gradient_allreduce_op",
    "get_aio_config",
    "get_lower_precision_safe_modules",
    "get_optimizer_params",
    "get_pipeline_config",
    "get_torch_autocast_dtype",
    "get_zero_config",
    "DeepSpeedActivationCheckpointingConfig",
    "DeepSpeedAutotuningConfig",
    "DeepSpeedFlopsProfilerConfig",
)
"""Code that reads what is no such section; ``ds_npu.config.deepspeed_readers`` says what it demands."""
READ_ELSEWHERE = ("allgather_size", "data_parallel_size", "sequence_parallel_size", "vocabulary_size")
BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
SCALARS: dict[Any, dict[str, Any]] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    Path: {"type": "string", "format": "path"},
    type(None): {"type": "null"},
    dict: {"type": "object"},
    torch.dtype: {"instance": "torch.dtype"},
    object: {},
    Any: {},
}


def schema_of(kind: Any) -> dict[str, Any]:
    """The JSON schema of a type that stands in DeepSpeed's models."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return {"anyOf": [schema_of(each) for each in inner]}
    if origin is Literal:
        return {"enum": list(inner)}
    if (origin or kind) in (list, tuple):
        return {"type": "array", "items": schema_of(inner[0]) if inner else {}}
    if origin is dict:
        return {"type": "object"}
    if inspect.isclass(kind) and issubclass(kind, enum.Enum):
        return {"enum": [each.value for each in kind], "type": "integer" if issubclass(kind, int) else "string"}
    return model_schema(kind) if inspect.isclass(kind) and issubclass(kind, BaseModel) else SCALARS[kind]


def model_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Properties with their other names and defaults, and the validators, each with a hash of its code."""
    properties = {name: field_schema(field) for name, field in model.model_fields.items()}
    decorators = model.__pydantic_decorators__
    validators = {**decorators.model_validators, **decorators.field_validators}
    hashes = {name: hash_of(getattr(each.func, "__func__", each.func)) for name, each in validators.items()}
    return {"type": "object", "properties": properties, "validators": hashes}


def field_schema(field: Any) -> dict[str, Any]:
    node = dict(schema_of(field.annotation))
    for bound in field.metadata:
        node |= {BOUNDS[key]: getattr(bound, key) for key in BOUNDS if hasattr(bound, key)}
    if field.alias:
        node["alias"] = field.alias
    extra = field.json_schema_extra or {}
    if extra.get("deprecated") and extra.get("set_new_param", True):
        node["replaced_by"] = extra["new_param"]
    if "properties" not in node and isinstance(field.default, bool | int | float | str | None):
        node["default"] = field.default
    return node


def hash_of(code: Any) -> str:
    return hashlib.sha256(inspect.getsource(code).encode()).hexdigest()[:12]


def reader_hashes() -> dict[str, str]:
    found = {}
    for name in READERS:
        code: Any = runtime
        for part in name.split("."):
            code = getattr(code, part, None)
        if code is not None:
            found[name] = hash_of(code)
    return found


class Recorder(dict):
    """A config that remembers which of its keys were asked for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: set[str] = set()

    def __contains__(self, key: Any) -> bool:
        self.asked.add(key)
        return super().__contains__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        return self

    def __copy__(self) -> Recorder:
        return self


def top_level() -> list[str]:
    recorder = Recorder({"train_batch_size": 1})
    runtime.DeepSpeedConfig(recorder)
    return sorted({*recorder.asked, *READ_ELSEWHERE} - {*removed()})


def removed() -> dict[str, str]:
    return dict(getattr(runtime, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", {}))


def schema() -> dict[str, Any]:
    """What the installed DeepSpeed accepts."""
    return {
        "written by": "python tests/support/deepspeed_schema.py",
        "top_level": top_level(),
        "removed": removed(),
        "removed_from_zero": dict(getattr(runtime, "_REMOVED_ZERO_CONFIG_KEYS", {})),
        "sections": {path: model_schema(model) for path, model in SECTIONS.items()},
        "readers": reader_hashes(),
    }


def file_of(version: str) -> Path:
    return FOLDER / f"{version}.json"


if __name__ == "__main__":
    file_of(deepspeed.__version__.split("+")[0].strip()).write_text(json.dumps(schema(), indent=1) + "\n")
