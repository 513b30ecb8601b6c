"""Checkpoints into shards: bitwise the slices of what transformers' from_pretrained gives, with no more memory."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
import transformers
from allocated import peak_bytes
from loading_models import (
    EXPERTS,
    FAMILIES,
    SINGLE,
    F,
    H,
    V,
    assert_parts,
    save_in_files,
    save_pickled,
    save_pickled_in_files,
    save_single,
    sections,
    shard,
    sharded,
    tensors_of,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM, LlamaModel
from transformers.core_model_loading import WeightRenaming

from ds_npu import capability
from ds_npu.capability import SUPPORTED
from ds_npu.checkpoint.loading import load_checkpoint, meta_model
from ds_npu.parallel.runtime.placement import sharding_of
from ds_npu.parallel.tensor.sharding import Sharding

FORMS = (save_single, save_in_files, save_pickled, save_pickled_in_files)


@pytest.mark.parametrize("save", FORMS, ids=lambda save: save.__name__)
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_each_rank_has_its_part(family, save, tmp_path):
    save(family.make(), tmp_path)
    plain = family.auto.from_pretrained(tmp_path)
    for ranks, rank in ((1, 0), (2, 0), (2, 1)):
        model = sharded(family, tmp_path, ranks, rank)
        load_checkpoint(model, tmp_path, {"tp": rank})
        assert_parts(model, plain, rank)
        assert type(model) is type(plain) and not model.training
        assert model.config.to_dict() == plain.config.to_dict()
        assert model.config.name_or_path == plain.config.name_or_path


def test_checkpoints_hold_what_the_models_do_not(tmp_path):
    """Each expert's weights alone (and old names), q, k, v in one: what the test above converts."""
    for name, expected in (
        ("mixtral", "model.layers.0.block_sparse_moe.experts.3.w1.weight"),
        ("qwen3_moe", "model.layers.0.mlp.experts.3.gate_proj.weight"),
        ("deepseek_v3", "model.layers.1.mlp.experts.3.gate_proj.weight"),
        ("hrm_text", "model.L_module.layers.0.attn.gqkv_proj.weight"),
    ):
        if name not in FAMILIES:
            assert capability.installed_version("transformers") == SUPPORTED["transformers"].oldest
            continue
        model = FAMILIES[name].make()
        save_single(model, tmp_path / name)
        assert expected in load_file(tmp_path / name / SINGLE)
        assert expected not in model.state_dict()


RANGES = {
    "uneven, and none for the last": (((0, 7),), ((7, F),), ()),
    "out of order, and twice": (((8, 16), (0, 8)), ((16, F), (0, 4)), ((0, 8),)),
}


@pytest.mark.parametrize("ranges", RANGES.values(), ids=RANGES)
def test_any_ranges(ranges, tmp_path):
    family = FAMILIES["llama"]
    save_in_files(family.make(), tmp_path)
    rules = {
        r"(gate|up)_proj": lambda ranks: Sharding(0, F, ranges),
        r"down_proj": lambda ranks: Sharding(1, F, ranges),
    }
    plain = family.auto.from_pretrained(tmp_path)
    for rank in range(3):
        model = shard(meta_model(family.auto, tmp_path), rules, 3, rank)
        load_checkpoint(model, tmp_path, {"tp": rank})
        assert_parts(model, plain, rank)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_over_ranks(name, tmp_path):
    """Whole experts, uneven, and not in order: dim 0 of what the checkpoint holds one by one."""
    family = FAMILIES[name]
    save_single(family.make(), tmp_path)
    rules = {r"experts\.(gate_up|down)_proj$": lambda ranks: Sharding(0, EXPERTS, (((3, 4), (0, 2)), ((2, 3),)))}
    plain = family.auto.from_pretrained(tmp_path)
    for rank in range(2):
        model = shard(meta_model(family.auto, tmp_path), rules, 2, rank)
        load_checkpoint(model, tmp_path, {"tp": rank})
        assert_parts(model, plain, rank)


