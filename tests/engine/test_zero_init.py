"""Models that transformers has made under zero.Init, as it does by itself under ZeRO 3, over tensor ranks."""

from __future__ import annotations

from collections.abc import Callable

import gradient_rule as rule
import pytest
import tensor_parallel_rule
import tiny_models
import torch
import torch.distributed as dist
import transformers
from ranks import run_on_ranks
from sharded_models import first_fast
from torch import nn
from zero_init import zero_init_by_transformers

from ds_npu.models.zero3 import forget_partition

SECTION = {"parallel": {"tensor": 2, "sequence_parallel": True}}
EAGER = {"dtype": torch.float32, "attn_implementation": "eager"}


HOST = {"device": "cpu"}
SETTINGS: dict[str, tuple[torch.dtype, dict[str, object]]] = {
    "parameters on the host": (torch.float32, {"offload_param": HOST}),
    "optimizer on the host": (torch.float32, {"offload_optimizer": HOST}),
    "both on the host, bf16": (
        torch.bfloat16,
        {"offload_param": HOST, "offload_optimizer": HOST},
    ),
    "bf16": (torch.bfloat16, {}),
}
"""By name: the dtype of the model, and what else ``zero_optimization`` holds."""


def config(dtype: torch.dtype = torch.float32, **zero: object) -> dict[str, object]:
    made = tensor_parallel_rule.config(3, dtype, SECTION) | {"zero_force_ds_cpu_optimizer": False}
    return made | {"zero_optimization": made["zero_optimization"] | zero}


def read(folder: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **EAGER | {"dtype": dtype})


def with_new_words(folder: str) -> nn.Module:
    model = read(folder)
    model.resize_token_embeddings(tiny_models.VOCABULARY + 7)
    return model


def with_new_head(folder: str) -> nn.Module:
    return transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3, **EAGER)


def adapted(folder: str) -> nn.Module:
    import peft

    return peft.get_peft_model(read(folder), peft.LoraConfig(target_modules=["q_proj", "o_proj"], r=2))


def from_scratch(folder: str) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder), **EAGER)


CASES: dict[str, tuple[str, Callable[[str], nn.Module]]] = {
    "llama": ("llama", read),
    "mixtral, whose experts are converted": ("mixtral", read),
    "new words": ("llama", with_new_words),
    "a head that the checkpoint lacks": ("llama", with_new_head),
    "adapters": ("llama", adapted),
    "from scratch": ("llama", from_scratch),
}


def gathered(model: nn.Module) -> dict[str, torch.Tensor]:
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: each.clone() for name, each in model.state_dict().items()}


