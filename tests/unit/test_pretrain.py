"""examples/pretrain.py without its launcher: which checkpoint is whole, and which mistakes are noticed."""

import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))

import checkpoints  # noqa: E402
import pretrain  # noqa: E402
from rank_group import Ranks  # noqa: E402

# ---- checkpoints on disk ----


def make_checkpoint(folder: Path, step: int) -> Path:
    path = folder / checkpoints.tag_of(step)
    path.mkdir(parents=True)
    (path / "weights.pt").write_bytes(b"x" * 100)
    files = {"weights.pt": 100}
    (path / checkpoints.MANIFEST).write_text(json.dumps({"step": step, "identity": {}, "files": files}))
    return path


def spoil(folder: Path, how: str) -> None:
    """Leave behind what a death during a save, or a careless hand, leaves behind."""
    path = make_checkpoint(folder, 30)
    if how == "partial":
        path.rename(path.with_name(path.name + checkpoints.PARTIAL))
    elif how == "truncated":
        (path / "weights.pt").write_bytes(b"x" * 99)
    elif how == "file missing":
        (path / "weights.pt").unlink()
    elif how == "no manifest":
        (path / checkpoints.MANIFEST).unlink()
    elif how == "half a manifest":
        (path / checkpoints.MANIFEST).write_text('{"step": 30, "fil')
    (folder / "latest").write_text(path.name)


@pytest.mark.parametrize("how", ["partial", "truncated", "file missing", "no manifest", "half a manifest"])
def test_only_a_whole_checkpoint_is_chosen(tmp_path, how):
    make_checkpoint(tmp_path, 9)
    whole = make_checkpoint(tmp_path, 20)
    spoil(tmp_path, how)
    assert checkpoints.choose(tmp_path, required=True) == whole
    shutil.rmtree(whole)
    assert checkpoints.choose(tmp_path, required=True).name == checkpoints.tag_of(9)


def test_resume_without_a_checkpoint(tmp_path):
    spoil(tmp_path, "truncated")
    assert checkpoints.choose(tmp_path, required=False) is None
    with pytest.raises(pretrain.RunError, match="no complete checkpoint"):
        checkpoints.choose(tmp_path, required=True)


def test_differences_name_the_key_and_pass_over_what_cannot_matter():
    saved = {"--seed": 1, "deepspeed_config": {"steps_per_print": 1, "optimizer": {"type": "Adam"}}}
    now = {"--seed": 1, "deepspeed_config": {"steps_per_print": 9, "optimizer": {"type": "Lion"}}}
    assert checkpoints.differences(saved, saved) == []
    (line,) = checkpoints.differences(saved, now)
    assert line == "deepspeed_config.optimizer: {'type': 'Adam'} then, {'type': 'Lion'} now"


class Engine:
    """Loads what DeepSpeed saved, as far as these tests go."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    def save_checkpoint(self, folder: str, tag: str, **_: object) -> None:
        (Path(folder) / tag / "weights.pt").write_bytes(bytes(range(256)) * 40)

    def load_checkpoint(self, folder: str, tag: str) -> tuple[str, dict]:
        self.loaded.append(tag)
        return folder, {}


class Alone(Ranks):
    """A world of one rank, without a process group."""

    def __init__(self) -> None:
        self.rank, self.size, self.local_rank, self.group = 0, 1, 0, None


def saved(folder: Path) -> tuple[checkpoints.Checkpoints, Path]:
    kept = checkpoints.Checkpoints(folder, 0, Alone())
    return kept, kept.save(Engine(), 7, {"--seed": 0}, {"losses": 3, "loss_sum": torch.ones(1)})


def test_what_was_saved_is_loaded(tmp_path):
    kept, path = saved(tmp_path)
    expected = [random.random(), np.random.rand(), torch.rand(1).item()]
    engine = Engine()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    checkpoints.set_random_states(checkpoints._load_numbers(path / "rank-00000.pt")["random"])
    assert kept.load(engine, path) == {"losses": 3, "loss_sum": torch.ones(1)}
    assert engine.loaded == [path.name]
    assert [random.random(), np.random.rand(), torch.rand(1).item()] == expected


@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), file=st.integers(0, 1))
@settings(max_examples=30, deadline=None)
def test_a_flipped_bit_is_refused_and_named(where, bit, file):
    with tempfile.TemporaryDirectory() as folder:
        kept, path = saved(Path(folder))
        damaged = path / ("weights.pt", "rank-00000.pt")[file]
        content = bytearray(damaged.read_bytes())
        expected = hashlib.sha256(content).hexdigest()
        content[int(where * len(content))] ^= 1 << bit
        damaged.write_bytes(content)
        assert checkpoints.choose(Path(folder), required=True) == path
        engine = Engine()
        with pytest.raises(pretrain.RunError) as caught:
            kept.load(engine, path)
        found = hashlib.sha256(content).hexdigest()
        assert all(part in str(caught.value) for part in (f"{damaged} is damaged", expected, found, "Remove"))
        assert engine.loaded == []


def test_a_checkpoint_without_checksums_is_loaded(tmp_path):
    """As they were before: sizes only, and numpy's state as an array."""
    kept, path = saved(tmp_path)
    own = path / "rank-00000.pt"
    states = checkpoints.random_states() | {"numpy": np.random.get_state()}
    torch.save({"random": states, "state": {"losses": 4}}, own)
    manifest = json.loads((path / checkpoints.MANIFEST).read_text())
    manifest["files"] = {each.name: each.stat().st_size for each in path.iterdir() if each.name != checkpoints.MANIFEST}
    (path / checkpoints.MANIFEST).write_text(json.dumps(manifest))
    expected = np.random.rand()
    assert kept.load(Engine(), path) == {"losses": 4}
    assert np.random.rand() == expected


