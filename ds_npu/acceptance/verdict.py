"""The meaning of a run in plain words, and advice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ds_npu.acceptance.groups import GROUPS
from ds_npu.acceptance.record import Entry

MOST_NAMED = 8
"""Cases of a group that the summary names; the file has all."""


def is_clean(entries: Sequence[Entry]) -> bool:
    """Whether every case that was run has passed, and one was run."""
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
