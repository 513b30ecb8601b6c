"""The keys of the section, a promise to users: docs/keys.md lists them, and tests/rules/test_readme.py compares it."""

from __future__ import annotations

from ds_npu.config.schema import leaves, section_schema
from ds_npu.config.sections import DsNpuConfig
from ds_npu.features.driver import FEATURES


def test_every_key_and_section_says_what_it_means_in_one_line():
    sections = {key: node for key, node in section_schema()["properties"].items() if "properties" in node}
    for path, node in [*leaves(section_schema()), *sections.items()]:
        assert node["description"].strip() and "\n" not in node["description"], path


def test_each_key_is_one_features():
    assert sorted(feature.key for feature in FEATURES) == sorted(DsNpuConfig.model_fields)
