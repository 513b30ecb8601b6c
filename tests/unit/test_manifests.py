"""Manifests and files of checkpoints that strangers wrote: one CheckpointError, whatever is wrong with them."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds_npu.checkpoint.contents import fingerprint
from ds_npu.checkpoint.files import CheckpointError
from ds_npu.checkpoint.manifest import MODULE, Manifest, WrittenPart, WrittenRun, manifest_of_json, manifest_path
from ds_npu.checkpoint.wholeness import checkpoints_in, newest_whole
from ds_npu.checkpoint.written import Differences, Plain, WrittenCheckpoint, differences, over_ranks
from ds_npu.parallel.tensor.sharding import Sharding

FILE = "mp_rank_00_model_states.pt"
HALVES = Sharding(0, 4, (((0, 2),), ((2, 4),)))
FILE_OF_MANIFEST = "ds_npu_layout_rank_00000.json"
PLACE = Path("folder", FILE_OF_MANIFEST)


def manifest(rank: int = 0) -> Manifest:
    sharded = WrittenPart(
        (2, 3),
        {"tp": HALVES},
        {"tp": rank},
        WrittenRun(FILE.replace("00", f"0{rank}"), (MODULE, "weight"), 0, 0, 6),
        WrittenRun(FILE.replace("00", f"0{rank}"), ("optimizer", "state", 0), 0, 0, 6),
        0,
        "torch.float32",
    )
    return Manifest({"weight": sharded}, 2, [{"lr": 0.1, "betas": [0.9, 0.99]}], FILE, files={"name": "1a2b"})


def plain() -> dict:
    return json.loads(manifest().to_json())


def test_a_manifest_reads_what_it_wrote():
    assert manifest_of_json(manifest().to_json(), PLACE) == manifest()


def test_manifests_of_version_1_are_read():
    old = plain() | {"version": 1}
    for key in ("layout", "is_known", "leaves_out_frozen", "files"):
        del old[key]
    del old["parts"]["weight"]["dtype"]
    read = manifest_of_json(json.dumps(old), PLACE)
    assert read.version == 1 and read.is_known and read.like(manifest())


HOSTILE = {
    "": ([], "an object"),
    "version": (3, "found version 3"),
    "ranks": (-1, "ranks: expected an integer"),
    "ranks ": (10**30, "ranks: expected an integer"),
    "ranks  ": (True, "ranks: expected an integer"),
    "groups": ({}, "a list"),
    "groups/0": (7, "an object"),
    "groups/0/lr": ({"a": 1}, "a number, text or a list"),
    "model_file": ("/etc/passwd", "plain name"),
    "model_file ": ("..", "plain name"),
    "parts": ([], "an object"),
    "parts/weight": (None, "an object"),
    "parts/weight/shape": ([2, -3], "an integer"),
    "parts/weight/shape ": ([2**40, 2**40], "elements"),
    "parts/weight/shape  ": ([2, 3.0], "an integer"),
    "parts/weight/shape   ": ([4, 3], "shardings make"),
    "parts/weight/shape    ": ([1] * 99, "dims"),
    "parts/weight/shardings": ({"xy": {}}, "axes"),
    "parts/weight/shardings/tp/dim": (2, "dim along"),
    "parts/weight/shardings/tp/size": (10**40, "size along"),
    "parts/weight/shardings/tp/ranges": ([[[0, 2]], [[3, 4]]], "no rank has the indices from 2"),
    "parts/weight/shardings/tp/ranges ": ([[[2, 0]], [[0, 4]]], "a start and a stop"),
    "parts/weight/shardings/tp/ranges  ": ([[[0, 2]], [[2, 9]]], "an integer from 0 to 4"),
    "parts/weight/shardings/tp/ranges   ": ([], "no rank has"),
    "parts/weight/place": ({}, "place of"),
    "parts/weight/place/tp": (2, "place of"),
    "parts/weight/value/file": ("../other/secret.pt", "plain name"),
    "parts/weight/value/file ": ("C:\\secret.pt", "plain name"),
    "parts/weight/value/file  ": ("", "plain name"),
    "parts/weight/value/keys": ([], "names and indices"),
    "parts/weight/value/keys ": ([[]], "names and indices"),
    "parts/weight/value/keys  ": ([MODULE, -1], "negative"),
    "parts/weight/value/first": (1, "elements up to 6"),
    "parts/weight/value/start": (-1, "start of"),
    "parts/weight/value/numel": (2**63, "numel of"),
    "parts/weight/state": ("x", "an object"),
    "parts/weight/group": (1, "group of"),
    "parts/weight/dtype": (7, "text"),
    "is_known": (1, "true or false"),
    "files": ([], "an object"),
    "files ": ({"../x": "1a2b"}, "plain name"),
    "files/name": (7, "text"),
}
"""By the way to a value, which is replaced; blanks at the end tell several apart."""


@pytest.mark.parametrize(("way", "given"), HOSTILE.items())
def test_hostile_manifests(way, given):
    value, said = given
    with pytest.raises(CheckpointError, match=said) as caught:
        manifest_of_json(json.dumps(replaced(plain(), way.strip(), value)), PLACE)
    assert str(PLACE) in str(caught.value) and "What to do:" in str(caught.value)


def replaced(found: object, way: str, value: object) -> object:
    if not way:
        return value
    keys = [int(key) if key.isdigit() else key for key in way.split("/")]
    found = copy.deepcopy(found)
    last = found
    for key in keys[:-1]:
        last = last[key]
    assert keys[-1] in last if isinstance(last, dict) else len(last) > keys[-1], way
    last[keys[-1]] = value
    return found


@pytest.mark.parametrize(
    "text", ["", "{", "7", "null", "[" * 100_000, '{"version": 2}', "1" * 5000, '{"version": NaN}']
)
def test_no_manifest_at_all(text):
    with pytest.raises(CheckpointError, match=str(PLACE)):
        manifest_of_json(text, PLACE)


def ways(found: object) -> list[str]:
    items = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
    return [""] + [f"{key}/{rest}".rstrip("/") for key, each in items for rest in ways(each)]


ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from(["..", "/x", 2**62]),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.sampled_from(["tp", "dim", "size"]), each, max_size=3),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(way=st.sampled_from(ways(plain())), value=ANY)
def test_drawn_manifests(way, value, tmp_path):
    """Any value at any place is refused by name, or reads the weight as it was written."""
    weight = torch.arange(12.0).view(4, 3)
    write(tmp_path, weight)
    manifest_path(tmp_path, 0).write_text(json.dumps(replaced(plain(), way, value)))
    written = WrittenCheckpoint(tmp_path)
    try:
        if written.plain_weights().get("weight") == Plain((4, 3), "torch.float32"):
            found = written.value("weight")
            assert found.shape == weight.shape
            written.state("weight"), written.settings("weight"), written.model_state()
    except CheckpointError as error:
        assert str(tmp_path) in str(error)


def write(folder: Path, weight: torch.Tensor, **more: object) -> None:
    """A checkpoint of two tensor ranks."""
    for rank in range(2):
        part = weight[2 * rank :][:2].clone()
        states = {"state": {0: {"exp_avg": part + 1, "step": 3}}}
        torch.save({MODULE: {"weight": part}, "optimizer": states} | more, folder / FILE.replace("00", f"0{rank}"))
        manifest_path(folder, rank).write_text(manifest(rank).to_json())


def test_a_checkpoint_is_put_together(tmp_path):
    weight = torch.arange(12.0).view(4, 3)
    write(tmp_path, weight)
    written = WrittenCheckpoint(tmp_path)
    assert written.value("weight").equal(weight)
    assert written.state("weight")["exp_avg"].equal(weight + 1) and written.state("weight")["step"] == 3
    assert written.plain_weights() == {"weight": Plain((4, 3), "torch.float32")}


class Mine:
    """A class of a user's client_state."""


