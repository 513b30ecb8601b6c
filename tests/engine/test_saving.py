"""Sharded models back into checkpoints: byte for byte what the plain model saves, or nothing under the final name."""

from __future__ import annotations

import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from allocated import peak_bytes
from loading_models import FAMILIES, SINGLE, F, save_in_files, save_single, shard, sharded, tensor_holders
from ranks import run_on_ranks
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ds_npu.checkpoint.files import ENTRIES, CheckpointError, open_checkpoint
from ds_npu.checkpoint.loading import load_checkpoint, meta_model
from ds_npu.checkpoint.saving import save_pretrained, whole_state_dict
from ds_npu.parallel.tensor.sharding import Sharding

pytestmark = pytest.mark.slow


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_same_state(found, expected):
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].device.type == "cpu", name
        assert torch.equal(found[name], tensor), name


# ---- on ranks ----


def save_each_family(folder):
    rank, size = dist.get_rank(), dist.get_world_size()
    for name, family in FAMILIES.items():
        model = sharded(family, folder / name, size, rank)
        load_checkpoint(model, folder / name, {"tp": rank})
        state = whole_state_dict(model, tensor_holders(dist.group.WORLD))
        if rank:
            assert state == {}
            continue
        plain = family.auto.from_pretrained(folder / name)
        assert_same_state(state, plain.state_dict())
        save_pretrained(model, folder / f"{name}-ours", state, max_shard_size="6KB")
        plain.save_pretrained(folder / f"{name}-plain", max_shard_size="6KB")
        assert contents(folder / f"{name}-ours") == contents(folder / f"{name}-plain"), name
        again = family.auto.from_pretrained(folder / f"{name}-ours")
        assert_same_state(again.state_dict(), plain.state_dict())


def test_each_family_comes_back(tmp_path):
    """Names, conversions, config and index are those of the plain model's own save_pretrained."""
    for number, (name, family) in enumerate(FAMILIES.items()):
        save_single(family.make((torch.float32, torch.bfloat16)[number % 2]), tmp_path / name)
    run_on_ranks(2, save_each_family, tmp_path)


UNEVEN = (((7, 16), (0, 2)), ((2, 7), (16, F), (0, 1)), ())


def save_uneven(folder):
    rank = dist.get_rank()
    rules = {
        r"(gate|up)_proj": lambda ranks: Sharding(0, F, UNEVEN),
        r"down_proj": lambda ranks: Sharding(1, F, UNEVEN),
    }
    plain = AutoModelForCausalLM.from_pretrained(folder)
    model = shard(meta_model(AutoModelForCausalLM, folder), rules, 3, rank)
    load_checkpoint(model, folder, {"tp": rank})
    turned = model.model.layers[0].mlp.up_proj.weight
    turned.data = turned.data.t().contiguous().t()
    state = whole_state_dict(model, tensor_holders(dist.group.WORLD))
    assert_same_state(state, plain.state_dict() if rank == 0 else {})
    # A change on the rank that holds an index is what is saved.
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.add_(1)
    changed = whole_state_dict(model, tensor_holders(dist.group.WORLD))
    if rank == 0:
        name = "model.layers.1.mlp.down_proj.weight"
        assert torch.equal(changed[name], plain.state_dict()[name] + 1)
        assert all(mine.data_ptr() != model.state_dict()[name].data_ptr() for name, mine in changed.items())


def test_ranks_that_hold_more_than_others_the_same_or_nothing(tmp_path):
    save_single(FAMILIES["llama"].make(), tmp_path)
    run_on_ranks(3, save_uneven, tmp_path)


