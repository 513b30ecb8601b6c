"""The part about NPUs of ds_report, on machines with and without one."""

from __future__ import annotations

import io
import re
from importlib.metadata import version

import npu_double
import pytest
from deepspeed.ops.op_builder import npu as op_builder_npu
from packaging.version import Version

from ds_npu import capability
from ds_npu.capability import runtime
from ds_npu.engine import report as module
from ds_npu.engine.report import report


def printed(**arguments):
    out = io.StringIO()
    report(out, **arguments)
    return out.getvalue()


def row(text, name):
    """What stands behind the dots of the row ``name``."""
    found = re.search(rf"^{re.escape(name)} \.+ (.*)$", text, re.MULTILINE)
    assert found, f"no row {name!r} in:\n{text}"
    return found.group(1)


@pytest.fixture
def cpu_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(runtime, "DEV", tmp_path)
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)


def test_on_a_cpu_machine_every_part_is_there_with_reasons(cpu_machine, monkeypatch):
    npu_double.remove(monkeypatch)
    text = printed()
    assert row(text, "torch_npu version") == "not installed"
    assert "ASCEND_HOME_PATH is not set" in row(text, "CANN version")
    assert row(text, "NPUs").startswith(module.NO)
    assert "What to do: " in text
    assert module.NO in row(text, "versions go together")
    assert row(text, "fused_adam") == f"{module.NO} see NPUs above"


def test_on_an_npu_machine(cpu_machine, monkeypatch, tmp_path):
    npu_double.install(monkeypatch, devices=2)
    (tmp_path / "version.info").write_text("Version=8.5.0\n")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    monkeypatch.setenv("HCCL_BUFFSIZE", "512")
    text = printed()
    assert row(text, "NPUs") == f"{module.OKAY} 2"
    assert row(text, "npu:1") == "Double910, 64.0 GiB"
    assert row(text, "CANN version") == "8.5.0"
    assert row(text, "HCCL_BUFFSIZE").startswith("512 (user; ")
    assert row(text, "fused_adam") == module.OKAY


def test_a_device_that_does_not_answer_does_not_end_the_report(cpu_machine, monkeypatch):
    npu = npu_double.install(monkeypatch, devices=1)

    def busy(index):
        raise RuntimeError("device 0 is busy")

    npu.get_device_properties = busy
    text = printed()
    assert "device 0 is busy" in row(text, "npu:0")
    assert "ds_npu features" in text


def test_versions_that_go_together_are_okay(cpu_machine, monkeypatch):
    good = capability.Versions("2.9.0", "2.9.0", "8.5.0", "24.1", "0.19.8", "3.11.4")
    monkeypatch.setattr(capability, "versions", lambda: good)
    assert row(printed(), "versions go together") == module.OKAY


def test_every_setting_has_its_row(cpu_machine):
    text = printed()
    assert [name for name, _, _ in capability.SETTINGS if row(text, name) == ""] == []


def test_builders_that_cannot_be_imported_do_not_end_the_report(cpu_machine, monkeypatch):
    real = capability.try_import

    def broken(name):
        return (None, RuntimeError("Two accelerators")) if name == "ds_npu.ops.builders" else real(name)

    monkeypatch.setattr(capability, "try_import", broken)
    assert "Two accelerators" in row(printed(), "all operators")


def test_features_and_what_they_lack(cpu_machine):
    text = printed(features=[("fused_ops", []), ("moe", ["no grouped matmul", "no permute"])])
    assert row(text, "fused_ops") == module.OKAY
    assert row(text, "moe") == f"{module.NO} no grouped matmul"
    assert re.search(r"^ +no permute$", text, re.MULTILINE)
    assert text.rstrip().endswith("-" * 20)


def test_it_goes_to_the_stdout_of_the_moment(cpu_machine, capsys):
    report()
    assert "NPU devices" in capsys.readouterr().out


def test_the_look_is_ds_reports():
    from deepspeed import env_report

    assert (env_report.OKAY, f"{env_report.YELLOW}[NO]{env_report.END}") == (module.OKAY, module.NO)


@pytest.mark.parametrize("home", [None, "", "/nowhere/at/all"])
def test_cann_path_replacement_raises_nothing(monkeypatch, home):
    from deepspeed import env_report

    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    if home is not None:
        monkeypatch.setenv("ASCEND_HOME_PATH", home)
    assert module.installed_cann_path() is None
    monkeypatch.setattr(env_report, "installed_cann_path", module.installed_cann_path)
    assert "CANN_HOME does not exist" in env_report.installed_cann_version()


def test_cann_path_replacement_agrees_where_the_original_works(monkeypatch, tmp_path):
    from deepspeed import env_report

    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert module.installed_cann_path() == env_report.installed_cann_path() == str(tmp_path)


@pytest.mark.parametrize("built_for", ["cpu", "npu"])
def test_the_installed_column(monkeypatch, capsys, built_for):
    from deepspeed import env_report
    from deepspeed.accelerator import get_accelerator

    from ds_npu.ops import builders

    said = module.installed_operators({"cpu_adam": True, "async_io": False}, built_for)
    assert (said["fused_adam"], said["transformer_inference"], said["async_io"]) == (True, True, False)
    assert said["cpu_adam"] is (built_for == "npu")
    made = {"fused_adam": builders.FusedAdamBuilder(), "cpu_adam": builders.CPUAdamBuilder()}
    monkeypatch.setattr(env_report, "ALL_OPS", made)
    monkeypatch.setattr(env_report, "installed_ops", said)
    monkeypatch.setattr(env_report, "accelerator_name", get_accelerator()._name)
    env_report.op_report(verbose=False)
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if "...." in line}
    assert "[YES]" in rows["fused_adam"]
    assert ("[YES]" in rows["cpu_adam"]) is (built_for == "npu")


def test_what_is_called_installed_is_loaded_without_a_build():
    loaded = {each.name: each.load() for each in module._builders() if not each.sources()}
    later = {"fused_lamb": "FusedLamb", "fused_lion": "FusedLion", "quantizer": "Quantizer"}
    here = {name for name, builder in later.items() if f"{builder}Builder" in vars(op_builder_npu)}
    assert set(loaded) == {"fused_adam", "transformer_inference", *here}
    assert len(here) == (3 if Version(version("deepspeed")) >= Version("0.19.8") else 0)
