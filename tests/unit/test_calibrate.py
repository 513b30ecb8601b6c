"""``ds_npu calibrate``: the profile of a machine whose speeds are known, files that are no reports, and its use."""

from __future__ import annotations

import dataclasses
import json

import pytest

from ds_npu.acceptance.case import Scope
from ds_npu.acceptance.groups import GROUPS
from ds_npu.acceptance.speed_cases import NODE, SpeedCase, calibrated, speed_cases
from ds_npu.cli.main import main
from ds_npu.topology.machine import A2, MACHINES, UNITS, machine_named

TRUE = dataclasses.replace(
    A2,
    name="true",
    matmul=2.5e14,
    matmul_float32=6e13,
    memory=((48 << 20, 3e12), (150 << 20, 2e12), (192 << 20, 1.5e12), (1 << 30, 1.1e12)),
    attention=((1024, 5e13), (2048, 7e13), (4096, 9e13), (8192, 1e14), (16384, 1.2e14), (32768, 1.3e14)),
    hbm=60 << 30,
    kernel=4e-6,
    message=2e-5,
    port=1.2e11,
    link=1.8e10,
    host=2.1e10,
)


def seconds_of(case: SpeedCase) -> float:
    """Seconds of a case on the machine TRUE, each written out by hand."""
    tile = 2 * 128 * 256
    of_a_product = 86 * 24 * tile * 8192  # 2,048 tiles are 86 rounds of 24 cores.
    sent = (case.ranks - 1) / case.ranks * (256 << 20)
    return {
        "kernel": lambda: 4e-6,
        "hbm": lambda: float(60 << 30),
        "matmul": lambda: 4e-6 + of_a_product / 2.5e14,
        "matmul_float32": lambda: 4e-6 + of_a_product / 6e13,
        "memory": lambda: 4e-6 + case.size / dict(TRUE.memory)[case.size],
        "attention": lambda: 4e-6 + 7 * 2 * 32 * case.size**2 * 128 / dict(TRUE.attention)[case.size],
        "host": lambda: (256 << 20) / 2.1e10,
        "message": lambda: 2e-5,
        "link": lambda: 2e-5 + sent / 1.8e10,
        "port": lambda: 2e-5 + sent / 1.2e11,
    }[case.field]()


def report(npus: int = NODE, **changed) -> dict:
    cases = [
        {"group": "speeds", "case": case.name, "result": "passed", "speed": [seconds_of(case)]}
        for case in speed_cases(Scope(npus, False))
    ]
    versions = {"torch_npu": "2.13.0", "cann": "8.5", "driver": None}
    about = {"ds_npu accept": 1, "simulated": False, "begun": "2026-11-25T00:00:00Z", "versions": versions}
    return about | {"npus": [{"name": "Ascend910B2"}] * npus, "cases": cases} | changed


def test_a_machines_numbers_are_found_again():
    found = calibrated(A2, [(case, seconds_of(case)) for case in speed_cases(Scope(NODE, False))])
    for field in UNITS:
        value = getattr(TRUE, field)
        wanted = [rate for _, rate in value] if isinstance(value, tuple) else value
        number = [rate for _, rate in getattr(found, field)] if isinstance(value, tuple) else getattr(found, field)
        assert number == pytest.approx(wanted, rel=1e-12), field


def test_a_call_that_takes_no_longer_than_the_least_is_refused():
    kernel, _, product, *_ = speed_cases(Scope(1, False))
    with pytest.raises(ValueError, match=r"a product of matrices .* no longer than the least time"):
        calibrated(A2, [(kernel, 1e-3), (product, 9e-4)])


def broken(speed) -> dict:
    """A report whose first case has ``speed`` in place of its seconds."""
    found = report()
    found["cases"][0]["speed"] = [speed]
    return found


