"""The executor of pipelines: every schedule on ranks against one process in float64, and ranks that fail."""

from __future__ import annotations

import itertools
import weakref

import pipelines
import pytest
import random_schedules
import scheduled_engines
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from ranks import run_on_ranks

from ds_npu.parallel.pipeline.fill import recomputed
from ds_npu.parallel.pipeline.schedule import Kind
from ds_npu.parallel.pipeline.schedules import SCHEDULES
from ds_npu.parallel.pipeline.transfers import PipelineLinks


def schedules(ranks: int, micro_batches: int):
    """Every schedule; the interleaved one with two and three stages of each rank."""
    for name, each in SCHEDULES.items():
        for chunks in (each.chunks,) if each.chunks else (2, 3):
            yield each.make(ranks, max(micro_batches, each.fewest_micro_batches(ranks)), chunks), name


@pytest.mark.parametrize(("ranks", "more"), [(2, 3), pytest.param(4, 6, marks=pytest.mark.slow)])
def test_every_schedule_computes_what_one_process_does(ranks, more):
    """To the bit: each adds up the gradients of micro-batches in their order."""
    cases = [schedule for schedule, _ in itertools.chain(schedules(ranks, 1), schedules(ranks, more))]
    run_on_ranks(ranks, pipelines.run_all, *cases)


@pytest.mark.parametrize(("ranks", "more"), [(2, 5), pytest.param(4, 9, marks=pytest.mark.slow)])
def test_schedules_that_recompute(ranks, more):
    """To the bit, too; and as many graphs are alive at once as a schedule says."""
    cases = [recomputed(schedule, ahead) for schedule, _ in schedules(ranks, more) for ahead in (0, 1, 3)]
    run_on_ranks(ranks, pipelines.run_all, *cases)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
@settings(max_examples=1, deadline=None, phases=[Phase.generate])
@given(st.data())
def test_random_schedules_run(ranks, data):
    """Stages in any place, whole and split backwards, recomputations: one world runs 40 of them."""
    drawn = data.draw(st.lists(random_schedules.schedules(ranks), min_size=40, max_size=40))
    run_on_ranks(ranks, pipelines.run_in_any_order, *drawn)


class Transfer:
    """A send or a receive that counts how often it is waited for."""

    waited = 0

    def wait(self) -> None:
        self.waited += 1


def test_tensors_are_kept_until_the_receiver_has_answered(monkeypatch):
    sent: list[Transfer] = []
    tensors: list[weakref.ref] = []

    def isend(values, group, group_dst):
        sent.append(Transfer())
        tensors.append(weakref.ref(values))
        return sent[-1]

    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 0)
    monkeypatch.setattr(torch.distributed, "isend", isend)
    monkeypatch.setattr(torch.distributed, "irecv", lambda values, group, group_src: Transfer())
    schedule = SCHEDULES["1f1b"].make(2, 4, 1)
    links = PipelineLinks((None, None), torch.device("cpu"))
    links.begin(schedule.messages[0], ["shape"] * 4, schedule.acknowledged)
    kept = []
    for step in schedule.with_transfers.rows[0]:
        if step in schedule.carried and step.kind is Kind.SEND_STATES:
            links.send(schedule.carried[step], 1, (torch.zeros(3),))
        elif step in schedule.carried:
            links.receive(schedule.carried[step], 1)
        kept.append(sum(each() is not None for each in tensors))
    # The first message has a header. Rank 1 answers each micro-batch with its gradient.
    assert max(kept) == 3 and kept[-1] == 0
    assert [each.waited for each in sent] == [1] * 5
    links.finish()
    assert [each.waited for each in sent] == [1] * 5


@given(st.data())
def test_a_message_is_acknowledged_when_its_receiver_had_it_before_it_sent(data):
    ranks = data.draw(st.integers(2, 4))
    schedule = data.draw(random_schedules.schedules(ranks))
    rows = schedule.with_transfers.rows
    for action, (send, receive) in schedule.transfers.items():
        sender, receiver = (schedule.rank_of[each.stage] for each in (send, receive))
        before = rows[sender][: rows[sender].index(send)]
        arrived = [
            each
            for each in before
            if each in schedule.carried
            and each == schedule.transfers[schedule.carried[each]][1]
            and schedule.rank_of[schedule.carried[each].stage] == receiver
        ]
        assert schedule.acknowledged[action] == len(arrived)


def test_a_rank_that_waits_for_a_dead_one_says_for_what():
    run_on_ranks(2, pipelines.dying, SCHEDULES["zb_h1"].make(2, 4, 1))


@pytest.mark.slow
def test_a_rank_that_waits_for_one_that_hangs_says_for_what():
    run_on_ranks(2, pipelines.standing_still, SCHEDULES["zb_h1"].make(2, 4, 1))


ONE_STAGE = [name for name, each in SCHEDULES.items() if each.chunks == 1]
CASES = [(name, family, zero) for name in ONE_STAGE for family in ("llama", "gpt2") for zero in (0, 1, 2)]


def test_engines_run_schedules():
    """Zero-bubble schedules queue weight gradients; ZeRO reduces them once."""
    run_on_ranks(2, scheduled_engines.steps, [("1f1b", "llama", 1), ("zb_h1", "gpt2", 2), ("zb_h2", "llama", 0)])


@pytest.mark.slow
def test_engines_run_every_schedule():
    run_on_ranks(2, scheduled_engines.steps, CASES, deadline_s=600.0)
