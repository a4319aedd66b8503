"""How ranks come to profile, and to end at the same step, over a real store."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch.distributed as dist

from tula_agent.channel import Channel
from tula_agent.config import ProfilePlan
from tula_agent.guard import Guard
from tula_agent.profiling import Profiling
from tula_agent.together import Together

PLAN = ProfilePlan(warmup_steps=5, measure_steps=20, precision=0.05)


class Here:
    """A meeting whose way to the other ranks is there already."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def channel(self, _within_s: float = 0.0) -> Channel:
        return self._channel


def two_ranks() -> list[Profiling]:
    """Two ranks that are about to meet; neither has a plan of its own."""
    store, ranks = dist.HashStore(), []
    for rank in range(2):
        meeting: Any = Here(Channel(store, "run/", rank, 2))
        ranks.append(Profiling(None, rank == 0, Guard()))
        ranks[rank].join(Together(meeting, Guard(), 2))
    return ranks


def settle(ranks: list[Profiling], step: int) -> None:
    """All ranks, each in a thread of its own, since they wait for each other."""
    threads = [threading.Thread(target=rank.settle, args=(step,)) for rank in ranks if rank.unsettled]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_a_plan_that_comes_before_the_ranks_meet_is_every_rank_s_and_ends_them_at_one_step() -> None:
    ranks = two_ranks()
    ranks[0].offer(PLAN)
    settle(ranks, 7)
    plans = [rank.plan for rank in ranks]
    assert plans[0] is not None
    assert plans[0] == plans[1] == ProfilePlan(7, 20, 0.05)
    ends = [next(step for step in range(8, 100) if rank.ends(step, 0.1 * (1 + step % 2))) for rank in ranks]
    assert ends == [18, 18]  # as soon as the first rank is sure, at a step where all look for its word


def test_a_plan_that_comes_too_late_ends_no_rank_since_the_others_would_wait_for_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = two_ranks()
    settle(ranks, 7)
    ranks[0].offer(PLAN)
    assert ranks[0].unsettled
    settle(ranks, 9)
    assert [rank.plan for rank in ranks] == [None, None]
    assert not any(rank.ends(step, 0.1) for rank in ranks for step in range(10, 100))
    assert "start it by `tula tune`" in caplog.text


def test_one_rank_may_be_told_at_any_time() -> None:
    alone = Profiling(None, True, Guard())
    alone.join(Together(None, Guard()))
    assert not alone.unsettled
    alone.offer(PLAN)
    alone.settle(9)
    assert alone.plan == ProfilePlan(9, 20, 0.05)
