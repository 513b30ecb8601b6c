"""The code of one key of the section stands in that key's rooms; only the driver and the engine import them."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator

from test_rules import PACKAGE, Source, sources

from ds_npu.config.sections import DsNpuConfig
from ds_npu.features.driver import FEATURES

MAY_IMPORT_ROOMS = ("ds_npu/features/driver.py", "ds_npu/engine/")


@functools.cache
def feature_rooms() -> dict[str, str]:
    """For each key the package or module of ``features`` that is its own: ``ds_npu.features.tensor_parallel``."""
    rooms = {}
    for name, module in list(sys.modules.items()):
        if name.startswith("ds_npu.features.") and name != "ds_npu.features.driver":
            own = [each.key for each in FEATURES if any(value is each for value in vars(module).values())]
            rooms.update(dict.fromkeys(own, ".".join(name.split(".")[:3])))
    return rooms


def imports_of_rooms(source: Source) -> Iterator[str]:
    """Imports of another room of ``features``, also those by a string, outside of the driver and the engine."""
    if source.path.startswith(MAY_IMPORT_ROOMS):
        return
    own = source.path.removesuffix(".py").replace("/", ".")
    for node in source.nodes(ast.Import, ast.ImportFrom, ast.Constant):
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            imported = [node.value] if isinstance(node.value, str) else []
        for room in sorted(set(feature_rooms().values())):
            found = [name for name in imported if f"{name}.".startswith(f"{room}.")]
            if found and not f"{own}.".startswith(f"{room}."):
                yield f"{source.path}:{node.lineno}: {found[0]}"


def test_each_key_has_its_rooms_and_nobody_else_imports_them():
    assert feature_rooms().keys() == DsNpuConfig.model_fields.keys()
    assert [said for source in sources(*PACKAGE) for said in imports_of_rooms(source)] == []
    planted = {
        "ds_npu/features/context_parallel/a.py": "from ds_npu.features.tensor_parallel.refusal import refuse_copies",
        "ds_npu/models/b.py": "import ds_npu.features.fused_ops.loss",
        "ds_npu/features/c.py": "from ds_npu.features import tensor_parallel",
        "zero_ext/d.py": "importlib.import_module('ds_npu.features.plan')",
    }
    assert all(list(imports_of_rooms(Source(path, text))) for path, text in planted.items())
    fine = {
        "ds_npu/features/driver.py": "from ds_npu.features.plan import PLAN",
        "ds_npu/engine/a.py": "from ds_npu.features.tensor_parallel.refusal import check_shardable",
        "ds_npu/features/tensor_parallel/a.py": "from ds_npu.features.tensor_parallel.refusal import SAVE",
        "ds_npu/cli/a.py": "from ds_npu.features.driver import FEATURES",
    }
    assert not [said for path, text in fine.items() for said in imports_of_rooms(Source(path, text))]
