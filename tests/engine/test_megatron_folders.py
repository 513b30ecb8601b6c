"""``ds_npu convert``: Megatron-Core's folders as Hugging Face models; what is refused, and that nothing is run."""

from __future__ import annotations

import argparse
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import trusted_loads
from ranks import run_on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from ds_npu.checkpoint.distributed_files import DistributedFiles
from ds_npu.cli.main import main

LAYERS, HEADS, GROUPS, HEAD, HIDDEN, WIDTH, WORDS, PADDED = 2, 6, 2, 4, 24, 20, 30, 32
SIZES = {
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": HEAD,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "vocab_size": WORDS,
    "dtype": "float32",
}
QUERIES = HEADS // GROUPS


def model_of(kind: str, **given: object):
    made = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}[kind](**{**SIZES, **given})
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(made)
    model.config.architectures = [type(model).__name__]
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight))
    return model


def megatrons(state: dict[str, torch.Tensor], layer: int) -> dict[str, torch.Tensor]:
    """A layer's weights as Megatron-Core 0.16.1 keeps them, row by row."""
    own = {name.removeprefix(f"model.layers.{layer}."): each for name, each in state.items() if f"s.{layer}." in name}
    found = {
        "self_attention.linear_qkv.layer_norm_weight": own["input_layernorm.weight"],
        "self_attention.linear_proj.weight": own["self_attn.o_proj.weight"],
        "mlp.linear_fc1.layer_norm_weight": own["post_attention_layernorm.weight"],
        "mlp.linear_fc1.weight": torch.cat([own["mlp.gate_proj.weight"], own["mlp.up_proj.weight"]]),
        "mlp.linear_fc2.weight": own["mlp.down_proj.weight"],
    }
    for kind in ("weight", "bias"):
        if f"self_attn.q_proj.{kind}" not in own:
            continue
        rows = []
        for group in range(GROUPS):
            for head in range(QUERIES):
                begin = (group * QUERIES + head) * HEAD
                rows += [own[f"self_attn.q_proj.{kind}"][begin + row] for row in range(HEAD)]
            for part in "kv":
                rows += [own[f"self_attn.{part}_proj.{kind}"][group * HEAD + row] for row in range(HEAD)]
        found[f"self_attention.linear_qkv.{kind}"] = torch.stack(rows)
    for part in "qk":
        if f"self_attn.{part}_norm.weight" in own:
            found[f"self_attention.{part}_layernorm.weight"] = own[f"self_attn.{part}_norm.weight"]
    return found


def megatrons_of(model, is_stacked: bool) -> dict[str, torch.Tensor]:
    state = {name: each.detach() for name, each in model.state_dict().items()}
    padding = torch.full((PADDED - WORDS, HIDDEN), 7.0)
    found = {
        "embedding.word_embeddings.weight": torch.cat([state["model.embed_tokens.weight"], padding]),
        "decoder.final_layernorm.weight": state["model.norm.weight"],
    }
    if not model.config.tie_word_embeddings:
        found["output_layer.weight"] = torch.cat([state["lm_head.weight"], padding])
    layers = [megatrons(state, index) for index in range(LAYERS)]
    for name in layers[0]:
        each = [layer[name] for layer in layers]
        separate = {f"decoder.layers.{index}.{name}": weight for index, weight in enumerate(each)}
        found |= {f"decoder.layers.{name}": torch.stack(each)} if is_stacked else separate
    return found


STATES = {"optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight": torch.zeros(3)}