def save_in_two_groups(folder):
    """Tensor groups (0, 1) and (2, 3), as with two data-parallel ranks; weights partitioned as ZeRO-3 does."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[rank // 2]
    family = FAMILIES["gemma"]
    model = sharded(family, folder, 2, rank % 2)
    load_checkpoint(model, folder, {"tp": rank % 2})
    away = {id(each): each.data for each in model.parameters()}
    for each in model.parameters():
        vars(each)["ds_shape"] = each.shape
        each.data = torch.empty(0)

    @contextmanager
    def gathered(parameter):
        parameter.data = away[id(parameter)]
        yield
        parameter.data = torch.empty(0)

    state = whole_state_dict(model, tensor_holders(group), gather=gathered)
    expected = family.auto.from_pretrained(folder).state_dict() if rank % 2 == 0 else {}
    assert_same_state(state, expected)
    if state:
        assert state["lm_head.weight"] is state["model.embed_tokens.weight"]
    assert all(each.numel() == 0 for each in model.parameters())


def test_groups_and_partitioned_weights(tmp_path):
    save_single(FAMILIES["gemma"].make(), tmp_path)
    run_on_ranks(4, save_in_two_groups, tmp_path)


WIDE = {"hidden_size": 128, "intermediate_size": 32, "vocab_size": 1024, "num_hidden_layers": 1}


@pytest.mark.parametrize("rank", [0, 1])
def test_memory_of_gathering(rank, tmp_path, monkeypatch):
    """The first rank needs what it returns and one part of another's; the others, one part: no more than one weight.

    Without processes: gloo lets go of a part in a thread of its own, where frees are not seen.
    """
    save_single(FAMILIES["llama"].make(**WIDE), tmp_path)
    bounds = ((0, 60), (60, 80), (80, 110), (110, 128))
    rules = {r"(embed_tokens|lm_head)": lambda ranks: Sharding(1, 128, tuple((each,) for each in bounds))}
    model = shard(meta_model(AutoModelForCausalLM, tmp_path), rules, 4, rank)
    load_checkpoint(model, tmp_path, {"tp": rank})
    sent = []
    monkeypatch.setattr(dist, "get_rank", lambda group: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 4)
    monkeypatch.setattr(dist, "broadcast", lambda part, **options: sent.append(options["group_src"]))
    peak = peak_bytes(lambda: whole_state_dict(model, tensor_holders(None)))
    assert sent == 2 * [1, 2, 3]
    everything = sum(each.numel() * each.element_size() for each in load_file(tmp_path / SINGLE).values())
    returned = everything if rank == 0 else 0
    assert returned <= peak <= returned + 30 * 1024 * 4


def gather_over_too_few(folder):
    model = sharded(FAMILIES["llama"], folder, 2, 0)
    with pytest.raises(ValueError, match=r"embed_tokens\.weight is sharded over 2 ranks, but the tensor group has 1"):
        whole_state_dict(model, tensor_holders(dist.group.WORLD))


def fill_the_disk(folder):
    """A limit on the size of files stands in for the disk's end."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    before = contents(folder)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for target in (folder, folder.with_name("new")):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        with pytest.raises(OSError, match=r"was not saved to .*File too large.* What to do: make room there") as caught:
            save_pretrained(model, target, model.state_dict())
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert str(target) in str(caught.value)
    assert contents(folder) == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize("body", [gather_over_too_few, fill_the_disk], ids=lambda body: body.__name__)
def test_what_one_rank_cannot_do(body, tmp_path):
    save_single(FAMILIES["llama"].make(), tmp_path / "old")
    run_on_ranks(1, body, tmp_path / "old")


# ---- what lies in the folder ----


@pytest.fixture
def plain():
    return FAMILIES["llama"].make()


def test_other_files_stay_and_old_weights_go(plain, tmp_path):
    folder = tmp_path / "deep" / "checkpoint"
    save_pretrained(plain, folder, plain.state_dict(), max_shard_size="6KB")
    assert (folder / "model.safetensors.index.json").is_file()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_text("older")
    (folder / "step-1").mkdir()
    (folder / "step-1" / "model.safetensors").write_text("another's")
    save_pretrained(plain, folder, plain.state_dict())
    found = sorted(contents(folder))
    assert found == ["config.json", "generation_config.json", SINGLE, "step-1/model.safetensors", "tokenizer.json"]
    assert_same_state(AutoModelForCausalLM.from_pretrained(folder).state_dict(), plain.state_dict())
    assert [path.name for path in folder.parent.iterdir()] == ["checkpoint"]


def test_conversions_that_loading_did_not_need_are_not_reverted(tmp_path):
    family = FAMILIES["mixtral"]
    family.make().save_pretrained(tmp_path / "merged", save_original_format=False)
    plain = family.auto.from_pretrained(tmp_path / "merged")
    plain.save_pretrained(tmp_path / "plain")
    assert "model.layers.0.mlp.experts.down_proj" in load_file(tmp_path / "plain" / SINGLE)
    model = meta_model(family.auto, tmp_path / "merged")
    load_checkpoint(model, tmp_path / "merged", {"tp": 0})
    save_pretrained(model, tmp_path / "ours", model.state_dict())
    assert contents(tmp_path / "ours") == contents(tmp_path / "plain")