class Code:
    """Code in a pickle: it would run where it is loaded, and make ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.folder),))


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    kept, path = saved(tmp_path)
    torch.save({"random": Code(tmp_path / "made"), "state": {}}, path / "rank-00000.pt")
    manifest = {"identity": {}, "files": {}}
    (path / checkpoints.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(pretrain.RunError, match=r"rank-00000\.pt cannot be read"):
        kept.load(Engine(), path)
    assert not (tmp_path / "made").exists()


# ---- mistakes, seen before anything is started ----


def broken_json(folder: Path, name: str, **changes: object) -> str:
    values = json.loads((EXAMPLES / "configs" / name).read_text()) | changes
    path = folder / name
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return str(path)


MISTAKES = {
    "no such data": (lambda t: ["--data", str(t / "none")], "there is no such file or folder"),
    "empty folder": (lambda t: ["--data", str(t)], "holds no file with a byte in it"),
    "too short": (
        lambda t: ["--data", __file__, "--seq-len", "999999", "--model", long_model(t)],
        "fewer than --seq-len",
    ),
    "no such model": (lambda t: ["--model", str(t / "none.json")], "No such file"),
    "not json": (lambda t: ["--model", __file__], "is not JSON"),
    "no model type": (lambda t: ["--model", broken_json(t, "gpt2-tiny.json", model_type=None)], 'no "model_type"'),
    "strange model": (lambda t: ["--model", broken_json(t, "gpt2-tiny.json", model_type="zzz")], "Unrecognized model"),
    "vocabulary": (lambda t: ["--model", broken_json(t, "gpt2-tiny.json", vocab_size=255)], "bytes need at least 256"),
    "positions": (lambda t: ["--seq-len", "5000"], "longer than the 1024 positions"),
    "no optimizer": (
        lambda t: ["--deepspeed_config", broken_json(t, "demo.json", optimizer=None)],
        'has no "optimizer" section',
    ),
    "no ds config": (lambda t: ["--deepspeed_config", str(t / "none")], "No such file"),
    "ds config in base64": (lambda t: ["--deepspeed_config", "eyJv" * 1000], "base64 is not read here"),
    "resume from nowhere": (lambda t: ["--resume"], "--resume needs --save DIR"),
    "zero steps": (lambda t: ["--steps", "0"], "not a whole number above 0"),
    "unknown option": (lambda t: ["--sepps", "1"], "unrecognized arguments: --sepps 1"),
}


def long_model(folder: Path) -> str:
    return broken_json(folder / "..", "llama-tiny.json", max_position_embeddings=10**7)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gives_one_line_and_status_2(name, tmp_path, monkeypatch, capsys):
    arguments, expected = MISTAKES[name]
    monkeypatch.setattr(sys, "argv", ["pretrain.py", *arguments(tmp_path)])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    # A mistake that is not noticed must fail here, not open a process group.
    monkeypatch.setattr(pretrain, "join_world", lambda: pytest.fail("the mistake was not noticed"))
    assert pretrain.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and expected in line


def test_shipped_configs_are_valid():
    for path in sorted((EXAMPLES / "configs").glob("*.json")):
        values = json.loads(path.read_text())
        if "model_type" in values:
            assert pretrain.read_model_config(path, 128).vocab_size == 256
        else:
            assert values["train_micro_batch_size_per_gpu"] > 0 and "optimizer" in values
