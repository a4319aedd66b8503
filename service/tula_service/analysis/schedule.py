"""Plans a batch schedule with a few stages: the batch grows with the gradient noise scale, on the best number of nodes.

1. `scaling.noise_curve` returns the noise scale of each part of a training run. The schedule uses the smallest noise
   scale from a part to the end of the run, so that the batch never has to decrease later.
2. The accuracy guard limits the batch of every stage under all objectives, based on this noise scale and on the number
   of steps of a whole training run at this batch. Among the allowed batches, the objective chooses the batch and the
   nodes, as for a recommendation.
3. Of all ways to divide the run into at most four stages, the objective chooses the best; each change of stage
   requires a relaunch.
4. The schedule is recommended if it improves the objective by at least `WORTH` over the constant batch.

Increasing the batch with the noise scale was proposed by McCandlish et al. (2018, section 5). Merrill et al. (2025)
measured on OLMo which batches training tolerates, and question whether the noise scale predicts these batches.
Therefore, the guard is applied as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise
from typing import Any, Final

import numpy as np

import tula_wire as wire
from tula_service.analysis.answer import Answer, analyse
from tula_service.analysis.explanation import explain_choice, suggest_learning_rate, to_wire_estimate
from tula_service.analysis.job_data import JobData
from tula_service.analysis.scaling import LEAST_COVERED, NoiseCurve, StatisticalEfficiency
from tula_service.perfmodel.intervals import Interval
from tula_service.perfmodel.objectives import OBJECTIVES, Goal
from tula_service.perfmodel.pricing import Estimate
from tula_wire.enums import Objective
from tula_wire.format import duration, money, percent

MOST_STAGES: Final = 4
WORTH: Final = 0.02
"""The minimum relative improvement of the objective by a schedule; smaller gains are within the prediction error."""
RELAUNCH_S: Final = 120.0
"""The assumed seconds from the end of a stage to the first step of the next stage, as in `SpotPrice.restart_s`."""


@dataclass(frozen=True)
class Stage:
    """The parts `first` to `end` (exclusive) of a training run, which use one configuration.

    `estimate` has the time, cost and energy of this stage; `noise_scale` is the smallest value from the beginning of
    the stage to the end of the run.
    """

    first: int
    end: int
    noise_scale: float
    estimate: Estimate


@dataclass(frozen=True)
class Ramp:
    """One to four stages whose batches never decrease; `total` has the sums over the stages, including relaunches."""

    stages: tuple[Stage, ...]
    total: Estimate


@dataclass(frozen=True)
class Ramps:
    """The possible ramps of a training run.

    `noise_scales`, shape (parts,), are the noise scales of equal parts of the training run, in examples. `candidates`
    are estimates for the whole training run. `goal` must have a guard.
    """

    noise_scales: Sequence[float]
    candidates: Sequence[Estimate]
    goal: Goal
    relaunch_s: float = RELAUNCH_S

    @cached_property
    def least(self) -> list[float]:
        """Return the smallest noise scale from each part to the end of the run; these values never decrease."""
        backwards = np.asarray(self.noise_scales, dtype=np.float64)[::-1]
        return [float(value) for value in np.minimum.accumulate(backwards)[::-1]]

    def best(self) -> Ramp | None:
        """Return the best ramp by the objective, or None if the guard allows no candidate for the first part."""
        chosen = [self._choose(noise) for noise in self.least]
        changes = [part for part in range(1, len(chosen)) if chosen[part] is not chosen[part - 1]]
        ramps = []
        for further in range(MOST_STAGES):
            for begins in combinations(changes, further):
                spans = [
                    (estimate, first, end)
                    for first, end in pairwise((0, *begins, len(chosen)))
                    if (estimate := chosen[first]) is not None
                ]
                if len(spans) > further and all(_follows(a, b) for (a, *_), (b, *_) in pairwise(spans)):
                    ramps.append(self._ramp(spans))
        return min(ramps, key=lambda r: (self.goal.value(r.total).expected, len(r.stages)), default=None)

    def constant(self, estimate: Estimate) -> Ramp:
        """Return the ramp with a single stage, to which the guard is not applied, for comparison with other ramps."""
        return self._ramp([(estimate, 0, len(self.least))])

    def saved(self, ramp: Ramp, constant: Estimate) -> tuple[Interval, Interval]:
        """Return the seconds and the money that a ramp saves over a constant configuration.

        The errors of predictions for different configurations are assumed to be independent. Parts that train at the
        constant configuration are ignored, so their errors do not widen the intervals.
        """
        changed = [stage for stage in ramp.stages if stage.estimate.key != constant.key]
        if not changed:
            return Interval(0.0, 0.0, 0.0), Interval(0.0, 0.0, 0.0)
        before = _total([self._stage(constant, stage.first, stage.end) for stage in changed])
        after = _total(changed, [self._relaunch(stage) for stage in ramp.stages[1:]])
        return _difference(before.time_s, after.time_s), _difference(before.cost_usd, after.cost_usd)

    def _choose(self, noise_scale: float) -> Estimate | None:
        """Return the objective's choice among the batches that the guard allows at a noise scale, or None."""
        assert self.goal.guard is not None
        guard = replace(self.goal.guard, noise_scale=noise_scale)
        allowed = {
            e.key: (e, _times(e, self._steps_factor(e, noise_scale)))
            for e in self.candidates
            if guard.allows(e.configuration.global_batch_size)
        }
        if not allowed:
            return None
        ranked = OBJECTIVES[self.goal.objective].rank(
            replace(self.goal, guard=guard), [at_noise for _, at_noise in allowed.values()]
        )
        return allowed[ranked[0].key][0]

    def _ramp(self, spans: Sequence[tuple[Estimate, int, int]]) -> Ramp:
        stages = tuple(self._stage(*span) for span in spans)
        return Ramp(stages, _total(stages, [self._relaunch(stage) for stage in stages[1:]]))

    def _stage(self, estimate: Estimate, first: int, end: int) -> Stage:
        """Return the stage from part `first` up to part `end`, given an `estimate` for the whole training run."""
        share = sum(self._steps_factor(estimate, noise) for noise in self.least[first:end]) / len(self.least)
        return Stage(first, end, self.least[first], _times(estimate, share))

    def _steps_factor(self, estimate: Estimate, noise_scale: float) -> float:
        """Return the number of steps that reach the same quality at a noise scale, relative to the estimate's steps.

        The result is 1 if the objective does not account for additional steps.
        """
        counted = self.goal.steps_factor.get(estimate.configuration)
        if counted is None or self.goal.guard is None:
            return 1.0
        efficiency = StatisticalEfficiency(noise_scale, self.goal.guard.base_batch_size)
        return 1.0 / efficiency.of(estimate.configuration.global_batch_size) / counted

    def _relaunch(self, stage: Stage) -> Estimate:
        """Return the time and the cost of the relaunch before a stage."""
        seconds = stage.estimate.time_s.mean
        relaunch = _times(stage.estimate, self.relaunch_s / seconds if seconds > 0.0 else 0.0)
        return replace(relaunch, time_s=Interval(self.relaunch_s, self.relaunch_s, self.relaunch_s))


