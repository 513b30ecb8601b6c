"""Compilation of the simulator's C++ for each version of sources, torch and torch_npu, into a folder like CANN's."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import mmap
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from ds_npu.simulator.cache import SEAL, BuildError, is_sealed, locked, own_folder, scratch, seal

SOURCES = Path(__file__).parent / "csrc"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra")

LIBRARY = "libds_npu_simulator.so"
SONAMES = (
    "libascendcl.so",
    "libhccl.so",
    "libhcomm.so",
    "libacl_op_compiler.so",
    "libge_runner.so",
    "libgraph.so",
    "libopapi.so",
    "libacl_tdt_channel.so",
    "libmsprofiler.so",
    "libascend_hal.so",
)
"""The libraries of CANN that torch_npu links or opens by name: links to LIBRARY, which the loader opens once."""

LINKED_FROM = "lib64"
"""The folder of the toolkit that DeepSpeed's builders of operators link CANN's libraries from."""

LINKED = ("libtorch_cpu.so", "libc10.so")
"""torch's libraries that LIBRARY needs. It does not say where they are: the process that opens it has loaded them."""
TORCH_NPU = "libtorch_npu.so"

CONTENTS = "simulated.json"
"""File that lists, for each source, its functions of CANN's interface."""

TORCH_INCLUDE = "#include <ATen/ATen.h>"
SECONDS_A_FILE = 4.8
"""Seconds of one core: g++ 12 on x86-64, estimated from a compilation on a busy machine."""
SECONDS_BETWEEN = 10
"""Seconds between two lines of progress."""
MOST_WITHOUT = 4
"""The number of files up to which headers are not precompiled, since that would take as long."""

CANN_FOLDERS = ("runtime", "compiler", "opp")

MSPROF = Path(__file__).parent / "msprof.py"
"""The stand-in of CANN's program that exports profiles."""
MSPROF_SCRIPT = Path("tools/profiler/profiler_tool/analysis/msprof/msprof.py")
MSPROF_FOLDER = Path("tools/profiler/bin")
"""Paths in CANN's folder: of the script that torch_npu looks for, and of the folder of the command ``msprof``."""


@dataclass(frozen=True)
class Toolchain:
    """Inputs of a build other than the sources: ``compiler`` and the folders of torch and torch_npu."""

    compiler: str
    torch: Path
    torch_npu: Path

    @staticmethod
    def found() -> Toolchain:
        """Find all three without importing torch or torch_npu. Raises BuildError for what is missing."""
        compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, COMPILERS)), None)
        if compiler is None or shutil.which(compiler) is None:
            raise BuildError(
                f"no C++ compiler: looked for {compiler or ', '.join(COMPILERS)}. The simulated NPUs are C++ and are "
                f"compiled at first use; install g++ 11 or later (Debian and Ubuntu: apt-get install g++), or name one "
                f"in CXX"
            )
        return Toolchain(compiler, _folder("torch"), _folder("torch_npu"))

    def include_flags(self) -> list[str]:
        third_party = self.torch_npu / "include" / "third_party"
        torch = self.torch / "include"
        npu = (third_party.parent, third_party / "acl/inc", third_party / "hccl/inc")
        folders = (*npu, torch, torch / "torch/csrc/api/include")
        return [f"-I{SOURCES}", *(flag for folder in folders for flag in ("-isystem", str(folder)))]

    def identity(self) -> str:
        """A text that changes whenever compiled objects can no longer be used.

        It does not name the folders: environments with the same torch and torch_npu share what is compiled.
        """
        version = subprocess.run([self.compiler, "--version"], capture_output=True, text=True, check=False).stdout
        torch = [(self.torch / "version.py").read_text(), *(_size(self.torch / "lib" / name) for name in LINKED)]
        torch_npu = [f"torch_npu {importlib.metadata.version('torch_npu')}", _size(self.torch_npu / "lib" / TORCH_NPU)]
        return "\n".join([version, *torch, *torch_npu, *FLAGS])


def _size(library: Path) -> str:
    """The name and size of ``library``: builds of one version differ in size."""
    return f"{library.name} {library.stat().st_size if library.exists() else 0}"


def _folder(package: str) -> Path:
    # Not importlib.util.find_spec: where CANN is missing, it answers None for a torch_npu that is installed.
    spec = PathFinder.find_spec(package) or importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise BuildError(f"{package} is not installed; the simulated NPUs run the real one: pip install {package}")
    return Path(spec.submodule_search_locations[0])


