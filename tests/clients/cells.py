"""What was tried of which client over which ranks: the table in docs/clients.md, and the test that each cell rests on.

Printed by ``python tests/clients/cells.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

DOES = ("train", "eval", "save", "resume")
HEADER = ("client", "ranks", "ZeRO", *DOES, "test")


@dataclass(frozen=True)
class Cell:
    """A client over some ranks, as ``test`` runs it against one process."""

    client: str
    ranks: str
    zero: str
    does: str
    """Of DOES; what is missing was not tried. "refused": an error before the first step, by name."""
    test: str
    """Name of a file in tests, and of a test in it."""

    @property
    def row(self) -> str:
        does = ["refused"] * len(DOES) if self.does == "refused" else ["yes" * (each in self.does) for each in DOES]
        return f"| {' | '.join([self.client, self.ranks, self.zero, *does, f'`{self.test}`'])} |"


def trl(client: str) -> tuple[Cell, ...]:
    test = "clients/test_trl.py::test_losses_norms_and_metrics_are_those_of_one_process"
    return tuple(Cell(client, ranks, "1", "train eval save", test) for ranks in ("tensor", "context", "both"))


CELLS = (
    *(each for client in ("TRL SFT", "TRL DPO", "TRL GRPO", "TRL RLOO") for each in trl(client)),
    Cell("TRL Reward", "tensor", "1", "train eval save", trl("")[0].test),
    Cell("TRL Reward", "context", "1", "refused", "clients/test_trl.py::test_scores_of_sequences_are_refused"),
)


def table() -> str:
    return "\n".join(["| " + " | ".join(HEADER) + " |", "|---" * len(HEADER) + "|", *(each.row for each in CELLS)])


if __name__ == "__main__":
    print(table())
