"""How a run comes to profile, and to end by itself: the plan, whoever gave it, followed by all ranks alike."""

from __future__ import annotations

from tula_agent.config import ProfilePlan
from tula_agent.guard import Guard, logger
from tula_agent.measure.step_timer import relative_error
from tula_agent.together import Together

__all__ = ["Profiling"]


class Profiling:
    """`plan` is None in a training run; the environment or, later, the service may give one.

    `offer` and `stop_soon` come from the shipping thread, and take effect at the next step that all ranks share.
    """

    def __init__(self, plan: ProfilePlan | None, leads: bool, guard: Guard) -> None:
        self.plan = plan
        self.stopping = False
        self.unsettled = False  # True: `settle` has something to do
        self.together = Together(None, guard)
        self.leads = leads
        self._times: list[float] = []
        self._offered: ProfilePlan | None = None
        self._stop_asked = False

    @property
    def measuring(self) -> bool:
        """True while a profiling run still measures."""
        return self.plan is not None and not self.stopping

    def join(self, together: Together) -> None:
        """Take these ranks for those that train together."""
        self.together = together
        self.unsettled = self.unsettled or not together.met

    def offer(self, plan: ProfilePlan) -> None:
        """The service says that this is a profiling run."""
        self._offered = plan
        self.unsettled = True

    def stop_soon(self) -> None:
        """The service has seen enough."""
        self._stop_asked = True

    def settle(self, step: int) -> None:
        """Agree with the other ranks on whether and how to profile; `step`: the one that ended, or is to begin."""
        self.unsettled = False
        before = self.plan
        offered, self._offered = self._offered, None
        if offered is not None and before is None:
            if self.together.alone or not self.together.met:
                self.plan = offered
            else:
                # The others would go on, and wait for this rank in their next reduction.
                logger.warning(
                    "the service said that this run profiles when its ranks trained already, so it goes on to its end: "
                    "start it by `tula tune`, or with TULA_MEASURE_STEPS"
                )
        if not self.together.met:
            self.plan = self.together.meet(self.plan)
        if before is None and self.plan is not None:
            # What has passed stands for the warm-up.
            self.plan = ProfilePlan(max(step, self.plan.warmup_steps), self.plan.measure_steps, self.plan.precision)

    def may_repeat(self, step: int) -> bool:
        """True when the loop goes over its loader again: a profiling run that needs more steps, on all ranks alike."""
        if not self.measuring:
            return False
        if not self.together.met:
            self.settle(step)
        return self.measuring and self.together.agreed

    def ends(self, step: int, step_time_s: float | None) -> bool:
        """True when the run ends with `step`; its time in seconds, or None where it was not like the others."""
        if self.plan is None:
            return False
        if step_time_s is not None:
            self._times.append(step_time_s)
        measured = step + 1 - self.plan.warmup_steps
        if not self.together.agreed or measured < 1:
            return False
        enough = self._stop_asked or (self.leads and relative_error(self._times) <= self.plan.precision)
        if measured >= self.plan.measure_steps or self.together.decide(measured, enough):
            self.stopping = True
            return True
        return False