def test_experts_that_the_checkpoint_holds_in_one(tmp_path):
    family = FAMILIES["mixtral"]
    family.make().save_pretrained(tmp_path, save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(tmp_path / SINGLE)
    plain = family.auto.from_pretrained(tmp_path)
    model = sharded(family, tmp_path, 2, 1)
    load_checkpoint(model, tmp_path, {"tp": 1})
    assert_parts(model, plain, 1)


def test_experts_transposed_in_the_checkpoint(tmp_path):
    """Qwen3-VL-MoE's published form, [E, H, 2I]: told from the model's by the whole weight's shape."""
    family = FAMILIES["qwen3_vl_moe"]
    save_single(family.make(), tmp_path)
    stored = load_file(tmp_path / SINGLE)
    for name in stored:
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = stored[name].transpose(1, 2).contiguous()
    save_file(stored, tmp_path / SINGLE, metadata={"format": "pt"})
    plain = family.auto.from_pretrained(tmp_path)
    for rank in range(2):
        model = sharded(family, tmp_path, 2, rank)
        load_checkpoint(model, tmp_path, {"tp": rank})
        assert_parts(model, plain, rank)


@pytest.mark.parametrize("name", ["gpt2", "gemma"])
def test_a_checkpoint_of_the_base_model(name, tmp_path):
    """Without the prefix of the base model, and without the head, which is tied."""
    family = FAMILIES[name]
    model = family.make()
    save_single(model.base_model, tmp_path)
    if name == "gpt2":  # old files hold the causal mask
        stored = load_file(tmp_path / SINGLE) | {"h.0.attn.bias": torch.ones(1, 1, 32, 32)}
        save_file(stored, tmp_path / SINGLE, metadata={"format": "pt"})
    plain = family.auto.from_pretrained(tmp_path)
    ours = sharded(family, tmp_path, 2, 1)
    load_checkpoint(ours, tmp_path, {"tp": 1})
    assert_parts(ours, plain, 1)
    assert ours.get_output_embeddings().weight is ours.get_input_embeddings().weight


# ---- dtypes, marks, objects ----


@pytest.mark.parametrize("save", [save_single, save_pickled], ids=lambda save: save.__name__)
@pytest.mark.parametrize("asked", [None, "auto", torch.float16, "float32"], ids=str)
def test_the_dtype_is_transformers_choice(asked, save, tmp_path):
    """DeepSeek-V3's router bias stays in float32, the others' dtype is the config's unless another is asked for."""
    family = FAMILIES["deepseek_v3"]
    save(family.make(torch.bfloat16), tmp_path)
    plain = family.auto.from_pretrained(tmp_path, **({} if asked is None else {"dtype": asked}))
    model = sharded(family, tmp_path, 2, 1, dtype=asked)
    load_checkpoint(model, tmp_path, {"tp": 1})
    assert_parts(model, plain, 1)
    dtypes = {each.dtype for each in model.state_dict().values()}
    wanted = {None: torch.bfloat16, "auto": torch.bfloat16, "float32": torch.float32}.get(asked, asked)
    assert dtypes == {wanted, torch.float32}


def test_a_config_without_a_dtype(tmp_path):
    family = FAMILIES["llama"]
    save_single(family.make(torch.bfloat16), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = sharded(family, tmp_path, 2, 0)
    assert model.dtype == torch.bfloat16
    load_checkpoint(model, tmp_path, {"tp": 0})
    assert_parts(model, family.auto.from_pretrained(tmp_path), 0)


def test_a_dtype_for_what_is_loaded(tmp_path):
    """But not for a weight that the model keeps in a dtype of its own, nor for a buffer that is computed."""
    family = FAMILIES["deepseek_v3"]
    save_single(family.make(torch.float32), tmp_path)
    plain = family.auto.from_pretrained(tmp_path, dtype=torch.bfloat16)
    model = sharded(family, tmp_path, 2, 1)
    for each in (model, plain):
        each.model.norm.weight = torch.nn.Parameter(each.model.norm.weight.double())
    plain.model.norm.weight.data.copy_(load_file(tmp_path / SINGLE)["model.norm.weight"])
    load_checkpoint(model, tmp_path, {"tp": 1}, dtype=torch.bfloat16)
    assert_parts(model, plain, 1)


def test_a_weight_under_two_names(tmp_path):
    """With and without the base model's prefix: transformers' choice."""
    family = FAMILIES["llama"]
    save_single(family.make(), tmp_path)
    stored = load_file(tmp_path / SINGLE)
    stored["norm.weight"] = stored["model.norm.weight"] + 1
    save_file(stored, tmp_path / SINGLE, metadata={"format": "pt"})
    model = sharded(family, tmp_path, 2, 0)
    load_checkpoint(model, tmp_path, {"tp": 0})
    assert_parts(model, family.auto.from_pretrained(tmp_path), 0)


def test_a_name_that_only_an_old_one_of_another_weight_resembles(tmp_path, monkeypatch):
    """A renaming that leads away from a name that the model has does not apply."""
    family = FAMILIES["llama"]
    save_single(family.make(), tmp_path)
    renaming = WeightRenaming("model.norm", "model.scale")
    monkeypatch.setattr("ds_npu.checkpoint.conversion.get_model_conversion_mapping", lambda model: [renaming])
    model = sharded(family, tmp_path, 2, 0)
    load_checkpoint(model, tmp_path, {"tp": 0})
    assert_parts(model, family.auto.from_pretrained(tmp_path), 0)


def test_marks_and_ties_stay(tmp_path):
    family = FAMILIES["gemma"]
    save_single(family.make(), tmp_path)
    model = sharded(family, tmp_path, 2, 1)
    before = {name: dict(vars(each)) for name, each in model.named_parameters(remove_duplicate=False)}
    model.model.norm.weight.requires_grad_(False)
    load_checkpoint(model, tmp_path, {"tp": 1})
    for name, each in model.named_parameters(remove_duplicate=False):
        assert before[name].items() <= vars(each).items(), name
        assert type(each) is torch.nn.Parameter and each.is_leaf
        assert each.requires_grad == (name != "model.norm.weight")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert sharding_of(model.lm_head.weight) is not None and model.lm_head.weight.shape == (V // 2, H)
    assert not any(each.is_meta for each in tensors_of(model).values())


def test_what_is_real_keeps_its_object(tmp_path):
    family = FAMILIES["mixtral"]
    save_single(family.make(), tmp_path)
    plain = family.auto.from_pretrained(tmp_path)
    model = shard(family.make(max_position_embeddings=32), family.rules, 2, 1)
    before = tensors_of(model)
    memory = {name: each.data_ptr() for name, each in before.items()}
    load_checkpoint(model, tmp_path, {"tp": 1})
    assert_parts(model, plain, 1)
    for name, each in tensors_of(model).items():
        assert each is before[name] and each.data_ptr() == memory[name], name


def test_half_of_a_model_is_real(tmp_path):
    """Layers that the surgery made on a device, and meta ones around them."""
    family = FAMILIES["llama"]
    save_single(family.make(), tmp_path)
    model = sharded(family, tmp_path, 2, 0)
    mlp = model.model.layers[0].mlp
    made = torch.nn.Parameter(torch.zeros(mlp.up_proj.weight.shape))
    vars(made).update(vars(mlp.up_proj.weight))
    mlp.up_proj.weight = made
    load_checkpoint(model, tmp_path, {"tp": 0})
    assert mlp.up_proj.weight is made
    assert_parts(model, family.auto.from_pretrained(tmp_path), 0)


def test_only_buffers_are_initialised(tmp_path, monkeypatch):
    """Modules whose tensors are all in the checkpoint are not shown to the model's initialisation."""
    family = FAMILIES["llama"]
    save_single(family.make(), tmp_path)
    model = sharded(family, tmp_path, 2, 0)
    seen = []
    initialise = LlamaForCausalLM._init_weights

    def record(self, module):
        seen.append(type(module).__name__)
        initialise(self, module)

    for model_class in (LlamaForCausalLM, LlamaModel):
        monkeypatch.setattr(model_class, "_init_weights", record)
    load_checkpoint(model, tmp_path, {"tp": 0})
    assert seen == ["LlamaRotaryEmbedding"]


def test_loading_changes_no_random_number(tmp_path):
    family = FAMILIES["qwen2_5_vl"]
    save_single(family.make(), tmp_path)
    before = torch.get_rng_state()
    load_checkpoint(sharded(family, tmp_path, 2, 0), tmp_path, {"tp": 0})
    assert torch.equal(torch.get_rng_state(), before)


def test_options_of_from_pretrained(tmp_path):
    family = FAMILIES["llama"]
    save_single(family.make(), tmp_path)
    generation = json.loads((tmp_path / "generation_config.json").read_text()) | {"max_new_tokens": 7}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    for model_class in (AutoModelForCausalLM, LlamaForCausalLM):
        make = partial(meta_model, model_class, tmp_path)
        model = make(attn_implementation="eager", attention_dropout=0.25)
        assert type(model) is LlamaForCausalLM and all(each.is_meta for each in model.parameters())
        assert model.config._attn_implementation == "eager" and model.config.attention_dropout == 0.25
        assert model.generation_config.max_new_tokens == 7
        assert make().config._attn_implementation == model_class.from_pretrained(tmp_path).config._attn_implementation


def test_transformers_partitions_nothing_under_zero_3(tmp_path, monkeypatch):
    save_single(FAMILIES["llama"].make(), tmp_path)
    monkeypatch.setattr(transformers.modeling_utils, "is_deepspeed_zero3_enabled", lambda: True)
    model = meta_model(AutoModelForCausalLM, tmp_path)
    assert all(each.is_meta and each.numel() for each in model.parameters())


# ---- memory ----


def bytes_of(tensors):
    return sum(each.numel() * each.element_size() for each in {id(each): each for each in tensors}.values())


WIDE = {"hidden_size": 128, "intermediate_size": 352, "vocab_size": 1024, "head_dim": 32}


@pytest.mark.parametrize("save", [save_single, save_pickled], ids=lambda save: save.__name__)
@pytest.mark.parametrize(
    "name", [name for name in ("llama", "phi3", "gemma", "mixtral", "qwen3_moe", "hrm_text") if name in FAMILIES]
)
def test_memory_is_one_ranks_shard_and_the_largest_weight(name, save, tmp_path):
    """Of ~2 MB to 6 MB models in bfloat16 files, loaded in float32, so that a cast needs memory as well."""
    family = FAMILIES[name]
    wide = WIDE | ({"moe_intermediate_size": 352} if name == "qwen3_moe" else {})
    save(family.make(torch.bfloat16, **wide), tmp_path)
    rules = {
        r"(embed_tokens|lm_head)\.weight$": sections(0, 1024),
        r"experts\.gate_up_proj$": sections(1, 352, 352),
        r"experts\.down_proj$": sections(2, 352),
        r"gate_up_proj\.weight$": sections(0, 352, 352),
        r"mlp\.(gate|up)_proj\.weight$": sections(0, 352),
        r"mlp\.down_proj\.weight$": sections(1, 352),
    }
    ranks = 4
    model = shard(meta_model(family.auto, tmp_path, dtype=torch.float32), rules, ranks, 1)
    largest = max(bytes_of([each]) * (ranks if sharding_of(each) else 1) for each in model.parameters())
    peak = peak_bytes(lambda: load_checkpoint(model, tmp_path, {"tp": 1}), mapped=[next(tmp_path.glob("*model.*"))])
    shard_bytes = bytes_of(tensors_of(model).values())
    assert shard_bytes <= peak <= shard_bytes + largest
    # Weights that need no conversion go from the file to where they stay; experts are converted one by one, each as
    # its two parts, and as the whole that they make.
    expert = 2 * (2 * 352) * 128 * 4 if "experts" in "".join(tensors_of(model)) else 0
    assert peak <= shard_bytes + expert + 10_000


def test_the_meter_sees_a_whole_model(tmp_path, monkeypatch):
    family = FAMILIES["mixtral"]
    save_single(family.make(torch.bfloat16, **WIDE), tmp_path)
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # the profiler sees one thread
    load = partial(family.auto.from_pretrained, tmp_path, dtype=torch.float32)
    assert peak_bytes(load, mapped=[tmp_path / SINGLE]) >= bytes_of(load().parameters())