RAN = []


class Attack:
    """Runs code where it is unpickled."""

    def __reduce__(self):
        return RAN.append, (1,)


def test_classes_are_refused_by_name(tmp_path):
    write(tmp_path, torch.zeros(4, 3), mine=Mine())
    with pytest.raises(
        CheckpointError, match=r"an object of test_manifests\.Mine.*allowed_classes: ..test_manifests\.Mine"
    ):
        WrittenCheckpoint(tmp_path).value("weight")
    assert WrittenCheckpoint(tmp_path, [Mine]).value("weight").equal(torch.zeros(4, 3))


def test_no_code_is_run(tmp_path):
    write(tmp_path, torch.zeros(4, 3), mine=Attack())
    with pytest.raises(CheckpointError, match=r"mp_rank_00_model_states\.pt"):
        WrittenCheckpoint(tmp_path).value("weight")
    assert RAN == []


def test_files_that_lack_what_manifests_name(tmp_path):
    write(tmp_path, torch.zeros(4, 3))
    path = tmp_path / FILE
    for state, said in (
        ({MODULE: {}}, "has no module/weight"),
        ({MODULE: []}, "has no module/weight"),
        ({MODULE: {"weight": {}}}, "is dict"),
        ({MODULE: {"weight": torch.zeros(2)}}, r"is \[2\]"),
        ([], "expected a dict"),
    ):
        torch.save(state, path)
        with pytest.raises(CheckpointError, match=said):
            WrittenCheckpoint(tmp_path).value("weight")
    torch.save({"optimizer": {"state": []}}, path)
    with pytest.raises(CheckpointError, match="expected the state of an optimizer"):
        WrittenCheckpoint(tmp_path).state("weight")
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        WrittenCheckpoint(tmp_path).value("weight")


