"""Chooses the configurations to profile next and states their purpose, or explains why profiling is over."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress

import numpy as np
from scipy import special

from tula_service.perfmodel.choice import Choice, price_candidates, recommend
from tula_service.perfmodel.intervals import Interval
from tula_service.perfmodel.objectives import Goal
from tula_service.perfmodel.points import FloatArray, ObservationError, Points
from tula_service.perfmodel.pricing import Estimate
from tula_service.perfmodel.priors import Priors, generic_prior
from tula_service.perfmodel.step_time_form import log_terms, residual_covariance, same_points
from tula_service.perfmodel.step_time_model import StepTimeModel, unmeasured_model
from tula_service.perfmodel.variants import Launch, find_launch, find_launches, switches
from tula_wire.configurations import Configuration
from tula_wire.enums import Search

_DESIGN_RUNS = 4
_RUNS_PER_FURTHER_TYPE = 2
_BATCHES_PER_LAUNCH = 3
_APART = 4
_WORTH_A_LAUNCH = 0.01  # least expected gain for a further launch; docs/evidence/model.md describes how it was chosen
_DEARER, _LEAST_WEIGHT = 0.5, 1e-3
_BOUND_SDS = 2.0  # in replays of half of the public grids with 3 % noise, 1.5 to 2.5 had the same regret, and 1 more
_MOST_JUDGED = 128  # most candidates whose variance a design sums, so that thousands of them need 0.2 s and 50 MiB
_ONE_GB = Interval(1e9, 1e9, 1e9)
_FORBIDDEN = 1e3
_ROUNDING = 1e-3  # a ratio of standard deviations that is this close to a whole number is treated as whole


@dataclass(frozen=True)
class PlanBudget:
    """The limits on all profiling of a job. GPU-seconds are seconds multiplied by the number of ranks.

    If `max_gpu_seconds` is None, GPU-seconds are not limited. `by_default` is True if the user did not set `max_runs`.
    If `share_launches` is True, a launch measures up to three local batches, and `max_runs` is a number of launches.
    `failed` configurations count as launched.
    """

    max_runs: int = 6
    max_gpu_seconds: float | None = None
    spent_gpu_seconds: float = 0.0
    steps_per_run: int = 30
    steps_per_further_run: int = 30
    by_default: bool = False
    share_launches: bool = False
    failed: frozenset[Configuration] = frozenset()


@dataclass(frozen=True)
class PlannedRun:
    """A configuration to profile, with a sentence that states the purpose of the run."""

    configuration: Configuration
    purpose: str


@dataclass(frozen=True)
class Plan:
    """The runs to execute next, possibly in parallel; if profiling is over, `stop_reason` contains the reason.

    If a plan has neither runs nor a reason, the pending runs must end first or, if no runs are pending, no candidate is
    within the limits.
    """

    runs: tuple[PlannedRun, ...]
    stop_reason: str | None


def plan(
    search: Search,
    candidates: Sequence[Configuration],
    model: StepTimeModel | None = None,
    *,
    goal: Goal,
    recommendation: Choice | None = None,
    budget: PlanBudget | None = None,
    pending: Collection[Configuration] = (),
    unavailable: Collection[Configuration] = (),
) -> Plan:
    """Return the configurations to profile next; the plan is deterministic.

    - `full` profiles every candidate.
    - `partial` profiles four corners: the smallest and the largest batch on the smallest and the largest cluster.
    - `paper` profiles two corners: the smallest batch on the smallest cluster, and the largest on the largest.
    - `adaptive` profiles the four most informative candidates, largest cluster first, then follows `_refine_choice`.

    If `budget.share_launches` is True, a launch measures up to three batches on its cluster, and `adaptive` begins with
    up to two launches of each instance type. The first launch uses the largest cluster. The second launch uses the
    smallest cluster, and is omitted if the first launch measured how a step splits into compute and communication. If a
    probe measured the links between nodes, only the launch on the smallest cluster is needed. If the job has options,
    these launches use the base options; afterwards, `adaptive` plans the launch with the largest expected gain.

    `model` is the job's fit, or its priors before the first measurement, or None if there is neither. Once there are
    measurements, `recommendation` is the choice that the user sees for `goal`; by default, it is computed from the same
    arguments. `pending` runs have been planned or are in progress; `unavailable` configurations failed and are neither
    planned nor chosen. Raises ObservationError if all candidates failed.
    """
    unavailable = frozenset(unavailable)
    left = tuple(c for c in dict.fromkeys(candidates) if c not in unavailable)
    if not left:
        raise ObservationError("the runs of all candidates have failed; fix the cause and register the job again.")
    state = _State(search, left, model, budget or PlanBudget(), pending)
    if (stop_reason := state.exhausted()) is not None:
        return Plan((), None if pending else stop_reason)
    if search == "full":
        return Plan(tuple(PlannedRun(c, "Full search: every candidate is profiled.") for c in state.unused), None)
    if search != "adaptive":
        name = "The paper's search" if search == "paper" else "Partial search"
        corners = [c for c in corner_design(left, two=search == "paper") if c in state.affordable]
        runs = [PlannedRun(c, f"{name}: this candidate has an extreme batch and cluster size.") for c in corners]
        return Plan(tuple(runs), None if runs or pending else f"{name}: its corners have been profiled.")
    runs = _first_launches(state) if state.budget.share_launches else _next_design_runs(state, goal)
    if runs or pending or state.model is None:
        return Plan(tuple(runs), None)
    if recommendation is None:
        recommendation = recommend(candidates, state.model, goal, unavailable=unavailable)
    return _refine_choice(state, recommendation)


class _State:
    """The input of all planning decisions; `model` is None before the first measurement.

    `used` configurations have been measured or are pending; all other candidates are `unused`, and the unused
    candidates within the budget are `affordable`. `of_base` contains the candidates that the design can launch: the
    candidates with the base options or, if there are none, with the options nearest to the base. A launch measures up
    to `batches` local batches, and `runs_left` launches remain.
    """

    def __init__(
        self,
        search: Search,
        candidates: tuple[Configuration, ...],
        model: StepTimeModel | None,
        budget: PlanBudget,
        pending: Collection[Configuration],
    ) -> None:
        self.candidates, self.budget = candidates, budget
        self.priors = Priors() if model is None else model.priors
        base = self.priors.base
        self.base = min({c.options for c in candidates}, key=lambda options: (len(switches(base, options)), options))
        self.of_base = tuple(c for c in candidates if c.options == self.base)
        self.model = None if model is None or model.observations is None else model
        self.used = frozenset(pending)
        if self.model is not None:
            self.used |= frozenset(compress(candidates, self.model.predict(candidates).measured))
        self.unused = tuple(c for c in candidates if c not in self.used)
        self.affordable = frozenset(self._affordable())
        # Only the adaptive search has a limit on the number of runs, which is fixed for all other searches.
        limit = budget.max_runs if search == "adaptive" else len(candidates) + 1
        self.batches = _BATCHES_PER_LAUNCH if budget.share_launches else 1
        self.runs_left = limit - counted_launches(self.used | budget.failed, share_launches=budget.share_launches)

    def exhausted(self) -> str | None:
        """Return the reason why no further runs are possible, or None if a further run is possible."""
        budget = self.budget
        if not self.unused:
            return "Every candidate has been profiled."
        if self.runs_left <= 0:
            which = "the default of profiling.max_runs" if budget.by_default else "profiling.max_runs"
            one, many = ("launch", "launches") if budget.share_launches else ("run", "runs")
            return f"The budget of {budget.max_runs} {one if budget.max_runs == 1 else many} ({which}) is spent."
        if not self.affordable:
            return (
                f"The budget of {budget.max_gpu_seconds:g} GPU-seconds (profiling.max_gpu_seconds) has too little left "
                "for another run."
            )
        return None

    def launch(self, asked: Configuration, purpose: str) -> Plan:
        """Return a plan with one launch that measures this configuration and further local batches."""
        batches = self.choose_batches(self.affordable, find_launch(asked), asked)
        return Plan(tuple(PlannedRun(c, purpose) for c in batches), None)

    def choose_batches(
        self, among: Iterable[Configuration], launch: Launch, *asked: Configuration
    ) -> list[Configuration]:
        """Return up to `self.batches` configurations of a launch, sorted.

        The `asked` configurations have the highest priority, followed by the smallest, the largest and the middle
        batch. If the launch's options differ from the base, the base's largest batch has priority over the middle
        batch.
        """
        batches = sorted(c for c in among if find_launch(c) == launch)
        of_base = [c.local_batch_size for c in self.of_base if find_launch(c) == launch._replace(options=self.base)]
        shared = [c for c in batches if c.local_batch_size == max(of_base, default=0) and c.options != self.base]
        chosen = [*asked, *batches[:1], *batches[-1:], *shared, *batches[len(batches) // 2 :][:1]]
        return sorted([*dict.fromkeys(chosen)][: self.batches])

    def tells_split(self, launch: Launch) -> bool:
        """Return True if this launch has measured how a step splits into compute and exposed communication."""
        seen = None if self.model is None else self.model.observations
        if seen is None:
            return False
        split = np.isfinite(seen.compute_time_s) | np.isfinite(seen.exposed_comm_time_s)
        rows = compress(seen.points.rows(), split)
        return launch in {
            Launch(variant.instance_type, int(n), int(ranks), int(steps), variant.options)
            for variant, n, ranks, _, steps in rows
        }

    def _counted_launch(self, c: Configuration) -> object:
        return find_launch(c) if self.budget.share_launches else c

    def _affordable(self) -> Iterator[Configuration]:
        """Yield the unused candidates that can be run within the remaining GPU-seconds.

        A launch measures its batches in ascending order, so a batch can only run after all smaller batches.
        """
        budget, needed = self.budget, defaultdict[object, float](float)
        most = math.inf if budget.max_gpu_seconds is None else budget.max_gpu_seconds
        left = most - budget.spent_gpu_seconds
        if left == math.inf or self.model is None or not self.unused:
            yield from self.unused if left > 0.0 else ()
            return
        ascending = sorted(self.unused, key=lambda c: c.local_batch_size)
        for c, step_time_s in zip(ascending, self.model.predict(ascending).mean_s.tolist(), strict=True):
            launch = self._counted_launch(c)
            steps = budget.steps_per_further_run if launch in needed else budget.steps_per_run
            needed[launch] += step_time_s * steps * c.world_size
            if needed[launch] <= left:
                yield c


def counted_launches(configurations: Iterable[Configuration], *, share_launches: bool) -> int:
    """Return the number of launches in the budget that these configurations use.

    Each configuration uses one launch or, if launches are shared, one launch is used by up to three configurations.
    """
    if not share_launches:
        return len(frozenset(configurations))
    counts = Counter(map(find_launch, frozenset(configurations))).values()
    return sum(math.ceil(count / _BATCHES_PER_LAUNCH) for count in counts)


def corner_design(candidates: Sequence[Configuration], *, two: bool = False) -> list[Configuration]:
    """Return the smallest and the largest batch on the largest and the smallest cluster of each variant.

    If `two` is True, return only the two corners used in the paper (IV-B): the largest batch on the largest cluster,
    and the smallest batch on the smallest cluster.
    """
    corners: list[Configuration] = []
    for variant in sorted({c.variant for c in candidates}):
        alike = [c for c in candidates if c.variant == variant]
        sizes = [c.world_size for c in alike]
        for size in (max(sizes), min(sizes)):
            cluster = [c for c in alike if c.world_size == size]
            cluster.sort(key=lambda c: (c.local_batch_size, c))
            ends = [cluster[-1], cluster[0]]
            corners += ends if not two else ends[:1] if size == max(sizes) else ends[1:]
    return list(dict.fromkeys(corners))


def _first_launches(state: _State) -> list[PlannedRun]:
    """Return the missing runs of the launches with which every adaptive search begins.

    These launches use the largest and the smallest cluster of each instance type or, if a probe measured the links
    between nodes, only the smallest. An instance type needs no further launch once a launch has separated compute from
    communication. Among the launches on one cluster, the launch with the least gradient accumulation is treated as the
    largest.
    """
    begun = find_launches(state.used)
    told = {launch.instance_type for launch in begun if launch.options == state.base and state.tells_split(launch)}
    sizes, among = [c.world_size for c in state.candidates], (*state.used, *state.affordable)
    needed: list[Launch] = []
    for name in sorted({c.instance_type for c in state.of_base}):
        launches = sorted(
            find_launches(c for c in state.of_base if c.instance_type == name),
            key=lambda launch: (launch.world_size, -launch.grad_accum_steps, launch),
        )
        ends = launches[:1] if name in state.priors.probed else list(dict.fromkeys((launches[-1], launches[0])))
        needed += [launch for launch in ends if launch in begun or name not in told]
    first = sorted(needed, key=lambda launch: launch not in begun)
    missing = [launch for launch in first if launch not in begun]
    runs = []
    for launch in [*first[: len(first) - len(missing)], *missing[: state.runs_left]]:
        purpose = f"Design: {_place(launch.world_size, sizes)} cluster, with its other batches in one launch."
        runs += [PlannedRun(c, purpose) for c in state.choose_batches(among, launch) if c not in state.used]
    return runs


def _next_design_runs(state: _State, goal: Goal) -> list[PlannedRun]:
    """Return the runs of the design that have not been planned or measured yet."""
    num_types = len({c.instance_type for c in state.of_base})
    num_runs = _DESIGN_RUNS + _RUNS_PER_FURTHER_TYPE * (num_types - 1)
    used = [c for c in state.used if c.options == state.base]
    missing = min(num_runs - len(used), state.runs_left)
    if missing <= 0:
        return []
    chosen = design(state.of_base, state.priors, missing, goal=goal, allowed=state.affordable, used=used)
    # Memory is predicted best from two batches of an instance type that differ by a factor of four, so the run on the
    # largest cluster is followed by a run with a batch that is at least four times as large or as small.
    chosen[num_types:] = sorted(chosen[num_types:], key=lambda c: not _far_apart(c, chosen[0]))
    return [PlannedRun(c, _purpose(c, state.of_base)) for c in chosen]


def _far_apart(one: Configuration, other: Configuration) -> bool:
    """Return True if one local batch is at least four times the other, on the same instance type."""
    batches = sorted((one.local_batch_size, other.local_batch_size))
    return one.instance_type == other.instance_type and batches[1] >= _APART * batches[0]


def _purpose(chosen: Configuration, candidates: Sequence[Configuration]) -> str:
    same = [c for c in candidates if c.instance_type == chosen.instance_type]
    cluster = _place(chosen.world_size, [c.world_size for c in same])
    batch = _place(chosen.local_batch_size, [c.local_batch_size for c in same])
    why = "so that no candidate is extrapolated" if cluster == "largest" else "most informative for the model"
    return f"Design: {cluster} cluster with {batch} batch, {why}."


def _place(value: int, among: Sequence[int]) -> str:
    return "largest" if value == max(among) else "smallest" if value == min(among) else "middle"


def design(
    candidates: Sequence[Configuration],
    priors: Priors,
    num_runs: int,
    *,
    goal: Goal | None = None,
    allowed: Collection[Configuration] | None = None,
    used: Collection[Configuration] = (),
) -> list[Configuration]:
    """Return the most informative candidates, starting with each type's largest cluster, then its smallest.

    The largest cluster comes first because predictions are worst for clusters that are larger than all measured ones.
    If there is a goal, the run on the largest cluster uses the batch that is expected to be best there, and the
    variances of candidates are weighted by the goal: a candidate that is expected to cost twice as much as the best
    candidate has a quarter of the best candidate's weight. The design chooses among the `allowed` candidates (by
    default, all candidates); `used` configurations have been or will be measured.
    """
    # The design uses the uncertainty of the prior, not of the fit. A design that is fixed before all measurements is as
    # good as one that changes after every run, and its runs may be executed in parallel.
    believed = {c.instance_type: priors.believed.get(c.instance_type, generic_prior()) for c in candidates}
    model = unmeasured_model(replace(priors, believed=believed), candidates)
    value, weights = None, np.ones(len(candidates))
    if goal is not None:
        value = log_value(model, candidates, goal)
        weights = np.exp((value.min() - value) / _DEARER) + _LEAST_WEIGHT
    rows = [row for row, c in enumerate(candidates) if allowed is None or c in allowed]
    names = sorted({c.instance_type for c in candidates})
    first = []
    for end in (max, min):
        for name in names:
            size = end(c.world_size for c in candidates if c.instance_type == name)
            if any((c.instance_type, c.world_size) == (name, size) for c in used):
                continue
            at = [row for row in rows if (candidates[row].instance_type, candidates[row].world_size) == (name, size)]
            first.append(at if value is None or end is min else sorted(at, key=value.__getitem__)[:1])
    used_rows = [row for row, c in enumerate(candidates) if c in used]
    return [candidates[row] for row in greedy_design(model, candidates, num_runs, rows, used_rows, first, weights)]


def log_value(model: StepTimeModel, candidates: Sequence[Configuration], goal: Goal) -> FloatArray:
    """Return the logarithm of the goal's value for each candidate at its best offer, shape (n,).

    The result is 1000 for a candidate that the goal forbids. Since memory use is not known yet, every rank is assumed
    to use 1 GB if there is a price per GB-hour.
    """
    largest = goal.limits.max_global_batch_size or math.inf
    best = dict.fromkeys(candidates, _FORBIDDEN)
    for estimate in price_candidates(candidates, model, goal, assumed_peak=_ONE_GB):
        if estimate.configuration.global_batch_size <= largest and goal.may_choose(estimate.configuration):
            value = math.log(max(goal.value(estimate).mean, 1e-300))
            best[estimate.configuration] = min(value, best[estimate.configuration])
    return np.array([best[c] for c in candidates])


def greedy_design(
    model: StepTimeModel,
    candidates: Sequence[Configuration],
    num_runs: int,
    allowed: Iterable[int],
    used: Iterable[int],
    first: Iterable[Sequence[int]],
    weights: FloatArray,
) -> list[int]:
    """Return the row numbers of up to `num_runs` candidates, in order, chosen greedily and deterministically.

    Each choice minimises the weighted sum of the posterior variances of log step time under a model without
    measurements. The sum is over all rows or, if there are more than 128 rows, over 128 evenly spread rows. The choices
    do not depend on measured step times, so the runs may be executed in parallel. `allowed` rows may be chosen; `used`
    rows have been or will be measured. One row of each group in `first` is chosen before all others. `weights`, shape
    (n,), has the weights of the variances.
    """
    points, noise = Points.of(candidates), generic_prior().scales.noise ** 2
    judged = np.unique(np.linspace(0, len(points) - 1, min(len(points), _MOST_JUDGED)).astype(int))
    covariance, variance = prior_covariance(model, points.take(judged), points), np.zeros(len(points))
    for variant in set(points.variant):
        at = points.find_rows(variant)
        variance[at] = model.posterior_for(variant).predict(points.take(at))[1]
    opening, left, due = [list(group) for group in first if group], sorted(set(allowed)), list(used)
    removed = np.zeros((len(points), 0))
    chosen: list[int] = []
    while due or (len(chosen) < num_runs and left):
        if due:
            row = due.pop()
        else:
            pool = np.array([row for row in opening.pop(0) if row in left] or left if opening else left)
            gain = weights[judged] @ covariance[:, pool] ** 2 / (variance[pool] + noise)
            row = int(pool[int(np.argmax(np.round(gain / max(float(gain.max()), 1e-300), 9)))])
            chosen.append(row)
            left.remove(row)
        column = prior_covariance(model, points, points.take([row]))[:, 0] - removed @ removed[row]
        step = column / np.sqrt(variance[row] + noise)
        covariance -= np.outer(step[judged], step)
        variance -= step**2
        removed = np.column_stack([removed, step])
    return chosen


def prior_covariance(model: StepTimeModel, first: Points, second: Points) -> FloatArray:
    """Return the covariance of log step time under a model without measurements, shape (len(first), len(second)).

    The result is the sum of the covariances due to the parameters and due to the residual. Variants are treated as
    independent.
    """
    covariance = np.zeros((len(first), len(second)))
    for variant in set(first.variant) & set(second.variant):
        rows, columns = first.find_rows(variant), second.find_rows(variant)
        one, other, posterior = first.take(rows), second.take(columns), model.posterior_for(variant)
        member = posterior.leading
        slopes, others = (
            log_terms(member.theta, each, posterior.reference_batch_size, posterior.prior.slow_from).step_slopes
            for each in (one, other)
        )
        residual = residual_covariance(one, other, member.scales) + member.scales.own**2 * same_points(one, other)
        covariance[np.ix_(rows, columns)] = residual + slopes @ member.covariance @ others.T
    return covariance


def _refine_choice(state: _State, choice: Choice) -> Plan:
    """Return the next launch that may verify or change the choice, or the reason why no launch is needed.

    1. Verification: the choice itself is launched if it has not been measured.
    2. Contender: otherwise, the candidate with the lowest confidence bound is launched if it has not been measured. If
       the job has options, the launch with the largest expected gain is preferred instead, because options that were
       never launched have wide bounds.

    If a launch measures several batches, or if the job has options, a contender must have a minimum expected gain.
    """
    chosen = choice.chosen
    if chosen is not None and not chosen.measured and chosen.configuration in state.affordable:
        return state.launch(chosen.configuration, "Verification: this run measures the current choice.")
    has_options = bool(state.base)
    least_gain = _WORTH_A_LAUNCH if state.budget.share_launches or has_options else 0.0
    if (gain := expected_gain(choice, state.affordable)) >= least_gain:
        if has_options and math.isfinite(gain):
            of_launches = _expected_gains(choice, state.affordable)
            gains = max(sorted(of_launches.items()), key=lambda item: sum(item[1].values()))[1]
            return state.launch(
                max(sorted(gains), key=lambda c: gains[c]),
                "Contender: this launch has the largest expected gain of all remaining launches.",
            )
        best = most_promising(choice, state.affordable)
        if best is not None and not best.measured and best.configuration in state.affordable:
            return state.launch(
                best.configuration,
                "Contender: this candidate has the lowest confidence bound, so it might beat the current choice.",
            )
    if chosen is None:
        return Plan((), None)
    if not chosen.measured:
        return Plan((), "Too little of the budget remains to measure the choice, so it is still a prediction.")
    return Plan((), "The choice is stable: it has been measured, and further runs are unlikely to improve it.")


def most_promising(choice: Choice, runnable: Collection[Configuration]) -> Estimate | None:
    """Return the estimate with the lowest confidence bound of the goal's value (Cox and John 1992), or None.

    The bound of an unmeasured estimate is two standard deviations of the logarithm below its mean, or the value at the
    shortest plausible step (`_shortest_steps`) if this is higher. For measured estimates and the choice, the bound is
    the mean. Estimates are compared first by how far their bounds of time and cost exceed the deadline and the budget,
    and then by the bound of the value. Unmeasured estimates are considered only if they are `runnable`. A candidate
    that may not fit into memory is also considered, since its run shows whether it fits.
    """
    barred, limits = choice.barred, choice.goal.limits
    measured = {e.key for e in choice.estimates if e.measured or e is choice.chosen}
    shortest = _shortest_steps(choice)

    def rank(estimate: Estimate) -> tuple[float, float, int, Configuration]:
        def lower(value: Interval) -> float:
            least = -_sds_of_shortest(value, estimate, shortest)
            return _bound(value, 0.0 if estimate.key in measured else min(_BOUND_SDS, least))

        excess = (lower(value) - math.log(limit) for _, value, limit in limits.of_totals(estimate))
        bound = lower(choice.goal.value(estimate))
        # In a tie, the smaller cluster is used, since its run costs less.
        c = estimate.configuration
        return (round(max([0.0, *excess]), 3), round(bound, 3), c.world_size, c)

    possible = [
        estimate
        for estimate in choice.estimates
        if estimate.key not in barred and (estimate.key in measured or estimate.configuration in runnable)
    ]
    return min(possible, key=rank, default=None)


def expected_gain(choice: Choice, runnable: Collection[Configuration]) -> float:
    """Return the relative improvement of the best value that the best launch is expected to bring (0.01 means 1 %).

    The gain of a launch is a sum over its unmeasured batches. Each summand is the expected improvement of the value's
    logarithm (Jones 1998) with the batch's better offer, since one run measures both offers. Steps are assumed to be no
    shorter than `_shortest_steps` allows. The sum is an upper bound on the improvement by the best batch, and by the
    few batches that the launch measures. The gain is infinite while the choice may exceed a limit.
    """
    if choice.chosen is None or not choice.within_limits_is_likely:
        return math.inf
    return max((sum(gains.values()) for gains in _expected_gains(choice, runnable).values()), default=0.0)


def _expected_gains(choice: Choice, runnable: Collection[Configuration]) -> dict[Launch, dict[Configuration, float]]:
    """Return by how much each configuration is expected to improve the best value's logarithm, grouped by launch."""
    assert choice.expected_best is not None
    best, barred = choice.goal.value(choice.expected_best), choice.barred
    shortest = _shortest_steps(choice)
    gains: defaultdict[Launch, dict[Configuration, float]] = defaultdict(dict)
    for estimate in choice.estimates:
        if not estimate.measured and estimate.configuration in runnable and estimate.key not in barred:
            value = choice.goal.value(estimate)
            sd = max(value.log_sd, 1e-9)
            ahead = (_bound(best, 0.0) - _bound(value, 0.0)) / sd
            impossible = _expected_excess(min(_sds_of_shortest(value, estimate, shortest), ahead))
            gain = sd * max(_expected_excess(ahead) - impossible, 0.0)
            of_launch = gains[find_launch(estimate.configuration)]
            of_launch[estimate.configuration] = max(gain, of_launch.get(estimate.configuration, 0.0))
    return gains


