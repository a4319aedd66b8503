"""How the ranks of a profiling run come to stop at the same step, without a collective of ours."""

from __future__ import annotations

from tula_agent.channel import Channel
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

    `announce` before the first step; `meet` once, after steps that synchronise gradients: by then a rank that has an
    agent at all has announced itself, so a rank without one costs PEERS_WITHIN_S once and nobody waits for it again.
    Then a rank waits only for a first rank that it knows to be measuring too and that its own training waits for.
    """

    def __init__(self, channel: Channel | None, guard: Guard) -> None:
        self._channel = channel
        self._guard = guard
        self._agreed = channel is None
        self._met = channel is None

    @property
    def met(self) -> bool:
        """True once it is settled whether all ranks take part."""
        return self._met

    @property
    def agreed(self) -> bool:
        """True when all ranks take part: only then may a loop end by itself."""
        return self._agreed

    def announce(self) -> None:
        """This rank measures."""
        if self._channel is not None:
            self._channel.set(f"here/{self._channel.rank}", True)

    def meet(self, plan: ProfilePlan | None) -> ProfilePlan | None:
        """Settle who takes part, and the plan: the first rank's, on every rank."""
        self._met = True
        channel = self._channel
        if channel is None:
            return plan
        with self._guard("meeting the other ranks"):
            if channel.rank == 0:
                others = [f"here/{rank}" for rank in range(1, channel.world_size)]
                self._agreed = all(channel.wait(key, PEERS_WITHIN_S) for key in others[:1]) and channel.has(*others)
                word = [plan.warmup_steps, plan.measure_steps, plan.precision] if plan else None
                channel.set("verdict", [self._agreed, word])
            elif channel.wait("here/0", PEERS_WITHIN_S):
                verdict = channel.wait("verdict", 3 * PEERS_WITHIN_S)
                if verdict is not None:
                    self._agreed = bool(verdict[0])
                    plan = ProfilePlan(*verdict[1]) if verdict[1] else None
        if not self._agreed and plan is not None:
            logger.warning("not every rank runs the agent: call tula_agent.init() on all, or the run can't end early")
        return plan

    def decide(self, measured: int, mine: bool) -> bool:
        """True when the loop ends here. `measured` counts steps after warm-up and is the same on every rank."""
        if not self._agreed:
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
            self._agreed = False
        return word
