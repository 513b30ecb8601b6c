"""What ds_npu finds out about a machine, and what it says when something is missing."""

from __future__ import annotations

import npu_double
import pytest

from ds_npu import capability
from ds_npu.capability import releases, runtime

NOT_HERE = "cannot open shared object file: No such file or directory"
CUDA = RuntimeError("Two accelerators cannot be used at the same time in PyTorch: npu and cuda. You can install")


@pytest.fixture
def dev(tmp_path, monkeypatch):
    """An empty /dev, and no variable that hides devices."""
    monkeypatch.setattr(runtime, "DEV", tmp_path)
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    return tmp_path


@pytest.fixture
def cann(tmp_path, monkeypatch):
    """An empty folder that ASCEND_HOME_PATH names."""
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ImportError(f"libhccl.so: {NOT_HERE}"), ["libhccl.so", "CANN", "set_env.sh", "DS_ACCELERATOR=cpu"]),
        (ImportError(f"libascendcl.so.1: {NOT_HERE}"), ["libascendcl.so.1", "CANN"]),
        (ImportError(f"libascend_hal.so: {NOT_HERE}"), ["libascend_hal.so", "driver", "LD_LIBRARY_PATH"]),
        (ImportError(f"libtorch_cpu.so: {NOT_HERE}"), ["libtorch_cpu.so", "torch"]),
        (
            ImportError("libtorch_npu.so: undefined symbol: _ZN3c1010TensorImplE"),
            ["_ZN3c1010TensorImplE", "another torch"],
        ),
        (ImportError("libtorch_npu.so: undefined symbol: aclrtGetDeviceInfo"), ["aclrtGetDeviceInfo", "CANN"]),
        (CUDA, ["cuda", "CPU build", "TORCH_DEVICE_BACKEND_AUTOLOAD=0"]),
        (ImportError("/lib/libstdc++.so.6: version `GLIBCXX_3.4.30' not found"), ["GLIBCXX_3.4.30", "older"]),
        (ModuleNotFoundError("No module named 'yaml'"), ["yaml", "pip"]),
        (OSError("something else"), ["OSError", "something else", "DS_ACCELERATOR=cpu"]),
        (ValueError(), ["ValueError", "no message"]),
    ],
)
def test_explain_names_the_cause_and_the_way_out(error, said, monkeypatch):
    for name in ("DS_ACCELERATOR", "TORCH_DEVICE_BACKEND_AUTOLOAD"):
        monkeypatch.delenv(name, raising=False)
    message = capability.explain(error)
    assert [word for word in said if word not in message] == []
    assert "What to do: " in message
    assert "\n" not in message
    assert "{" not in message


@pytest.mark.parametrize("error", [ImportError(f"libhccl.so: {NOT_HERE}"), OSError("something else")], ids=repr)
@pytest.mark.parametrize(
    ("accelerator", "autoload", "advice"),
    [
        ("npu", "1", "set DS_ACCELERATOR=cpu to run on the CPU on purpose"),
        ("npu", "0", "set DS_ACCELERATOR=cpu and unset TORCH_DEVICE_BACKEND_AUTOLOAD to run on the CPU on purpose"),
        ("cpu", "0", "unset TORCH_DEVICE_BACKEND_AUTOLOAD to run on the CPU on purpose"),
        ("cpu", "1", "uninstall torch_npu to run on the CPU on purpose: DS_ACCELERATOR=cpu is set"),
    ],
)
def test_explain_advises_what_is_left_to_do_for_the_cpu(accelerator, autoload, advice, error, monkeypatch):
    """Without ds_npu's start-up line, which that variable switches off, transformers fails on the CPU too."""
    monkeypatch.setenv("DS_ACCELERATOR", accelerator)
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", autoload)
    assert f", or {advice}" in capability.explain(error)


@pytest.mark.parametrize(("autoload", "advice"), [("1", "set TORCH_DEVICE_BACKEND_AUTOLOAD=0"), ("0", "uninstall it")])
def test_explain_advises_what_is_left_to_do_for_another_accelerator(autoload, advice, monkeypatch):
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", autoload)
    assert f", or {advice} to stay with cuda" in capability.explain(CUDA)


def test_explain_reads_the_cause_behind_torchs_own_error():
    wrapped = RuntimeError("Failed to load the backend extension: torch_npu.")
    wrapped.__cause__ = ImportError(f"libhccl.so: {NOT_HERE}")
    assert "libhccl.so belongs" not in capability.explain(wrapped)
    assert "libhccl.so was not found" in capability.explain(wrapped)