@pytest.fixture
def calibrate(tmp_path, capsys, monkeypatch):
    """``ds_npu calibrate`` of a report: exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    def calibrate(found, *options):
        (tmp_path / "report.json").write_text(found if isinstance(found, str) else json.dumps(found))
        code = main(["calibrate", "report.json", *options])
        return code, *capsys.readouterr()

    return calibrate


def test_a_profile_is_written_and_used(calibrate, tmp_path, capsys):
    code, said, _ = calibrate(report(), "--name", "ours")
    assert code == 0 and "10 numbers measured, 14 as of 910B2" in said and "2.5e+14 FLOP/s" in said
    machine = machine_named("machine.json")
    assert machine.name == "ours" and machine.matmul == pytest.approx(2.5e14)
    assert (machine.network, machine.peak) == (MACHINES["910B2"].network, MACHINES["910B2"].peak)
    entry = json.loads((tmp_path / "machine.json").read_text())["machines"]["ours"]["link"]
    assert entry["mark"] == "measured" and "8 x Ascend910B2" in entry["source"] and "CANN 8.5" in entry["source"]
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 32, "hidden_size": 4096}))
    config = {"train_micro_batch_size_per_gpu": 1, "ds_npu": {"parallel": {"context": 4}}}
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    options = ("--model", "config.json", "--sequence-length", "8192", "--machine", "machine.json")
    assert main(["check", "ds_config.json", *options]) == 0
    assert "Assumed of an ours" in capsys.readouterr().out


def test_one_npu_measures_no_links(calibrate):
    code, said, _ = calibrate(report(1))
    assert code == 0 and "7 numbers measured, 17 as of 910B2" in said and "link" not in said


@pytest.mark.parametrize(
    ("found", "options", "why"),
    [
        ("{", (), "Expecting property name"),
        ("[]", (), "no file of ds_npu accept"),
        (report(simulated=True), (), "its NPUs were simulated"),
        (report(cases=[]), (), "it has no speeds; run ds_npu accept --only speeds"),
        (report(cases=[5]), (), "no whole file of ds_npu accept"),
        (report(cases=[{"group": "speeds"}]), (), "no whole file of ds_npu accept"),
        (report(npus=1) | {"npus": "NPU"}, (), "no whole file of ds_npu accept"),
        (report(versions=None), (), "no whole file of ds_npu accept"),
        (broken("nan"), (), "the least time of a kernel: nan s"),
        (broken("a day"), (), "could not convert string to float: 'a day'"),
        (report(), ("--name", "A2"), "of no known machine"),
        (report(), ("--name", "a b"), "of no known machine"),
        (report(), ("--out", "report.json"), "is there already"),
    ],
    ids=lambda value: value if isinstance(value, str) and value[:1] not in "{[" else "",
)
def test_what_is_no_report_is_refused_in_one_line(calibrate, tmp_path, found, options, why):
    code, said, errors = calibrate(found, *options)
    assert code in (1, 2) and not said and why in errors and errors.count("\n") == 1
    assert not (tmp_path / "machine.json").exists()


@pytest.mark.parametrize(
    "text",
    [
        *("B200", "no_file.json", ".", "{}", "[]", '{"machines": 1}', '{"machines": {}}', '{"machines": {"x": 1}}'),
        *(json.dumps({"machines": {"x": {"like": like}}}) for like in ("x", "y", "")),
        '{"machines": {"x": {"like": ["A2"]}}}',
        '{"machines": {"x": {}, "y": {}}}',
        "[" * 100_000,
    ],
    ids=lambda text: text[:40],
)
def test_a_machine_that_is_none_is_one_error(text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds_config.json").write_text("{}")
    if text[0] in "{[":
        (tmp_path / "machine.json").write_text(text)
        text = "machine.json"
    with pytest.raises(SystemExit) as ended:
        main(["check", "ds_config.json", "--machine", text])
    errors = capsys.readouterr().err
    assert ended.value.code == 2 and f"found '{text}'" in errors and errors.count("\n") == 1


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("matmul", -1, "-1 is no positive number"),
        ("node", 8.5, "8.5 is no positive number of ranks"),
        ("cores", True, "True is no positive number"),
        ("memory", {"x": 1e12}, "no table of numbers by sizes"),
        ("memory", {"-1": 1e12}, "no table of numbers by sizes"),
        ("speed", 1, "missing or unknown: speed"),
    ],
)
def test_a_wrong_number_of_a_profile_is_named_with_its_file(field, value, why, tmp_path):
    entry = {"value": value, "unit": UNITS.get(field, ""), "mark": "measured", "trust": "high", "source": "a test"}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"machines": {"mine": {"like": "A2", field: entry}}}))
    with pytest.raises(ValueError, match=rf"mine\.json: mine.*{why}"):
        machine_named(str(path))


def test_speeds_are_measured_last():
    assert [group.name for group in GROUPS][-1] == "speeds"
