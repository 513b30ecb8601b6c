"""PEFT's adapters in an unmodified Trainer script: trained, resumed, saved apart and merged, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gradient_rule as rule
import peft
import pytest
import tiny_models
import torch
import transformers
from ranks import run_on_ranks
from safetensors.torch import load_file
from torch import nn
from trainer_lives import Said, assert_close, ds_config, live, told

pytestmark = pytest.mark.slow

SINGLE = 1e-6
"""Relative error in float32."""
LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "sequences": (2, {"tensor": 2, "sequence_parallel": True}),
    "tensor": (2, {"tensor": 2}),
    "context": (2, {"context": 2}),
    "both": (4, {"tensor": 2, "context": 2}),
}
SHARDED = ["lora", "lora, resumed", "rslora", "modules to save"]
"""What tensor ranks train."""


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Callable[[str], str]:
    """The folder of a family's model."""
    made: dict[str, str] = {}

    def of(family: str) -> str:
        if family not in made:
            made[family] = str(tmp_path_factory.mktemp(family))
            tiny_models.tiny(family, torch.float32).save_pretrained(made[family])
        return made[family]

    return of


@pytest.fixture(scope="module")
def alone(start, tmp_path_factory) -> Callable[[str], tuple[Path, dict[str, Said]]]:
    """Lives of one process without ds_npu: their folder, and what it says."""
    found: dict[str, tuple[Path, dict[str, Said]]] = {}

    def of(family: str) -> tuple[Path, dict[str, Said]]:
        if family not in found:
            folder = tmp_path_factory.mktemp(f"alone-{family}")
            titles = [*SHARDED, "dora"] if family == "llama" else ["experts"]
            run_on_ranks(1, live, titles, str(folder), start(family), ds_config(1, None))
            found[family] = folder, told(folder, 1)[0]
        return found[family]

    return of


@pytest.mark.parametrize(
    ("layout", "stage"),
    [("sequences", 3)] + [(layout, stage) for layout in ("tensor", "context", "both") for stage in range(4)],
)
def test_adapters_are_those_of_one_process(layout: str, stage: int, start, alone, tmp_path: Path):
    ranks, parallel = LAYOUTS[layout]
    titles = [*SHARDED, "dora"] if layout == "context" else SHARDED
    run_on_ranks(ranks, live, titles, str(tmp_path), start("llama"), ds_config(stage, parallel))
    folder, expected = alone("llama")
    for rank, each in enumerate(told(tmp_path, ranks)):
        assert_close(each, {title: expected[title] for title in titles}, SINGLE, f"rank {rank}")
        assert each["lora, resumed"]["losses"] == each["lora"]["losses"][-2:]
    for title in titles:
        if not title.endswith("resumed"):
            same_adapters(tmp_path / title, folder / title, start("llama"))
    assert rule.relative(*(load_file(each / ADAPTER) for each in checkpoints(tmp_path, folder))) <= SINGLE


@pytest.mark.parametrize("stages", [(3, 1), (1, 3)], ids=["from ZeRO 3", "to ZeRO 3"])
def test_adapters_resume_at_another_layout(stages, start, alone, tmp_path: Path):
    """The Trainer leaves frozen weights out of its checkpoints, and loads them with load_module_strict=False."""
    for title, stage, parallel in zip(["lora", "lora, resumed"], stages, [{"tensor": 2}, {"context": 2}], strict=True):
        run_on_ranks(2, live, [title], str(tmp_path), start("llama"), ds_config(stage, parallel))
    _, expected = alone("llama")
    for rank, each in enumerate(told(tmp_path, 2)):
        assert_close(each, {"lora, resumed": expected["lora, resumed"]}, SINGLE, f"rank {rank}")


ADAPTER = "adapter_model.safetensors"


def checkpoints(*folders: Path) -> list[Path]:
    return [folder / "lora" / "checkpoint-3" for folder in folders]


def same_adapters(found: Path, expected: Path, start: str) -> None:
    """Saved apart, read by plain PEFT, and merged there."""
    assert rule.relative(load_file(found / ADAPTER), load_file(expected / ADAPTER)) <= SINGLE
    logits = []
    for folder in (found, expected):
        plain = transformers.AutoModelForCausalLM.from_pretrained(start)
        model = peft.PeftModel.from_pretrained(plain, folder).merge_and_unload()
        assert not isinstance(model, peft.PeftModel)
        logits.append({"logits": model(input_ids=tiny_models.tokens(2, 9)).logits.detach()})
    assert rule.relative(*logits) <= SINGLE