def test_nothing_imports_torch_before_it_is_asked_for():
    done = npu_double.python("""
        import sys
        from ds_npu import capability
        capability.explain(ImportError("x")); capability.versions(); capability.hccl_environment()
        print(sorted({"torch", "torch_npu", "deepspeed"} & set(sys.modules)))
    """)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def state_in_a_process(folder, lines="", **environ):
    """torch_npu_state() of a new process where ``folder`` is importable and ``folder``/dev is /dev."""
    (folder / "dev").mkdir(exist_ok=True)
    done = npu_double.python(
        f"""
        from pathlib import Path
        from ds_npu import capability
        from ds_npu.capability import runtime
        runtime.DEV = Path({str(folder / "dev")!r})
        state = capability.torch_npu_state()
        print(state.installed, state.version, state.usable, state.reason, "|", state.advice)
        """,
        folder,
        **environ,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_state_not_installed(monkeypatch):
    npu_double.remove(monkeypatch)
    state = capability.torch_npu_state()
    assert (state.installed, state.version, state.usable) == (False, None, False)
    assert state.reason == "torch_npu is not installed"


def test_state_installed_without_cann(tmp_path):
    npu_double.write_package(tmp_path, body=f"raise ImportError('libhccl.so: {NOT_HERE}')")
    assert "True 2.13.0 False libhccl.so was not found" in state_in_a_process(tmp_path)


def test_state_built_for_another_torch(tmp_path):
    npu_double.write_package(
        tmp_path, body="raise ImportError('undefined symbol: x')", version="2.9.0", requires="torch==2.9.0.*"
    )
    said = state_in_a_process(tmp_path)
    assert "True 2.9.0 False torch_npu 2.9.0 was built for torch==2.9.0.* and found torch" in said


def test_state_without_a_driver(tmp_path):
    npu_double.write_package(tmp_path, body=npu_double.WORKING.format(devices=0))
    assert "True 2.13.0 False no NPU: there is neither /dev/davinci*" in state_in_a_process(tmp_path)


@pytest.mark.parametrize("visible", ["", "-1", "none"])
def test_state_with_every_device_hidden(tmp_path, visible):
    npu_double.write_package(tmp_path, body=npu_double.WORKING.format(devices=0))
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "davinci0").touch()
    said = state_in_a_process(tmp_path, ASCEND_RT_VISIBLE_DEVICES=visible)
    assert f"False ASCEND_RT_VISIBLE_DEVICES={visible!r} names no device" in said


def test_state_usable(tmp_path):
    npu_double.write_package(tmp_path, body=npu_double.WORKING.format(devices=2))
    assert state_in_a_process(tmp_path).startswith("True 2.13.0 True  |")


def test_hardware_is_seen_by_its_nodes(dev):
    assert not capability.ascend_hardware_present()
    (dev / "davincible").touch()
    assert not capability.ascend_hardware_present()
    (dev / "davinci_manager").touch()
    assert capability.ascend_hardware_present()


def test_a_visible_device_that_does_not_exist(dev, monkeypatch):
    for number in (0, 1):
        (dev / f"davinci{number}").touch()
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "1,9")
    unavailable = capability.hidden_devices()
    assert unavailable and "names device 9" in unavailable.reason and "[0, 1]" in unavailable.reason
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0,1")
    assert capability.hidden_devices() is None


def test_a_device_without_a_node_counts(dev, monkeypatch):
    npu_double.install(monkeypatch, devices=1)
    assert capability.hidden_devices() is not None
    assert capability.missing_devices() is None


def test_the_runtime_is_not_started_where_there_are_nodes(dev, monkeypatch):
    (dev / "davinci0").touch()
    npu = npu_double.install(monkeypatch)
    npu.device_count = lambda: pytest.fail("device_count starts the Ascend runtime")
    assert capability.missing_devices() is None


@pytest.mark.parametrize(
    ("files", "version"),
    [
        (
            {"aarch64-linux/ascend_toolkit_install.info": "package_name=x\nversion=8.0.RC3\ninnerversion=V1\n"},
            "8.0.RC3",
        ),
        (
            {"ascend_toolkit_install.info": "version=8.5.0\n", "version.cfg": "toolkit_running_version=[1:9.9.9]\n"},
            "8.5.0",
        ),
        ({"ascend_nnae_install.info": "compatible_version=[V1]\nversion=8.2.RC1\n"}, "8.2.RC1"),
        ({"version.cfg": "# version: 1.0\nruntime_running_version=[7.6.0.1.220:8.0.0]\n"}, "8.0.0"),
        ({"version.info": "Version=7.6.0.1\nversion_dir=8.3.RC1\n"}, "8.3.RC1"),
        ({"version.info": "Version=9.1.0\n"}, "9.1.0"),
        # Malformed first, sound second: the sound one is taken.
        (
            {"ascend_toolkit_install.info": "version=\n", "version.cfg": "toolkit_running_version=[1:8.1.RC1]\n"},
            "8.1.RC1",
        ),
        ({"ascend_toolkit_install.info": "version latest\n"}, None),
        ({"version.cfg": "toolkit_running_version=[]\n"}, None),
        ({"version.info": "Version=unknown\n"}, None),
        ({}, None),
    ],
)
def test_cann_version_from_its_files(cann, files, version):
    for name, text in files.items():
        (cann / name).parent.mkdir(exist_ok=True)
        (cann / name).write_text(text)
    assert capability.cann_version() == version
    assert capability.missing_cann() is None


