"""Decides whether this is a profiling run, and ends profiling on all ranks at the same step without a collective."""

from __future__ import annotations

import time
from dataclasses import astuple, replace
from typing import Any

from tula_agent.config import ProfilePlan
from tula_agent.guard import Guard, logger
from tula_agent.launch import Launch
from tula_agent.rank_channel import Channel, RankRendezvous
from tula_wire.bounds import FURTHER_WARMUP_STEPS
from tula_wire.precision import FEWEST_STEPS, MOST_TIMES, is_known, is_long_enough, spread

DECIDE_EVERY = 4
"""Number of steps between two opportunities to end early, once FEWEST_STEPS steps have been measured."""
TRAIN_WARMUP_STEPS = 5
PEERS_WITHIN_S = 10.0
DECISION_WITHIN_S = 600.0
"""Time that a rank waits for the first rank's decision; a collective in the training run would wait as long."""


class StopAgreement:
    """Ends profiling on all ranks together: the first rank decides, and the others read its decision at fixed steps.

    Call `join` once, after steps that synchronise gradients, since all ranks that have an agent then reach the call at
    the same time. If a rank has no agent, the others wait once, for PEERS_WITHIN_S seconds. After that, ranks wait only
    for the first rank's decision, and only when training waits for the first rank anyway. Without a rendezvous, the
    ranks never agree.

    joined: True once it is known whether all ranks take part. agreed: True if all ranks take part; only then may a loop
    end early.
    """

    def __init__(self, rendezvous: RankRendezvous | None, guard: Guard, world_size: int = 1) -> None:
        self._rendezvous = rendezvous
        self._channel: Channel | None = None
        self._guard = guard
        self.agreed = self.joined = world_size == 1

    def join(self, plan: ProfilePlan | None) -> ProfilePlan | None:
        """Determine whether all ranks take part; return the first rank's plan on every rank."""
        self.joined = True
        with self._guard("finding the other ranks"):
            channel = self._channel = None if self._rendezvous is None else self._rendezvous.channel(PEERS_WITHIN_S)
            if channel is not None and channel.rank == 0:
                if plan is not None:  # a training run waits for no other rank
                    ends = time.monotonic() + PEERS_WITHIN_S
                    others = [f"joined/{rank}" for rank in range(1, channel.world_size)]
                    self.agreed = all(channel.wait(key, ends - time.monotonic()) for key in others)
                channel.set("plan", [self.agreed, None if plan is None else astuple(plan)])
            elif channel is not None:
                channel.set(f"joined/{channel.rank}", True)
                answer = channel.wait("plan", 2 * PEERS_WITHIN_S)
                if answer is not None:
                    self.agreed = bool(answer[0])
                    plan = None if answer[1] is None else _parse_plan(answer[1])
        if not self.agreed and plan is not None:
            logger.warning(
                "the ranks could not agree on when to stop, so the run can't end early: call tula_agent.init() on all "
                "ranks, and start to iterate over run.steps() after init_process_group()"
            )
        return plan

    def decide(self, measured: int, measure_steps: int, wants_stop: bool, first_step: int = 0) -> bool:
        """Return True if the ranks have agreed that the measurement that began at `first_step` ends at this step.

        measured: the number of steps after warm-up. measure_steps: the requested number of steps. Both are the same on
        every rank. wants_stop: only the first rank's value is used.
        """
        channel = self._channel
        if channel is None:
            return wants_stop
        early = measured >= FEWEST_STEPS and (measured - FEWEST_STEPS) % DECIDE_EVERY == 0
        if not early and measured % measure_steps:
            return False
        with self._guard("agreeing with the other ranks"):
            if channel.rank == 0:
                channel.set(f"stop/{first_step}/{measured}", wants_stop)
                return wants_stop
            return bool(channel.wait(f"stop/{first_step}/{measured}", DECISION_WITHIN_S))
        self.agreed = False  # the store is gone for all ranks, so no rank ends early from now on
        return False


