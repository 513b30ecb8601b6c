"""Moves modules and names to other modules, and rewrites every import, patch target and path that names them.

    python tests/rooms.py        at the top of a checkout, once

Whole modules move by MODULES; NAMES says which names of a module go elsewhere than the rest of it.
"""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

ROOM = "features.tensor_parallel"
MODULES = {
    "config": "config.section",
    "features.all": "config.sections",
    "features.batch": "config.batch",
    "features.check": "config.check",
    "features.context_choice": "planner.context_choice",
    "features.context_cost": "planner.context_cost",
    "features.context_parallel": "config.context_parallel",
    "features.deepspeed_keys": "config.deepspeed_keys",
    "features.deepspeed_readers": "config.deepspeed_readers",
    "features.deepspeed_schema": "config.deepspeed_schema",
    "features.deepspeed_validators": "config.deepspeed_validators",
    "features.feature": "features.build",
    "features.fused_ops": "features.fused_ops.feature",
    "features.loading": "config.loading",
    "features.model_file": "planner.model_file",
    "features.moe": "config.moe",
    "features.optimizer_memory": "config.optimizer_memory",
    "features.parallel": "config.parallel",
    "features.pipeline": "config.pipeline",
    "features.plan": "config.plan",
    "features.reading": "config.reading",
    "features.recompute": "config.recompute",
    "features.rules": "config.rules",
    "features.schema": "config.schema",
    "features.swap": "config.swap",
    "features.tensor_overlap": f"{ROOM}.tensor_overlap",
    "cli.context": "planner.context_report",
    "topology.context": "config.context_algorithm",
    "topology.machine": "planner.machine",
    "models.roles": "config.roles",
    "models.adapters": f"{ROOM}.adapters",
    "models.cuts": f"{ROOM}.role_shards",
    "models.experts": f"{ROOM}.experts",
    "models.latent": f"{ROOM}.latent",
    "models.part_copy": f"{ROOM}.part_copy",
    "models.refusal": f"{ROOM}.refusal",
    "models.shard_protection": f"{ROOM}.shard_protection",
    "models.split_probe": f"{ROOM}.probe",
    "models.tensor_parallel": f"{ROOM}.sharded_model",
    "models.vocabulary": f"{ROOM}.vocabulary",
    "models.whole_sequences": f"{ROOM}.whole_sequences",
    "models.context_parallel": "features.context_parallel.sharded_sequences",
    "models.context.attention": "features.context_parallel.attention",
    "models.context.batch": "features.context_parallel.batch",
    "models.context.forward": "features.context_parallel.forward",
    "models.context.layers": "features.context_parallel.layers",
    "models.context.loss": "features.context_parallel.loss",
    "models.context.mixing": "features.context_parallel.mixing",
    "models.context.values": "features.context_parallel.values",
    "models.context.visibility": "features.context_parallel.visibility",
    "models.fused": "features.fused_ops.fused_model",
    "models.fusion.loss": "features.fused_ops.loss",
    "models.fusion.mlp": "features.fused_ops.mlp",
    "models.fusion.norm": "features.fused_ops.norm",
    "models.fusion.outcome": "features.fused_ops.outcome",
    "models.fusion.probe": "features.fused_ops.probe",
    "models.fusion.rotary": "features.fused_ops.rotary",
    "models.checkpoint": "checkpoint.files",
    "models.conversion": "checkpoint.conversion",
    "models.disk": "checkpoint.disk",
    "models.fit": "checkpoint.fit",
    "models.loading": "checkpoint.loading",
    "models.saving": "checkpoint.saving",
    "overlap.tensor_matmul": "parallel.tensor.overlapped_matmul",
    "parallel.context.blockwise": "parallel.context.blockwise_attention",
    "parallel.context.calls": "parallel.context.kernel_calls",
    "parallel.context.exchange": "parallel.context.ulysses",
    "parallel.context.heads": "parallel.context.ulysses_heads",
    "parallel.context.merge": "parallel.context.online_softmax",
    "parallel.context.ring": "parallel.context.ring_schedule",
    "parallel.context.tiles": "parallel.context.mask_tiles",
    "parallel.context.tokens": "parallel.context.load_balance",
    "parallel.context.work": "parallel.context.local_attention",
    "zero_ext.lost_hooks": "zero_ext.dropped_hooks",
    "capability.lack": "capability.unavailable",
    "engine.late": "engine.after_deepspeed",
}
PROBLEMS = "config.problems"
NAMES = {
    "config": dict.fromkeys(
        ["Problem", "ConfigError", "printable", "shown", "shortened", "MOST_CHARACTERS", "MOST_PROBLEMS"], PROBLEMS
    ),
    "features.feature": dict.fromkeys(
        ["MOST_RANKS", "MOST_CONTEXT_RANKS", "Ranks", "ContextRanks", "AtLeastOne", "AtLeastZero"], "config.section"
    )
    | {"Feature": "features.feature"},
    "features.all": dict.fromkeys(["FEATURES", "apply_features"], "features.driver"),
    "features.context_parallel": {
        "CONTEXT_PARALLEL": "features.context_parallel.feature",
        "choose_for": "planner.context_choice",
    },
    "features.fused_ops": {"FusedOpsSection": "config.fused_ops"},
    "features.parallel": {"PARALLEL": f"{ROOM}.feature"},
    "features.plan": {"PLAN": "features.plan"},
    "features.tensor_overlap": {"TensorOverlap": "config.tensor_overlap"},
}
TEXTS = ("*.py", "*.md", "*.toml", "*.json", "Makefile")
TOP = "ds_npu."


