"""Methods of DeepSpeed's engines, optimizers and monitors are wrapped by the table of cards, and in no other way."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import replace

import deepspeed
import gradient_rule
import pytest
import torch
from ranks import run_on_ranks
from test_rules import PACKAGE, Source, sources

from ds_npu.parallel.runtime.forward_wraps import Wrap
from ds_npu.zero_ext import method_wraps
from ds_npu.zero_ext.method_cards import CARDS, FRAGMENT, MethodCard
from ds_npu.zero_ext.method_wraps import MethodLevel, check_card, wrap_method

MAY_SET = ("ds_npu/parallel/runtime/forward_wraps.py", "zero_ext/method_wraps.py", "ds_npu/models/attributes.py")
HOLDERS = ("engine", "optimizer", "monitor", "basic_optimizer")
"""The last part of what DeepSpeed's objects are called in the source."""


def classes() -> dict[str, type]:
    """By name in the table, the classes whose methods are wrapped."""
    names = {name for card in CARDS for name in card.classes if name != FRAGMENT}
    return {name: getattr(importlib.import_module(name.partition(":")[0]), name.partition(":")[2]) for name in names}


def foreign_methods() -> set[str]:
    kinds = {kind for each in classes().values() for kind in each.__mro__ if kind.__module__.startswith("deepspeed")}
    return {name for kind in kinds for name, each in vars(kind).items() if inspect.isfunction(each)} | {"step"}


def replaced_methods(source: Source, methods: set[str]) -> Iterator[str]:
    """Places where ``source`` sets a method of DeepSpeed's on some object."""
    if source.path in MAY_SET:
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in (part for each in targets for part in ast.walk(each)):
                if isinstance(target, ast.Attribute) and target.attr in methods and not is_self(target.value):
                    yield f"{source.path}:{node.lineno}: {ast.unparse(target)} is assigned"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "set_attribute") and node.args:
            owner, name = ast.unparse(node.args[0]).rpartition(".")[2], node.args[1]
            names_one = isinstance(name, ast.Constant) and name.value in methods
            if names_one or owner in HOLDERS:
                yield f"{source.path}:{node.lineno}: {ast.unparse(node)[:60]}"


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def test_no_method_of_deepspeeds_is_replaced_past_the_table():
    methods, checked = foreign_methods(), sources(*PACKAGE)
    assert len(methods) > 100 and len(checked) > 300
    assert [said for source in checked for said in replaced_methods(source, methods)] == []


@pytest.mark.parametrize(
    "line",
    (
        "engine._take_model_step = ours",
        "self.engine.backward, x = ours, 1",
        "setattr(optimizer, name, ours)",
        "set_attribute(self._engine.optimizer, 'anything', ours)",
        "set_attribute(thing, 'unscale_and_clip_grads', ours)",
    ),
)
def test_a_replaced_method_is_noticed(line):
    assert list(replaced_methods(Source("ds_npu/features/x.py", line), foreign_methods()))


@pytest.mark.parametrize("card", CARDS, ids=lambda card: f"{card.classes[0].rpartition(':')[2]}.{card.name}")
def test_every_card_is_filled_in_and_true(card):
    assert all(text.strip() for text in (card.what, card.why, card.upstream, card.until))
    for owner in card.classes:
        if owner == FRAGMENT:
            method = getattr(importlib.import_module(FRAGMENT), card.name)
        else:
            method = inspect.getattr_static(classes()[owner], card.name)
        method_wraps._check(card, owner, method)


def test_no_two_cards_are_of_one_method():
    methods = [(owner, card.name) for card in CARDS for owner in card.classes]
    assert len(methods) == len(set(methods))


def test_another_signature_is_refused(monkeypatch):
    kind = classes()["deepspeed.runtime.bf16_optimizer:BF16_Optimizer"]
    card = next(card for card in CARDS if card.name == "clear_hp_grads")
    monkeypatch.setattr(method_wraps, "CARDS", (replace(card, parameters=("set_to_none",)),))
    with pytest.raises(RuntimeError, match=r"BF16_Optimizer.clear_hp_grads, which ds_npu wraps, has the parameters"):
        check_card(kind, "clear_hp_grads")
    monkeypatch.setattr(method_wraps, "CARDS", (replace(card, name="clear_grads"),))
    with pytest.raises(RuntimeError, match=r"BF16_Optimizer.clear_hp_grads has no card"):
        check_card(kind, "clear_hp_grads")


def test_a_method_that_is_gone_is_refused(monkeypatch):
    owner = "deepspeed.runtime.bf16_optimizer:BF16_Optimizer"
    gone = MethodCard((owner,), "step_twice", (), "x", "x", "x", "x")
    monkeypatch.setattr(method_wraps, "CARDS", (gone,))
    with pytest.raises(RuntimeError, match=r"BF16_Optimizer.step_twice, which ds_npu wraps, is not there"):
        check_card(classes()[owner], "step_twice")


class Counted(torch.optim.SGD):
    """An optimizer that says when it steps."""

    calls: list[str]

    def step(self, closure=None):
        self.calls.append("step")


@pytest.mark.parametrize("order", ((0, 1, 2), (2, 1, 0), (1, 2, 0)))
def test_levels_decide_who_is_called_first(monkeypatch, order):
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = Counted([weight], lr=0.1)
    optimizer.calls = []
    owner = f"{Counted.__module__}:{Counted.__qualname__}"
    monkeypatch.setattr(method_wraps, "CARDS", (MethodCard((owner,), "step", ("closure",), "x", "x", "x", "x"),))
    levels = (MethodLevel.RECORDED_STEP, MethodLevel.MEMORY_PLAN, MethodLevel.CORRECTION)

    def around(name):
        def run(step, *args, **kwargs):
            optimizer.calls.append(f"before {name}")
            step(*args, **kwargs)
            optimizer.calls.append(f"after {name}")

        return run

    undo = [wrap_method(optimizer, "step", around(index), levels[index]) for index in order]
    optimizer.step()
    assert optimizer.calls == ["before 0", "before 1", "before 2", "step", "after 2", "after 1", "after 0"]
    for each in undo:
        each()
    optimizer.calls.clear()
    optimizer.step()
    assert optimizer.calls == ["step"] and "step" not in vars(optimizer)


def shadowed(holder: object) -> dict[str, object]:
    """Attributes of ``holder`` itself that stand before a method of its class."""
    of_class = {name: inspect.getattr_static(type(holder), name, None) for name in vars(holder)}
    return {name: vars(holder)[name] for name, each in of_class.items() if callable(each)}


def engines(_: int) -> None:
    gradient_rule.without_extension()
    section = {
        "optimizer_memory": {"moments": "bf16"},
        "memory_report": True,
        "watch": {"finite": True},
    }
    for stage in range(4):
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
            "zero_optimization": {"stage": stage},
            "ds_npu": section,
        }
        engine, *_others = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        for _step in range(3):
            loss = engine(torch.ones(1, 8, dtype=torch.bfloat16)).float().sum()
            engine.backward(loss)
            engine.step()
        found = {}
        for holder in (engine, engine.optimizer, engine.optimizer.optimizer, engine.monitor):
            found |= {f"{type(holder).__name__}.{name}": each for name, each in shadowed(holder).items()}
        others = {name: each for name, each in found.items() if not isinstance(each, Wrap)}
        assert found and not others, (stage, others)
        engine.destroy()


@pytest.mark.slow
def test_the_methods_of_built_engines_are_those_of_their_classes_or_wraps():
    run_on_ranks(1, engines, 0)