def trained(model: nn.Module, settings: dict[str, object] | None = None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of two steps, and the whole weights after them."""
    import deepspeed

    parameters = [each for each in model.parameters() if each.requires_grad]
    engine, *_ = deepspeed.initialize(model=model.train(), model_parameters=parameters, config=settings or config())
    losses = []
    for ids in tiny_models.tokens(4 * tensor_parallel_rule.ACCUMULATION, 9).split(2):
        classes = type(engine.module).__name__.endswith("SequenceClassification")
        loss = engine(input_ids=ids, labels=ids[:, 0] % 3 if classes else ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, engine.whole_state_dict()


def same_as_whole_models(folders: dict[str, str], titles: list[str]) -> None:
    """A model partitioned by zero.Init trains as one with the same weights that was whole on every rank."""
    rule.without_extension()
    transformers.logging.set_verbosity_error()
    for title in titles:
        family, make = CASES[title]
        torch.manual_seed(dist.get_rank())
        with zero_init_by_transformers(config()):
            model = make(folders[family])
        assert any(
            each.ds_process_group.size() == dist.get_world_size() for each in model.parameters() if is_zero(each)
        )
        weights = gathered(model)
        plain = make(folders[family])
        loaded = {name for name, each in plain.state_dict().items() if torch.equal(each, weights[name])}
        assert make is from_scratch or len(loaded) > len(weights) / 2, (title, loaded ^ weights.keys())
        plain.load_state_dict(weights)
        expected = trained(plain)
        before = [id(each) for each in model.parameters()]
        losses, after = trained(model)
        assert losses == expected[0], title
        assert after.keys() == expected[1].keys() and all(torch.equal(after[name], expected[1][name]) for name in after)
        assert before == [id(each) for each in model.parameters()]


def same_as_whole_models_with(folder: str) -> None:
    rule.without_extension()
    transformers.logging.set_verbosity_error()
    for title, (dtype, zero) in SETTINGS.items():
        settings = config(dtype, **zero)
        expected = trained(read(folder, dtype), settings)
        with zero_init_by_transformers(settings):
            model = read(folder, dtype)
        assert all(map(is_zero, model.parameters()))
        losses, after = trained(model, settings)
        assert losses == expected[0], title
        assert after.keys() == expected[1].keys() and all(torch.equal(after[name], expected[1][name]) for name in after)


def is_zero(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "ds_id")


def refused() -> None:
    """A model that cannot be sharded stays as zero.Init has made it."""
    import deepspeed

    rule.without_extension()
    one_head = tiny_models.config_of("llama", num_attention_heads=1, num_key_value_heads=1)
    with zero_init_by_transformers(config()):
        model = transformers.AutoModelForCausalLM.from_config(one_head)
    weights, before = gathered(model), {name: set(vars(each)) for name, each in model.named_parameters()}
    with pytest.raises(ValueError, match="1 heads cannot be sharded over 2 tensor ranks"):
        deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config())
    assert {name: set(vars(each)) for name, each in model.named_parameters()} == before
    after = gathered(model)
    assert all(torch.equal(after[name], weights[name]) for name in weights)
    parameter = model.lm_head.weight
    forget_partition(parameter)
    # What else DeepSpeed may write on it in another version is to be forgotten, too.
    assert {name for name in vars(parameter) if not name.startswith(("_", "ds_npu"))} == set()


def refused_on_nvme() -> None:
    """DeepSpeed's swapper needs libaio; it stands in each parameter."""
    import deepspeed

    rule.without_extension()
    with zero_init_by_transformers(config()):
        model = transformers.AutoModelForCausalLM.from_config(tiny_models.config_of("llama"))
    assert all(each.nvme_swapper is None for each in model.parameters())
    model.lm_head.weight.nvme_swapper = object()
    with pytest.raises(ValueError, match=r'offload_param\.device "nvme": zero\.Init has given lm_head\.weight'):
        deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config())


@pytest.mark.parametrize("has_fp16", [True, False])
def test_each_accelerator_takes_the_dtype_that_is_given(has_fp16, monkeypatch):
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as ZeroInit

    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: has_fp16)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        assert ZeroInit(dtype=dtype).dtype == dtype


def trains_in_float64(has_fp16: bool) -> None:
    rule.pretend_fp16(has_fp16)
    tensor_parallel_rule.hold_to_one_process("llama", 2, (3,), torch.float64, {})


@pytest.mark.parametrize("has_fp16", [True, False])
def test_float64_is_trained_whatever_the_cpu_supports(has_fp16):
    run_on_ranks(2, trains_in_float64, has_fp16)


def test_weights_on_nvme_are_refused():
    run_on_ranks(2, refused_on_nvme)


def test_a_model_that_cannot_be_sharded_is_left_alone():
    run_on_ranks(2, refused)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    made = {family: str(tmp_path_factory.mktemp(family)) for family in ("llama", "mixtral")}
    for family, folder in made.items():
        tiny_models.tiny(family, torch.float32).save_pretrained(folder)
    return made


@first_fast("ranks", [2, 4])
def test_it_trains_as_a_whole_model(ranks, folders):
    run_on_ranks(ranks, same_as_whole_models, folders, list(CASES))


def test_offloaded_and_narrow_weights(folders):
    run_on_ranks(4, same_as_whole_models_with, folders["llama"])