def _follows(before: Estimate, after: Estimate) -> bool:
    """Return True if the stage `after` may follow `before`: the two must differ, and the batch must not decrease."""
    return before is not after and before.configuration.global_batch_size <= after.configuration.global_batch_size


def _times(estimate: Estimate, factor: float) -> Estimate:
    if factor == 1.0:  # a shortcut, since this is called for thousands of candidates in each part
        return estimate
    energy = estimate.energy_kwh
    return replace(
        estimate,
        time_s=estimate.time_s.scaled(factor),
        cost_usd=estimate.cost_usd.scaled(factor),
        energy_kwh=None if energy is None else energy.scaled(factor),
    )


def _total(stages: Sequence[Stage], relaunches: Sequence[Estimate] = ()) -> Estimate:
    parts = [*(stage.estimate for stage in stages), *relaunches]
    energies = [part.energy_kwh for part in parts if part.energy_kwh is not None]
    return replace(
        parts[0],
        time_s=_sum(part.time_s for part in parts),
        cost_usd=_sum(part.cost_usd for part in parts),
        energy_kwh=_sum(energies) if len(energies) == len(parts) else None,
    )


def _sum(values: Iterable[Interval]) -> Interval:
    total = Interval(0.0, 0.0, 0.0)
    for value in values:
        total = total.plus(value)
    return total


def _difference(before: Interval, after: Interval) -> Interval:
    mean = before.mean - after.mean
    down = math.hypot(before.mean - before.low, after.high - after.mean)
    up = math.hypot(before.high - before.mean, after.mean - after.low)
    return Interval(mean, mean - down, mean + up)


