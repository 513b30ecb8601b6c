"""Nothing of DeepSpeed's shared-memory extension stays in /dev/shm, and nothing of another's is removed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import run_on_ranks, shared_memory_files

from ds_npu.engine.shared_memory import FOLDER, PREFIX

NOBODY = 65534


class Extension:
    """Opens files as shm.cpp does, without a minute of compilation: made, written, mapped and kept open."""

    def __init__(self, dies: bool) -> None:
        self.dies = dies

    def initialize(self, size: int, rank: int) -> None:
        names = [name_of(os.environ["MASTER_PORT"], each) for each in range(size)]
        descriptor = os.open(names[rank], os.O_CREAT | os.O_RDWR, 0o600)
        os.write(descriptor, bytes(4096))
        if self.dies:
            os._exit(0)
        while not all(name.exists() for name in names):
            pass
        for name in names:
            os.open(name, os.O_RDWR)

    def vector_kernel_level(self) -> int:
        return 0


def name_of(port: str, rank: int, user: int | None = None) -> Path:
    return FOLDER / f"{PREFIX}_{os.getuid() if user is None else user}_127.0.0.1_{port}_{rank}"


def opened(port: str, dies: bool = False) -> None:
    import deepspeed

    os.environ["MASTER_PORT"] = port
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: Extension(dies)
    deepspeed.init_distributed("gloo")


def unlinked(port: str) -> None:
    before = {name_of(port, rank) for rank in range(2)}
    opened(port)
    dist.barrier()
    assert not any(each.exists() for each in before)


@pytest.fixture
def port():
    """No run's: names in this test's /dev/shm are its own."""
    mine = f"test-{uuid.uuid4().hex[:8]}"
    yield mine
    for path in FOLDER.glob(f"{PREFIX}_*_127.0.0.1_{mine}*"):
        path.unlink()


def test_names_go_when_every_rank_has_mapped_them(port):
    before = shared_memory_files()
    run_on_ranks(2, unlinked, port)
    assert shared_memory_files() <= before


def test_what_a_killed_run_left_goes_with_the_next_and_nothing_else(port):
    abandoned = [name_of(f"{port}-killed", rank) for rank in range(2)]
    running = name_of(f"{port}-running", 0)
    another = name_of(f"{port}-another", 0, NOBODY)
    disguised = name_of(f"{port}-disguised", 0)
    for path in (*abandoned, running, another, disguised):
        path.write_bytes(bytes(10))
    if os.getuid() == 0:
        os.chown(another, NOBODY, NOBODY)
        os.chown(disguised, NOBODY, NOBODY)
    holder = "import mmap, sys; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 10); f.close(); input()"
    with subprocess.Popen([sys.executable, "-c", holder, str(running)], stdin=subprocess.PIPE) as process:
        while str(running) not in Path(f"/proc/{process.pid}/maps").read_text():
            assert process.poll() is None
        run_on_ranks(2, unlinked, port)
        process.stdin.close()
    assert not any(path.exists() for path in abandoned)
    assert running.exists() and another.exists()
    assert disguised.exists() == (os.getuid() == 0)


REAL = """
import os, signal, sys
import deepspeed
deepspeed.init_distributed("gloo")
import torch.distributed as dist
dist.barrier()
how = sys.argv[-1]
if how == "exception":
    raise ValueError("on purpose")
if how.startswith("SIG"):
    os.kill(os.getpid(), getattr(signal, how))
"""


@pytest.mark.slow
def test_the_real_extension_however_a_run_ends(tmp_path):
    """The first run compiles it, a minute."""
    script = tmp_path / "script.py"
    script.write_text("import ds_npu" + REAL)
    before = shared_memory_files()
    for number, how in enumerate(("end", "exception", "SIGTERM", "SIGKILL")):
        ranks = []
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29750 + number), "WORLD_SIZE": "2"}
        environ |= {"LOCAL_SIZE": "2", "DS_ACCELERATOR": "cpu"}
        for rank in range(2):
            mine = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, str(script), how]
            ranks.append(subprocess.Popen(command, env=os.environ | environ | mine, stderr=subprocess.PIPE, text=True))
        said = [rank.communicate(timeout=300)[1] for rank in ranks]
        codes = {"end": 0, "exception": 1, "SIGTERM": -signal.SIGTERM, "SIGKILL": -signal.SIGKILL}
        assert [rank.returncode for rank in ranks] == [codes[how]] * 2, said
        assert shared_memory_files() <= before, how