def moved(module: str, name: str) -> str:
    """Where ``name`` of ``module`` (a module of ds_npu, in full) is to be imported from."""
    short = module.removeprefix(TOP)
    elsewhere = NAMES.get(short, {}).get(name)
    return TOP + (elsewhere or MODULES.get(short, short))


def import_lines(node: ast.ImportFrom) -> str:
    """The same import from where its names are now."""
    by_module: dict[str, list[str]] = {}
    for alias in node.names:
        whole = f"{node.module}.{alias.name}".removeprefix(TOP)
        said = alias.name if alias.asname is None else f"{alias.name} as {alias.asname}"
        home = node.module if node.module == "ds_npu" else moved(node.module, alias.name)
        if whole in MODULES:
            home, _, last = f"{TOP}{MODULES[whole]}".rpartition(".")
            bound = alias.asname or alias.name
            said = last if last == bound else f"{last} as {bound}"
        by_module.setdefault(home, []).append(said)
    pad = " " * node.col_offset
    return f"\n{pad}".join(f"from {module} import {', '.join(names)}" for module, names in by_module.items())


def rewritten_imports(text: str) -> str:
    lines = text.splitlines(keepends=True)
    nodes = [each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.ImportFrom) and each.module]
    ours = [each for each in nodes if f"{each.module}.".startswith(TOP)]
    for node in sorted(ours, key=lambda each: -each.lineno):
        first = lines[node.lineno - 1][: node.col_offset]
        rest = lines[node.end_lineno - 1][node.end_col_offset :]
        lines[node.lineno - 1 : node.end_lineno] = [f"{first}{import_lines(node)}{rest}"]
    return "".join(lines)


def rewritten_mentions(text: str) -> str:
    """Dotted names in strings, in ``import a.b`` and in prose, and paths of files."""
    for old, names in NAMES.items():
        for name, new in names.items():
            text = re.sub(rf"\bds_npu\.{re.escape(old)}\.{name}\b", f"{TOP}{new}.{name}", text)
    dotted = {f"{TOP}{old}": f"{TOP}{new}" for old, new in MODULES.items() if "." in old}
    paths = {f"{key}.py".replace(".", "/", key.count(".")): f"{value}.py" for key, value in dotted.items()}
    paths = {key: value.replace(".", "/", value.count(".") - 1) for key, value in paths.items()}
    # All at once: what was replaced is not replaced again.
    pattern = "|".join(rf"\b{re.escape(old)}\b" for old in sorted(dotted | paths, key=len, reverse=True))
    # In code a key of the section is no module: "ds_npu.context_parallel" is none of these.
    return re.sub(pattern, lambda found: (dotted | paths)[found.group()], text)


def main() -> None:
    for old, new in MODULES.items():
        source, target = (Path("ds_npu", *each.split(".")).with_suffix(".py") for each in (old, new))
        # Links: git moves only what it knows under its own name.
        source, target = (path.parent.resolve().relative_to(Path.cwd()) / path.name for path in (source, target))
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "mv", "-k", str(source), str(target)], check=True)
        assert target.exists(), (source, target)
    listed = subprocess.run(["git", "ls-files", *TEXTS], capture_output=True, text=True, check=True).stdout
    for path in map(Path, listed.splitlines()):
        if path.is_symlink() or not path.exists() or path.name in ("rooms.py", "CHANGELOG.md"):
            continue
        text = path.read_text()
        found = rewritten_imports(text) if path.suffix == ".py" else text
        found = rewritten_mentions(found)
        if found != text:
            path.write_text(found)


if __name__ == "__main__":
    main()