def write(folder: Path, model, is_stacked: bool, **more: torch.Tensor) -> Path:
    """The folder of a run of one rank, and the model's config beside it."""
    folder.mkdir(exist_ok=True)
    model.config.save_pretrained(folder / "config")
    inside = folder / "iter_0000012"
    dcp.save({**megatrons_of(model, is_stacked), **STATES, **more}, checkpoint_id=str(inside), no_dist=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("12")
    return inside


def converted(folder: Path, source: Path) -> int:
    given = ["--to", "hf", "--model", str(folder / "config"), "--out", str(folder / "hf")]
    return main(["convert", str(source), *given])


def is_same(folder: Path, model) -> bool:
    found, expected = AutoModelForCausalLM.from_pretrained(folder / "hf").state_dict(), model.state_dict()
    return found.keys() == expected.keys() and all(each.equal(expected[name]) for name, each in found.items())


def save_sharded(folder: str) -> None:
    """Two ranks' shards: rows of some weights, columns of others, of all layers in one tensor."""
    mesh, model = init_device_mesh("cpu", (2,)), model_of("llama")
    state = {}
    for name, each in megatrons_of(model, is_stacked=True).items():
        dim = 2 if "linear_proj" in name or "linear_fc2" in name else 1 if "layers" in name else 0
        placement = Replicate() if "norm" in name else Shard(dim)
        state[name] = distribute_tensor(each, mesh, [placement])
    dcp.save(state, checkpoint_id=folder)
    if dist.get_rank() == 0:
        model.config.save_pretrained(Path(folder).parent / "config")


@pytest.mark.parametrize(("kind", "is_stacked"), [("llama", True), ("qwen2", False), ("qwen3", True)])
def test_weights_are_those_that_were_trained(kind, is_stacked, tmp_path, capsys):
    model = model_of(kind, tie_word_embeddings=kind == "qwen3")
    write(tmp_path, model, is_stacked)
    assert converted(tmp_path, tmp_path) == 0, capsys.readouterr().err
    assert "common.pt has no arguments of the run" in capsys.readouterr().out and is_same(tmp_path, model)


def test_shards_of_two_ranks(tmp_path, capsys):
    run_on_ranks(2, save_sharded, str(tmp_path / "sharded"))
    assert len(list((tmp_path / "sharded").glob("*.distcp"))) > 1
    assert converted(tmp_path, tmp_path / "sharded") == 0, capsys.readouterr().err
    assert is_same(tmp_path, model_of("llama"))


def refused(folder: Path, source: Path, capsys) -> str:
    assert converted(folder, source) == 1 and not (folder / "hf").exists()
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    return said


def test_what_is_not_known_is_refused(tmp_path, capsys):
    model = model_of("llama")
    inside = write(tmp_path / "a", model, True, **{"decoder.layers.mlp.router.weight": torch.zeros(2, 3)})
    assert "weights that are not known: decoder.layers.mlp.router.weight" in refused(tmp_path / "a", inside, capsys)
    inside = write(tmp_path / "b", model, True)
    arguments = argparse.Namespace(num_layers=LAYERS, apply_layernorm_1p=True, rotary_base=10000, kind=Path("here"))
    torch.save({"args": arguments, "iteration": 12, "mine": trusted_loads.Attack()}, inside / "common.pt")
    assert "the run that wrote it has apply_layernorm_1p True (the config: False)" in refused(
        tmp_path / "b", inside, capsys
    )
    arguments.apply_layernorm_1p = False
    torch.save({"args": arguments, "mine": trusted_loads.Attack()}, inside / "common.pt")
    assert converted(tmp_path / "b", inside) == 0 and "no arguments" not in capsys.readouterr().out
    inside = write(tmp_path / "c", model_of("llama"), True)
    model_of("llama", num_hidden_layers=LAYERS + 1).config.save_pretrained(tmp_path / "c" / "config")
    assert "does not fit LlamaForCausalLM: 9 missing from the checkpoint" in refused(tmp_path / "c", inside, capsys)
    assert not trusted_loads.RAN


def test_nothing_of_the_folder_is_run(tmp_path, capsys):
    inside = write(tmp_path, model_of("llama"), True)
    (inside / ".metadata").write_bytes(pickle.dumps(trusted_loads.Attack()))
    assert "has an object of builtins.getattr, which is not loaded" in refused(tmp_path, inside, capsys)
    inside = write(tmp_path, model_of("llama"), True)
    data = (inside / "__0_0.distcp").read_bytes()
    (inside / "__0_0.distcp").write_bytes(data[: len(data) // 2])
    assert "cannot be read" in refused(tmp_path, inside, capsys)
    assert not trusted_loads.RAN


def test_chunks_that_are_not_the_whole_tensor(tmp_path):
    inside = write(tmp_path, model_of("llama"), True)
    metadata = pickle.loads((inside / ".metadata").read_bytes())
    chunks = metadata.state_dict_metadata["output_layer.weight"].chunks
    for changed, message in (([], "have 0 elements"), ([chunks[0]] * 2, "each once")):
        metadata.state_dict_metadata["output_layer.weight"].chunks = changed
        (inside / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(ValueError, match=message):
            DistributedFiles(inside).tensor("output_layer.weight")
    place = next(each for key, each in metadata.storage_data.items() if key.fqn == "output_layer.weight")
    metadata.state_dict_metadata["output_layer.weight"].chunks = chunks
    place.relative_path = "../elsewhere.distcp"
    (inside / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="no file of this folder"):
        DistributedFiles(inside).tensor("output_layer.weight")
