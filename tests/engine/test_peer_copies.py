"""``checkpoint.peer_copies``: ranks are killed, and a new start loses few steps, or loads what is on the disk."""

from __future__ import annotations

import copied_lives
import copied_runs
import pytest
from ranks import run_on_ranks

from ds_npu.checkpoint.rank_files import RankFiles, name_latest
from ds_npu.checkpoint.wholeness import checkpoints_in, newest_whole, verify
from ds_npu.engine.checkpoints.peer_ring import ring_order

EVERY, DEATH, STEPS = 4, 7, 9
TENSOR = {"parallel": {"tensor": 2}}
CASES = [
    *[(2, (1,), {}), (2, (0,), {}), (4, (2,), TENSOR), (4, (0, 2), {})],
    (4, (1,), {"parallel": {"pipeline": 2}}),
]


def survivors_say(run: copied_runs.Run, victims: tuple[int, ...]) -> str:
    return "".join(screen for rank, screen in enumerate(run.screens) if rank not in victims)


OF_TWO = [("llama", 1, {}), ("mixtral", 2, {"parallel": {"expert": 2}}), ("llama", 3, {}), ("llama", 0, TENSOR)]
OF_FOUR = [("llama", 1, {"parallel": {"pipeline": 2}}), ("mixtral", 0, {"parallel": {"expert": 2, "expert_tensor": 2}})]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "cases"), [(2, OF_TWO), (4, OF_FOUR)], ids=str)
def test_copies_hold_what_a_save_holds(ranks, cases, tmp_path):
    run_on_ranks(ranks, copied_lives.life, str(tmp_path), cases, deadline_s=400.0)


@pytest.mark.slow
@pytest.mark.parametrize("is_on_thread", [True, False])
def test_a_rank_that_cannot_make_its_copy(is_on_thread, tmp_path):
    run_on_ranks(3, copied_lives.failing_life, str(tmp_path), is_on_thread)


@pytest.mark.slow
@pytest.mark.matrix(corners=1, drawn=1)
@pytest.mark.parametrize(("ranks", "victims", "section"), CASES, ids=str)
def test_a_new_start_goes_on_to_the_bit(ranks, victims, section, tmp_path):
    folder = tmp_path / "copies"
    dying = copied_runs.run(ranks, folder, STEPS, section, (victims, DEATH))
    said = survivors_say(dying, victims)
    assert said.count("is gone. The other ranks write") == len(victims), said
    assert "the files of all ranks are in" in said, said
    named = folder / (folder / "latest").read_text()
    assert newest_whole(folder) == named and "_copies_" in named.name
    found = next(each for each in checkpoints_in(folder) if each.folder == named)
    assert not verify(found) and not list(folder.rglob("*.unfinished"))
    again = copied_runs.run(ranks, folder, STEPS, section)
    assert int(again.number("begins at")) >= DEATH - EVERY and again.number("the same is") == "True", again.screens


@pytest.mark.slow
def test_a_rank_and_its_holder_are_gone(tmp_path):
    """Ranks 1 and 2: nobody has the files of rank 1, and the checkpoint on the disk is loaded."""
    folder = tmp_path / "copies"
    dying = copied_runs.run(4, folder, STEPS, {}, ((1, 2), DEATH))
    said = survivors_say(dying, (1, 2))
    assert said.count("is gone. The other ranks write") == 1 and "the files of all ranks are in" not in said, said
    assert (folder / "latest").read_text() == "global_step2" and newest_whole(folder) == folder / "global_step2"
    again = copied_runs.run(4, folder, STEPS, {})
    assert again.number("begins at") == "2" and again.number("the same is") == "True", again.screens


ASYNCHRONOUS = {"checkpoint": {"asynchronous": True}}


@pytest.mark.slow
@pytest.mark.matrix(corners=1, drawn=1)
@pytest.mark.parametrize("has_copies", [False, True])
def test_all_ranks_get_sigterm_while_they_save(has_copies, tmp_path):
    """As a launcher or a scheduler ends a run: what was begun is written, and copies besides, which are newer."""
    folder, death = tmp_path / "copies", 4 if has_copies else 2
    copies = {"peer_copies": EVERY, "peer_folder": str(folder)} if has_copies else {}
    section = {"checkpoint": ASYNCHRONOUS["checkpoint"] | copies}
    ended = copied_runs.run(2, folder, STEPS, section, ((0, 1), death), copied_runs.TERMINATED_ON_A_SLOW_DISK)
    said = "".join(ended.screens)
    assert "has failed" not in said and "Traceback" not in said, said
    named = folder / (folder / "latest").read_text()
    assert named.name.startswith(("global_step2", "global_step4_copies") if has_copies else "global_step2"), said
    # A copy that not all ranks had may be there in part; latest does not name it.
    for each in (named, folder / "global_step2"):
        found = next(checkpoints_in(each))
        assert not found.problems and not verify(found)
    assert not list(folder.rglob("*.unfinished")) and not list(folder.rglob("*.saving"))


@pytest.mark.slow
def test_a_rank_dies_while_all_save_behind_training(tmp_path):
    """What cannot be saved any more, and what there is in its place: the last words say what to do."""
    folder = tmp_path / "copies"
    section = {"checkpoint": {**ASYNCHRONOUS["checkpoint"], "peer_copies": 2, "peer_folder": str(folder)}}
    dying = copied_runs.run(2, folder, STEPS, section, ((1,), 2), ("SIGKILL", "slow"))
    said = survivors_say(dying, (1,))
    assert "a save behind training has failed: " in said and "the files of all ranks are in" in said, said
    last = said[max(said.index("a save behind training has failed: "), said.index("the files of all ranks are in")) :]
    assert "What to do: " in last, said
    named = folder / (folder / "latest").read_text()
    assert newest_whole(folder) == named and "_copies_" in named.name, said


def test_neighbours_are_on_different_hosts():
    assert ring_order(["a", "a", "b", "b"]) == [0, 2, 1, 3]
    assert ring_order(["a"] * 3) == [0, 1, 2]
    hosts = ["a", "a", "b", "b", "c", "c"]
    order = ring_order(hosts)
    assert sorted(order) == list(range(6))
    assert all(hosts[order[at - 1]] != hosts[order[at]] for at in range(6))


def test_latest_is_the_newest_that_all_ranks_have_written(tmp_path):
    """Each of two ranks writes two copies, of which the newer one is on one rank only."""
    manifest = "ds_npu_layout_rank_{:05d}.json"
    for rank in range(2):
        RankFiles("old", 2, rank, {f"{rank}.pt": b"1", manifest.format(rank): b"{}"}).write(tmp_path)
        named = name_latest(tmp_path, {"old": 2, "new": 4}, 2, ())
        assert named == (None, "old")[rank]
    RankFiles("new", 4, 0, {"0.pt": b"2", manifest.format(0): b"{}"}).write(tmp_path)
    assert name_latest(tmp_path, {"old": 2, "new": 4}, 2, ()) == "old"
    RankFiles("new", 4, 1, {"1.pt": b"2", manifest.format(1): b"{}"}).write(tmp_path)
    assert name_latest(tmp_path, {"old": 2, "new": 4}, 2, ()) == "new"
    assert (tmp_path / "latest").read_text() == "new"
