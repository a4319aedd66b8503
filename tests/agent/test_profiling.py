"""Ranks agree over a real store on a profiling plan and on the step to stop at."""

from __future__ import annotations

import threading
from typing import Any

import torch.distributed as dist

from tula_agent.config import ProfilePlan
from tula_agent.guard import Guard
from tula_agent.profiling import LIMIT_EVERY, Profiling, StopAgreement
from tula_agent.rank_channel import Channel
from tula_agent.sweep import Sweep

PLAN = ProfilePlan(warmup_steps=5, measure_steps=20, precision=0.05)


class Connected:
    """A rendezvous that has its channel already."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def channel(self, _within_s: float = 0.0) -> Channel:
        return self._channel


def test_all_ranks_take_the_first_ranks_plan_and_end_at_the_same_step() -> None:
    store, ranks = dist.HashStore(), []
    for rank, plan in enumerate((PLAN, None)):
        rendezvous: Any = Connected(Channel(store, "run/", rank, 2))
        ranks.append(Profiling(plan, Sweep("r", None), Guard()))
        ranks[rank].use(StopAgreement(rendezvous, Guard(), 2))
    threads = [threading.Thread(target=rank.agree) for rank in ranks if rank.pending]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert [rank.plan for rank in ranks] == [PLAN, PLAN]
    ends = [next(step for step in range(6, 100) if rank.ends(step, 0.1 + 0.001 * (step % 2))) for rank in ranks]
    assert ends == [16, 16]  # at the first common step after the first rank has enough


def test_a_training_without_a_limit_or_whose_ranks_did_not_agree_never_ends_early() -> None:
    unlimited, alone = (
        Profiling(None, Sweep("r", None), Guard()),
        Profiling(None, Sweep("r", None), Guard(), time_limit_s=1e-9),
    )
    unlimited.use(StopAgreement(None, Guard(), 1))
    alone.use(StopAgreement(None, Guard(), 2))  # no rank answered
    assert not any(each.reaches_limit(step) for each in (unlimited, alone) for step in range(5 * LIMIT_EVERY))


def test_ranks_end_a_training_at_the_step_that_the_first_announced_in_time() -> None:
    store, ranks = dist.HashStore(), []
    for rank in range(2):
        rendezvous: Any = Connected(Channel(store, "run/", rank, 2))
        ranks.append(Profiling(None, Sweep("r", None), Guard(), time_limit_s=1e-9 if rank == 0 else 1e9))
        ranks[rank].use(StopAgreement(rendezvous, Guard(), 2))
    threads = [threading.Thread(target=rank.agree) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    ends: dict[int, int] = {}
    for step in range(3, 5 * LIMIT_EVERY):
        for rank in (1, 0):  # the second is a step ahead of the first
            if rank not in ends and ranks[rank].reaches_limit(step):
                ends[rank] = step
    assert ends == {0: 3 * LIMIT_EVERY, 1: 3 * LIMIT_EVERY}
