"""What ``ds_npu.optimizer_memory`` refuses beside it: where, what was found, and what would do."""

from __future__ import annotations

import pytest
import torch

from ds_npu.config.check import check
from ds_npu.config.deepspeed_keys import REFUSED
from ds_npu.config.problems import ConfigError

SECTIONS = {
    "share_fp32": {"share_fp32": True},
    "swap": {"swap": True},
    "moments": {"moments": "bf16"},
}
FOUND = {
    "zero_optimization.offload_optimizer.device": "cpu",
    "zero_optimization.offload_param.device": "cpu",
    "zero_optimization.zenflow": {"topk_ratio": 0.1},
    "zero_optimization.zero_hpz_partition_size": 2,
}
"""Values of keys of DeepSpeed that are refused; of others, true."""


def config(memory: dict[str, object], **more: object) -> dict[str, object]:
    section: dict[str, object] = {"optimizer_memory": memory}
    section.update(more.pop("section", {}))  # type: ignore[call-overload]
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "ds_npu": section,
        **more,
    }


def put(into: dict[str, object], path: str, value: object) -> None:
    *folders, leaf = path.split(".")
    for folder in folders:
        into = into.setdefault(folder, {})  # type: ignore[assignment]
    into[leaf] = value


def problems(asked: dict[str, object]) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        check(asked, 8)
    found: dict[str, str] = {}
    for each in caught.value.problems:
        found[each.path] = f"{found.get(each.path, '')}{each.accepted}"
    return found


@pytest.mark.parametrize("name", SECTIONS)
@pytest.mark.parametrize("path", REFUSED)
def test_keys_that_cannot_go_with_it_are_refused(name, path):
    asked = config(SECTIONS[name])
    put(asked, path, FOUND.get(path, True))
    assert f"ds_npu.optimizer_memory.{name}" in problems(asked)[path]
    put(asked, path, None)
    values, _ = REFUSED[path]
    for fine in values:
        put(asked, path, fine)
        try:
            check(asked, 8)
        except ConfigError as error:
            assert path not in {each.path for each in error.problems}, error


@pytest.mark.parametrize("name", SECTIONS)
def test_other_precisions_and_optimizers_are_refused(name):
    for other in ({"fp16": {"enabled": True}, "bf16": {"enabled": False}}, {"bf16": {"enabled": False}}):
        assert "true with ds_npu.optimizer_memory." in problems(config(SECTIONS[name], **other))["bf16.enabled"]
    for other in ("SGD", "Lamb", "OneBitAdam", "Muon", "Adagrad"):
        asked = config(SECTIONS[name], optimizer={"type": other, "params": {"lr": 1e-3}})
        assert "'Adam' or 'AdamW'" in problems(asked)["optimizer.type"]
    check(config(SECTIONS[name]), 8)
    check(config(SECTIONS[name], optimizer={"type": "Adam", "params": {"lr": 1e-3}}), 8)
    # As in the Trainer's configs, which it fills in after the first check.
    check(config(SECTIONS[name], bf16={"enabled": "auto"}), 8)


def test_keys_that_contradict_each_other():
    assert problems(config({"resident_gib": 2}))["ds_npu.optimizer_memory.resident_gib"].startswith("only with")
    assert (
        "a number >= 0" in problems(config({"swap": True, "resident_gib": -1}))["ds_npu.optimizer_memory.resident_gib"]
    )
    for axis in ("tensor", "expert_tensor"):
        asked = config({"moments": "int8"}, section={"parallel": {axis: 2}})
        assert f"ds_npu.parallel.{axis} > 1" in problems(asked)["ds_npu.optimizer_memory.moments"]
    asked = config({"moments": "int8"}, section={"parallel": {"pipeline": 2}}, zero_optimization={"stage": 1})
    assert "ds_npu.parallel.pipeline > 1" in problems(asked)["ds_npu.optimizer_memory.moments"]
    check(config({"moments": "bf16"}, section={"parallel": {"tensor": 2}}), 8)
    asked = config({"swap": True}, section={"parallel": {"expert": 2}, "moe": {"placement_interval": 10}})
    assert "experts that move" in problems(asked)["ds_npu.moe.placement_interval"]


def test_off_it_demands_nothing():
    asked = config({}, optimizer={"type": "SGD", "params": {"lr": 1e-3}}, bf16={"enabled": False})
    assert check(asked, 8).config.optimizer_memory.moments == "fp32"


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1), "the engine's optimizer is SGD; one of"),
    ],
)
def test_an_optimizer_that_is_not_known_is_refused(optimizer, said):
    """One of the client's, which no config names."""
    from ds_npu.zero_ext.optimizer_state import why_not_kept

    assert said in (why_not_kept(optimizer) or "")
