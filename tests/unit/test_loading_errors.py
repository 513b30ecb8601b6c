"""What is wrong with a checkpoint is said at once, and before anything of the model is changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from loading_models import FAMILIES, SINGLE, F, H, V, assert_parts, save_pickled, save_single, sharded, tensors_of
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from ds_npu.checkpoint.files import CheckpointError, open_checkpoint
from ds_npu.checkpoint.loading import load_checkpoint, meta_model
from ds_npu.parallel.runtime.placement import mark_sharded
from ds_npu.parallel.tensor.sharding import Sharding


def refused(model, folder, rank=0):
    """What load_checkpoint says; the model is as it was."""
    before = tensors_of(model)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(model, folder, {"tp": rank})
    assert all(each is before[name] for name, each in tensors_of(model).items())
    return str(caught.value)


def edit(folder, change):
    stored = load_file(folder / SINGLE)
    change(stored)
    save_file({name: each.clone() for name, each in stored.items()}, folder / SINGLE, metadata={"format": "pt"})


@pytest.fixture
def llama(tmp_path):
    save_single(FAMILIES["llama"].make(), tmp_path)
    return tmp_path


def test_names_and_shapes_that_do_not_fit(llama):
    def spoil(stored):
        del stored["model.norm.weight"], stored["model.layers.0.self_attn.q_proj.weight"]
        stored["model.layers.0.mlp.extra.weight"] = torch.zeros(1)
        stored["model.layers.1.mlp.up_proj.weight"] = torch.zeros(F + 1, H)
        stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)  # of old checkpoints: no mistake

    edit(llama, spoil)
    model = sharded(FAMILIES["llama"], llama, 2, 1)
    said = refused(model, llama, 1)
    assert all(each.is_meta for each in model.parameters())
    first, *lines = said.splitlines()
    assert first == f"the checkpoint in {llama} does not fit LlamaForCausalLM:"
    assert [line.strip() for line in lines if line.startswith("    ")] == [
        f"model.layers.0.self_attn.q_proj.weight ({H}, {H})",
        f"model.norm.weight ({H},)",
        "model.layers.0.mlp.extra.weight",
        f"model.layers.1.mlp.up_proj.weight: ({F + 1}, {H}) in the checkpoint, ({F}, {H}) in the model",
    ]
    kinds = [line.split("(")[0].strip() for line in lines if not line.startswith("    ")]
    assert kinds == ["2 missing from the checkpoint", "1 in the checkpoint only", "1 of another shape"]


def test_a_new_head_is_named(llama):
    model = meta_model(AutoModelForSequenceClassification, llama, num_labels=3)
    said = refused(model, llama)
    assert f"score.weight (3, {H})" in said and "lm_head.weight" in said and "from_pretrained" in said


def test_many_mistakes_are_counted(llama):
    edit(llama, lambda stored: stored.update({f"more.{number}": torch.zeros(1) for number in range(50)}))
    said = refused(sharded(FAMILIES["llama"], llama, 1, 0), llama)
    assert "50 in the checkpoint only" in said and "more.19" in said and "more.20" not in said and "and 30 more" in said


@pytest.mark.parametrize(
    ("gone", "kind"),
    [
        (("3.w1", "3.w3"), "of another shape"),
        (("2.w1",), "not convertible"),
        (("0.w2", "1.w2", "2.w2", "3.w2"), "missing from the checkpoint"),
    ],
)
def test_experts_that_are_not_there(gone, kind, tmp_path):
    family = FAMILIES["mixtral"]
    save_single(family.make(), tmp_path)
    for each in gone:
        edit(tmp_path, lambda stored, each=each: stored.pop(f"model.layers.1.block_sparse_moe.experts.{each}.weight"))
    said = refused(sharded(family, tmp_path, 2, 0), tmp_path)
    kinds = [line.split(" (")[0].strip() for line in said.splitlines() if line.startswith("  ") and line[2] != " "]
    assert kinds == [f"1 {kind}"] and "model.layers.1.mlp.experts." in said


def test_a_shard_of_another_size_than_its_sharding_says(llama):
    model = sharded(FAMILIES["llama"], llama, 2, 0)
    mark_sharded(model.lm_head.weight, Sharding(0, V, (((0, 19),), ((19, V),))))
    with pytest.raises(ValueError, match=r"lm_head\.weight has the shape \(20, 16\).* rank 0 holds 19 of 40"):
        load_checkpoint(model, llama, {"tp": 0})


def test_tied_weights_that_differ(tmp_path):
    family = FAMILIES["gemma"]
    save_pickled(family.make(), tmp_path)
    stored = torch.load(tmp_path / "pytorch_model.bin")
    same = {name: each.clone() for name, each in stored.items()}
    torch.save(same, tmp_path / "pytorch_model.bin")
    model = sharded(family, tmp_path, 2, 1)
    load_checkpoint(model, tmp_path, {"tp": 1})
    assert_parts(model, family.auto.from_pretrained(tmp_path), 1)
    same["lm_head.weight"][-1, -1] += 1
    torch.save(same, tmp_path / "pytorch_model.bin")
    said = refused(sharded(family, tmp_path, 2, 1), tmp_path)
    assert "lm_head.weight and model.embed_tokens.weight" in said and "tie_word_embeddings" in said


def test_a_buffer_that_nobody_computes(llama):
    model = sharded(FAMILIES["llama"], llama, 2, 0)
    model.model.layers[1].register_buffer("bounds", torch.empty(2, device="meta"), persistent=False)
    with pytest.raises(CheckpointError, match=r"_init_weights does not compute: model\.layers\.1\.bounds\. What to do"):
        load_checkpoint(model, llama, {"tp": 0})


def test_a_quantized_checkpoint(llama):
    config = json.loads((llama / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (llama / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="quantized"):
        meta_model(AutoModelForCausalLM, llama)


def cut_short(folder: Path):
    file = folder / SINGLE
    file.write_bytes(file.read_bytes()[:-100])
    return r"model\.safetensors cannot be read: .*What to do: fetch the file anew"


def no_weights(folder: Path):
    (folder / SINGLE).unlink()
    return r"a checkpoint has one of model\.safetensors, .*; found none of them"


def no_folder(folder: Path):
    folder.rename(folder.with_name("away"))
    return "found no such folder"


def a_file_of_the_index_is_gone(folder: Path):
    (folder / SINGLE).rename(folder / "a.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors", "z": "c.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return r"lacks 2 of the 3 files that model\.safetensors\.index\.json names: b\.safetensors, c\.safetensors"


def an_index_of_something_else(folder: Path):
    (folder / SINGLE).unlink()
    (folder / "model.safetensors.index.json").write_text("[1]")
    return "cannot be read as an index"


def code_in_a_pickle(folder: Path):
    (folder / SINGLE).unlink()
    torch.save({"x": Path("y")}, folder / "pytorch_model.bin")
    return r"pytorch_model\.bin cannot be read"


def a_pickle_of_something_else(folder: Path):
    (folder / SINGLE).unlink()
    torch.save([torch.zeros(1)], folder / "pytorch_model.bin")
    return "holds no state dict.*found list"


def a_file_of_another_kind(folder: Path):
    (folder / SINGLE).rename(folder / "a.gguf")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "a.gguf"}}))
    return "a.gguf: weights are read from"


@pytest.mark.parametrize(
    "spoil",
    [
        cut_short,
        no_weights,
        no_folder,
        a_file_of_the_index_is_gone,
        an_index_of_something_else,
        code_in_a_pickle,
        a_pickle_of_something_else,
        a_file_of_another_kind,
    ],
    ids=lambda spoil: spoil.__name__,
)
def test_files_that_cannot_be_read(spoil, llama):
    message = spoil(llama)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(llama)