def test_cann_version_from_bytes_that_are_no_text(cann):
    (cann / "version.info").write_bytes(b"\xff\xfe\nVersion=8.5.0\n\xff")
    assert capability.cann_version() == "8.5.0"


def test_cann_version_where_a_folder_stands_for_a_file(cann):
    (cann / "version.cfg").mkdir()
    assert capability.cann_version() is None


@pytest.mark.parametrize(
    ("home", "said"), [(None, "is not set"), ("", "is not set"), ("/nowhere/at/all", "is no folder")]
)
def test_cann_home_unset_or_wrong(monkeypatch, home, said):
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    if home is not None:
        monkeypatch.setenv("ASCEND_HOME_PATH", home)
    assert capability.cann_home() is None
    assert capability.cann_version() is None
    unavailable = capability.missing_cann()
    assert unavailable and said in unavailable.reason and "set_env.sh" in unavailable.advice


def test_versions_of_this_environment(monkeypatch, tmp_path, cann):
    import platform

    import torch

    monkeypatch.setattr(releases, "DRIVER_INFO", tmp_path / "driver.info")
    assert capability.versions().driver is None
    (tmp_path / "driver.info").write_text("Version=24.1.rc1\nascendhal_version=7.35.19\n")
    found = capability.versions()
    assert (found.driver, found.python, found.torch) == ("24.1.rc1", platform.python_version(), torch.__version__)


def found(torch="2.9.0", torch_npu="2.9.0", cann="8.5.0", python="3.11.4"):
    return capability.Versions(torch, torch_npu, cann, "24.1", "0.19.8", python)


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        (found(), []),
        (found("2.12.0+cpu", "2.12.0", "9.1.0", "3.14.0"), []),
        (found(torch="2.8.0"), ["needs torch 2.9 and found torch 2.8.0"]),
        (found(cann="9.1.0"), ["with CANN 9.1.0 is not a listed pair", "gives CANN 8.5.0"]),
        (found(cann="8.5.1"), ["with CANN 8.5.1 is not a listed pair"]),
        (found("2.13.0", "2.13.0", "9.1.0"), ["torch_npu 2.13.0 with CANN 9.1.0 is unknown"]),
        (found("2.9.0", "2.9.0.post3", "9.0.0"), ["torch_npu 2.9.0.post3 with CANN 9.0.0 is unknown"]),
        (found(cann=None), ["is unknown", "listed with CANN 8.5.0"]),
        (found("2.13.0", "2.13.0", None), ["is unknown", "no table"]),
        (found(torch=None), ["torch is not installed"]),
        (found(torch_npu=None), ["torch_npu is not installed", "unknown"]),
        (found(python="3.14.1"), ["Python 3.10 to 3.13 and found Python 3.14.1"]),
        (found("3.0.0", "3.0.0", "9.1.0"), ["CANN 9.1.0 is unknown", "Python 3.11.4 is unknown"]),
        (found(torch="main"), ["main", "unknown"]),
        (found(torch_npu="nightly"), ["nightly", "unknown"]),
    ],
)
def test_mismatches(pair, said):
    sentences = capability.mismatches(pair)
    assert bool(sentences) == bool(said)
    assert [word for word in said if word not in " ".join(sentences)] == []
    assert all(sentence.endswith(".") for sentence in sentences)


def test_the_settings_say_who_set_them():
    environ = {"HCCL_BUFFSIZE": "400", "TASK_QUEUE_ENABLE": "1", "DS_NPU_DEFAULTS_SET": "TASK_QUEUE_ENABLE"}
    by_name = {setting.name: setting for setting in capability.hccl_environment(environ)}
    assert (by_name["HCCL_BUFFSIZE"].value, by_name["HCCL_BUFFSIZE"].origin) == ("400", "user")
    assert by_name["TASK_QUEUE_ENABLE"].origin == "ds_npu"
    assert (by_name["HCCL_EXEC_TIMEOUT"].value, by_name["HCCL_EXEC_TIMEOUT"].origin) == (None, "default")
    assert len(by_name) == len(capability.SETTINGS)


def test_hccl_options(dev, monkeypatch):
    npu_double.install(monkeypatch)
    assert capability.hccl_options({"hccl_buffer_size": 64}).hccl_config == {"hccl_buffer_size": 64}
    with pytest.raises(ValueError, match="0 MiB"):
        capability.hccl_options({"hccl_buffer_size": 0})


def test_hccl_options_without_a_device(dev, monkeypatch):
    npu_double.install(monkeypatch, devices=0)
    assert capability.hccl_options({"hccl_buffer_size": 64}) is None