def _shortest_steps(choice: Choice) -> dict[tuple[Configuration, bool], float]:
    """Return the shortest plausible step times of unmeasured estimates, by key.

    Each step time is expressed as the distance of its logarithm from the logarithm of the mean, in standard deviations.

    Additional ranks only add communication, so a step is assumed to be no shorter than the mean step with the same
    local batch on a smaller cluster, less two standard deviations. Without this assumption, the planner would launch
    large clusters in the hope that they are cheaper per example. Estimates without a measurement on a smaller cluster
    are omitted. If ranks share the optimizer's work, all estimates are omitted, because additional ranks then shorten a
    part of the step.
    """
    measured = defaultdict[object, list[Estimate]](list)
    least: dict[tuple[Configuration, bool], float] = {}
    if choice.goal.sharded:
        return least
    for estimate in choice.estimates:
        if estimate.measured and math.isfinite(estimate.known_sd):
            measured[_without_cluster(estimate)].append(estimate)
    for estimate in choice.estimates:
        if estimate.measured:
            continue
        c = estimate.configuration
        smaller = [
            math.log(other.step_time_s.mean) - _BOUND_SDS * other.known_sd
            for other in measured[_without_cluster(estimate)]
            if other.configuration.num_nodes <= c.num_nodes and other.configuration.world_size < c.world_size
        ]
        if smaller:
            step_s = estimate.step_time_s
            least[estimate.key] = (max(smaller) - math.log(step_s.mean)) / max(step_s.log_sd, 1e-9)
    return least