def built() -> Path:
    """The folder with the libraries for these sources, torch and torch_npu; compiles them if they are not there.

    Safe to call from many processes at once: one compiles, the others wait for it. A library whose hash is wrong is
    built again, since loading a truncated one would kill the process. Raises BuildError, or OSError where the cache
    cannot be written.
    """
    toolchain = Toolchain.found()
    digest = _digest(toolchain)
    with own_folder() as folder:
        home = folder / digest
        if not _is_whole(home):
            with locked(folder / f"{digest}.lock"):
                if not _is_whole(home):
                    _build(toolchain, home)
    return home


def _is_whole(home: Path) -> bool:
    linked = all((home / name).is_symlink() and (home / name).exists() for name in (*SONAMES, LINKED_FROM))
    folders = all((home / folder).is_dir() for folder in CANN_FOLDERS)
    tools = (home / MSPROF_SCRIPT).exists() and (home / MSPROF_FOLDER / "msprof").exists()
    return linked and folders and tools and is_sealed(home / LIBRARY) and is_sealed(home / CONTENTS)


def _digest(toolchain: Toolchain) -> str:
    content = hashlib.sha256(toolchain.identity().encode() + Path(__file__).read_bytes() + MSPROF.read_bytes())
    for source in sorted(SOURCES.rglob("*.*")):
        content.update(str(source.relative_to(SOURCES)).encode() + source.read_bytes())
    return content.hexdigest()[:16]


def _build(toolchain: Toolchain, home: Path) -> None:
    """Compile into another folder and rename it to ``home``, which exists whole or not at all."""
    sources = sorted(SOURCES.rglob("*.cpp"))
    with scratch(home.parent) as folder:
        making = folder / "home"
        for name in CANN_FOLDERS:
            (making / name).mkdir(parents=True)
        objects = _compile(toolchain, sources, folder)
        contents = {
            str(source.relative_to(SOURCES)): _defined(made) for source, made in zip(sources, objects, strict=True)
        }
        (making / CONTENTS).write_text(json.dumps(contents))
        _link(toolchain, objects, {name for names in contents.values() for name in names}, making)
        for soname in SONAMES:
            (making / soname).symlink_to(LIBRARY)
        (making / LINKED_FROM).symlink_to(".")
        _install_msprof(making)
        seal(making / LIBRARY)
        seal(making / CONTENTS)
        if home.exists():
            shutil.rmtree(home)
        making.rename(home)


def _install_msprof(home: Path) -> None:
    """The command ``msprof``, which torch_npu looks for in PATH, and the script that it also asks for."""
    script = home / MSPROF_SCRIPT
    command = home / MSPROF_FOLDER / "msprof"
    for file in (script, command):
        file.parent.mkdir(parents=True)
    shutil.copyfile(MSPROF, script)
    relative = Path(*[".."] * len(MSPROF_FOLDER.parts)) / MSPROF_SCRIPT
    command.write_text(f'#!/bin/sh\nexec python3 "$(dirname "$(readlink -f "$0")")/{relative}" "$@"\n')
    command.chmod(0o755)


def _compile(toolchain: Toolchain, sources: Sequence[Path], folder: Path) -> list[Path]:
    """One object per source, as many at a time as there are cores; objects of earlier builds are reused."""
    kept = folder.parent / "objects"
    kept.mkdir(exist_ok=True)
    identity = toolchain.identity().encode()
    targets = {source: _object_of(source, identity, kept) for source in sources}
    missing = [source for source in sources if not is_sealed(targets[source])]
    with_torch = {
        source for source in missing if any(TORCH_INCLUDE in file.read_text() for file in (source, *_included(source)))
    }
    # Sources that need not wait for torch's headers come first, then the longest: no core has one left at the end.
    missing.sort(key=lambda source: (source in with_torch, -source.stat().st_size))

    def compiled(source: Path) -> None:
        made = folder / targets[source].name
        extra = headers.result() if source in with_torch else []
        command = [toolchain.compiler, *FLAGS, *toolchain.include_flags(), *extra]
        _run([*command, "-c", str(source), "-o", str(made)])
        seal(made)
        for file in (made, made.with_name(made.name + SEAL)):
            file.rename(kept / file.name)

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        headers = pool.submit(_precompiled, toolchain, folder, len(with_torch))
        _tell_progress(missing, pool.map(compiled, missing))
    return list(targets.values())


