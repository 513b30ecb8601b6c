"""Modules and arguments as data that holds no code: tensors, numbers, texts, and names of classes and functions.

A module is the name of its class, its plain attributes, and its children. Whoever reads it makes an object of that
class without calling its constructor: nothing of the file runs, and classes come from the reader's own installation.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn

from ds_npu.capability import try_import
from ds_npu.models.logits import AbsentLogits
from ds_npu.parallel.runtime.forward_wraps import wraps_of
from ds_npu.parallel.runtime.marks import RECORD, held
from ds_npu.parallel.tensor.shard_access import local_shard

Plain = Any
"""None, numbers, texts, dtypes, tensors, and lists, tuples and dicts of them."""
UNKNOWN, CONFIG, FUNCTION = "ds_npu: unknown", "ds_npu: config", "ds_npu: function"
"""Keys of dicts that replace an object: by its type, by its values, by its name."""
FUNCTIONS_OF = ("torch", "transformers")
"""Packages whose functions a module may hold."""
SCRIPT = "ds_npu_replayed_script"
"""The name under which a script is imported whose classes are those of ``__main__``."""
SCALARS = (bool, int, float, str, type(None), torch.dtype, torch.Size)
NOT_KEPT = frozenset({*held(nn.Module()), "forward", RECORD})
"""Attributes of a module that are torch's, or ds_npu's wraps and marks."""


class RebuildError(ValueError):
    """A module or argument that cannot be made again, with its name and the reason."""


def as_plain(value: Any) -> Plain:
    """``value`` as plain data; what is none of it becomes ``{UNKNOWN: its type}``. Tensors are copied to the host."""
    if isinstance(value, torch.Tensor) and not isinstance(value, AbsentLogits):
        return host_copy(value)
    if isinstance(value, SCALARS):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str | int) for key in value):
        return {key: as_plain(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(as_plain(each) for each in value)
    if _is_config(value):
        kept = {"_attn_implementation": held(value).get("_attn_implementation_internal")}
        return {CONFIG: _path(type(value)), "values": as_plain(value.to_dict()), "kept": as_plain(kept)}
    if isinstance(value, FunctionType | BuiltinFunctionType) and _function(_path(value)) is value:
        return {FUNCTION: _path(value)}
    return {UNKNOWN: f"{type(value).__module__}.{type(value).__qualname__}"}


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of ``tensor`` (of a shard: this rank's) in host memory, without graph, marks and subclass."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        return local_shard(tensor).detach().to("cpu", copy=True).contiguous()


def unknown_in(data: Plain, path: str = "") -> list[str]:
    """The paths of what ``as_plain`` could not take, each with its type."""
    if isinstance(data, Mapping):
        if UNKNOWN in data:
            return [f"{path}, a {data[UNKNOWN]}"]
        return [found for key, each in data.items() for found in unknown_in(each, f"{path}.{key}".lstrip("."))]
    if isinstance(data, list | tuple):
        return [found for index, each in enumerate(data) for found in unknown_in(each, f"{path}[{index}]")]
    return []


def module_data(module: nn.Module) -> Plain:
    """``module`` without the values of its weights and buffers, as plain data."""
    kept = {name: value for name, value in held(module).items() if name not in NOT_KEPT}
    return {
        "class": _path(type(module)),
        "attributes": {name: as_plain(value) for name, value in kept.items()},
        "training": module.training,
        "wraps": sorted({each.level.name for each in wraps_of(module)}),
        "weights": [name for name, _ in module.named_parameters(recurse=False)],
        "buffers": [name for name, _ in module.named_buffers(recurse=False)],
        "empty": [name for name, each in (module._parameters | module._buffers).items() if each is None],
        "children": {name: None if child is None else module_data(child) for name, child in module._modules.items()},
    }


def rebuilt(data: Plain, weights: Mapping[str, torch.Tensor], name: str = "") -> nn.Module:
    """The module that ``module_data`` has described, with ``weights`` by name. Raises RebuildError where it cannot."""
    kind = _named_class(data["class"], name)
    unknown = [key for key, value in data["attributes"].items() if isinstance(value, Mapping) and UNKNOWN in value]
    if data["class"].startswith("ds_npu.") and unknown:
        raise RebuildError(
            f"{f'{name} is ' if name else ''}a {kind.__name__} of ds_npu, which computes with other ranks"
        )
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    for key, value in data["attributes"].items():
        if key not in unknown:
            held(module)[key] = made_of(value)
    module.training = data["training"]
    prefix = f"{name}." if name else ""
    for each in data["weights"]:
        module.register_parameter(each, nn.Parameter(_values(weights, prefix + each)))
    for each in data["buffers"]:
        module.register_buffer(each, _values(weights, prefix + each))
    for each in data["empty"]:
        module.register_parameter(each, None)
    for each, child in data["children"].items():
        module.add_module(each, None if child is None else rebuilt(child, weights, prefix + each))
    return module


def made_of(data: Plain) -> Any:
    """The value that ``as_plain`` made ``data`` of. Raises RebuildError for a class or function that is not there."""
    if isinstance(data, Mapping):
        if CONFIG in data:
            return _config(data)
        if FUNCTION in data:
            found = _function(data[FUNCTION])
            if found is None:
                raise RebuildError(f"the function {data[FUNCTION]} is not there, or is none of {FUNCTIONS_OF}")
            return found
        return {key: made_of(each) for key, each in data.items()}
    if type(data) in (list, tuple):
        return type(data)(made_of(each) for each in data)
    return data


def _values(weights: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    if name not in weights:
        raise RebuildError(f"the file has no values of {name}: the module did not use it before the error")
    return weights[name]


def _config(data: Plain) -> Any:
    kind = _found(data[CONFIG])
    transformers = sys.modules.get("transformers")
    if transformers is None or not (isinstance(kind, type) and issubclass(kind, transformers.PretrainedConfig)):
        raise RebuildError(f"{data[CONFIG]} is no class of a config of transformers here")
    config: Any = kind
    made = config.from_dict(made_of(data["values"]))
    for name, value in data["kept"].items():
        if value is not None:
            held(made)[f"{name}_internal"] = value
    return made


def _is_config(value: Any) -> bool:
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(value, transformers.PretrainedConfig)


def _path(named: Any) -> str:
    return f"{named.__module__}:{named.__qualname__}"


def _function(path: str) -> Any:
    if path.partition(".")[0].partition(":")[0] not in FUNCTIONS_OF:
        return None
    found = _found(path)
    return found if isinstance(found, FunctionType | BuiltinFunctionType) else None


def _named_class(path: str, name: str) -> type[nn.Module]:
    found = _found(path)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise RebuildError(
            f"{f'{name}: ' if name else ''}{path.replace(':', '.')} is no class of a module that can be imported here. "
            "What to do: run in the folder of the script, or name the script (--script FILE)"
        )
    return found


def _found(path: str) -> Any:
    """The object that ``path`` names, as ``module:A.b``; None where it is not there.

    Raises RebuildError where importing the module ends in an error.
    """
    name, _, names = path.partition(":")
    owner: Any = sys.modules.get(SCRIPT if name == "__main__" else name)
    if owner is None:
        if name == "__main__" or _is_missing(name.split(".")):
            return None
        owner, error = try_import(name)
        if error is not None:
            raise RebuildError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error
    for part in names.split("."):
        owner = getattr(owner, part, None)
    return owner


def _is_missing(parts: Sequence[str]) -> bool:
    lengths = range(1, len(parts) + 1)
    return any(importlib.util.find_spec(".".join(parts[:length])) is None for length in lengths)
