"""The NPU accelerator against a double of torch.npu: what it asks the device, exports, sets, and says without one."""

from __future__ import annotations

import inspect
import re
import threading

import npu_double
import pytest
from deepspeed.accelerator.npu_accelerator import NPU_Accelerator as NpuAccelerator

from ds_npu import capability
from ds_npu.accelerator import environment, npu_accelerator
from ds_npu.capability import runtime


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with two NPUs, and an environment that this test may change."""
    monkeypatch.setattr(environment.os, "environ", {})
    monkeypatch.setattr(runtime, "DEV", tmp_path)
    return npu_double.install(monkeypatch)


@pytest.fixture
def accelerator(machine):
    return NpuAccelerator()


@pytest.fixture
def without_device(monkeypatch, tmp_path):
    """An accelerator on a machine whose driver is not loaded, and the warnings given while it was made."""
    warnings = []
    monkeypatch.setattr(environment.os, "environ", {})
    monkeypatch.setattr(runtime, "DEV", tmp_path)
    monkeypatch.setattr(npu_accelerator, "warn_once", warnings.append)
    npu_double.install(monkeypatch, devices=0)
    return NpuAccelerator(), warnings


def test_it_is_deepspeeds_npu_accelerator(accelerator):
    from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator

    assert isinstance(accelerator, DeepSpeedAccelerator)
    assert (accelerator._name, accelerator.device_name(), accelerator.device_name(1)) == ("npu", "npu", "npu:1")
    assert accelerator.communication_backend_name() == "hccl"
    assert accelerator.op_builder_dir() == "ds_npu.ops.builders"


def test_every_override_takes_what_the_built_in_takes():
    ours, built_in = NpuAccelerator.__bases__
    assert ours is npu_accelerator.NpuAcceleratorMixin
    different = {
        name
        for name, method in vars(ours).items()
        if inspect.isfunction(method) and name in dir(built_in) and name != "__init__"
        if list(inspect.signature(method).parameters)
        != list(inspect.signature(inspect.getattr_static(built_in, name)).parameters)
    }
    assert different == set()


def test_available_memory_counts_other_processes_and_the_unused_cache(accelerator, machine):
    # 100 in all, 10 free; torch_npu holds 7, of which 3 are used: 10 + (7 - 3). The built-in would say 100 - 3.
    assert accelerator.available_memory() == 14
    assert accelerator.available_memory(1) == 14


def test_float64_is_not_claimed(accelerator):
    import torch
    from deepspeed.runtime.zero import utils

    assert accelerator.is_fp64_supported() is False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "get_accelerator", lambda: accelerator)
        assert utils.get_norm_dtype() is torch.float


def test_capturing_is_asked_of_the_device(accelerator, machine):
    assert accelerator.is_current_stream_capturing() is False
    machine.capturing = True
    assert accelerator.is_current_stream_capturing() is True


def test_ranges_nest_and_balance(accelerator, machine):
    accelerator.range_push("outer")
    accelerator.range_push("inner", domain="DeepSpeed", category="ignored")
    accelerator.range_push("innermost")
    accelerator.range_pop()
    accelerator.range_pop(domain="DeepSpeed")
    accelerator.range_pop()
    accelerator.range_pop()
    assert machine.mstx.calls == [
        ("start", "outer", "default", 1),
        ("start", "inner", "DeepSpeed", 2),
        ("start", "innermost", "default", 3),
        ("end", 3, "default"),
        ("end", 2, "DeepSpeed"),
        ("end", 1, "default"),
    ]


def test_ranges_stay_balanced_when_profiling_starts_and_stops_inside(accelerator, machine):
    machine.mstx.profiling = False
    accelerator.range_push("unseen")
    machine.mstx.profiling = True
    accelerator.range_push("seen")
    machine.mstx.profiling = False
    accelerator.range_push("")
    for _ in range(3):
        accelerator.range_pop()
    starts = {call[3] for call in machine.mstx.calls if call[0] == "start" and call[3]}
    assert [call[1] for call in machine.mstx.calls if call[0] == "end"] == [*starts]
    assert "" not in [call[1] for call in machine.mstx.calls]


def test_ranges_of_two_threads_are_apart(accelerator, machine):
    accelerator.range_push("main")
    other = threading.Thread(target=accelerator.range_pop)
    other.start()
    other.join()
    assert [call for call in machine.mstx.calls if call[0] == "end"] == []
    accelerator.range_pop()
    assert [call for call in machine.mstx.calls if call[0] == "end"] == [("end", 1, "default")]


def test_ranges_without_mstx_do_nothing(machine):
    del machine.mstx
    accelerator = NpuAccelerator()
    accelerator.range_push("x")
    accelerator.range_pop()


def test_deepspeed_instruments_with_these_ranges(accelerator, machine, monkeypatch):
    from deepspeed.utils import nvtx

    monkeypatch.setattr(nvtx, "get_accelerator", lambda: accelerator)

    @nvtx.instrument_w_nvtx
    def step():
        return 5

    assert step() == 5
    assert [call[0] for call in machine.mstx.calls] == ["start", "end"]
    assert machine.mstx.calls[0][1].endswith("step")


def test_the_launcher_sends_what_npus_need(accelerator):
    exports = accelerator.export_envs()
    # The rule of deepspeed/launcher/runner.py, and the names of field.md 3.2.
    sent = """ASCEND_HOME_PATH HCCL_BUFFSIZE LD_LIBRARY_PATH PATH PYTORCH_NPU_ALLOC_CONF TASK_QUEUE_ENABLE
        CPU_AFFINITY_CONF MULTI_STREAM_MEMORY_REUSE COMBINED_ENABLE INF_NAN_MODE_ENABLE P2P_HCCL_BUFFSIZE
        TORCH_HCCL_ZERO_COPY RANK_TABLE_FILE STREAMS_PER_DEVICE PER_STREAM_QUEUE ACL_DEVICE_SYNC_TIMEOUT
        ATB_OPSRUNNER_KERNEL_CACHE_GLOABL_COUNT GLOO_SOCKET_IFNAME TP_SOCKET_IFNAME OMP_NUM_THREADS LD_PRELOAD
        NPU_ASD_ENABLE OOM_SNAPSHOT_ENABLE DS_ACCELERATOR DS_NPU_CONFIG TORCH_EXTENSIONS_DIR DEEPSPEED_TIMEOUT"""
    assert [name for name in sent.split() if not name.startswith(tuple(exports))] == []
    kept = ["HOME", "USER", "SSH_AUTH_SOCK", "DISPLAY", "TMPDIR", "DS_SECRET", "HOSTNAME", "RANK", "LOCAL_RANK"]
    assert [name for name in kept if name.startswith(tuple(exports))] == []


def test_the_version_of_the_backend_is_canns(accelerator, monkeypatch):
    for text, numbers in (("8.5.0", (8, 5, 0)), ("8.3.RC1", (8, 3)), (None, ())):
        monkeypatch.setattr(capability, "cann_version", lambda text=text: text)
        assert accelerator.communication_backend_version() == numbers


def test_without_a_device_it_warns_and_does_not_raise(without_device):
    _, warnings = without_device
    assert len(warnings) == 1
    assert "no NPU" in warnings[0] and "What to do: " in warnings[0]


@pytest.mark.parametrize(
    "first_use",
    [lambda accelerator: accelerator.communication_backend_name(), lambda accelerator: accelerator.set_device(0)],
)
def test_without_a_device_the_first_use_says_so(without_device, first_use):
    accelerator, _ = without_device
    with pytest.raises(RuntimeError, match=r"needs an NPU: no NPU.*What to do: .*DS_ACCELERATOR=cpu"):
        first_use(accelerator)


def test_without_a_device_what_import_and_ds_report_call_is_harmless(without_device):
    accelerator, _ = without_device
    with accelerator.describing():
        assert accelerator.communication_backend_name() == "hccl"
    with pytest.raises(RuntimeError):
        accelerator.communication_backend_name()
    assert accelerator.is_available() is False
    assert accelerator.device_count() == 0
    assert accelerator.get_op_builder("ShareMemCommBuilder")().name == "deepspeed_not_implemented"


def test_with_a_device_the_check_is_made_once(accelerator, machine):
    accelerator.set_device(1)
    machine.device_count = lambda: pytest.fail("asked again")
    accelerator.set_device(0)
    assert machine.current == [1, 0]


# ---- the process's own device ----


@pytest.mark.parametrize("visible", ["", "3"])
def test_a_number_beyond_the_npus_that_are_seen_is_refused(monkeypatch, accelerator, machine, visible):
    machine.device_count = lambda: 1
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", visible)
    expected = (
        f"LOCAL_RANK=1 makes NPU 1 this process's own, and the process sees 1 of them (ASCEND_RT_VISIBLE_DEVICES is "
        f"{visible!r})"
    )
    with pytest.raises(RuntimeError, match="^" + re.escape(expected)):
        npu_accelerator.check_own_device(1, "LOCAL_RANK=1")


@pytest.mark.parametrize(("before", "warned"), [([], False), ([1], False), ([0], True)])
def test_a_script_that_works_on_another_npu_is_told(monkeypatch, accelerator, machine, before, warned):
    lines = []
    monkeypatch.setattr(npu_accelerator, "warn_once", lines.append)
    for index in before:
        accelerator.set_device(index)
    npu_accelerator.check_own_device(1, "LOCAL_RANK=1")
    assert bool(lines) is warned
    if warned:
        (line,) = lines
        assert line.startswith("this process has worked on npu:0, and DeepSpeed trains on npu:1 (LOCAL_RANK=1)")
        assert "torch.npu.set_device(1)" in line


def test_the_double_answers_as_torch_npu_does():
    torch_npu, npu = npu_double.make()
    assert torch_npu._C._npu_getDeviceWithoutSet() == -1
    npu.set_device(1)
    assert torch_npu._C._npu_getDeviceWithoutSet() == 1


def applied(environ, bound=False):
    before = dict(environ)
    result = environment.apply_defaults(environ, bound)
    assert {name: environ[name] for name in before if name != "DS_NPU_DEFAULTS_SET"} == {
        name: value for name, value in before.items() if name != "DS_NPU_DEFAULTS_SET"
    }
    return result


ALWAYS = {
    "HCCL_HOST_SOCKET_PORT_RANGE": "auto",
    "TASK_QUEUE_ENABLE": "1",
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
}


@pytest.mark.parametrize(
    ("environ", "bound", "expected"),
    [
        ({}, False, ALWAYS),
        ({"LOCAL_RANK": "0"}, False, {**ALWAYS, "CPU_AFFINITY_CONF": "1"}),
        ({"LOCAL_RANK": "0"}, True, ALWAYS),
        ({"WORLD_SIZE": "1"}, False, ALWAYS),
        ({"WORLD_SIZE": "16"}, False, {**ALWAYS, "HCCL_CONNECT_TIMEOUT": "316"}),
        ({"WORLD_SIZE": "100000"}, False, {**ALWAYS, "HCCL_CONNECT_TIMEOUT": "7200"}),
        ({"WORLD_SIZE": "many"}, False, ALWAYS),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, False, {**ALWAYS, "HCCL_CONNECT_TIMEOUT": "304"}),
        # 30 minutes fit into HCCL's own 1836 s, 60 do not.
        ({"DEEPSPEED_TIMEOUT": "30"}, False, ALWAYS),
        ({"DEEPSPEED_TIMEOUT": "60"}, False, {**ALWAYS, "HCCL_EXEC_TIMEOUT": "3600", "HCCL_EVENT_TIMEOUT": "3632"}),
        ({"DEEPSPEED_TIMEOUT": "60", "HCCL_OP_EXPANSION_MODE": "AIV"}, False, ALWAYS),
        ({"HCCL_EXEC_TIMEOUT": "5000"}, False, {**ALWAYS, "HCCL_EVENT_TIMEOUT": "5032"}),
        ({"HCCL_EXEC_TIMEOUT": "0"}, False, {**ALWAYS, "HCCL_EVENT_TIMEOUT": "0"}),
        ({"HCCL_EXEC_TIMEOUT": "2147483647"}, False, {**ALWAYS, "HCCL_EVENT_TIMEOUT": "2147483647"}),
        ({"HCCL_EXEC_TIMEOUT": "soon"}, False, ALWAYS),
        ({"HCCL_EXEC_TIMEOUT": "9000", "HCCL_EVENT_TIMEOUT": "1"}, False, ALWAYS),
    ],
)
def test_defaults(environ, bound, expected):
    assert applied(dict(environ), bound) == expected


@pytest.mark.parametrize(
    ("users", "left_alone"),
    [
        ({"HCCL_IF_BASE_PORT": "50000"}, "HCCL_HOST_SOCKET_PORT_RANGE"),
        ({"ASCEND_LAUNCH_BLOCKING": "1"}, "TASK_QUEUE_ENABLE"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, "PYTORCH_NPU_ALLOC_CONF"),
        *(({name: ""}, name) for name, _ in environment.DEFAULTS),
    ],
)
def test_defaults_never_go_against_the_user(users, left_alone):
    environ = {**users, "WORLD_SIZE": "8", "LOCAL_RANK": "0", "DEEPSPEED_TIMEOUT": "90"}
    assert left_alone not in applied(environ)


def test_defaults_are_marked_and_not_marked_twice():
    environ = {"WORLD_SIZE": "4"}
    first = applied(environ)
    assert set(environ["DS_NPU_DEFAULTS_SET"].split(",")) == set(first)
    assert applied(environ) == {}
    environ["LOCAL_RANK"] = "0"
    assert applied(environ) == {"CPU_AFFINITY_CONF": "1"}
    assert environ["DS_NPU_DEFAULTS_SET"].split(",") == [*first, "CPU_AFFINITY_CONF"]


def test_making_an_accelerator_applies_them(accelerator):
    assert environment.os.environ["TASK_QUEUE_ENABLE"] == "1"


def test_the_folder_is_safe_for_deepspeed():
    folder = npu_double.ROOT / "accelerator"
    assert (folder / "__init__.py").read_text() == ""
    assert not (folder / "abstract_accelerator.py").exists()


def test_deepspeed_takes_it_for_npu_from_its_first_import(tmp_path):
    """The real import order: builders bind while deepspeed is being imported, with our accelerator already chosen."""
    npu_double.write_package(tmp_path, body=npu_double.WORKING.format(devices=2))
    done = npu_double.python(
        """
        import ds_npu
        import deepspeed
        from deepspeed.accelerator import get_accelerator
        from deepspeed.ops.op_builder import EvoformerAttnBuilder, FusedAdamBuilder
        print(type(get_accelerator()).__module__, FusedAdamBuilder.__module__, EvoformerAttnBuilder.__module__)
        """,
        tmp_path,
        DS_ACCELERATOR="npu",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-3:] == [
        "ds_npu.accelerator.npu_accelerator",
        "ds_npu.ops.builders.fused_adam",
        "ds_npu.ops.builders.builder",
    ]
