"""How the ranks of a profiling run come to stop at the same step, without a collective of ours."""

from __future__ import annotations

import time

from tula_agent.channel import Channel, Meeting
from tula_agent.config import ProfilePlan
from tula_agent.guard import Guard, logger

__all__ = ["FIRST_DECISION", "Together"]

FIRST_DECISION, DECIDE_EVERY = 8, 4
"""Measured steps before the first chance to end early, and between two."""
PEERS_WITHIN_S = 10.0
WORD_WITHIN_S = 600.0
"""How long a rank waits for the first rank's word: no longer than the collectives of training would wait for it."""


class Together:
    """The first rank decides; the others follow its word at fixed steps.

    `meet` once, after steps that synchronise gradients: all ranks that have an agent come there at the same time, so
    a rank without one costs PEERS_WITHIN_S once and nobody waits for it again. Then a rank waits only for a first
    rank that it knows to be measuring too and that its own training waits for. Ranks that have no way to meet
    (`meeting` is None) never agree.

    alone: there is one rank. met: it is settled whether all ranks take part. agreed: all do; only then may a loop end
    by itself.
    """

    def __init__(self, meeting: Meeting | None, guard: Guard, world_size: int = 1) -> None:
        self._meeting = meeting
        self._channel: Channel | None = None
        self._guard = guard
        self.alone = self.agreed = self.met = world_size == 1

    def meet(self, plan: ProfilePlan | None) -> ProfilePlan | None:
        """Settle who takes part, and the plan: the first rank's, on every rank."""
        if self.met:
            return plan
        self.met = True
        with self._guard("meeting the other ranks"):
            channel = self._channel = None if self._meeting is None else self._meeting.channel(PEERS_WITHIN_S)
            if channel is not None and channel.rank == 0:
                ends = time.monotonic() + PEERS_WITHIN_S
                others = [f"here/{rank}" for rank in range(1, channel.world_size)]
                self.agreed = all(channel.wait(key, ends - time.monotonic()) for key in others)
                word = [plan.warmup_steps, plan.measure_steps, plan.precision] if plan else None
                channel.set("verdict", [self.agreed, word])
            elif channel is not None:
                channel.set(f"here/{channel.rank}", True)
                verdict = channel.wait("verdict", 2 * PEERS_WITHIN_S)
                if verdict is not None:
                    self.agreed = bool(verdict[0])
                    plan = ProfilePlan(*verdict[1]) if verdict[1] else None
        if not self.agreed and plan is not None:
            logger.warning(
                "the ranks could not agree, so the run can't end early: call tula_agent.init() on all of them, and "
                "begin run.steps() after init_process_group()"
            )
        return plan

    def decide(self, measured: int, mine: bool) -> bool:
        """True when the loop ends here. `measured` counts steps after warm-up and is the same on every rank."""
        if not self.agreed:
            return False
        channel = self._channel
        if channel is None:
            return mine
        if measured < FIRST_DECISION or (measured - FIRST_DECISION) % DECIDE_EVERY:
            return False
        word = False
        try:
            if channel.rank == 0:
                channel.set(f"stop/{measured}", mine)
                word = mine
            else:
                word = bool(channel.wait(f"stop/{measured}", WORD_WITHIN_S))
        except Exception as error:
            # The store is gone, for every rank alike: nobody ends early any more.
            self._guard.note("agreeing with the other ranks", error)
            self.agreed = False
        return word
