"""`ds_npu sim`: what a process sees on simulated NPUs, and the faults that are planted and must be caught."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import sys

import pytest
import simulated
from stream_trace import Trace

pytestmark = pytest.mark.slow  # the libraries are compiled first, if they are not yet

ORDER = """
import torch

side = torch.npu.Stream()
one = torch.ones(4096, device="cpu").npu()
wrong = []
for attempt in range(30):
    torch.npu.synchronize()
    {body}
    torch.npu.synchronize()
    wrong += [attempt] if (found.cpu() != expected).any() else []
print(wrong)
"""

WAITED = """
    shared = torch.zeros(4096, device="npu")
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        shared.add_(one)
    {wait}
    found, expected = shared + shared, 2
"""

RECORDED = """
    freed = one + one
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        found, expected = freed + freed, 4
    {record}
    del freed
    reused = torch.zeros(4096, device="npu")
"""


def wrong_numbers(body: str, seed: int) -> str:
    """Which of 30 attempts gave a wrong number."""
    (attempts,) = simulated.printed(simulated.python(ORDER.format(body=body), "--chaos", str(seed)))
    return attempts


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_missing_event_wait_gives_wrong_numbers_the_same_each_time(seed):
    wrong = wrong_numbers(WAITED.format(wait=""), seed)
    assert wrong != "[]"
    assert wrong_numbers(WAITED.format(wait=""), seed) == wrong
    assert wrong_numbers(WAITED.format(wait="torch.npu.current_stream().wait_stream(side)"), seed) == "[]"


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_missing_record_stream_gives_wrong_numbers_the_same_each_time(seed):
    wrong = wrong_numbers(RECORDED.format(record=""), seed)
    assert wrong != "[]"
    assert wrong_numbers(RECORDED.format(record=""), seed) == wrong
    assert wrong_numbers(RECORDED.format(record="freed.record_stream(side)"), seed) == "[]"


def test_a_process_sees_the_devices_the_chip_and_the_memory_that_were_asked_for():
    code = """
    import torch
    properties = torch.npu.get_device_properties(1)
    print(torch.npu.device_count(), torch.npu.get_device_name(1), properties.total_memory, properties.cube_core_num)
    """
    done = simulated.python(code, "--devices", "3", "--soc", "910_9391", "--memory", "2GiB")
    assert simulated.printed(done) == [f"3 Ascend910_9391 {2 * 2**30} 24"]


def test_visible_devices_hide_the_others():
    code = "import torch; print(torch.npu.device_count())"
    assert simulated.printed(simulated.python(code, "--devices", "4", ASCEND_RT_VISIBLE_DEVICES="1,3")) == ["2"]


def test_an_allocation_past_the_capacity_raises_torchs_own_error_with_its_report():
    code = """
    import torch
    held = torch.empty(300 * 2**20, dtype=torch.uint8, device="npu")
    try:
        torch.empty(300 * 2**20, dtype=torch.uint8, device="npu")
    except torch.OutOfMemoryError as error:
        print(str(error).replace(chr(10), " "))
    del held
    torch.npu.empty_cache()
    print(torch.empty(300 * 2**20, dtype=torch.uint8, device="npu").numel())
    """
    report, after = simulated.printed(simulated.python(code, "--memory", "512MiB"))
    assert "Tried to allocate 30" in report
    assert "512.00 MiB total capacity" in report
    assert int(after) == 300 * 2**20


def test_expandable_segments_share_the_same_capacity():
    code = """
    import torch
    held = [torch.empty(100 * 2**20, dtype=torch.uint8, device="npu") for _ in range(4)]
    try:
        torch.empty(200 * 2**20, dtype=torch.uint8, device="npu")
    except torch.OutOfMemoryError:
        print("full")
    held.clear()
    torch.npu.empty_cache()
    print(torch.empty(400 * 2**20, dtype=torch.uint8, device="npu").numel() // 2**20)
    """
    done = simulated.python(code, "--memory", "512MiB", PYTORCH_NPU_ALLOC_CONF="expandable_segments:True")
    assert simulated.printed(done) == ["full", "400"]


def test_an_operator_that_is_not_simulated_is_named():
    code = """
    import torch
    a = torch.eye(4).npu()
    torch.linalg.qr(a)
    """
    done = simulated.python(code)
    assert done.returncode != 0
    assert "not simulated" in done.stderr
    assert "ds_npu/simulator/csrc/aclnn" in done.stderr


@pytest.mark.parametrize("task_queue", ["0", "1", "2"])
def test_after_an_operator_of_the_old_interface_that_is_not_simulated_nothing_wrong_can_be_read(task_queue):
    """torch_npu runs it in a thread of its own, and after one error drops what it is given without a word."""
    code = """
    import sys, torch, torch_npu
    a = torch.ones(2, 3, 4, device="cpu").npu()
    for _ in range(3):
        try:
            print(torch_npu.npu_confusion_transpose(a, (0, 2, 1), (2, 4, 3), True).cpu().shape)
        except RuntimeError as error:
            print("RuntimeError")
            print(error, file=sys.stderr)
    """
    done = simulated.python(code, TASK_QUEUE_ENABLE=task_queue)
    assert simulated.printed(done) == ["RuntimeError"] * 3
    assert "the operator ConfusionTransposeD is not simulated" in done.stderr


def test_an_operator_that_fails_stops_the_device_and_says_where():
    code = """
    import torch
    a = torch.ones(4).npu()
    try:
        torch.ops.aten.add.out(a, torch.ones(4).npu(), out=a)
        torch.npu.synchronize()
    except RuntimeError as error:
        print(error)
    """
    done = simulated.python(code, "--fault", "aclnnAdd=507015")
    assert "planted by ds_npu sim --fault" in done.stdout, done.stdout + done.stderr


def test_only_the_call_that_was_named_fails():
    code = """
    import torch
    a = torch.ones(4).npu()
    for call in (1, 2, 3):
        try:
            a + a
            torch.npu.synchronize()
            print(call, "went well")
        except RuntimeError as error:
            print(call, "507015" in str(error))
    """
    done = simulated.python(code, "--fault", "aclnnAdd:2=507015")
    assert simulated.printed(done) == ["1 went well", "2 True", "3 went well"]


def test_a_process_dies_where_it_was_told_to():
    code = "import torch; torch.ones(4).npu(); print('alive')"
    done = simulated.python(code, "--fault", "aclrtMallocAlign32=exit")
    assert (done.returncode, done.stdout) == (-9, "")
    alive = simulated.python(code, "--fault", "aclrtMallocAlign32@1=exit", RANK="0")
    assert (alive.returncode, alive.stdout) == (1, "alive\n")
    assert "has not fired" in alive.stderr.splitlines()[-1]


@pytest.mark.parametrize("package", ["torch", "torch_npu", "deepspeed"])
def test_the_packages_are_as_they_were_installed(package):
    files = [file for file in importlib.metadata.distribution(package).files if file.hash and file.suffix != ".pyc"]
    assert len(files) > 100
    for file in files:
        digest = hashlib.new(file.hash.mode, file.locate().read_bytes()).digest()
        assert base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == file.hash.value, file


def test_the_simulator_leaves_nothing_of_python_in_the_process():
    code = "import sys, torch; print([name for name in sys.modules if name.startswith('ds_npu.simulator')])"
    assert simulated.printed(simulated.python(code)) == ["[]"]


def test_the_exit_code_is_the_commands():
    assert simulated.sim("--", sys.executable, "-c", "import os; os._exit(7)").returncode == 7


def test_the_page_lists_what_is_simulated():
    page = (simulated.ROOT / "docs" / "simulator.md").read_text()
    found = page.partition("<!-- list: written by `ds_npu sim --list` -->")[2].partition("<!-- end of list -->")[0]
    assert found.strip().splitlines() == simulated.printed(simulated.sim("--list"))


def test_a_trace_has_every_task_by_stream_with_what_it_waited_for(tmp_path):
    code = """
    import torch
    side, one = torch.npu.Stream(), torch.ones(4, device="npu")
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        one.add_(1)
    torch.npu.current_stream().wait_stream(side)
    one.mul_(3)
    print(one.cpu().tolist())
    """
    done = simulated.python(code, "--trace", str(tmp_path / "new" / "folder"))
    assert simulated.printed(done) == ["[6.0, 6.0, 6.0, 6.0]"]
    assert f"traced to {tmp_path}/new/folder" in done.stderr
    tasks = {task.name: task for task in Trace(tmp_path / "new" / "folder").tasks}
    made, added, times = (tasks[name] for name in ("aclnnInplaceOne", "aclnnInplaceAdds", "aclnnInplaceMuls"))
    assert made.stream == times.stream != added.stream
    assert made.place < added.place < times.place
    assert made.ended <= added.begun <= added.ended <= times.begun
    trace = Trace(tmp_path / "new" / "folder")
    assert (added, False) in trace.after(made) and (times, False) in trace.after(added)
    assert (made, False) not in trace.after(added)


def test_streams_that_do_not_wait_are_free_in_the_trace(tmp_path):
    code = """
    import torch
    side, one, other = torch.npu.Stream(), torch.ones(4, device="npu"), torch.ones(4, device="npu")
    torch.npu.synchronize()
    one.mul_(3)
    with torch.npu.stream(side):
        other.add_(1)
    torch.npu.synchronize()
    """
    simulated.printed(simulated.python(code, "--trace", str(tmp_path)))
    trace = Trace(tmp_path)
    tasks = {task.name: task for task in trace.tasks}
    times, added = tasks["aclnnInplaceMuls"], tasks["aclnnInplaceAdds"]
    assert (added, True) not in trace.after(times) and (times, True) not in trace.after(added)


def test_a_folder_that_cannot_be_written_to_is_named():
    done = simulated.python("import torch; torch.ones(4, device='npu').cpu()", "--trace", "/dev/null/folder")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ds_npu sim: [Errno 20] Not a directory: '/dev/null/folder'"


def test_a_full_disk_ends_a_traced_run_with_the_file_and_the_reason(tmp_path):
    """The host waits for an event whose line could not be written; no file may grow, as on a full disk."""
    code = """
    import resource, torch
    one = torch.ones(4, device="npu")
    torch.npu.synchronize()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
    torch.npu.current_stream().record_event().synchronize()
    """
    done = simulated.python(code, "--trace", str(tmp_path))
    (file,) = tmp_path.iterdir()
    assert done.returncode == 1
    assert f"a record of what streams do: cannot write to {file}: File too large" in done.stderr


def test_what_is_simulated_is_called_so():
    done = simulated.sim("--devices", "2", "--memory", "1GiB", "--chaos", "3", "--", "ds_report")
    assert "ds_npu sim: 2 simulated NPUs (Ascend910B2, 1 GiB each, chaos 3)" in done.stderr
    assert "2 NPUs, simulated by ds_npu sim" in done.stdout