def test_the_config_names_the_dtype_of_what_is_saved(plain, tmp_path):
    """An engine has cast the model since it was made."""
    plain.to(torch.bfloat16)
    save_pretrained(plain, tmp_path / "x", plain.state_dict())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "x")
    assert again.dtype == torch.bfloat16
    assert_same_state(again.state_dict(), plain.state_dict())


def test_an_attention_that_the_meta_device_lacks(plain, tmp_path):
    """As flash attention on the CPU: what a model runs with has no part in saving it."""
    plain.config._attn_implementation = "flash_attention_2"
    save_pretrained(plain, tmp_path / "x", plain.state_dict())
    assert_same_state(AutoModelForCausalLM.from_pretrained(tmp_path / "x").state_dict(), plain.state_dict())


def test_the_state_dict_is_left_as_it_is(tmp_path):
    model = FAMILIES["mixtral"].make()
    state = model.state_dict()
    names = list(state)
    save_pretrained(model, tmp_path / "x", state)
    assert list(state) == names


def test_a_file_in_the_place_of_the_folder(plain, tmp_path):
    (tmp_path / "x").write_text("mine")
    with pytest.raises(NotADirectoryError, match="is a file"):
        save_pretrained(plain, tmp_path / "x", plain.state_dict())
    assert (tmp_path / "x").read_text() == "mine"


class Power(BaseException):
    """The machine's end: nothing after it runs."""


def saved_until(step: int, model, folder, monkeypatch) -> bool:
    """Save, with the power gone before the given change to the files under the final name; whether it came to that."""
    left = [step]

    def counted(name):
        real = vars(Path)[name]

        def change(self, *args, **options):
            if left[0] == 0:
                raise Power
            left[0] -= 1
            return real(self, *args, **options)

        return change

    with monkeypatch.context() as patch:
        for name in ("rename", "replace", "unlink"):
            patch.setattr(Path, name, counted(name))
        try:
            save_pretrained(model, folder, model.state_dict(), max_shard_size="6KB")
        except Power:
            return True
    return False


@pytest.mark.parametrize("earlier", ["none", "one file", "more files", "as many files"])
def test_an_interrupted_save_leaves_nothing_that_looks_complete(earlier, plain, tmp_path, monkeypatch):
    old = FAMILIES["llama"].make(num_hidden_layers=3 if earlier == "more files" else 2)
    with torch.no_grad():
        for each in old.parameters():
            each.mul_(2)
    steps = 0
    while True:
        folder = tmp_path / str(steps) / "x"
        if earlier == "one file":
            save_single(old, folder)
        elif earlier != "none":
            save_in_files(old, folder)
        interrupted = saved_until(steps, plain, folder, monkeypatch)
        try:
            found = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        except OSError:
            found = None
            with pytest.raises(CheckpointError):
                open_checkpoint(folder)
            assert not any((folder / entry).exists() for entry in ENTRIES)
            # All of the new weights are still there, beside the folder or in it.
            beside = folder.with_name(".x.incomplete")
            files = (*folder.glob("*.safetensors"), *beside.glob("*.safetensors"))
            everything = {name: each for file in files for name, each in load_file(file).items()}
            for name, each in plain.state_dict().items():
                assert torch.equal(everything[name], each), name
        if found is not None:
            assert_same_state(found, (old if interrupted and steps == 0 else plain).state_dict())
        # The next save is whole.
        save_pretrained(plain, folder, plain.state_dict())
        assert_same_state(AutoModelForCausalLM.from_pretrained(folder).state_dict(), plain.state_dict())
        assert sum((folder / entry).is_file() for entry in ENTRIES) == 1
        assert [path.name for path in folder.parent.iterdir()] == ["x"]
        if not interrupted:
            break
        steps += 1
    assert steps >= {"none": 1, "one file": 5}.get(earlier, 10)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError], ids=lambda error: error.__name__)
def test_a_save_that_is_stopped_while_it_writes(error, plain, tmp_path, monkeypatch):
    save_single(plain, tmp_path / "x")
    before = contents(tmp_path / "x")

    def stop(*args, **options):
        raise error

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", stop)
    with pytest.raises(error):
        save_pretrained(plain, tmp_path / "x", plain.state_dict())
    assert contents(tmp_path / "x") == before
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
