"""``ds_npu.dump`` in a config: mistakes, and keys that it cannot be with."""

from __future__ import annotations

import pytest

from ds_npu.config.check import check
from ds_npu.config.problems import ConfigError


def config(section: dict) -> dict:
    return {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "ds_npu": section}


REFUSED = {
    "without steps": ({"dump": {"what": "tensors"}}, "ds_npu.dump.what", "only with ds_npu.dump.steps"),
    "optimizer_memory": (
        {"dump": {"steps": [0]}, "optimizer_memory": {"swap": True}},
        "ds_npu.optimizer_memory.swap",
        "left out with ds_npu.dump",
    ),
    "relocation": (
        {"dump": {"steps": [0]}, "parallel": {"expert": 2}, "moe": {"placement_interval": 5}},
        "ds_npu.moe.placement_interval",
        "left out with ds_npu.dump",
    ),
    "a negative step": ({"dump": {"steps": [-1]}}, "ds_npu.dump.steps", ">= 0"),
    "no folder": ({"dump": {"steps": [0], "folder": ""}}, "ds_npu.dump.folder", "a non-empty string"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_dump_cannot_be_with_is_named(name):
    section, key, accepted = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        check(config(section), 2)
    assert key in str(caught.value) and accepted in str(caught.value), caught.value


def test_a_dump_with_its_keys_is_accepted():
    check(config({"dump": {"steps": [0, 100], "modules": ["**.self_attn"], "what": "tensors", "folder": "a"}}), 1)