def _sds_of_shortest(
    value: Interval, estimate: Estimate, shortest: Mapping[tuple[Configuration, bool], float]
) -> float:
    """Return the number of standard deviations between a value's mean and the value at the shortest plausible step.

    The result is -inf if the step time does not bound the value. The step time bounds a value only if the value is as
    uncertain as the step time, or twice as uncertain because time and cost are multiplied; prices of memory or energy
    add further uncertainty.
    """
    powers = value.log_sd / max(estimate.step_time_s.log_sd, 1e-9)
    is_of_step = min(abs(powers - 1.0), abs(powers - 2.0)) < _ROUNDING
    return shortest.get(estimate.key, -math.inf) if is_of_step else -math.inf


def _without_cluster(estimate: Estimate) -> object:
    c = estimate.configuration
    return c.variant, c.local_batch_size, c.grad_accum_steps


def _expected_excess(ahead: float) -> float:
    """Return the mean of max(ahead - x, 0) for a standard normal x."""
    if ahead == -math.inf:
        return 0.0
    return ahead * float(special.ndtr(ahead)) + math.exp(-0.5 * ahead**2) / math.sqrt(2.0 * math.pi)


def _bound(value: Interval, sds: float) -> float:
    """Return the logarithm of a value's mean, minus `sds` standard deviations; a mean of 0 is replaced by 1e-300."""
    return math.log(max(value.mean, 1e-300)) - sds * value.log_sd
