"""Whatever stands in a file, ``ds_npu check`` ends soon, with exit code 0, 1 or 2, and in one short readable error."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import hjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ds_npu.cli import check as check_command
from ds_npu.cli.main import main
from ds_npu.config.check import check
from ds_npu.config.loading import MOST_BYTES, MOST_HJSON_CHARACTERS, load
from ds_npu.config.problems import ConfigError
from ds_npu.engine.announcement import with_section

ROOT = Path(__file__).parents[2]
VALID = {
    "train_batch_size": 16,
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8},
    "bf16": {"enabled": True},
    "ds_npu": {"parallel": {"tensor": 2, "context": 2}, "plan": {"layers.*": "block"}},
}
MODEL = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
SECONDS = 10.0
"""Of a processor, which others share."""
MOST_OUTPUT = 40_000


def run(*arguments, encoding="ascii"):
    """Exit code, output and errors of ``ds_npu ARGUMENTS`` in this process, on a terminal of ``encoding``."""
    out, errors = (io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True) for _ in range(2))
    start = time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            code = main([str(each) for each in arguments])
        except SystemExit as end:
            code = end.code
    assert time.process_time() - start < SECONDS
    return code, *(stream.buffer.getvalue().decode(encoding) for stream in (out, errors))


def assert_readable(code, out, errors):
    """A report, or an error whose first line says how many mistakes there are."""
    assert code in (0, 1) and len(out) + len(errors) < MOST_OUTPUT, (code, len(out), len(errors))
    assert "Traceback" not in errors and (errors == "") == (code == 0)
    if code:
        first, *problems = errors.splitlines()
        count = int(first.split()[0].replace(",", ""))
        assert first.startswith(("1 mistake in ", f"{count:,} mistakes in ")) and first.endswith(":") and out == ""
        assert 1 <= len(problems) <= 51 and len(problems) == min(count, 51)
        assert all(line.startswith("  ") and line.isprintable() for line in problems), problems


def mutated(valid):
    """The bytes of a valid file with a piece of them replaced."""
    data = json.dumps(valid).encode()
    pieces = st.sampled_from(
        [
            *(b"", b"NaN", b"1e400", b"-", b"}", b"[", b"/*", b"'''", b'"', b"\\ud800", b"\xff", b"\0", b",", b"#"),
            *(b"true", b"null", b"0.5", b'"auto"', b"{}", b'"train_batch_size"', b"-0", b"9" * 5000, b"\xef\xbb\xbf"),
        ]
    )
    return st.builds(
        lambda at, length, piece: data[:at] + piece + data[at + length :],
        st.integers(0, len(data)),
        st.integers(0, 20),
        pieces | st.binary(max_size=8),
    )


KEYS = st.text(max_size=8) | st.sampled_from(
    ["\ud800", "ds_npu", "parallel", "context", "train_batch_size", "plan", ""]
)
NUMBERS = st.integers() | st.floats() | st.sampled_from([10**30, 10**4000, -(2**64), 1e308, 2**20, 720720, 720])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=20) | st.just("\udfff" * 3000),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
DOCUMENTS = st.dictionaries(
    KEYS, VALUES | st.dictionaries(KEYS, VALUES | st.dictionaries(KEYS, VALUES, max_size=3), max_size=3), max_size=4
)
FILES = (
    st.binary(max_size=200)
    | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass"))
    | st.text("{}[]:,\"'#/*\\n \n0aNt-.e", max_size=60).map(str.encode)
    | mutated(VALID)
    | DOCUMENTS.map(lambda value: json.dumps(value).encode())
    | DOCUMENTS.map(lambda value: json.dumps(VALID | value).encode("utf-16"))
)
WORLDS = st.sampled_from([(), ("--world-size", 8), ("--world-size", 2**40), ("--world-size", 1)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("bytes")


@given(FILES, WORLDS)
@settings(max_examples=300)
@example(b"", ())
@example(b"\xef\xbb\xbf", ())
@example(b"[" * 100_000, ())
@example(b'{"a":' * 900 + b"1" + b"}" * 900, ())
@example(b"{a:" * 900 + b"1" + b"}" * 900, ())
@example(b'{"ds_npu": {"\\ud800": 1, "a\\nb\\u001b[31m": 1}, "train_batch_size": 1}', ())
@example(b'{"train_batch_size": ' + b"9" * 5000 + b"}", ())
@example(b"{train_batch_size: 1e400}", ())
@example(b"{a: /* ", ())
@example(b"a: '''", ())
@example(b"n" + b"," * MOST_HJSON_CHARACTERS, ())
@example(b"n" + b"," * (MOST_HJSON_CHARACTERS - 1), ())
@example(b"\0" * (MOST_BYTES + 1), ())
def test_any_bytes_are_a_config_or_end_in_an_error(folder, data, options):
    path = folder / "ds_config.json"
    path.write_bytes(data)
    assert_readable(*run("check", path, *options))


@given(
    st.binary(max_size=60)
    | mutated(MODEL)
    | st.fixed_dictionaries(
        {}, optional=dict.fromkeys([*MODEL, "hidden_size", "text_config", "qk_nope_head_dim"], VALUES)
    ).map(lambda value: json.dumps(MODEL | value).encode()),
    st.integers(1, 2**40),
    st.sampled_from([2, 6, 64]),
)
@settings(max_examples=100)
@example(b'{"num_attention_heads": 2, "head_dim": 1e30}', 64, 2)
@example(b'{"num_attention_heads": 2, "head_dim": 1' + b"0" * 30 + b"}", 64, 2)
@example(b'{"num_attention_heads": NaN, "head_dim": -Infinity}', 64, 2)
@example(b"[" * 100_000, 64, 2)
def test_any_bytes_are_a_model_or_end_in_an_error(folder, data, length, context):
    (folder / "config.json").write_bytes(data)
    section = {"parallel": {"context": context}}
    (folder / "context.json").write_text(json.dumps({"train_batch_size": 8, "ds_npu": section}))
    options = ("--model", folder, "--sequence-length", length)
    assert_readable(*run("check", folder / "context.json", *options))


@given(DOCUMENTS | st.just(VALID), st.booleans())
@settings(max_examples=150)
def test_json_is_read_as_deepspeed_reads_it(folder, document, indented):
    """DeepSpeed takes all files for Hjson; what is JSON is not read by hjson here."""
    path = folder / "ds_config.json"
    path.write_text(json.dumps(document, allow_nan=True, indent=2 if indented else None))
    try:
        found = load(path)
    except ConfigError:
        return
    theirs = hjson.loads(path.read_text())
    assert found == theirs and json.dumps(found) == json.dumps(theirs)


@pytest.mark.parametrize("text", ['{"a": 1e400}', '{"a": ' + "9" * 5000 + "}"])
def test_what_deepspeed_cannot_read_is_refused_by_its_path(folder, text):
    path = folder / "ds_config.json"
    path.write_text(text)
    with pytest.raises((OverflowError, ValueError)):
        hjson.loads(text)
    with pytest.raises(ConfigError, match=r"\n  a: found "):
        load(path)


def test_a_config_in_base64_is_not_overlooked():
    """deepspeed.initialize takes a dict, a path, or this."""
    for config in (VALID, {"train_batch_size": 1}):
        given = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
        assert with_section(given) == (config if "ds_npu" in config else None)
    assert with_section("no/such/file.json") is None and with_section("\0") is None and with_section("ÿ") is None
    with pytest.raises(ConfigError, match="the config in base64, line 1, column 12"):
        with_section(base64.urlsafe_b64encode(b'{"ds_npu": }').decode())


@pytest.mark.parametrize("layers", [65, 900, 10_000])
def test_a_dict_made_in_python_may_be_as_bad(layers):
    bottom = config = {}
    for _ in range(layers):
        bottom["a"] = bottom = {}
    for endless in (config, {"ds_npu": config}):
        with pytest.raises(ConfigError, match="at most 64 objects and lists inside of one another"):
            check({"train_batch_size": 1, "ds_npu": {}, "x": endless}, 1)
    bottom["a"] = config
    with pytest.raises(ConfigError, match="at most 64"):
        check({"train_batch_size": 1, "ds_npu": config}, 1)


HOSTILE = [
    10**5000,
    -(10**5000),
    float("nan"),
    float("inf"),
    "\ud800",
    "x" * 10**6,
    b"\xff",
    object(),
    {(1, 2): 3},
    {1},
]


@pytest.mark.parametrize("value", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("key", ["tensor", "context", "sequence_parallel", "zzz"])
def test_a_python_value_that_json_does_not_have_is_refused_by_name(key, value):
    for config in ({"parallel": {key: value}}, {"plan": {"a": value}}, {"recompute": {"budget_gib": value}}, value):
        with pytest.raises(ConfigError) as caught:
            check({"train_batch_size": 1, "ds_npu": config}, 1)
        assert len(str(caught.value)) < 3000 and "ds_npu" in str(caught.value)
    with pytest.raises(ConfigError, match="train_batch_size"):
        check({"train_batch_size": value, "ds_npu": {}}, 1)


@pytest.mark.parametrize("where", ["ds_npu", "plan", "top", "near"])
def test_thousands_of_wrong_keys_are_counted_not_listed(folder, where):
    wrong = {f"key{index}": index for index in range(20_000)}
    config = {
        "ds_npu": {"ds_npu": wrong},
        "plan": {"ds_npu": {"plan": wrong}},
        "top": {"ds_npu": {"a": 1}} | wrong,
        "near": {"ds_npu": {"a": 1}} | {f"ds_npu{index}": 1 for index in range(20_000)},
    }[where]
    path = folder / "ds_config.json"
    path.write_text(json.dumps({"train_batch_size": 8} | config))
    code, out, errors = run("check", path)
    assert_readable(code, out, errors)
    if where in ("ds_npu", "plan"):
        assert errors.splitlines()[0] == "20,000 mistakes in the DeepSpeed config:" and "and 19,950 more" in errors


def test_what_is_no_regular_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "link")
    for path, reason in (("pipe", "a pipe"), (".", "a directory"), ("/dev/zero", "a device"), ("link", "symbolic")):
        code, _, errors = run("check", tmp_path / path)
        assert code == 1 and reason in errors
        with pytest.raises(ConfigError, match=reason) if path != "link" else contextlib.nullcontext():
            with_section(tmp_path / path)
        code, _, errors = run("check", tmp_path / "nul\0name")
        assert code == 1 and "null byte" in errors


@pytest.mark.parametrize("option", ["--world-size", "--sequence-length"])
@pytest.mark.parametrize("text", ["0", "-1", "1" * 5000, str(2**40 + 1), "1e3", "\ud800", "²"])
def test_a_size_that_is_none_is_wrong_usage(folder, option, text):
    path = folder / "valid.json"
    path.write_text(json.dumps(VALID))
    code, out, errors = run("check", path, f"{option}={text}")
    assert (code, out) == (2, "") and "an integer >= 1" in errors and len(errors) < 2000


def test_a_terminal_without_the_letters_shows_escapes(folder):
    path = folder / "valid.json"
    path.write_text(json.dumps(VALID | {"dsnpü": 1, "npu\u2028": 1}))
    code, out, _ = run("check", path, "--world-size", 8)
    assert code == 0 and "npu" in out and out.isascii()


def command(*arguments, **options):
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | options.pop("env", {})
    line = [sys.executable, "-m", "ds_npu.cli.main", *map(str, arguments)]
    return subprocess.Popen(line, env=environment, stderr=subprocess.PIPE, text=True, **options)


def no_room():
    """A full disk for the process: no file of it may grow."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def test_output_that_nobody_can_read(folder):
    path = folder / "valid.json"
    path.write_text(json.dumps(VALID))
    reader, writer = os.pipe()
    os.close(reader)
    with (folder / "full").open("w") as full:
        started = [
            (1, "", command("check", path, stdout=writer)),
            (1, "File too large", command("check", path, stdout=full, preexec_fn=no_room)),
            (0, "", command("check", path, stdout=subprocess.DEVNULL, env={"PYTHONIOENCODING": "ascii"})),
            (1, "1 mistake in", command("check", folder, stdout=subprocess.DEVNULL, env={"LC_ALL": "C"})),
        ]
        os.close(writer)
        for expected, said, process in started:
            _, errors = process.communicate(timeout=60)
            assert process.returncode == expected and said in errors and len(errors.splitlines()) <= 2, errors


def test_interrupted(folder, monkeypatch):
    def interrupt(_):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(check_command, "load", interrupt)
    # Python has no handler where the shell has started it in the background.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert run("check", folder / "valid.json") == (130, "", "")
    finally:
        signal.signal(signal.SIGINT, before)
