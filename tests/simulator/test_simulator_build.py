"""`ds_npu sim` before anything is simulated: its command line, and how the libraries are built."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
import simulated

from ds_npu.simulator import cache
from ds_npu.simulator.build import LIBRARY, LINKED


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("--devices", "0", "--", "true"), "found '0'; an integer from 1 to 1024"),
        ((), "no command to run"),
        (("--", "no-such-command"), "there is no command 'no-such-command'"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(arguments, said):
    done = simulated.sim(*arguments)
    assert done.returncode not in (0, 1)
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_compiler_there_is_one_error_that_says_what_to_install(tmp_path):
    done = simulated.sim("--", sys.executable, "-c", "1", PATH=str(tmp_path), DS_NPU_CACHE=str(tmp_path), CXX="")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("ds_npu sim: no C++ compiler: looked for c++, g++, clang++.")
    assert "apt-get install g++" in line


def test_operators_link_libraries_from_the_folder_that_a_toolkit_has(tmp_path):
    source = tmp_path / "operator.cpp"
    source.write_text('extern "C" int aclInit(const char *); int started() { return aclInit(nullptr); }')
    flags = f"-shared -fPIC -Wl,--no-undefined {source} -o {tmp_path / 'operator.so'}"
    done = simulated.sim("--", "sh", "-c", f'g++ {flags} -L"$ASCEND_HOME_PATH"/lib64 -lascendcl')
    assert done.returncode == 0, done.stderr


# Takes its time, writes down what it compiles, and makes an object without any function of CANN's.
COMPILER = """#!/bin/bash
while [ $# -gt 1 ]; do
    case "$1" in -o) out="$2";; -c) source="$2";; esac
    shift
