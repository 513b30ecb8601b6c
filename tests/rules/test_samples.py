"""What the sampling of slow tests promises (tests/support/matrix.py)."""

from __future__ import annotations

import matrix
from hypothesis import given
from hypothesis import strategies as st

OFFERED = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 5), min_size=1)
SECONDS = st.floats(0.5, 40)


def cases_of(counts: dict[str, int]) -> dict[str, list[str]]:
    return {test: [f"{test}[{case}]" for case in range(count)] for test, count in counts.items()}


@given(OFFERED, st.data(), st.floats(0, 200))
def test_a_sample_fits_its_budget(counts, data, budget):
    offered = cases_of(counts)
    seconds = {case: data.draw(SECONDS) for cases in offered.values() for case in cases}
    taken = matrix.within_budget(offered, seconds, budget)
    assert sum(seconds[case] for case in taken) <= budget + 1e-9
    left = budget - sum(seconds[case] for case in taken)
    assert all(case in taken or seconds[case] > left for case in seconds), "what still fits is taken"


@given(OFFERED)
def test_every_test_has_a_case_before_one_has_two(counts):
    offered = cases_of(counts)
    seconds = {case: 1.0 for cases in offered.values() for case in cases}
    taken = matrix.within_budget(offered, seconds, len(offered))
    assert taken == {cases[0] for cases in offered.values()}


def test_the_sample_changes_with_the_seed_and_only_with_it(monkeypatch):
    offered = cases_of(dict.fromkeys("abcdefgh", 5))
    seconds = {case: 1.0 for cases in offered.values() for case in cases}
    samples = []
    for seed in ("1a2b3c4", "1a2b3c4", "5d6e7f8"):
        monkeypatch.setattr(matrix, "seed", lambda seed=seed: seed)
        samples.append(matrix.within_budget(offered, seconds, 4))
    assert samples[0] == samples[1] != samples[2]


def test_the_record_holds_tests_that_exist(request):
    """A file that was renamed would leave its tests unmeasured."""
    files = {name.partition("::")[0] for name in matrix.recorded()}
    assert not [file for file in files if not (request.config.rootpath / file).is_file()]
