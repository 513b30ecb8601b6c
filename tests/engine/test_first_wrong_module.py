"""``watch.finite`` names the first wrong module, whatever the axis, and writes what computes it again."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO
from unittest import mock

import peft
import pytest
import tiny_models
import torch
import torch.distributed as dist
from planted import BAD, Planted, take_step
from ranks import run_on_ranks

from ds_npu.features.recorded_calls.module_file import ModuleFileError, read_module_file
from ds_npu.features.recorded_calls.replayed_call import MODULE, OPERATOR, replay_lines, replayed
from ds_npu.parallel.tensor.shard_access import allow_shard_access

SAVE = torch.save
FIRST, LAST = "model.layers.0.", "model.layers.1."
MODULES = ("model.embed_tokens", f"{LAST}self_attn.q_proj", FIRST[:-1], "lm_head")
SOME = (f"{FIRST}self_attn", f"{LAST}mlp.down_proj", f"{LAST}input_layernorm")
STAGES = {"parallel": {"pipeline": 2}}
FUSED = {"fused_ops": dict.fromkeys(("rms_norm", "swiglu", "rotary", "cross_entropy"), True)}


def both(names: Sequence[str], **of_case: object) -> list[Planted]:
    """Each of ``names`` in forward and in backward."""
    return [Planted(name, backward, **of_case) for backward in (False, True) for name in names]


def lora(model):
    return peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=["q_proj", "down_proj"]))


def compiled(model):
    model.compile(backend="eager")
    return model


ADAPTED = "base_model.model."
WORLDS: dict[str, tuple[list[Planted], Callable]] = {
    "kinds": (both(MODULES), lambda model: model),
    "zero 3": (both(SOME, stage=3), lambda model: model),
    "tensor": (both(SOME, section={"parallel": {"tensor": 2}}), lambda model: model),
    "sequence parallel": (
        both(SOME, section={"parallel": {"tensor": 2, "sequence_parallel": True}}),
        lambda model: model,
    ),
    "context": (both(SOME, section={"parallel": {"context": 2}}), lambda model: model),
    "expert": (
        both((f"{LAST}mlp", *SOME[::2]), family="mixtral", section={"parallel": {"expert": 2}}),
        lambda model: model,
    ),
    "pipeline": (both(SOME, rank=-1, section=STAGES), lambda model: model),
    "pipeline, zb_v": (
        both(
            ("model.layers.2.self_attn", "model.layers.3.mlp"),
            rank=-1,
            section=STAGES | {"pipeline": {"schedule": "zb_v"}},
            changes={"num_hidden_layers": 4},
        ),
        lambda model: model,
    ),
    "recompute": (both(SOME, section={"recompute": {"layers": "all"}}), lambda model: model),
    "swap": (both(SOME, section={"swap": {"activations": True}}), lambda model: model),
    "fused": (both(SOME, section=FUSED), lambda model: model),
    "chunked loss": (both(SOME, section={"chunked_loss": True}), lambda model: model),
    "LoRA": (
        both([f"{ADAPTED}{LAST}mlp.down_proj", f"{ADAPTED}{LAST}self_attn.q_proj.lora_A.default"]),
        lora,
    ),
    "compiled": (both((f"{LAST}mlp",)), compiled),
}


def named(world: str, folder: str) -> None:
    """Each planted module is named with its direction, micro-batch and rank, by all ranks alike."""
    cases, prepared = WORLDS[world]
    for case in cases:
        text = case.text(folder, prepared)
        every: list[str] = [""] * 2
        dist.all_gather_object(every, text)
        assert every[0] == every[1], every
        first = "in backward whose gradients are" if case.backward else "whose output is"
        rank = r"\d" if case.rank < 0 else case.rank
        module = re.escape(case.name)
        where = rf"\n  first module {first} not finite: {module} \(\w+\), on rank {rank}\n"
        assert re.search(where, text), (case, text)
        piece = r" \(of the pipeline's pieces of it number 1\)" if case.rank < 0 else ""
        direction = "backward" if case.backward else "forward"
        assert re.search(rf"in the {direction} of micro-batch 1{piece}: aten.div.Tensor gave ", text), text
        assert "\n  written on " in text, text
        axes = case.section.get("parallel", {}).keys()
        if not axes & {"expert"}:  # Wrong tokens may go to the other rank's experts.
            assert ("rank 0: loss" in text) == (not case.backward and bool(axes)), text
        for line in re.findall(r"\n  in: (.*)", text):
            assert line.endswith("all finite"), (case, line)
        assert re.search(r"\n  out: .*not finite \(", text), (case, text)


@pytest.mark.slow
@pytest.mark.matrix(corners=3, drawn=2)
@pytest.mark.parametrize("world", WORLDS)
def test_the_planted_module_is_named(world, tmp_path):
    run_on_ranks(2, named, world, f"{tmp_path}/")


def large(part: str, value: float = 3e38) -> Callable:
    """An edit of the weight of ``part``, by which its product overflows."""

    def edit(model) -> None:
        with torch.no_grad(), allow_shard_access():
            model.get_submodule(part).weight.fill_(value)

    return edit


def scaled(model) -> None:
    """Scores of an attention overflow."""
    model.get_submodule(f"{LAST}self_attn").scaling = 3e38


def one_expert(model) -> None:
    """One rank's second expert is not a number."""
    if dist.get_rank() == 1:
        with torch.no_grad(), allow_shard_access():
            model.get_submodule(f"{LAST}mlp.experts").down_proj[1].fill_(torch.nan)


