"""Each decoder on the list over tensor ranks, context ranks and stages: what docs/models.md says of it."""

from __future__ import annotations

import itertools
import json

import family_axes
import family_page
import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

CORNERS = ("olmo2", "gpt_oss", "bloom", "ctrl")
"""A norm over all heads; sinks and interleaved experts with biases; ALiBi; three hidden states for one attention."""
KINDS = [*CORNERS, *(kind for kind in family_axes.decoders() if kind not in CORNERS)]


def test_every_class_is_on_the_list_or_left_out_for_a_reason():
    found = json.loads(family_axes.LIST.read_text())
    assert found["decoders"].keys() | found["left_out"].keys() == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    assert not found["decoders"].keys() & found["left_out"].keys()
    assert len(set(found["decoders"].values())) == len(found["decoders"]) and all(found["left_out"].values())


def test_the_page_is_what_was_found():
    assert family_page.PAGE.read_text() == family_page.page(), "python tests/support/family_page.py"


@pytest.mark.slow
@pytest.mark.matrix(corners=1, drawn=1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_family_is_what_the_page_says(kind):
    recorded = json.loads(family_page.OUTCOMES.read_text())["outcomes"][kind]
    found = family_axes.tried(kind, list(family_axes.AXES))
    assert {axis: family_page.status(each) for axis, each in found.items()} == {
        axis: family_page.status(recorded[axis]) for axis in family_axes.AXES
    }, found
    assert not [each for each in found.values() if each.startswith(("wrong", "error"))], found


RECORDED = json.loads(family_page.OUTCOMES.read_text())["further"]
MOST_TRAINED = ("qwen3_next", "llama", "gpt_oss", "deepseek_v3", "mamba2", "granitemoehybrid")
FURTHER = [
    (kind, name) for kind in (*MOST_TRAINED, *KINDS) for name in family_axes.FURTHER if name in RECORDED.get(kind, {})
]


def test_what_a_yes_stands_for_was_tried():
    axes = json.loads(family_page.OUTCOMES.read_text())["outcomes"]
    for kind, (name, needed) in itertools.product(KINDS, family_axes.ON.items()):
        is_tried = name in RECORDED.get(kind, {})
        assert is_tried == all(axes[kind][axis] == "yes" for axis in needed) or not needed, (kind, name)
    found = {each for kind in RECORDED.values() for name, each in kind.items() if name != "commit"}
    assert not [each for each in found if each != "yes" and not each.startswith("refused: ")]


@pytest.mark.slow
@pytest.mark.matrix(corners=1, drawn=2)
@pytest.mark.parametrize(("kind", "name"), dict.fromkeys(FURTHER))
def test_a_family_on_an_axis_is_right_with_zero_other_axes_and_algorithms(kind, name):
    found = family_axes.tried(kind, [name])[name]
    assert family_page.status(found) == family_page.status(RECORDED[kind][name]), found
    assert found == "yes" or found.startswith("refused: "), found
