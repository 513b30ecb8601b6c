"""The code of one key of the section stands in that key's rooms; only the driver and the engine import them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from test_rules import PACKAGE, ROOT, Source, sources

from ds_npu.features.driver import FEATURES

ROOMS = {
    "parallel": ("config/parallel.py", "features/tensor_parallel", "parallel/tensor"),
    "tensor_overlap": ("config/tensor_overlap.py", "features/tensor_parallel", "parallel/tensor"),
    "plan": ("config/plan.py", "features/plan.py", "models"),
    "moe": ("config/moe.py", "features/experts", "parallel/expert"),
    "fused_ops": ("config/fused_ops.py", "features/fused_ops", "ops"),
    "context_parallel": (
        "config/context_parallel.py",
        "config/context_algorithm.py",
        "features/context_parallel",
        "parallel/context",
        "planner",
    ),
    "pipeline": ("config/pipeline.py", "features/pipeline", "parallel/pipeline", "planner"),
    "chunked_loss": ("config/chunked_loss.py", "features/chunked_loss", "parallel/tensor"),
    "recompute": ("config/recompute.py", "features/recompute", "memory"),
    "swap": ("config/swap.py", "features/swap", "memory"),
    "memory_report": ("config/memory_report.py", "features/memory_report", "memory"),
    "optimizer_memory": (
        "config/optimizer_memory.py",
        "config/optimizer_memory_keys.py",
        "features/optimizer_memory",
        "memory",
        "zero_ext/optimizer_state.py",
    ),
    "deterministic": ("features/deterministic.py",),
    "watch": ("config/watch.py", "features/watch"),
}
"""For each key of the section that is built, where in ds_npu it lives."""
MAY_IMPORT_ROOMS = ("ds_npu/features/driver.py", "ds_npu/engine/")


def feature_rooms() -> set[str]:
    """The modules of ``features`` that are a key's own: ``ds_npu.features.tensor_parallel`` and so on."""
    paths = {path for places in ROOMS.values() for path in places if path.startswith("features/")}
    return {f"ds_npu.{path.removesuffix('.py').replace('/', '.')}" for path in paths}


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
        for room in sorted(feature_rooms()):
            found = [name for name in imported if f"{name}.".startswith(f"{room}.")]
            if found and not f"{own}.".startswith(f"{room}."):
                yield f"{source.path}:{node.lineno}: {found[0]}"


def test_each_key_has_its_rooms_and_nobody_else_imports_them():
    assert ROOMS.keys() == {feature.key for feature in FEATURES}
    assert [path for places in ROOMS.values() for path in places if not (ROOT / "ds_npu" / path).exists()] == []
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