class Profiling:
    """Decides whether this is a profiling run, and when the run has measured enough.

    `plan` is None in a training run. The plan comes only from the environment, because a service that could turn a
    training run into a profiling run could end training. `stop_soon` is called on the shipping thread and takes effect
    at the next step at which all ranks can stop. launch: the batch sizes to measure, each after a separate warm-up.
    """

    def __init__(self, plan: ProfilePlan | None, launch: Launch, guard: Guard) -> None:
        self.plan = plan
        self._launch, self._guard = launch, guard
        self.stopping = False
        self.pending = False  # True: `agree` must be called
        self._agreement = StopAgreement(None, guard)
        self._times: list[float] = []
        self._usual_spread = 0.0  # of the batch sizes that this launch has measured
        self._began_s, self._start_up_s = time.monotonic(), 0.0
        self._stop_requested: str | None = None

    @property
    def probe_s(self) -> float:
        """Return the number of seconds for which the ranks probe their links; 0 unless all ranks take part."""
        return self.plan.probe_s if self.plan is not None and self._agreement.agreed else 0.0

    @property
    def warmup_steps(self) -> int:
        """Return the number of warm-up steps for the current batch size; these steps are not measured."""
        if self.plan is None:
            return TRAIN_WARMUP_STEPS
        further = self._launch.first_step > 0
        return min(self.plan.warmup_steps, FURTHER_WARMUP_STEPS) if further else self.plan.warmup_steps

    @property
    def measuring(self) -> bool:
        """Return True if this is a profiling run that still needs measurements."""
        return self.plan is not None and not self.stopping

    @property
    def timed_steps(self) -> int:
        """Return the number of measured steps of the current batch size, excluding its warm-up."""
        return len(self._times)

    def use(self, agreement: StopAgreement) -> None:
        """Use `agreement` from now on."""
        self._agreement = agreement
        self.pending = self.pending or not agreement.joined

    def stop_soon(self, run_id: str) -> None:
        """Stop run `run_id` soon, since the service reports that the run has ended, for example because it was
        cancelled.
        """
        self._stop_requested = run_id

    def drop_smaller_batches(self) -> None:
        """Measure only the whole batch, without the smaller ones."""
        if self.plan is not None:
            self.plan = replace(self.plan, smaller_batches=())

    def measure_alone(self, *, ends: bool) -> None:
        """Stop agreeing with the other ranks, because ranks that take different numbers of steps cannot end at the same
        step.

        This rank ends its measurement only if `ends` is True.
        """
        self._agreement, self.pending = StopAgreement(None, self._guard), False
        self._agreement.agreed = ends
        self.drop_smaller_batches()

    def begin_again(self) -> None:
        """Start measuring another batch size, beginning with its warm-up."""
        self.stopping = False
        self._usual_spread = max(self._usual_spread, spread(self._times))
        self._times = []
        self._began_s = time.monotonic()

    def agree(self) -> None:
        """Agree with the other ranks on whether and how to profile; the first rank's environment decides."""
        self.pending = False
        if not self._agreement.joined:
            self.plan = self._agreement.join(self.plan)
            if not self._agreement.agreed:
                self.drop_smaller_batches()  # the ranks would not end a measurement at the same step

    def may_repeat(self) -> bool:
        """Return True if a profiling run may repeat its loader to measure more steps; all ranks get the same result."""
        if not self.measuring:
            return False
        if not self._agreement.joined:
            self.agree()
        return self.measuring and self._agreement.agreed

    def ends(self, step: int, step_time_s: float | None, run_id: str = "") -> bool:
        """Return True if run `run_id` ends with `step`, which took `step_time_s` (None: not comparable with other
        steps).

        A run ends because the service reports that it was cancelled, or because the first rank has measured the
        requested steps or enough for the required precision. The run ends at the next step at which all ranks read the
        decision.
        """
        if self.plan is None:
            return False
        if step_time_s is not None:
            if not self._times:
                self._start_up_s = time.monotonic() - self._began_s - step_time_s
            self._times.append(step_time_s)
        measured = step + 1 - self._launch.first_step - self.warmup_steps
        if not self._agreement.agreed or measured < 1:
            return False
        asked, precision = self.plan.measure_steps, self.plan.precision
        enough = (
            self._stop_requested == run_id
            or is_known(self._times, precision, self._start_up_s, self._usual_spread)
            or (measured % asked == 0 and is_long_enough(self._times, measured, asked, precision, self._usual_spread))
        )
        most = MOST_TIMES * asked if precision > 0 else asked
        if measured >= most or self._agreement.decide(measured, asked, enough, self._launch.first_step):
            self.stopping = True
            return True
        return False


def _parse_plan(values: list[Any]) -> ProfilePlan:
    """Return the plan whose fields the first rank sent as JSON."""
    warmup_steps, measure_steps, precision, smaller_batches, probe_s = values
    runs = tuple((int(size), str(run)) for size, run in smaller_batches)
    return ProfilePlan(warmup_steps, measure_steps, precision, runs, probe_s)
