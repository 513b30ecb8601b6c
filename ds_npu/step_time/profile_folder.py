"""The files of a profile: ``rank<N>.json`` of each recorded rank, and the trace that it names."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ds_npu.step_time.npu_trace import read_npu_trace
from ds_npu.step_time.torch_trace import read_torch_trace
from ds_npu.step_time.trace import Header, RankTrace, TraceError, header_of

READERS: dict[bool, Callable[[Path, Header], RankTrace]] = {True: read_torch_trace, False: read_npu_trace}
"""The reader of a trace: True where the device was the CPU, False for an NPU."""


def write_header(folder: Path, header: Header) -> None:
    """Write ``rank<N>.json``, which names the trace of a rank; raises OSError where it cannot."""
    incomplete = folder / f".rank{header.rank}.incomplete"
    incomplete.write_text(json.dumps(header.as_json(), indent=1) + "\n", encoding="utf-8")
    incomplete.replace(folder / f"rank{header.rank}.json")


def traces_in(folder: Path) -> list[RankTrace]:
    """The traces of the last run that wrote to ``folder``, by rank; raises TraceError where there is none."""
    if not folder.is_dir():
        raise TraceError(f"{folder}: there is no such folder")
    files = sorted(folder.glob("rank*[0-9].json"), key=lambda each: each.stat().st_mtime)
    if not files:
        raise TraceError(f"{folder}: no profile is there; ds_npu.profile of a DeepSpeed config writes one")
    headers = [_header_in(file) for file in files]
    own = sorted((each for each in headers if each.run == headers[-1].run), key=lambda each: each.rank)
    others = sorted(each.rank for each in headers if each.run != headers[-1].run)
    if others:
        note = f"files of another run are left out: ranks {', '.join(map(str, others))}"
        own[0] = replace(own[0], notes=(*own[0].notes, note))
    if len({each.steps for each in own}) > 1:
        raise TraceError(f"{folder}: its ranks were recorded in different steps; remove the files of one window")
    return [READERS[each.device == "cpu"](folder / each.trace, each) for each in own]


def _header_in(file: Path) -> Header:
    try:
        return header_of(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TraceError(f"{file}: it is no file of ds_npu.profile ({error!r})") from error
