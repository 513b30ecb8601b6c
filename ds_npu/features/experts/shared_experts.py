"""The module of a block that computes shared experts after its routed ones, read from the source of its forward.

Most blocks of transformers are written so:

    hidden_states = self.experts(hidden_states, topk_indices, topk_weights)
    hidden_states = hidden_states + self.shared_experts(residuals)

where ``residuals`` is the input of the block, or of its routed experts. Only this pattern counts; a block that computes
shared experts first (Qwen2-MoE), or from another tensor, has none. Every forward checks again that the shared experts
are called with that tensor (``ds_npu.parallel.expert.overlap``).
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from torch import nn

from ds_npu.features.declaration import Change
from ds_npu.models import names
from ds_npu.parallel.expert.overlap import SharedExperts
from ds_npu.parallel.runtime.forward_wraps import Level, Wrapper, innermost_forward, wrap_forward

LAST = "down_proj"
"""The last layer of shared experts, in all models of transformers."""


@dataclass(frozen=True)
class SharedCall:
    """A call of a block's shared experts after its routed ones; names of modules in the model."""

    block: str
    experts: str
    shared: str
    last: str | None
    of_block_input: bool
    """Whether shared experts take the block's input; else that of its routed experts."""


def shared_call(model: nn.Module, experts: str) -> SharedCall | None:
    """The call in the block around ``experts``, which PEFT may have wrapped; None if there is none."""
    block_name = names.owner(experts)
    block = model.get_submodule(block_name)
    leaf = names.plain(experts).rpartition(".")[2]
    try:
        source = inspect.getsource(innermost_forward(block))
    except (OSError, TypeError):  # Code that has no source.
        return None
    for name, of_block_input in _calls_after(ast.parse(textwrap.dedent(source)), leaf):
        child = dict(block.named_children()).get(name)
        # A module without children is a gate. ZeRO 3 gathers a module's own parameters only by its hooks.
        if child is None or not list(child.children()) or list(child.parameters(recurse=False)):
            continue
        prefix = f"{block_name}." if block_name else ""
        shared = f"{prefix}{name}"
        last = f"{shared}.{LAST}" if LAST in dict(child.named_children()) else None
        return SharedCall(block_name, f"{prefix}{leaf}", shared, last, of_block_input)
    return None


def shared_changes(model: nn.Module, call: SharedCall, shared: SharedExperts) -> Iterator[Change]:
    """Wrap for ``shared`` the forwards of the block, its routed experts, its shared experts and their last layer."""

    def wrap(name: str, wrapper: Wrapper, level: Level) -> None:
        # Looked up when the change is made, because other features replace layers.
        wrap_forward(model.get_submodule(name), wrapper, level)

    leaf = names.plain(call.shared).rpartition(".")[2]
    wraps: list[tuple[str, Wrapper, Level, str]] = [
        (call.block, shared.in_block, Level.OPERATOR, f"{leaf} run while tokens travel"),
        (call.experts, shared.in_experts, Level.OVERLAP, f"call {leaf} while tokens travel"),
        (call.shared, shared.in_shared, Level.OVERLAP, "called by the routed experts, whose block takes the result"),
    ]
    if call.last is not None:
        wraps.append((call.last, shared.in_last, Level.OVERLAP, "runs while sums travel"))
    for name, wrapper, level, what in wraps:
        yield Change("wraps", name, what, partial(wrap, name, wrapper, level), level)


def _calls_after(tree: ast.Module, experts: str) -> Iterator[tuple[str, bool]]:
    """The attributes of self that are called after ``experts`` with one tensor: the block's or the experts' input.

    Yields with each whether it takes the block's input.
    """
    function = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    given = object()
    values: dict[str, object] = dict.fromkeys([each.arg for each in function.args.args[1:2]], given)
    of_experts: object = None
    for statement in _statements(function.body):
        for name, call in _calls_of_self(statement):
            first = call.args[0] if call.args else None
            value = values.get(first.id, first) if isinstance(first, ast.Name) else first
            if name == experts:
                of_experts = value
            elif of_experts is not None and len(call.args) + len(call.keywords) == 1 and value in (given, of_experts):
                yield name, value is given
        _assign(statement, values)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt | ast.expr]:
    """All statements in the order of the source; ``if`` and ``with`` as condition or contexts, then the body."""
    for statement in body:
        if isinstance(statement, ast.If):
            yield statement.test
            yield from _statements([*statement.body, *statement.orelse])
        elif isinstance(statement, ast.With):
            yield from (item.context_expr for item in statement.items)
            yield from _statements(statement.body)
        else:
            yield statement


def _calls_of_self(node: ast.AST) -> list[tuple[str, ast.Call]]:
    calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    found = [(each.func, each) for each in sorted(calls, key=lambda call: (call.lineno, call.col_offset))]
    return [
        (method.attr, call)
        for method, call in found
        if isinstance(method, ast.Attribute) and isinstance(method.value, ast.Name) and method.value.id == "self"
    ]


def _assign(node: ast.AST, values: dict[str, object]) -> None:
    """Update ``values``, the value of each name, by the statement ``node``."""
    stored = [each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]
    of: Mapping[str, object] = dict(values)
    values.update({name: object() for name in stored})
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
        values.update(dict.fromkeys(stored, of.get(node.value.id, object())))
