"""Tests that ranks agree on a profiling plan and on its last step, over a real store."""

from __future__ import annotations

import random
import threading
from typing import Any

import torch.distributed as dist

from tula_agent.config import ProfilePlan
from tula_agent.guard import Guard
from tula_agent.launch import Launch
from tula_agent.profiling import Profiling, StopAgreement
from tula_agent.rank_channel import Channel

PLAN = ProfilePlan(warmup_steps=5, measure_steps=20, precision=0.05)


class Connected:
    """A rendezvous with a channel that is already connected."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def channel(self, _within_s: float = 0.0) -> Channel:
        return self._channel


def test_all_ranks_take_the_first_ranks_plan_and_end_at_the_same_step() -> None:
    store, ranks = dist.HashStore(), []
    for rank, plan in enumerate((PLAN, None)):
        rendezvous: Any = Connected(Channel(store, "run/", rank, 2))
        ranks.append(Profiling(plan, Launch("r", None), Guard()))
        ranks[rank].use(StopAgreement(rendezvous, Guard(), 2))
    threads = [threading.Thread(target=rank.agree) for rank in ranks if rank.pending]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert [rank.plan for rank in ranks] == [PLAN, PLAN]
    ends = [next(step for step in range(6, 100) if rank.ends(step, 0.2 + 0.002 * (step % 2))) for rank in ranks]
    assert ends == [16, 16]  # at the first common step after the first rank has enough


def test_steps_that_are_slow_at_random_are_measured_for_longer_and_all_ranks_end_at_the_same_step() -> None:
    """The other ranks measure different times, but the first rank decides."""
    store, asked = dist.HashStore(), PLAN.measure_steps
    ranks = []
    for rank in range(2):
        rendezvous: Any = Connected(Channel(store, "run/", rank, 2))
        ranks.append(Profiling(PLAN, Launch("r", None), Guard()))
        ranks[rank].use(StopAgreement(rendezvous, Guard(), 2))
    threads = [threading.Thread(target=rank.agree) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    dice = random.Random(0)
    slow = [0.6 if dice.random() < 0.5 else 0.2 for _ in range(400)]
    first = next(step for step in range(5, 400) if ranks[0].ends(step, slow[step]))
    second = next(step for step in range(5, 400) if ranks[1].ends(step, 0.2))
    assert first == second
    assert first + 1 - PLAN.warmup_steps in (2 * asked, 4 * asked, 8 * asked)


def test_the_first_rank_of_a_training_waits_for_no_other() -> None:
    """Other ranks may run without an agent; a rank that has a plan learns that the first rank has none."""
    store = dist.HashStore()
    first, second = (Channel(store, "run/", rank, 2) for rank in range(2))
    waited: list[str] = []
    first.wait = lambda key, _within_s: waited.append(key)  # type: ignore[method-assign, assignment, func-returns-value]
    rendezvous: Any = Connected(first)
    assert StopAgreement(rendezvous, Guard(), 2).join(None) is None
    assert waited == []
    rendezvous = Connected(second)
    assert StopAgreement(rendezvous, Guard(), 2).join(PLAN) is None


def test_a_batch_whose_first_steps_are_alike_by_chance_is_measured_as_long_as_the_batch_before_it() -> None:
    profiling = Profiling(PLAN, Launch("r", None), Guard())
    profiling.use(StopAgreement(None, Guard(), world_size=1))
    dice = random.Random(0)
    slow = [0.6 if dice.random() < 0.5 else 0.2 for _ in range(200)]
    assert next(step for step in range(5, 200) if profiling.ends(step, slow[step])) > 5 + PLAN.measure_steps
    profiling.begin_again()
    alike = next(step for step in range(5, 200) if profiling.ends(step, 0.2)) + 1 - PLAN.warmup_steps
    assert alike > PLAN.measure_steps
