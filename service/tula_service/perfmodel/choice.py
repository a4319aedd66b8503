"""Which candidate to recommend inside the limits, and why; the Pareto frontier of time and cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tula_service.domain import Measure, Objective
from tula_service.perfmodel.intervals import Interval
from tula_service.perfmodel.knee import KneeFinding
from tula_service.perfmodel.points import ObservationError
from tula_service.perfmodel.pricing import SECONDS_PER_HOUR, Estimate

_NEARLY_BEST = 1.1
"""A compromise gives up a tenth of the best for a smaller batch, which generalises better, and for fewer nodes."""
OF_TOTALS = ("deadline_s", "budget_usd")
"""Limits that a larger number would let candidates keep; no deadline lets in a batch that is too large."""


def pareto_frontier(first: Sequence[float], second: Sequence[float]) -> tuple[int, ...]:
    """Row numbers of the undominated rows (smaller is better in both), ordered by the first measure.

    A row is dominated when another is no worse in both and better in one; of equal rows the first one stays.
    """
    order = sorted(range(len(first)), key=lambda row: (first[row], second[row], row))
    frontier: list[int] = []
    best = float("inf")
    for row in order:
        if second[row] < best:
            frontier.append(row)
            best = second[row]
    return tuple(frontier)


@dataclass(frozen=True)
class Limits:
    """What a recommendation must keep to; None means no such limit. Deadline and budget are for the whole training."""

    deadline_s: float | None = None
    budget_usd: float | None = None
    max_global_batch_size: int | None = None


@dataclass(frozen=True)
class Preference:
    """What makes one candidate better than another.

    `priced`: costs are money; else they are node-hours. `usd_per_hour_of_waiting` is what an hour of the training's
    duration costs its owner.
    """

    objective: Objective
    priced: bool = True
    usd_per_hour_of_waiting: float | None = None

    def value(self, estimate: Estimate) -> Interval:
        """What is to be small. Of a compromise: money and waiting together where waiting has a price, else time x cost,
        which needs no scale; time alone without prices."""
        measure = self.objective.measure
        if measure is Measure.COST:
            return estimate.cost_usd
        if measure is Measure.COMPROMISE and self.priced:
            if self.usd_per_hour_of_waiting is not None:
                waiting = estimate.time_s.scaled(self.usd_per_hour_of_waiting / SECONDS_PER_HOUR)
                return estimate.cost_usd.plus(waiting)
            return estimate.time_s.times(estimate.cost_usd)
        return estimate.time_s


@dataclass(frozen=True)
class Exclusion:
    """One limit that a candidate breaks; `certain` is False when only the interval's upper end breaks it.

    `share` is what it takes of the limit, at the upper end: above 1.
    """

    estimate: Estimate
    limit: str
    certain: bool
    sentence: str
    share: float


@dataclass(frozen=True)
class Choice:
    """A recommendation with its reasons. `chosen` is None when no candidate keeps the limits; `reason` names them.

    `excluded` has every limit that every candidate breaks, of one candidate the decisive one first.
    `within_limits_is_likely` is False when every candidate might break a limit and the one least likely to was taken.
    """

    preference: Preference
    chosen: Estimate | None
    runner_up: Estimate | None
    least_time: Estimate | None
    least_cost: Estimate | None
    balanced: Estimate | None
    knee: Estimate | None
    knee_finding: KneeFinding
    frontier: tuple[Estimate, ...]
    excluded: tuple[Exclusion, ...]
    within_limits_is_likely: bool
    reason: str

    @property
    def objective(self) -> Objective:
        """What was optimised."""
        return self.preference.objective

    def nearest_miss(self, limit: str) -> Exclusion | None:
        """Of the candidates that break a limit, the one that does by least, and of equals the best; None without one.

        Candidates that no deadline or budget lets in come last: those are no near miss of either.
        """
        barred = {found.estimate.key for found in self.excluded if found.limit not in OF_TOTALS}
        missed = (each for each in self.excluded if each.limit == limit and each.estimate is not self.chosen)
        return min(
            missed,
            key=lambda each: (each.estimate.key in barred, each.share, self.preference.value(each.estimate).mean),
            default=None,
        )


def choose(
    objective: Objective,
    estimates: Sequence[Estimate],
    *,
    limits: Limits | None = None,
    knee: KneeFinding | None = None,
    priced: bool = True,
    usd_per_hour_of_waiting: float | None = None,
) -> Choice:
    """The best candidate for the objective inside the limits; see `Preference` for the last two arguments.

    A candidate keeps the deadline and the budget only if the upper end of its interval does, so with a 90 % interval a
    broken limit is rare. If none does, the one whose mean keeps them by the widest margin is taken,
    `within_limits_is_likely` is False and `reason` states the chance. `Objective.TIME_TO_QUALITY` chooses the least
    time among estimates that were priced with `Goal.steps_factor`.
    """
    if not estimates:
        raise ObservationError("candidates: there are none; widen the node range or the batch range.")
    limits = limits or Limits()
    preference = Preference(objective, priced, usd_per_hour_of_waiting)
    finding = knee or KneeFinding(None, "no knee: no trade-off curve was given.")
    excluded = tuple(found for estimate in estimates for found in _breaches(estimate, limits))
    out = {found.estimate.key for found in excluded}
    allowed = [estimate for estimate in estimates if estimate.key not in out]
    likely = bool(allowed)
    if not allowed:
        hopeless = {found.estimate.key for found in excluded if found.certain}
        hopeful = [estimate for estimate in estimates if estimate.key not in hopeless]
        allowed = sorted(hopeful, key=lambda e: (-_margin(e, limits), _order(e)))[:1]
    if not allowed:
        reason = _none_fits(estimates, excluded)
        return Choice(preference, None, None, None, None, None, None, finding, (), excluded, False, reason)
    by_time = sorted(allowed, key=lambda e: (e.time_s.expected, e.cost_usd.expected, _order(e)))
    by_cost = sorted(allowed, key=lambda e: (e.cost_usd.expected, e.time_s.expected, _order(e)))
    rows = pareto_frontier([e.time_s.mean for e in allowed], [e.cost_usd.mean for e in allowed])
    frontier = tuple(allowed[row] for row in rows)
    at_knee = _nearest(finding, by_time)
    compromises, reason = _balanced(replace(preference, objective=Objective.BALANCED), frontier)
    ranked = compromises
    if objective.measure is not Measure.COMPROMISE:
        ranked, reason = _ranked(objective, by_time, by_cost, at_knee, finding)
    if not likely:
        reason = (
            f"It is the likeliest to keep the limits, with a chance of {_chance(allowed[0], limits) * 100:.0f} %; "
            f"none of the candidates keeps them at the upper end of its interval: {_least(estimates, excluded)}."
        )
    elif limits.deadline_s is not None or limits.budget_usd is not None:
        rest = Limits(max_global_batch_size=limits.max_global_batch_size)
        free = choose(
            objective, estimates, limits=rest, knee=knee, priced=priced, usd_per_hour_of_waiting=usd_per_hour_of_waiting
        )
        if free.chosen is not None and free.chosen.key in out:
            reason += f" Without deadline and budget, {_least(estimates, excluded)}."
    return Choice(
        preference=preference,
        chosen=ranked[0],
        runner_up=_runner_up(objective, ranked),
        least_time=by_time[0],
        least_cost=by_cost[0],
        balanced=compromises[0],
        knee=at_knee,
        knee_finding=finding,
        frontier=frontier,
        excluded=excluded,
        within_limits_is_likely=likely,
        reason=reason,
    )


def _balanced(preference: Preference, frontier: Sequence[Estimate]) -> tuple[list[Estimate], str]:
    """The frontier by the value of the compromise, the chosen candidate first, and the reason."""
    ranked = sorted(frontier, key=lambda e: (preference.value(e).expected, _order(e)))
    if preference.priced and preference.usd_per_hour_of_waiting is not None:
        return ranked, "It has the least expected cost with waiting counted in."
    best = preference.value(ranked[0]).expected
    near = [e for e in ranked if preference.value(e).expected <= _NEARLY_BEST * best]
    chosen = min(near, key=lambda e: (e.configuration.global_batch_size, e.configuration.num_nodes, ranked.index(e)))
    reason = "It is expected to be the fastest of the candidates within the limits."
    if preference.priced:
        reason = "It is the best compromise: its time multiplied by its cost is the smallest of all candidates."
    if chosen is not ranked[0]:
        what = "time multiplied by cost is" if preference.priced else "time is"
        reason = f"It has the smallest batch of the candidates whose {what} within 10 % of the smallest."
    return [chosen, *(e for e in ranked if e is not chosen)], reason


def _ranked(
    objective: Objective, by_time: list[Estimate], by_cost: list[Estimate], knee: Estimate | None, found: KneeFinding
) -> tuple[list[Estimate], str]:
    if objective.measure is Measure.COST:
        return by_cost, "It is expected to be the cheapest of the candidates within the limits."
    if objective.measure is Measure.CURVE and knee is not None:
        rest = [estimate for estimate in by_time if estimate is not knee]
        return [knee, *rest], f"It is the candidate nearest the knee: {found.reason}"
    if objective.measure is Measure.CURVE:
        return by_time, f"It is expected to be the fastest of the candidates within the limits; {found.reason}"
    return by_time, "It is expected to be the fastest of the candidates within the limits."


def _runner_up(objective: Objective, ranked: list[Estimate]) -> Estimate | None:
    """The next best; of least cost, the next that is not cheaper at its predicted value, which is printed beside it.

    The rank is by expected cost: a candidate that is predicted cheaper but less surely may come after the chosen one.
    """
    cheapest = ranked[0].cost_usd.mean if objective.measure is Measure.COST else 0.0
    return next((each for each in ranked[1:] if each.cost_usd.mean >= cheapest), None)


def _nearest(finding: KneeFinding, by_time: list[Estimate]) -> Estimate | None:
    """The candidate whose global batch is nearest the knee in log, the fastest of equals."""
    if finding.global_batch_size is None:
        return None
    target = math.log(finding.global_batch_size)
    near: Callable[[Estimate], float] = lambda e: round(abs(math.log(e.configuration.global_batch_size) - target), 9)  # noqa: E731
    return min(by_time, key=lambda e: (near(e), e.time_s.mean, _order(e)))


def _breaches(estimate: Estimate, limits: Limits) -> list[Exclusion]:
    """Every limit that a candidate breaks, those that it surely breaks first."""
    batch, most = estimate.configuration.global_batch_size, limits.max_global_batch_size
    broken = []
    if most is not None and batch > most:
        sentence = f"its global batch {batch} is above the limit of {most}."
        broken.append(Exclusion(estimate, "max_global_batch_size", True, sentence, batch / most))
    if not math.isfinite(estimate.time_s.mean):
        sentence = "spot interruptions would practically never let it finish."
        return [*broken, Exclusion(estimate, "interruptions", True, sentence, math.inf)]
    for name, value, limit, unit in (
        ("deadline_s", estimate.time_s, limits.deadline_s, "s"),
        ("budget_usd", estimate.cost_usd, limits.budget_usd, "USD"),
    ):
        if limit is not None and value.high > limit:
            certain = value.mean > limit
            what, said = ("time", "deadline") if name == "deadline_s" else ("cost", "budget")
            mean, high, top = (f"{x:,.0f}" if x >= 1e3 else f"{x:.4g}" for x in (value.mean, value.high, limit))
            sentence = f"its expected {what}, {mean} {unit}, is above the {said} of {top} {unit}."
            if not certain:
                upper = f"{high} at the upper end of its interval"
                sentence = f"its expected {what} is {mean} of the {said} of {top} {unit}, but {upper}."
            broken.append(Exclusion(estimate, name, certain, sentence, value.high / limit))
    return sorted(broken, key=lambda found: not found.certain)


def _chance(estimate: Estimate, limits: Limits) -> float:
    """Probability of keeping the tighter limit: time and cost of one configuration share their error."""
    return 0.5 * (1.0 + math.erf(_margin(estimate, limits) / math.sqrt(2.0)))


def _margin(estimate: Estimate, limits: Limits) -> float:
    """Standard deviations of the logarithm from the mean to its tighter limit; negative where the mean breaks it."""
    scores = [
        math.log(limit / value.mean) / max(value.log_sd, 1e-9)
        for value, limit in ((estimate.time_s, limits.deadline_s), (estimate.cost_usd, limits.budget_usd))
        if limit is not None and value.mean > 0
    ]
    return min(scores, default=math.inf)


def _order(estimate: Estimate) -> tuple[int, int, str, int, int]:
    """Ties go to fewer nodes, then the smaller batch, so that the choice is deterministic."""
    c = estimate.configuration
    return (c.world_size, c.global_batch_size, c.instance_type, c.local_batch_size, c.grad_accum_steps)


def _none_fits(estimates: Sequence[Estimate], excluded: Sequence[Exclusion]) -> str:
    limits = sorted({found.limit for found in excluded})
    least = _least(estimates, excluded)
    return (
        f"No candidate keeps the limits ({', '.join(limits)}){least and ': '}{least}. Relax one of them or widen the "
        "node range."
    )


def _least(estimates: Sequence[Estimate], excluded: Sequence[Exclusion]) -> str:
    """What deadline and budget would have to be for one candidate: the least upper end, and the expected value to it.

    Of the candidates that neither the largest batch nor interruptions take out; nothing where those take out all.
    """
    barred = {found.estimate.key for found in excluded if found.limit not in OF_TOTALS}
    near = [each for each in estimates if each.key not in barred]
    if not near:
        return ""
    time_s = min((each.time_s for each in near), key=lambda value: value.high)
    least = f"the fastest takes {duration(time_s.mean)}, {duration(time_s.high)} at the upper end"
    if any(found.limit == "budget_usd" for found in excluded):
        cost = min((each.cost_usd for each in near), key=lambda value: value.high)
        least += f"; the cheapest costs {cost.mean:,.4g} USD, {cost.high:,.4g} USD at the upper end"
    return least


def duration(seconds: float) -> str:
    """Seconds in words: in hours from one hour on."""
    return f"{seconds / SECONDS_PER_HOUR:.3g} h" if seconds >= SECONDS_PER_HOUR else f"{seconds:.3g} s"
