"""The table of families in docs/models.md, from ``family_outcomes.json``, which ``family_axes`` writes.

    python tests/support/family_page.py

puts it between its two marks.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from family_axes import AXES, FURTHER, LIST, decoders

OUTCOMES = Path(__file__).parent / "family_outcomes.json"
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN = "<!-- The table is made by tests/support/family_page.py. -->"
END = "<!-- The table ends here. -->"
REASONS = {
    "layers with a state or a convolution": r"has (layers with a state|linear_attention|.*conv|hybrid)",
    "Mamba's states (those of Mamba 2 are computed)": r"is Mamba, whose states",
    "sparse or compressed attention": r"has (indexed_attention|heavily|.*compressed|sparse)",
    "attention that transformers cannot exchange": r"computes its attention itself",
    "no stack of blocks with an attention in each": r"no stack of blocks|no one stack|0 blocks for",
    "blocks that return more than hidden states": r"returns a (tuple|list)",
    "a part that no stage is known to hold": r"nothing says which pipeline stage",
    "parts without a role": r"nothing says what it is|whose order is not known",
    "a part that may go from token to token": r"nothing says that it works on each token",
    "roles that its sizes contradict": r"PlanError",
    "a sharding that computes something else, as the probe found (heads in pairs; experts that are the identity)": (
        r"does not compute what it does whole"
    ),
    "an attribute of each block that the model reads in every stage": r"is in another stage, and its",
    "one weight in two stages": r"are one weight",
    "a module that is used before and behind the blocks": r"stands behind the blocks",
    "hidden states that the model flattens": r"and this model flattens them",
    "a router that counts all tokens": r"which is not known how to shard",
    "experts that ds_npu does not know": r"has no module of experts",
    "experts that are the identity": r"has weights of different numbers of experts",
}


def status(outcome: str) -> str:
    """The word of a cell: ``yes``, ``partly``, ``no``, or ``not tried``."""
    kind = outcome.partition(":")[0]
    return {"yes": "yes", "partly": "partly", "not built": "not tried"}.get(kind, "no")


def reason(outcome: str) -> str:
    """Why the cell is no, in few words."""
    kind, _, text = outcome.partition(": ")
    if kind == "partly":
        return f"whole on each rank: {text.removeprefix('not sharded ')}"
    if kind == "not built":
        return "no tiny model was made"
    # What a plan's error says of other axes is in front of its mistakes.
    text = re.sub(r"^.*?\d+ mistakes? in the plan of", "PlanError:", text)
    found = [words for words, pattern in REASONS.items() if re.search(pattern, text)]
    return found[0] if found else re.sub(r"^\w+: ", "", text.removeprefix("at the first step, "))[:90]


def counts(outcomes: dict[str, dict[str, str]]) -> dict[str, int]:
    """How many families each axis shards."""
    return {axis: sum(each.get(axis) == "yes" for each in outcomes.values()) for axis in AXES}


def table() -> str:
    """The page's lines between the marks."""
    found = json.loads(OUTCOMES.read_text())
    outcomes: dict[str, dict[str, str]] = found["outcomes"]
    commits = ", ".join(sorted({each["commit"] for each in outcomes.values()}))
    classes, total = decoders(), len(decoders())
    numbers = ", ".join(f"{axis} {count} ({100 * count / total:.0f} %)" for axis, count in counts(outcomes).items())
    release = json.loads(LIST.read_text())["transformers"]
    lines = [
        f"Tried at commit {commits} with transformers {release}, of {total} decoders: {numbers}.",
        "",
        f"| family | class | {' | '.join(AXES)} |",
        f"|---|---|{'---|' * len(AXES)}",
    ]
    for kind, name in classes.items():
        cells = [status(outcomes.get(kind, {}).get(axis, "not built")) for axis in AXES]
        lines.append(f"| {kind} | {name} | {' | '.join(cells)} |")
    for axis in AXES:
        reasons: dict[str, list[str]] = {}
        for kind in classes:
            outcome = outcomes.get(kind, {}).get(axis, "not built: ")
            if outcome != "yes":
                reasons.setdefault(reason(outcome), []).append(kind)
        lines += ["", f"Not yes of {axis}, and why:", ""]
        by_number = sorted(reasons.items(), key=lambda each: -len(each[1]))
        lines += [f"- {why}: {', '.join(kinds)}" for why, kinds in by_number]
    return "\n".join(lines)


def further_table() -> str:
    """The lines of what was tried of families with a yes for each axis of a setting."""
    found: dict[str, dict[str, str]] = json.loads(OUTCOMES.read_text())["further"]
    commits = ", ".join(sorted({commit for each in found.values() for commit in each["commit"].split(", ")}))
    lines = [
        f"Tried further at commit {commits}, where each axis of a setting is a yes (of expert ranks: where there are "
        "experts):",
        "",
        "| setting | ranks | ZeRO | yes |",
        "|---|---|---|---|",
    ]
    others = []
    for name, setting in FURTHER.items():
        tried = {kind: each[name] for kind, each in found.items() if name in each}
        reasons: dict[str, list[str]] = {}
        for kind, outcome in tried.items():
            if outcome != "yes":
                reasons.setdefault(reason(outcome), []).append(kind)
        others += [f"- {name}, {why}: {', '.join(kinds)}" for why, kinds in reasons.items()]
        count = sum(outcome == "yes" for outcome in tried.values())
        lines.append(f"| {name} | {setting.ranks} | {setting.zero} | {count} of {len(tried)} |")
    return "\n".join([*lines, "", "Not yes further, and why:", "", *others])


def page() -> str:
    """The whole page with the tables."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{further_table()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page())
