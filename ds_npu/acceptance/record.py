"""The file that users send back (the machine and every result, written anew after each case), and its summary."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ds_npu.acceptance.groups import GROUPS
from ds_npu.acceptance.machine import Npus, simulated, software_and_machine, without_names
from ds_npu.acceptance.world import CaseResult

FORMAT = 1
"""Version of the file's format; a run does not continue a file of another version."""
SAME_RUN = ("ds_npu accept", "simulated", "cases of", "versions", "npus")
"""Keys whose values must be the same in a file that a run continues."""
MOST_NAMED = 8
"""Cases of a group that the summary names; the file has all."""

Entry = Mapping[str, object]
"""A result as it stands in the file."""


@dataclass
class Record:
    """``entries`` by group and case; a later result of a case replaces an earlier one."""

    path: Path
    about: dict[str, object]
    entries: dict[tuple[str, str], Entry] = field(default_factory=dict)

    @staticmethod
    def begun(path: Path, npus: Npus, small: bool) -> Record:
        """A record without results."""
        return Record(
            path,
            {
                "ds_npu accept": FORMAT,
                "simulated": simulated(),
                "note": "simulated NPUs: this says nothing about a real one" if simulated() else "real NPUs",
                "cases of": "the small selection" if small else "all groups in full",
                "begun": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                **software_and_machine(),
                "npus": [
                    {"name": name, "memory GiB": size} for name, size in zip(npus.names, npus.memory_gib, strict=True)
                ],
                "groups": {group.name: {"purpose": group.purpose, "allowed": group.tolerance} for group in GROUPS},
            },
        )

    def continued(self) -> Record:
        """This record with the results that its file holds. Raises ValueError where the file is of another run."""
        try:
            found = json.loads(self.path.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.path} cannot be continued: {error}") from error
        other = [key for key in SAME_RUN if not isinstance(found, dict) or found.get(key) != self.about[key]]
        if other:
            raise ValueError(f"{self.path} is of another run: other {', '.join(other)}; name another file with --out")
        entries = {(entry["group"], entry["case"]): entry for entry in found["cases"]}
        return Record(self.path, self.about | {"begun": found["begun"]}, entries)

    def passed(self, group: str, case: str) -> bool:
        """Whether the case has passed already."""
        return self.entries.get((group, case), {}).get("result") == "passed"

    def add(self, result: CaseResult) -> None:
        """Add ``result`` and write the file."""
        self.entries[result.group, result.case] = entry_of(result)
        self.write(["the run was ended before its summary"])

    def write(self, summary: list[str]) -> None:
        """Write the file under another name first, so that it is whole whenever it is there."""
        whole = {**self.about, "summary": summary, "cases": list(self.entries.values())}
        written = self.path.with_name(self.path.name + ".new")
        written.write_text(json.dumps(_finite(whole), indent=1, allow_nan=False) + "\n")
        written.replace(self.path)


def entry_of(result: CaseResult) -> Entry:
    """``result`` for the file, without names and paths of the machine."""
    entry: dict[str, object] = {
        "group": result.group,
        "case": result.case,
        "ranks": result.ranks,
        "result": result.outcome,
        "seconds": round(result.seconds, 2),
    }
    if result.check is not None:
        entry |= {
            "what": result.check.what,
            "error": float(f"{result.check.error:.4g}"),
            "allowed": float(f"{result.check.allowed:.4g}"),
        }
    if result.call_s is not None:
        entry["call us"] = round(1e6 * result.call_s, 1)
    if result.message:
        entry["said"] = without_names(result.message)
    if result.output:
        entry["output"] = without_names(result.output).splitlines()
    return entry | {name: list(values) for name, values in result.series.items()}


def _finite(value: object) -> object:
    """``value`` with "nan" and "inf" as texts, for which JSON has no numbers."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def is_clean(entries: Sequence[Entry]) -> bool:
    """Whether at least one case was run, and every one that was run has passed."""
    outcomes = {entry["result"] for entry in entries}
    return "passed" in outcomes and outcomes <= {"passed", "not run"}


def verdict(entries: Sequence[Entry], file: str, simulated: bool, seconds: float) -> list[str]:
    """The summary, line by line."""
    counted = Counter(str(entry["result"]) for entry in entries)
    counts = ", ".join(f"{number} {outcome}" for outcome, number in counted.most_common())
    lines = [f"{counts or 'nothing was run'}; {seconds / 60:.1f} minutes."]
    for group in GROUPS:
        lines += _of_group(group.name, group.advice, [entry for entry in entries if entry["group"] == group.name])
    lines += ["", "What to do"]
    if simulated:
        return [*lines, "  Nothing to send: these NPUs are simulated, and say nothing about a real one."]
    lines.append(
        f"  Send {file} to the authors of ds_npu, whether or not all has passed: it is all they see of an NPU."
    )
    lines.append("  It has versions, results and times, and the end of what failed cases printed; read it before.")
    if is_clean(entries):
        lines.append("  What was run is right on these NPUs: train.")
    return lines


def first_line(message: object) -> str:
    """The first line of a message in the file: CANN's errors have many."""
    return str(message).partition("\n")[0]


def _of_group(name: str, advice: str, entries: Sequence[Entry]) -> Iterator[str]:
    skipped = Counter(str(entry["said"]) for entry in entries if entry["result"] == "not run")
    for reason, number in skipped.items():
        yield f"{name}: {number} not run: {reason}"
    bad = [entry for entry in entries if entry["result"] not in ("passed", "not run")]
    if not bad:
        return
    yield ""
    yield f"{name}: {len(bad)} of {len(entries)} did not pass"
    for entry in bad[:MOST_NAMED]:
        yield f"  {entry['case']}: {entry['result']}: {first_line(entry['said'])}"
    if len(bad) > MOST_NAMED:
        yield f"  and {len(bad) - MOST_NAMED} more"
    yield f"  {advice}"