def _tell_progress(sources: Sequence[Path], compiled: Iterable[None]) -> None:
    """Say how long the compilation of ``sources`` takes, and, as ``compiled`` counts them in order, how far it is."""
    cores = os.cpu_count() or 1
    sizes = [source.stat().st_size for source in sources]
    begun = reported = time.monotonic()
    say(
        f"building the simulated NPUs, {len(sources)} files on {cores} cores: about "
        f"{_duration(len(sources) * SECONDS_A_FILE / cores)}, once for this torch and torch_npu"
    )
    for done, _ in enumerate(compiled, start=1):
        now = time.monotonic()
        if done == len(sources):
            say(f"{done} of {len(sources)} files compiled, in {_duration(now - begun)}")
        elif now - reported >= SECONDS_BETWEEN:
            reported = now
            left = (now - begun) * (sum(sizes) / sum(sizes[:done]) - 1)
            say(f"{done} of {len(sources)} files compiled, about {_duration(left)} left")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _object_of(source: Path, identity: bytes, kept: Path) -> Path:
    """The object of ``source`` in the folder ``kept``, named by a hash of all that it is made from."""
    key = hashlib.sha256(identity)
    for file in (*sorted(_included(source)), source):
        key.update(file.read_bytes())
    return kept / f"{source.stem}-{key.hexdigest()[:16]}.o"


def _precompiled(toolchain: Toolchain, folder: Path, files: int) -> list[str]:
    """Precompile torch's headers, whose parsing takes half of a compilation, and return the options that use them.

    There are none for few ``files``.
    """
    if files <= MOST_WITHOUT:
        return []
    header = folder / "torch_headers.h"
    header.write_text(f"{TORCH_INCLUDE}\n")
    command = [toolchain.compiler, *FLAGS, *toolchain.include_flags()]
    _run([*command, "-x", "c++-header", str(header), "-o", f"{header}.gch"])
    return ["-include", str(header)]


def _included(source: Path, found: frozenset[Path] = frozenset()) -> frozenset[Path]:
    """The simulator's headers that ``source`` includes, directly or through others."""
    for name in re.findall(r'^#include "([^"]+)"', source.read_text(), re.MULTILINE):
        header = SOURCES / name
        if header.exists() and header not in found:
            found = _included(header, found | {header})
    return found


def _link(toolchain: Toolchain, objects: Sequence[Path], defined: set[str], home: Path) -> None:
    """Link the library, with a symbol for all that torch_npu may look up: what is not simulated fails when called."""
    operators = {half for name in operators_of(toolchain.torch_npu) for half in (name, f"{name}GetWorkspaceSize")}
    missing = sorted((operators | _linked_symbols(toolchain)) - defined)
    functions = (
        f'extern "C" __attribute__((visibility("default"))) int {name}() {{ return sim::not_simulated("{name}"); }}\n'
        for name in missing
    )
    stubs = home.parent / "not_simulated.cpp"
    stubs.write_text("".join(["namespace sim { int not_simulated(const char* name); }\n", *functions]))
    torch_lib = toolchain.torch / "lib"
    libraries = [f"-l:{name}" for name in LINKED]
    _run([toolchain.compiler, *FLAGS, "-shared", "-o", str(home / LIBRARY), *map(str, objects), str(stubs),
          f"-L{torch_lib}", *libraries, f"-Wl,-rpath-link,{torch_lib}", "-Wl,-z,defs"])  # fmt: skip


def _defined(compiled: Path) -> list[str]:
    listing = _run(["nm", "--defined-only", "--extern-only", "--format=just-symbols", str(compiled)])
    return sorted(re.findall(r"^(?:acl|Hccl|Msprof|hal[A-Z])\w+$", listing, re.MULTILINE))


def operators_of(torch_npu: Path) -> list[str]:
    """Names of the aclnn operators that torch_npu's library can call, sorted."""
    with (torch_npu / "lib" / TORCH_NPU).open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        names = re.findall(rb"\0(aclnn[A-Z]\w*?)(?:GetWorkspaceSize)?(?=\0)", content)
    return sorted({name.decode() for name in names})


def _linked_symbols(toolchain: Toolchain) -> set[str]:
    """C functions of CANN that torch_npu's libraries need in order to be loaded at all."""
    libraries = [*(toolchain.torch_npu / "lib").glob("lib*.so"), *toolchain.torch_npu.glob("_C*.so")]
    listing = _run(["nm", "-D", "--undefined-only", "--format=just-symbols", *map(str, libraries)])
    return set(re.findall(r"^(?:acl|Hccl|Msprof|rt[A-Z])\w+$", listing, re.MULTILINE))


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(
            f"the simulated NPUs could not be built: {command[0]} ended with {done.returncode}\n"
            f"{' '.join(command)}\n{done.stderr.strip()}"
        )
    return done.stdout


def say(text: str) -> None:
    """Print a line of ``ds_npu sim``."""
    print(f"ds_npu sim: {text}", file=sys.stderr, flush=True)  # noqa: T201
