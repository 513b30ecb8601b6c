"""Dumps of one model at any two layouts agree, and what is wrong in one of them is named: float64, the real engine."""

from __future__ import annotations

import itertools

import pytest
import torch
from dumped_runs import EXPERTS, LAYOUTS, PLAIN, Fault, Setting, dumped

from ds_npu.comparison.compared_steps import Comparison, compared
from ds_npu.dump_hooks import GRADIENT, GRADIENT_OF_OUTPUT, OUTPUT, WEIGHT

ONE, MIXTRAL = "one process", Setting(family="mixtral")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The dumps of this file."""
    return tmp_path_factory.mktemp("dumps")


def check_alike(comparison: Comparison, where: object) -> None:
    """Hold everything to be there, and nothing to be further off than rounding explains."""
    assert not comparison.copies and not comparison.off, (where, comparison.copies, comparison.off[:3])
    counted = {(row.step, row.kind) for row in comparison.rows}
    assert counted >= {(step, kind) for step in (0, 1) for kind in (WEIGHT, OUTPUT, GRADIENT_OF_OUTPUT, GRADIENT)}
    outputs = [row.name for row in comparison.rows if (row.step, row.kind) == (0, OUTPUT)]
    block = [f"model.layers.{index}" for index in range(4)]
    expected = [[f"{each}.input_layernorm", f"{each}.self_attn", f"{each}.post_attention_layernorm"] for each in block]
    order = [[*norms, f"{each}.mlp", each] for norms, each in zip(expected, block, strict=True)]
    assert outputs == ["model.embed_tokens", *itertools.chain(*order), "model.norm"], (where, outputs)
    assert not [note for note in comparison.notes if "samples" in note], where


@pytest.mark.slow
@pytest.mark.matrix(corners=2, drawn=2)
@pytest.mark.parametrize(("a", "b"), [pytest.param(*each) for each in itertools.combinations(LAYOUTS, 2)])
def test_two_layouts_agree(folder, a, b):
    check_alike(compared(dumped(folder, a), dumped(folder, b)), (a, b))


@pytest.mark.slow
@pytest.mark.matrix(corners=1, drawn=2)
@pytest.mark.parametrize(("a", "b"), [pytest.param(*each) for each in itertools.combinations([ONE, *EXPERTS], 2)])
def test_two_layouts_of_experts_agree(folder, a, b):
    check_alike(compared(dumped(folder, a, MIXTRAL), dumped(folder, b, MIXTRAL)), (a, b))


@pytest.mark.slow
@pytest.mark.matrix(corners=1, drawn=2)
@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
def test_padding_and_whole_tensors_agree(folder, layout):
    setting = Setting(padded=True, what="tensors")
    comparison = compared(dumped(folder, ONE, setting), dumped(folder, layout, setting))
    check_alike(comparison, layout)
    assert any(row.error > 0 for row in comparison.rows if row.kind == OUTPUT)


FLIPPED = {
    "model.layers.1.self_attn.q_proj.weight": ("model.layers.1.self_attn", 5),
    "model.layers.2.mlp.down_proj.weight": ("model.layers.2.mlp", 5),
    "model.embed_tokens.weight": ("model.embed_tokens", 32 * int(PLAIN.batch(0)["input_ids"][0, 0])),
    "model.layers.3.post_attention_layernorm.weight": ("model.layers.3.post_attention_layernorm", 5),
}
"""Weights, the modules whose outputs part first, and elements that matter."""


def parts_at(comparison: Comparison, weight: str, module: str, where: object) -> None:
    """Hold that the weight is named at step 0, no other one, and the output that parts first."""
    weights = [row.name for row in comparison.off if (row.step, row.kind) == (0, WEIGHT)]
    assert weights == [weight] and comparison.first_off().name == weight, (where, weights)
    assert comparison.first_off(OUTPUT).name == module, (where, comparison.first_off(OUTPUT))


@pytest.mark.slow
@pytest.mark.matrix(corners=1, drawn=3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_flipped_bit_of_a_weight_is_named(folder, layout):
    for weight, (module, index) in FLIPPED.items() if layout == ONE else list(FLIPPED.items())[:1]:
        comparison = compared(dumped(folder, ONE), dumped(folder, layout, fault=Fault("bit", weight, index=index)))
        parts_at(comparison, weight, module, layout)
        assert not comparison.copies


WRONG = {
    "dp4, ZeRO 3": 2,
    "tp2": 1,
    "tp2 of sequences x dp2, ZeRO 2": 3,
    "cp2, ring": 1,
    "tp2 of sequences x cp2": 2,
    "pp2 x dp2, ZeRO 1": 1,
    "pp2 x tp2, interleaved": 3,
}
"""Layouts, and the rank whose weight is wrong."""


@pytest.mark.slow
@pytest.mark.matrix(corners=1, drawn=3)
@pytest.mark.parametrize("layout", WRONG)
def test_a_wrong_weight_on_one_rank_is_named(folder, layout):
    rank, weight = WRONG[layout], "model.layers.1.self_attn.q_proj.weight"
    good, bad = dumped(folder, layout), dumped(folder, layout, fault=Fault("bit", weight, rank))
    comparison = compared(good, bad)
    named = [row.detail for row in comparison.off if row.kind == WEIGHT and row.name == weight and row.step == 0]
    copies = [each for each in comparison.copies if each.startswith("step 0") and weight in each and " weight " in each]
    assert any(f"rank {rank} of B" in each for each in named) or any(f"rank {rank} has" in each for each in copies), (
        named,
        comparison.copies[:3],
    )
    assert comparison.first_off(OUTPUT).name == "model.layers.1.self_attn"


@pytest.mark.slow
@pytest.mark.matrix(corners=1, drawn=3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_wrong_scale_in_a_layer_is_named(folder, layout):
    module = "model.layers.2.mlp"
    comparison = compared(dumped(folder, ONE), dumped(folder, layout, fault=Fault("scale", module)))
    first = comparison.first_off()
    assert (first.step, first.kind, first.name) == (0, OUTPUT, module), first
    assert first.error == pytest.approx(1e-3, rel=0.2)


WRONG_EXPERTS = {"ep2": 1, "ep2 x tp2, ZeRO 1": 2, "ep2 x etp2, ZeRO 3": 3, "pp2 x ep2": 1}


@pytest.mark.slow
@pytest.mark.matrix(corners=1, drawn=1)
@pytest.mark.parametrize("layout", WRONG_EXPERTS)
def test_a_wrong_weight_of_experts_on_one_rank_and_a_wrong_scale_are_named(folder, layout):
    rank, weight = WRONG_EXPERTS[layout], "model.layers.1.mlp.experts.gate_up_proj"
    good = dumped(folder, layout, MIXTRAL)
    comparison = compared(good, dumped(folder, layout, MIXTRAL, Fault("bit", weight, rank)))
    named = [row for row in comparison.off if (row.step, row.kind) == (0, WEIGHT)]
    copies = [each for each in comparison.copies if f" {rank} has another weight {weight}" in each]
    assert [row.name for row in named] == [weight] or copies, (named, comparison.copies[:3])
    assert copies or f"rank {rank} of B" in named[0].detail
    assert comparison.first_off(OUTPUT).name == "model.layers.1.mlp"
    first = compared(good, dumped(folder, layout, MIXTRAL, Fault("scale", "model.layers.2.self_attn"))).first_off()
    assert (first.step, first.kind, first.name) == (0, OUTPUT, "model.layers.2.self_attn"), first


RECOMPUTED = '{"recompute": {"layers": "all"}}'
SETTINGS = {
    "Adam": Setting(adam=True),
    "LoRA": Setting(lora=True),
    "float32": Setting(adam=True, dtype=torch.float32),
    "bfloat16": Setting(adam=True, dtype=torch.bfloat16),
    "packed documents": Setting(packed=True),
    "reentrant checkpoints": Setting(checkpointing=True, dtype=torch.float32),
    "recompute": Setting(section=RECOMPUTED, dtype=torch.float32),
    "a bias of keys": Setting(family="qwen2", adam=False),
    "learned positions": Setting(family="gpt2"),
}
OF_SETTINGS = {
    "learned positions": ["tp2", "pp2 x dp2, ZeRO 1"],
    "recompute": ["tp2 of sequences x dp2, ZeRO 2", "cp2, ring"],
}
"""Layouts, where not all of USUAL are meant."""
USUAL = ["tp2 of sequences x cp2", "dp4, ZeRO 3", "cp2, ring", "pp2 x dp2, ZeRO 1"]


@pytest.mark.slow
@pytest.mark.matrix(corners=2, drawn=3)
@pytest.mark.parametrize(
    ("setting", "layout"), [(name, layout) for name in SETTINGS for layout in OF_SETTINGS.get(name, USUAL)]
)
def test_settings_agree(folder, setting, layout):
    if setting == "reentrant checkpoints" and layout.startswith("pp2"):
        pytest.skip("checkpoints within pipeline stages have tests of their own")
    comparison = compared(dumped(folder, ONE, SETTINGS[setting]), dumped(folder, layout, SETTINGS[setting]))
    assert not comparison.off and not comparison.copies, (comparison.off[:3], comparison.copies[:3])
    kinds = {(row.step, row.kind) for row in comparison.rows}
    assert kinds >= {(step, kind) for step in (0, 1) for kind in (WEIGHT, OUTPUT, GRADIENT_OF_OUTPUT, GRADIENT)}
    if setting == "reentrant checkpoints":
        assert any("outputs of A have no gradient" in note for note in comparison.notes)