def plan_schedule(
    data: JobData, job_id: str, objective: Objective | None, beta2: float, curves: Sequence[NoiseCurve]
) -> str:
    """Return the JSON of a job's `wire.BatchSchedule`.

    `beta2` is Adam's beta2 at the base batch; `curves` are the noise curves of the newest training runs, newest first.
    """
    answer = analyse(data, objective)
    asked = answer.objective
    if not isinstance(answer, Answer):
        schedule = wire.BatchSchedule(
            job_id=job_id, objective=asked, stages=[], sentence=f"Nothing can be recommended: {answer.reason}"
        )
    elif answer.choice.chosen is None:
        schedule = wire.BatchSchedule(job_id=job_id, objective=asked, stages=[], sentence=explain_choice(answer.choice))
    else:
        schedule = wire.BatchSchedule(
            job_id=job_id, objective=asked, **_schedule_fields(answer, answer.choice.chosen, beta2, curves)
        )
    return schedule.model_dump_json()


def _schedule_fields(answer: Answer, chosen: Estimate, beta2: float, curves: Sequence[NoiseCurve]) -> dict[str, Any]:
    """Return the fields of `wire.BatchSchedule` for a job with the recommendation `chosen`."""
    facts: dict[str, Any] = {
        "constant": chosen.configuration,
        "spot": chosen.spot,
        "base_batch_size": answer.base_batch_size,
        "tokens_per_example": answer.data.tokens_per_example,
        "stages": [],
    }
    curve = next((curve for curve in curves if curve.values), None)
    if curve is None:
        return facts | {"sentence": _not_measured(curves)}
    facts["noise_run_id"] = curve.run_id
    ramps = Ramps(curve.values, _candidates(answer, chosen), answer.choice.goal)
    ramp, constant = ramps.best(), ramps.constant(chosen)
    if ramp is None or not _is_worth_it(ramp, constant, answer.choice.goal):
        return facts | {"sentence": _keep(ramps, ramp, constant)}
    stages = _stages(answer, ramp, beta2)
    saved_s, saved_usd = saved = ramps.saved(ramp, chosen)
    goal = answer.choice.goal
    steps = sum(stage.steps for stage in stages)
    return facts | {
        "stages": stages,
        "steps": steps,
        "relaunch_s": ramps.relaunch_s,
        "time_s": to_wire_estimate(ramp.total.time_s),
        "cost_usd": to_wire_estimate(ramp.total.cost_usd) if goal.priced else None,
        "saved_s": to_wire_estimate(saved_s),
        "saved_usd": to_wire_estimate(saved_usd) if goal.priced else None,
        "sentence": _worth(ramp, constant, saved, goal),
        "risk": "Accuracy: the guard allows the batch of every stage at the smallest noise scale from that stage on, "
        f"and training takes {steps:,} steps. However, our experiments have hardly tested schedules, and the noise "
        "scale is a doubtful predictor of the batches that training tolerates: for example, it also grows when the "
        "learning rate falls, which does not allow larger batches. Compare the validation loss with that of a "
        "training run at the constant batch.",
    }


def _candidates(answer: Answer, chosen: Estimate) -> list[Estimate]:
    """Return the candidates for a stage: those with the recommended variant and market that are within all limits.

    If the configuration of every stage meets the deadline and the budget, so does the schedule, apart from its
    relaunches.
    """
    out = {exclusion.estimate.key for exclusion in answer.choice.excluded}
    return [
        e
        for e in answer.estimates
        if e.configuration.variant == chosen.configuration.variant
        and e.spot == chosen.spot
        and e.configuration not in answer.choice.ineligible
        and e.key not in out
    ]


def _is_worth_it(ramp: Ramp, constant: Ramp, goal: Goal) -> bool:
    better = goal.value(ramp.total).expected < (1.0 - WORTH) * goal.value(constant.total).expected
    limits = goal.limits.of_totals(ramp.total)  # the relaunches may exceed these limits
    return better and len(ramp.stages) > 1 and all(value.high <= limit for _, value, limit in limits)


