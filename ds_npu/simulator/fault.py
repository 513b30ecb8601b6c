"""Faults of ``ds_npu sim --fault``: their syntax, and whether one has fired."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from ds_npu.simulator.build import CONTENTS, SOURCES, say
from ds_npu.simulator.child import ended_as, waited_for

FORM = re.compile(r"((?:acl|Hccl)\w+)(?::([0-9]+))?(?:@([0-9]+))?=([0-9]+|exit)", re.ASCII)
LARGEST = {"CALL": 10**9, "RANK": 10**6, "CODE": 2**31 - 1}
"""The largest accepted numbers; the simulator reads them as 32-bit integers."""

FIRED = "DS_NPU_SIM_FIRED"
"""The variable that names a file; each process of the run appends a line to it for each fault that fires."""


def fault_of(text: str) -> str:
    """Check ``text``, such as ``HcclAllReduce:3@1=exit``, and return it; raises ValueError where it is no fault."""
    found = FORM.fullmatch(text)
    if found is None:
        raise ValueError(
            f"found {text!r}; NAME[:CALL][@RANK]=CODE or =exit, where NAME is a function of ACL or HCCL or an aclnn "
            f"operator, as aclrtMalloc:2=207001 or HcclAllReduce:3@1=exit"
        )
    for key, digits, least in (("CALL", found[2], 1), ("RANK", found[3], 0), ("CODE", found[4], 1)):
        if digits and digits != "exit" and not (len(digits) <= 10 and least <= int(digits) <= LARGEST[key]):
            raise ValueError(f"found {key} {digits!r} in {text!r}; an integer from {least} to {LARGEST[key]}")
    return text


def unknown_function(fault: str, home: Path) -> str | None:
    """Why ``fault`` cannot fire in the build in ``home``: it names a function that cannot fail. None if it can."""
    name = FORM.fullmatch(fault)[1]  # type: ignore[index]
    known = faultable(home)
    if name in known:
        return None
    close = difflib.get_close_matches(name.removesuffix("GetWorkspaceSize"), known, n=3)
    return (
        f"argument --fault: found {name!r} in {fault!r}; a function that is simulated and can fail"
        f"{' (' + ', '.join(close) + '?)' if close else ''}: ds_npu sim --list shows them"
    )


def faultable(home: Path) -> set[str]:
    """The functions of the build in ``home`` that return an error code, without operators' GetWorkspaceSize."""
    defined = {name for names in json.loads((home / CONTENTS).read_text()).values() for name in names}
    sources = "\n".join(source.read_text() for source in SOURCES.rglob("*.cpp"))
    plain = set(re.findall(r"^SIM_PLAIN [^(]*?(\w+)\(", sources, re.MULTILINE))
    graph = {f"aclop{name}" for name in re.findall(r"^GRAPH_OPERATOR\((\w+)\)", sources, re.MULTILINE)}
    return defined - plain - graph - {f"{name}GetWorkspaceSize" for name in defined}


def run(program: str, command: Sequence[str], environment: dict[str, str], faults: Sequence[str]) -> int:
    """Run ``command`` and return its exit code: 1 in place of 0 where a fault has not fired in any process.

    Where a signal has ended the command, the same signal ends this process. SIGTERM and SIGHUP are passed on to it.
    """
    # The kernel removes this anonymous file with the process, however that ends.
    fired = os.memfd_create("ds_npu_fired")
    code = waited_for(program, command, {**environment, FIRED: f"/proc/{os.getpid()}/fd/{fired}"})
    seen = os.pread(fired, os.fstat(fired).st_size, 0).decode().splitlines()
    silent = [fault for fault in faults if fault not in seen]
    for fault in silent:
        say(f"--fault {fault} has not fired: no process made that call, so this run does not show what happens then")
    return ended_as(code) or int(bool(silent))