EDITS = {
    "product": (large(f"{LAST}mlp.down_proj"), Planted("")),
    "attention": (scaled, Planted("")),
    "sharded product": (large(f"{LAST}mlp.down_proj"), Planted("", section={"parallel": {"tensor": 2}})),
    "expert": (one_expert, Planted("", family="mixtral", section={"parallel": {"expert": 2}})),
}


def edited(folder: str) -> None:
    """The errors of models whose own weights or numbers overflow; their texts and files, by the edit."""
    for name, (edit, case) in EDITS.items():
        engine = case.engine(f"{folder}{name}/")
        take_step(engine, bad=False)
        edit(engine.module)
        with pytest.raises(FloatingPointError) as caught:
            take_step(engine, bad=False)
        if dist.get_rank() == 0:
            Path(f"{folder}{name}.txt").write_text(str(caught.value))


@pytest.mark.slow
def test_what_is_written_computes_the_module_again(tmp_path):
    run_on_ranks(2, edited, f"{tmp_path}/")
    texts = {name: (tmp_path / f"{name}.txt").read_text() for name in EDITS}
    data = {name: read_module_file(next((tmp_path / name).iterdir())) for name in EDITS}
    found = {name: replayed(each) for name, each in data.items()}
    for name in ("product", "attention"):
        replays, refused = found[name]
        assert not refused
        recorded = [each for each in replays if each.difference is not None]
        assert [each.of for each in recorded] == [OPERATOR, MODULE]
        assert all(each.difference == 0 and not each.is_finite for each in recorded), recorded
    assert [each.is_finite for each in found["product"][0]] == [False, False, True] * 2
    assert f"{LAST}mlp.down_proj (Linear), on rank 0" in texts["product"]
    assert "aten.mm.default gave -inf, inf" in texts["product"]
    # An argument that the module had is there as it was.
    plain = tiny_models.tiny("llama", torch.float32)
    seen = []
    plain.get_submodule(f"{LAST}mlp.down_proj").register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    weights = data["product"]["weights"]
    assert weights.keys() == {"weight"} and (weights["weight"] == 3e38).all()
    ids = tiny_models.tokens(2, 8)
    plain(input_ids=ids, labels=ids)
    given = data["product"]["arguments"]["args"][0]
    assert given.shape == seen[0].shape and torch.equal(given, seen[0])
    figures = rf"min {seen[0].min():.4g}, max {seen[0].max():.4g}, mean {seen[0].double().mean():.4g}, all finite"
    assert f"in: args[0]: float32 [2, 8, 48]: {figures}" in texts["product"], (figures, texts["product"])
    replays, refused = found["sharded product"]
    assert [(each.of, each.is_finite) for each in replays] == [(OPERATOR, False), (OPERATOR, False), (OPERATOR, True)]
    assert replays[0].difference == 0 and "a RowLinear of ds_npu, which computes with other ranks" in refused[0]
    assert "its weight down_proj of expert 1 on this rank gave nan" in texts["expert"]
    assert f"{LAST}mlp.experts (MixtralExperts), on rank 1" in texts["expert"]
    assert "computed again" in "\n".join(replay_lines(data["product"]))


def out_of_reach(folder: str) -> None:
    """A folder that cannot be made: the module is named all the same, with one message."""
    text = Planted(f"{LAST}mlp").text(f"{folder}/file/inside")
    assert f"first module whose output is not finite: {LAST}mlp (LlamaMLP), on rank 1" in text, text
    assert "was not written: Not a directory. What to do: name another folder in ds_npu.watch.finite" in text, text
    with mock.patch.object(torch, "save", saved_without_room):
        text = Planted(f"{LAST}mlp").text(f"{folder}/full/")
    assert "was not written: File too large" in text, text
    assert not os.listdir(f"{folder}/full")


def saved_without_room(data: object, stream: BinaryIO) -> None:
    """``torch.save`` where a file may have 4 KiB: the system refuses the rest of it."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        SAVE(data, stream)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.slow
def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    run_on_ranks(2, out_of_reach, str(tmp_path))


def test_other_files_are_refused(tmp_path):
    file = tmp_path / "x.pt"
    file.write_bytes(b"no file of torch")
    with pytest.raises(ModuleFileError, match=r"no file of ds_npu\.watch\.finite, or not a whole one"):
        read_module_file(file)
    torch.save({"weight": torch.ones(BAD)}, file)
    with pytest.raises(ModuleFileError, match=r"no file of ds_npu\.watch\.finite"):
        read_module_file(file)
