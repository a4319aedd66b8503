"""Ranks agree over a real store on a profiling plan and on the step to stop at."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch.distributed as dist

from tula_agent.config import ProfilePlan
from tula_agent.guard import Guard
from tula_agent.profiling import Profiling, StopAgreement
from tula_agent.rank_channel import Channel

PLAN = ProfilePlan(warmup_steps=5, measure_steps=20, precision=0.05)


class Connected:
    """A rendezvous that has its channel already."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def channel(self, _within_s: float = 0.0) -> Channel:
        return self._channel


def two_ranks() -> list[Profiling]:
    """Two ranks that have not joined yet; neither has a plan."""
    store, ranks = dist.HashStore(), []
    for rank in range(2):
        rendezvous: Any = Connected(Channel(store, "run/", rank, 2))
        ranks.append(Profiling(None, rank == 0, Guard()))
        ranks[rank].use(StopAgreement(rendezvous, Guard(), 2))
    return ranks


def agree(ranks: list[Profiling], step: int) -> None:
    """All ranks, each on its own thread, since they wait for each other."""
    threads = [threading.Thread(target=rank.agree, args=(step,)) for rank in ranks if rank.pending]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_a_plan_offered_before_the_ranks_join_ends_all_of_them_at_the_same_step() -> None:
    ranks = two_ranks()
    ranks[0].offer(PLAN)
    agree(ranks, 7)
    plans = [rank.plan for rank in ranks]
    assert plans[0] is not None
    assert plans[0] == plans[1] == ProfilePlan(7, 20, 0.05)
    ends = [next(step for step in range(8, 100) if rank.ends(step, 0.1 * (1 + step % 2))) for rank in ranks]
    assert ends == [18, 18]  # at the first common step after the first rank has enough


def test_a_plan_offered_after_the_ranks_joined_ends_no_rank(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = two_ranks()
    agree(ranks, 7)
    ranks[0].offer(PLAN)
    assert ranks[0].pending
    agree(ranks, 9)
    assert [rank.plan for rank in ranks] == [None, None]
    assert not any(rank.ends(step, 0.1) for rank in ranks for step in range(10, 100))
    assert "start it by `tula tune`" in caplog.text


def test_a_single_rank_takes_a_plan_at_any_time() -> None:
    single = Profiling(None, True, Guard())
    single.use(StopAgreement(None, Guard()))
    assert not single.pending
    single.offer(PLAN)
    single.agree(9)
    assert single.plan == ProfilePlan(9, 20, 0.05)
