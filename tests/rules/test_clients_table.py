"""The table of docs/clients.md is that of tests/clients/cells.py, and each of its tests exists."""

from __future__ import annotations

import runpy
from pathlib import Path

TESTS = Path(__file__).parent.parent
CELLS = runpy.run_path(str(TESTS / "clients/cells.py"))


def test_every_cell_names_a_test():
    for cell in CELLS["CELLS"]:
        file, _, name = cell.test.partition("::")
        assert f"def {name}(" in (TESTS / file).read_text(), cell


def test_the_table_is_that_of_the_cells():
    assert CELLS["table"]() in (TESTS.parent / "docs/clients.md").read_text(), "write python tests/clients/cells.py"
