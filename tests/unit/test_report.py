"""The part about NPUs of ds_report, on machines with and without one."""

from __future__ import annotations

import dataclasses
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
from ds_npu.engine.report import feature_report, report


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
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    for name, _, _ in capability.SETTINGS:
        monkeypatch.delenv(name, raising=False)


def test_on_a_cpu_machine_the_first_line_says_why_and_what_to_do(cpu_machine, monkeypatch):
    npu_double.remove(monkeypatch)
    text = printed(features=feature_report())
    first = text.splitlines()[1]
    assert first.startswith("ds_npu ..........................") and first == f"ds_npu {'.' * 27} {row(text, 'ds_npu')}"
    assert row(text, "ds_npu") == (
        f"{module.NO} no NPU can be used: torch_npu is not installed. What to do: install the torch_npu that matches "
        "torch, as pip install torch_npu."
    )
    assert "torch_npu not found, CANN not found" in row(text, "versions")
    assert re.fullmatch(r"\S+ \d of \d+, see ds_npu above", row(text, "DeepSpeed's operators"))
    assert re.fullmatch(r"\S+ \d of \d+, see ds_npu above", row(text, "kernels on NPUs (fused_ops)"))
    assert row(text, "keys of the section").startswith(f"{module.OKAY} parallel, ")
    assert len(text.splitlines()) == 8, text


def test_the_cpu_on_purpose_is_nothing_to_do(cpu_machine, monkeypatch):
    npu_double.remove(monkeypatch)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    said = row(printed(), "ds_npu")
    assert said.startswith(f"{module.OKAY} on the CPU, as DS_ACCELERATOR=cpu asks") and said.endswith("Nothing to do")


def test_patches_that_do_not_fit_come_first(cpu_machine, monkeypatch):
    npu_double.install(monkeypatch, devices=2)
    monkeypatch.setattr(module, "FAILED", ["deepspeed.initialize has other parameters"])
    wanted = f"{module.NO} a config with a ds_npu section is refused: deepspeed.initialize has other parameters"
    assert row(printed(), "ds_npu") == wanted


def test_on_an_npu_machine(cpu_machine, monkeypatch, tmp_path):
    npu_double.install(monkeypatch, devices=2)
    (tmp_path / "version.info").write_text("Version=8.5.0\n")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    monkeypatch.setenv("HCCL_BUFFSIZE", "512")
    text = printed()
    assert row(text, "ds_npu").startswith(f"{module.OKAY} 2 NPUs. ")
    assert row(text, "npu:0..1") == "Double910, 64.0 GiB"
    assert "CANN 8.5.0" in row(text, "versions")
    assert row(text, "HCCL_BUFFSIZE").startswith("512 (user, default 200; ")
    assert "fused_adam" not in text and "HCCL_CONNECT_TIMEOUT" not in text
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert row(printed(), "ds_npu").startswith(f"{module.OKAY} 2 NPUs. What to do: unset DS_ACCELERATOR")


def test_a_device_that_does_not_answer_does_not_end_the_report(cpu_machine, monkeypatch):
    npu = npu_double.install(monkeypatch, devices=3)
    answers = npu.get_device_properties

    def busy(index):
        if index == 1:
            raise RuntimeError("device 1 is busy")
        return answers(index)

    npu.get_device_properties = busy
    text = printed()
    assert "device 1 is busy" in row(text, "npu:1") and row(text, "npu:0") == row(text, "npu:2")
    assert row(text, "ds_npu").startswith(f"{module.OKAY} 2 NPUs. What to do: npu-smi info, as 1 do not answer (npu:1")

    def all_busy(index):
        raise RuntimeError("busy")

    npu.get_device_properties = all_busy
    assert row(printed(), "ds_npu").startswith(f"{module.NO} no NPU answers: it does not answer: busy. What to do:")


def test_versions_that_go_together_are_okay(cpu_machine, monkeypatch):
    good = capability.Versions("2.9.0", "2.9.0", "8.5.0", "24.1", "0.19.8", "3.11.4")
    monkeypatch.setattr(capability, "versions", lambda: good)
    npu_double.install(monkeypatch, devices=1)
    text = printed()
    assert row(text, "ds_npu") == f"{module.OKAY} 1 NPU. Nothing to do"
    assert "versions go together" not in text
    bad = dataclasses.replace(good, cann="8.0.0")
    monkeypatch.setattr(capability, "versions", lambda: bad)
    text = printed()
    assert "To be looked at: torch_npu 2.9.0 with CANN 8.0.0 is not a listed pair" in row(text, "ds_npu")
    assert row(text, "versions go together").startswith(module.NO)


def test_every_setting_that_is_set_has_its_row(cpu_machine, monkeypatch):
    for name, _, _ in capability.SETTINGS:
        monkeypatch.setenv(name, "1")
    text = printed()
    assert [name for name, _, _ in capability.SETTINGS if not row(text, name).startswith("1 (user, ")] == []


def test_builders_that_cannot_be_imported_do_not_end_the_report(cpu_machine, monkeypatch):
    real = capability.try_import

    def broken(name):
        return (None, RuntimeError("Two accelerators")) if name == "ds_npu.ops.builders" else real(name)

    monkeypatch.setattr(capability, "try_import", broken)
    assert "Two accelerators" in row(printed(), "DeepSpeed's operators")


def test_features_and_what_they_lack(cpu_machine):
    text = printed(features=[("fused_ops", []), ("moe", ["no grouped matmul", "no permute"]), ("plan", [])])
    assert row(text, "keys of the section") == f"{module.OKAY} fused_ops, plan"
    assert row(text, "moe") == f"{module.NO} no grouped matmul"
    assert re.search(r"^ +no permute$", text, re.MULTILINE)
    assert text.rstrip().endswith("-" * 20)


def test_it_goes_to_the_stdout_of_the_moment(cpu_machine, capsys):
    report()
    assert "\nds_npu ....." in capsys.readouterr().out


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