done
[ -n "$source" ] || { touch "$out"; exit; }
sleep 0.05
echo "$source" >>LOG
echo "int nothing;" | g++ -x c++ -c - -o "$out"
"""


def test_many_that_ask_at_once_build_once_and_a_killed_builder_leaves_no_lock(tmp_path):
    compiler, log = tmp_path / "compiler", tmp_path / "log"
    compiler.write_text(COMPILER.replace("LOG", str(log)))
    compiler.chmod(0o755)
    environ = {**os.environ, "DS_NPU_CACHE": str(tmp_path / "cache"), "CXX": str(compiler)}
    command = [sys.executable, "-m", "ds_npu.cli.main", "sim", "--", "true"]
    killed = subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL, start_new_session=True)
    while not log.exists():
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    asking = [subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    said = [process.communicate(timeout=100)[1] for process in asking]
    assert [process.returncode for process in asking] == [0] * 4, said
    assert sum("building" in text for text in said) == 1
    compiled = log.read_text().splitlines()
    sources = len(list((simulated.ROOT / "ds_npu" / "simulator" / "csrc").rglob("*.cpp")))
    assert len(set(compiled)) == sources
    assert len(compiled) <= sources + 2 * (os.cpu_count() or 1)  # what the killed one had under way is done again
    assert list((tmp_path / "cache").rglob("building-*")) == []


def test_a_compiler_that_fails_is_one_error_and_leaves_nothing_that_looks_built(tmp_path):
    for _ in range(2):
        done = simulated.sim("--", "true", CXX="/bin/false", DS_NPU_CACHE=str(tmp_path))
        assert done.returncode == 1
        assert "could not be built: /bin/false ended with 1" in done.stderr
        assert "Traceback" not in done.stderr


# The same, at once: the object is made before.
FAST_COMPILER = COMPILER.replace("sleep 0.05", "").replace(
    'echo "int nothing;" | g++ -x c++ -c - -o "$out"', 'cp OBJECT "$out"'
)


@pytest.fixture
def environ(tmp_path):
    """A build that takes a second and works as far as the command line looks."""
    compiler, made = tmp_path / "compiler", tmp_path / "nothing.o"
    subprocess.run(["g++", "-x", "c++", "-c", "-", "-o", made], input=b"int nothing;", check=True)
    script = FAST_COMPILER.replace("LOG", str(tmp_path / "log")).replace("OBJECT", str(made))
    compiler.write_text(script.replace('touch "$out"', f'cp {made} "$out"'))
    compiler.chmod(0o755)
    return {"DS_NPU_CACHE": str(tmp_path / "cache"), "CXX": str(compiler)}


def test_what_is_not_as_it_was_built_is_built_again(tmp_path, environ):
    assert "building" in simulated.sim("--", "true", **environ).stderr
    (library,) = (tmp_path / "cache").rglob(LIBRARY)
    whole, home = library.read_bytes(), library.parent
    damages = {
        "cut short": lambda: library.write_bytes(whole[:100]),
        "a flipped bit": lambda: library.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1])),
        "no list of functions": lambda: (home / "simulated.json").write_text(""),
        "no link": lambda: (home / "libhccl.so").unlink(),
        "no folder": lambda: (home / "opp").rmdir(),
        "an object cut short": lambda: [
            shutil.rmtree(home),
            *(made.write_bytes(b"") for made in (tmp_path / "cache").rglob("*.o")),
        ],
    }
    for name, damage in damages.items():
        assert "building" not in simulated.sim("--", "true", **environ).stderr, name
        damage()
        done = simulated.sim("--", "true", **environ)
        assert done.returncode == 0 and "building" in done.stderr, (name, done.stderr)
        assert library.read_bytes() == whole, name


@pytest.fixture
def folder(tmp_path, monkeypatch):
    made = tmp_path / "cache"
    monkeypatch.setenv("DS_NPU_CACHE", str(made))
    with cache.own_folder() as found:
        assert found == made / "simulator"
    return made


def foreign(folder) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root gives a folder away")
    os.chown(folder, 4711, -1)


def shared(folder) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root gives a folder away")
    os.chown(folder, -1, 4711)
    folder.chmod(0o775)


@pytest.mark.parametrize("inner", ["", "simulator"])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: folder.chmod(0o777), "into which everybody may write"),
        (lambda folder: folder.chmod(0o1777), "into which everybody may write"),
        (shared, "into which group 4711 may write"),
        (foreign, f"which belongs to user 4711, and this is user {os.geteuid()}"),
    ],
)
def test_a_folder_that_others_may_write_is_refused(folder, inner, change, said):
    change(folder / inner)
    with pytest.raises(cache.BuildError, match=said) as caught, cache.own_folder():
        pass
    assert str(folder / inner) in str(caught.value) and "DS_NPU_CACHE" in str(caught.value)
    done = simulated.sim("--", "true")
    assert done.returncode == 1 and done.stderr.splitlines() == [f"ds_npu sim: {caught.value}"]


def test_a_folder_below_one_that_others_may_change_is_refused_but_for_their_own_files_only(tmp_path, folder):
    tmp_path.chmod(0o1777)  # as /tmp
    with cache.own_folder():
        pass
    tmp_path.chmod(0o777)
    with pytest.raises(cache.BuildError, match="everybody may write"), cache.own_folder():
        pass


def test_a_folder_that_was_made_without_a_umask_is_closed_to_others(tmp_path, monkeypatch):
    monkeypatch.setenv("DS_NPU_CACHE", str(tmp_path / "a" / "b"))
    before = os.umask(0)
    try:
        with cache.own_folder() as made:
            assert os.umask(0o022) == 0o022
        assert os.umask(0) == 0
    finally:
        os.umask(before)
    for place in (made, made.parent, made.parent.parent):
        assert stat.S_IMODE(place.stat().st_mode) == 0o755


def test_what_killed_builds_leave_is_removed_and_what_others_work_in_is_not(tmp_path):
    for name in ("building-dead", "building-alive"):
        (tmp_path / name / "home").mkdir(parents=True)
    with (tmp_path / "building-alive" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with cache.scratch(tmp_path) as mine:
            assert {path.name for path in tmp_path.glob("building-*")} == {"building-alive", mine.name}
            with cache.scratch(tmp_path):
                assert mine.exists()
    assert {path.name for path in tmp_path.glob("building-*")} == {"building-alive"}


def linked_environment(folder):
    """A folder for PYTHONPATH with the packages of this environment at other paths."""
    folder.mkdir()
    for name in ("torch", "torch_npu"):
        package = Path(PathFinder.find_spec(name).submodule_search_locations[0])
        (folder / name).symlink_to(package)
        for metadata in package.parent.glob(f"{name}-*.dist-info"):
            (folder / metadata.name).symlink_to(metadata)
    return folder


def test_environments_with_the_same_torch_share_what_is_compiled(tmp_path, environ):
    said = simulated.sim("--", "true", **environ).stderr
    assert re.search(r"building the simulated NPUs, \d+ files on \d+ cores: about (\d+ min )?\d+ s, once", said), said
    assert re.search(r"(\d+) of \1 files compiled, in \d+ s\n", said), said
    other = linked_environment(tmp_path / "other")
    done = simulated.sim("--", "true", **environ, PYTHONPATH=str(other))
    assert done.returncode == 0 and "building" not in done.stderr
    # Of another build of torch they are not used, whatever its version.
    (other / "torch").unlink()
    (other / "torch" / "lib").mkdir(parents=True)
    for part in (*LINKED, "include"):
        place = Path(PathFinder.find_spec("torch").submodule_search_locations[0])
        (other / "torch" / "lib" / part).symlink_to(place / "lib" / part)
    (other / "torch" / "version.py").write_text("git_version = 'another'\n")
    (other / "torch" / "__init__.py").touch()
    assert "building" in simulated.sim("--", "true", **environ, PYTHONPATH=str(other)).stderr