def test_files_without_zip_archives(tmp_path):
    """As of DeepSpeed's checkpoint_serialization false."""
    weight = torch.arange(12.0).view(4, 3)
    write(tmp_path, weight)
    for path in tmp_path.glob("*.pt"):
        torch.save(torch.load(path), path, _use_new_zipfile_serialization=False)
    assert WrittenCheckpoint(tmp_path).value("weight").equal(weight)


def test_files_of_another_save(tmp_path):
    weight = torch.arange(12.0).view(4, 3)
    write(tmp_path, weight)
    for rank in range(2):
        file = FILE.replace("00", f"0{rank}")
        known = replace(manifest(rank), files={file: fingerprint(tmp_path / file)})
        manifest_path(tmp_path, rank).write_text(known.to_json())

    def check(rank: int, ranks: int) -> None:
        WrittenCheckpoint(tmp_path).check_files(rank, ranks)

    check(0, 1), check(0, 2), check(1, 2), check(2, 3)
    path = tmp_path / FILE.replace("00", "01")
    before = path.read_bytes()
    torch.save(torch.load(path), path)
    check(0, 1)
    weight[3, 2] = 7.0
    torch.save({MODULE: {"weight": weight[2:].clone()}, "optimizer": torch.load(path)["optimizer"]}, path)
    check(0, 2)
    for ranks in ((0, 1), (1, 2)):
        with pytest.raises(CheckpointError, match=r"mp_rank_01.* is not the file that .*00001\.json was saved with"):
            check(*ranks)
    path.write_bytes(before[:-50])
    with pytest.raises(CheckpointError, match=r"mp_rank_01.* cannot be read"):
        check(0, 1)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"mp_rank_01.* cannot be read"):
        check(0, 1)


def test_bytes_that_are_no_text(tmp_path):
    """A byte of a manifest that was flipped: the folder is listed with its problem, and others are found beside it."""
    tag = tmp_path / "tag"
    tag.mkdir()
    manifest_path(tag, 0).write_bytes(manifest().to_json().encode() + b"\xb7")
    said = rf"{FILE_OF_MANIFEST} cannot be read: 'utf-8' codec"
    with pytest.raises(CheckpointError, match=said):
        WrittenCheckpoint(tag).manifest(0)
    found = next(checkpoints_in(tmp_path))
    assert len(found.problems) == 1 and FILE_OF_MANIFEST in found.problems[0]
    assert newest_whole(tmp_path) is None


def test_differences():
    wide, int8 = Plain((4, 8), "torch.float32"), Plain((4, 8), "torch.int8")
    narrow, half = Plain((4, 6), "torch.float32"), Plain((4, 8), "torch.bfloat16")
    assert differences({"a": wide, "b": half}, {"a": half, "b": Plain((4, 8), None)}) == Differences([], [], [])
    found = differences({"a": wide, "b": wide, "d": wide, "e": wide}, {"b": narrow, "c": wide, "d": int8, "e": wide})
    assert (found.missing, found.unexpected) == (["c"], ["a"])
    assert found.other == [
        "b is [4, 8] in the checkpoint and [4, 6] in the model",
        "d is torch.float32 in the checkpoint and torch.int8 in the model",
    ]
    stages = [Differences((), ("a", "b", "x")), Differences((), ("c", "x")), Differences(("y",), ("x",))]
    assert over_ranks(stages) == Differences(["y"], ["x"], [])
    assert Differences([f"w{index}" for index in range(9)]).told().endswith("w5, and 3 more")