def test_adapters_of_experts_over_context_ranks(start, alone, tmp_path):
    run_on_ranks(2, live, ["experts"], str(tmp_path), start("mixtral"), ds_config(1, {"context": 2}))
    folder, expected = alone("mixtral")
    for each in told(tmp_path, 2):
        assert_close(each, expected, SINGLE, "experts")
    same_adapters(tmp_path / "experts", folder / "experts", start("mixtral"))


def refused_on_tensor_ranks(folder: str, start: str, experts: str) -> None:
    for title, model, said in (
        ("dora", start, "only the two factors of LoRA"),
        ("experts", experts, r"mlp\.experts\.base_layer .* has an adapter"),
    ):
        with pytest.raises(ValueError, match=said):
            live([title], folder, model, ds_config(1, {"tensor": 2}))


def merged_in_place() -> None:
    import deepspeed

    from ds_npu.parallel.tensor.shard_access import ShardAccessError

    rule.without_extension()
    for targets in (["q_proj"], ["o_proj"]):
        model = peft.get_peft_model(tiny_models.tiny("llama", torch.float32), peft.LoraConfig(target_modules=targets))
        trained = [each for each in model.parameters() if each.requires_grad]
        config = rule.config(1, torch.float32, {}) | {"ds_npu": {"parallel": {"tensor": 2}}}
        engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
        with pytest.raises(ShardAccessError, match=rf"{targets[0]}\..* sharded over 2 tensor ranks"):
            engine.module.merge_and_unload()


def test_adapters_are_not_merged_into_shards():
    """They are merged where they are read as a plain model, as above."""
    run_on_ranks(2, merged_in_place)


def merged_on_context_ranks(use_dora: bool) -> None:
    """Context ranks hold whole weights: a model merges in place as in one process, and its engine goes on with it."""
    import deepspeed

    rule.without_extension()

    def adapted() -> peft.PeftModel:
        torch.manual_seed(4)
        lora = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False, use_dora=use_dora)
        return peft.get_peft_model(tiny_models.tiny("llama", torch.float32), lora)

    plain, model = adapted().merge_and_unload(), adapted()
    trained = [each for each in model.parameters() if each.requires_grad]
    section = {"parallel": {"context": 2}, "context_parallel": {"algorithm": "ring"}}
    config = rule.config(1, torch.float32, {}) | {"ds_npu": section}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
    merged = engine.module.merge_and_unload()
    assert not isinstance(merged, peft.PeftModel)
    for name, weight in plain.state_dict().items():
        assert weight.equal(merged.state_dict()[name]), name
    tokens = tiny_models.tokens(2, 9)
    with torch.no_grad():
        found, expected = (each.eval()(input_ids=tokens, labels=tokens) for each in (merged, plain))
    torch.testing.assert_close(found.loss, expected.loss, rtol=SINGLE, atol=0)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=SINGLE)


@pytest.mark.parametrize("use_dora", [False, True])
def test_adapters_are_merged_on_context_ranks(use_dora):
    run_on_ranks(2, merged_on_context_ranks, use_dora)


def test_what_is_more_than_two_factors_is_refused_on_tensor_ranks(start, tmp_path):
    run_on_ranks(2, refused_on_tensor_ranks, str(tmp_path), start("llama"), start("mixtral"))


# ---- QLoRA: a double of what bitsandbytes makes, which is not to be had here ----


class Params4bit(nn.Parameter):
    """Packed numbers."""

    def __new__(cls, data: torch.Tensor) -> Params4bit:
        return torch.Tensor._make_subclass(cls, data, False)


def quantised(said_by_transformers: bool) -> nn.Module:
    model = tiny_models.tiny("llama", torch.float32)
    if said_by_transformers:
        model.is_quantized, model.quantization_method = True, "bitsandbytes"
    for layer in model.model.layers:
        weight = layer.self_attn.q_proj.weight
        packed = torch.zeros(weight.numel() // 2, 1, dtype=torch.uint8)
        layer.self_attn.q_proj.weight = Params4bit(packed) if not said_by_transformers else weight
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["o_proj"], r=2))


def quantised_models() -> None:
    import deepspeed

    rule.without_extension()
    for parallel, asked in (({"tensor": 2}, "tensor 2"), ({"context": 2}, "context 2")):
        for told_so, why in ((True, "bitsandbytes"), (False, "q_proj.weight is a Params4bit")):
            model = quantised(told_so)
            with pytest.raises(ValueError) as caught:
                config = rule.config(1, torch.float32, {}) | {"ds_npu": {"parallel": parallel}}
                deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
            said = str(caught.value)
            assert said.startswith("PeftModel is quantised (") and why in said and f"asks for {asked}" in said
            assert "QLoRA is not supported" in said and "What to do: load it without quantization_config" in said


def test_qlora_is_refused():
    run_on_ranks(2, quantised_models)