def _stages(answer: Answer, ramp: Ramp, beta2: float) -> list[wire.BatchStage]:
    """Return the stages as wire models; each stage has a whole number of steps."""
    data, base = answer.data, answer.base_batch_size
    examples, parts = data.spec.dataset.size * data.spec.epochs, ramp.stages[-1].end
    stages: list[wire.BatchStage] = []
    step = example = 0
    for stage in ramp.stages:
        c = stage.estimate.configuration
        batch, ends = c.global_batch_size, examples * stage.end / parts
        steps = max(1, round((ends - example) / batch) if stage.end < parts else int((ends - example) / batch))
        efficiency = StatisticalEfficiency(stage.noise_scale, base)
        stages.append(
            wire.BatchStage(
                first_step=step,
                first_example=example,
                first_share=example / examples,
                steps=steps,
                configuration=c,
                global_batch_size=batch,
                noise_scale=stage.noise_scale,
                learning_rate_factor=suggest_learning_rate(answer, c, efficiency).factor,
                beta2=beta2 ** (batch / base) if data.spec.model.optimizer == "adam" else None,
                time_s=to_wire_estimate(stage.estimate.time_s),
                cost_usd=to_wire_estimate(stage.estimate.cost_usd) if answer.choice.goal.priced else None,
            )
        )
        step, example = step + steps, example + steps * batch
    return stages


def _not_measured(curves: Sequence[NoiseCurve]) -> str:
    """Return a sentence that names the missing measurements of the noise scale, and explains how to obtain them."""
    seen = max((curve.covered for curve in curves), default=0.0)
    has = "No training run has measured its gradient noise scale, which determines when the batch can grow"
    if seen >= LEAST_COVERED:
        has = (
            "The gradient noise scale, which determines when the batch can grow, was measured in too few parts of a "
            "training run"
        )
    elif seen > 0.0:
        has = (
            "The gradient noise scale, which determines when the batch can grow, is known for only "
            f"{percent(seen, digits=0)} of a training run's examples"
        )
    return (
        f'{has}: complete a training run with `TulaOptimizer` and the agent (`policy="measure"` does not change the '
        "weights; it requires two ranks, or two micro-steps per step), and try again."
    )


def _keep(ramps: Ramps, ramp: Ramp | None, constant: Ramp) -> str:
    """Return a sentence that explains why the constant batch is better than a schedule."""
    least, most = ramps.least[0], ramps.least[-1]
    if ramp is None:
        return (
            "Keep the constant batch: no batch within the limits is small enough for the beginning of training, when "
            f"the noise scale is {least:,.0f} examples."
        )
    guard, batch = ramps.goal.guard, constant.total.configuration.global_batch_size
    if len(ramp.stages) == 1 and ramp.total.key == constant.total.key:
        noise = f"is {least:,.0f}" if round(least) == round(most) else f"grows from {least:,.0f} to {most:,.0f}"
        return (
            f"Keep the constant batch of {batch}: while the noise scale {noise} examples, the objective prefers no "
            "other batch that the accuracy guard allows."
        )
    at_risk = guard is not None and not guard.allows(batch)
    return (
        f"Keep the constant batch: the best schedule that the accuracy guard allows takes "
        f"{_compared(ramp, constant, ramps.goal)}"
        + (", which puts the accuracy at risk (see the quality line of the recommendation)." if at_risk else ".")
    )


def _worth(ramp: Ramp, constant: Ramp, saved: tuple[Interval, Interval], goal: Goal) -> str:
    """Return a sentence with the duration, the cost and the saving of a schedule."""
    time_s, usd = saved
    said = _saves(time_s, duration, "takes {} longer") + (
        f" and {_saves(usd, money, 'costs {} more')}" if goal.priced else ""
    )
    return f"The schedule takes {_compared(ramp, constant, goal)}: it {said}."


def _compared(ramp: Ramp, constant: Ramp, goal: Goal) -> str:
    """Return the time and cost of a ramp and of the constant batch, such as `5 h and $10 instead of 7 h and $14`."""
    both = [
        duration(total.time_s.mean) + (f" and {money(total.cost_usd.mean)}" if goal.priced else "")
        for total in (ramp.total, constant.total)
    ]
    return f"{both[0]} instead of {both[1]} at the constant batch of {constant.total.configuration.global_batch_size}"


def _saves(value: Interval, show: Callable[[float], str], loss: str) -> str:
    """Return the saving of a schedule and its interval as text; if the saving is negative, use the template `loss`."""
    if value.mean < 0.0:
        return f"{loss.format(show(-value.mean))} ({show(-value.high)} to {show(-value.low)})"
    return f"saves {show(value.mean)} ({show(value.low)} to {show(value.high)})"
