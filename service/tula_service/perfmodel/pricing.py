"""Computes the time and cost of candidates (equations 4a and 4b), their distance from the limits, and the frontier."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tula_service.perfmodel.intervals import Interval
from tula_service.perfmodel.points import ObservationError
from tula_wire.configurations import Configuration
from tula_wire.options import Options

SECONDS_PER_HOUR = 3600.0
_BYTES_PER_GB = 1e9
JOULES_PER_KWH = 3.6e6
_HOPELESS_EXPONENT = 50.0
_MENU = 5  # estimates; more would be hard to compare at a glance


@dataclass(frozen=True)
class Spot:
    """Interruptible capacity, with Poisson interruptions per node, which discard the work since the last checkpoint."""

    interruptions_per_node_hour: float
    checkpoint_interval_s: float = 600.0
    restart_s: float = 120.0


@dataclass(frozen=True)
class Offer:
    """The prices of one instance type; the cost is the sum of all charges, and a price of zero means no charge."""

    usd_per_node_hour: float = 0.0
    usd_per_gb_hour: float = 0.0
    usd_per_rank_hour: float = 0.0
    spot: Spot | None = None

    def usd_per_s(self, configuration: Configuration, *, gb_per_rank: float = 0.0) -> float:
        """Return the cost of a configuration in dollars per second if each rank uses `gb_per_rank` GB of memory."""
        per_rank = self.usd_per_rank_hour + gb_per_rank * self.usd_per_gb_hour
        hourly = configuration.num_nodes * self.usd_per_node_hour + configuration.world_size * per_rank
        return hourly / SECONDS_PER_HOUR


@dataclass(frozen=True)
class Training:
    """The amount of training: E epochs over a dataset of D examples (equation 4a)."""

    dataset_size: float
    epochs: float = 1.0


@dataclass(frozen=True)
class Estimate:
    """A candidate with all values that affect a choice; `terms` contains the parts of the mean step time, in seconds.

    `known_sd` is the standard deviation of the logarithm of the mean time; unlike the intervals, it does not include
    the noise of a run. `energy_kwh` is the energy of the accelerators, or None if no run reported power. If on-demand
    and interruptible capacity both have a price, a candidate has one estimate for each; `spot` distinguishes the two.
    """

    configuration: Configuration
    step_time_s: Interval
    time_s: Interval
    cost_usd: Interval
    epoch_time_s: Interval
    peak_bytes: Interval | None
    extrapolated: bool = False
    measured: bool = False
    known_sd: float = math.inf
    terms: Mapping[str, float] = field(default_factory=dict)
    spot: bool = False
    energy_kwh: Interval | None = None

    def narrowed(self, value: Interval, log_sd: float) -> Interval:
        """Return the interval `value`, narrowed as if the standard deviation of log time were at most `log_sd`."""
        if log_sd >= self.time_s.log_sd or value.low <= 0.0:
            return value
        share = log_sd / self.time_s.log_sd
        low, high = ((end / value.mean) ** share for end in (value.low, value.high))
        return Interval(value.mean, value.mean * low, value.mean * high)

    @property
    def key(self) -> tuple[Configuration, bool]:
        """Return the key of the estimate, which is unique within a choice."""
        return self.configuration, self.spot


@dataclass(frozen=True)
class Limits:
    """The limits of a recommendation; None means "not set". Deadline and budget apply to the whole training run."""

    deadline_s: float | None = None
    budget_usd: float | None = None
    max_global_batch_size: int | None = None

    def of_totals(self, estimate: Estimate) -> list[tuple[str, Interval, float]]:
        """Return (name, the candidate's time or cost, limit) for the deadline and for the budget, if they are set."""
        both = (
            ("deadline_s", estimate.time_s, self.deadline_s),
            ("budget_usd", estimate.cost_usd, self.budget_usd),
        )
        return [(name, value, limit) for name, value, limit in both if limit is not None]

    def margin(self, estimate: Estimate) -> float:
        """Return the distance between the mean and the tighter limit, in standard deviations of the logarithm.

        The distance is negative if the mean exceeds the limit.
        """
        both = [(value, limit) for _, value, limit in self.of_totals(estimate) if value.mean > 0]
        return min((math.log(limit / value.mean) / max(value.log_sd, 1e-9) for value, limit in both), default=math.inf)


def spot_slowdown(spot: Spot | None, num_nodes: int) -> float:
    """Return the expected wall time of a synchronous job on `num_nodes` spot nodes, relative to uninterrupted nodes.

    With L = num_nodes * (interruptions per node and time), the work between two checkpoints, which takes tau without
    interruptions, is expected to take (1/L + R) * (exp(L tau) - 1), where R is the time of a restart (Daly 2006,
    without the cost of checkpoints). The ratio is infinite if the job would practically never finish.
    """
    if spot is None:
        return 1.0
    rate = num_nodes * spot.interruptions_per_node_hour / SECONDS_PER_HOUR
    expected = rate * spot.checkpoint_interval_s
    if expected > _HOPELESS_EXPONENT:
        return math.inf
    # This is the same expression in a form that avoids a division by zero for a rate near 0.
    growth = math.expm1(expected) / expected if expected > 0.0 else 1.0
    return (1.0 + rate * spot.restart_s) * growth


def price(
    configuration: Configuration,
    step_time_s: Interval,
    training: Training,
    offer: Offer,
    *,
    peak_bytes: Interval | None = None,
    steps_factor: float = 1.0,
    power_w: Interval | None = None,
) -> Estimate:
    """Return the estimate of one candidate, with its time (equation 4a) and its cost (equation 4b):

        T = E * D / B * t_step * spot slowdown * steps factor
        C = T * (n * usd_per_node_hour + world_size * (usd_per_rank_hour + peak_GB * usd_per_gb_hour))

    `steps_factor` is the factor by which the candidate needs more steps for the same quality; `power_w` is the power of
    a rank's device during training. Raises ObservationError if there is a price per GB but no peak.
    """
    slowdown = spot_slowdown(offer.spot, configuration.num_nodes)
    epoch_steps = training.dataset_size / configuration.global_batch_size * steps_factor
    epoch = step_time_s.scaled(epoch_steps * slowdown)
    time_s = epoch.scaled(training.epochs)
    cost = time_s.scaled(offer.usd_per_s(configuration))
    if offer.usd_per_gb_hour > 0.0:
        if peak_bytes is None:
            raise ObservationError(
                "usd_per_gb_hour requires a memory prediction; profile a configuration that reports its peak memory."
            )
        gb_usd = configuration.world_size * offer.usd_per_gb_hour / SECONDS_PER_HOUR / _BYTES_PER_GB
        cost = cost.plus(time_s.times(peak_bytes).scaled(gb_usd))
    return Estimate(
        configuration=configuration,
        step_time_s=step_time_s,
        time_s=time_s,
        cost_usd=cost,
        epoch_time_s=epoch,
        peak_bytes=peak_bytes,
        spot=offer.spot is not None,
        energy_kwh=power_w and time_s.times(power_w).scaled(configuration.world_size / JOULES_PER_KWH),
    )


def pareto_frontier(estimates: Sequence[Estimate]) -> tuple[Estimate, ...]:
    """Return the estimates that no other estimate dominates in mean time and mean cost, fastest first.

    An estimate dominates another if it is better in one of the two and not worse in the other. Of several estimates
    with the same time and cost, only the first is returned.
    """
    frontier: list[Estimate] = []
    for estimate in sorted(estimates, key=lambda e: (e.time_s.mean, e.cost_usd.mean)):
        if not frontier or estimate.cost_usd.mean < frontier[-1].cost_usd.mean:
            frontier.append(estimate)
    return tuple(frontier)


def build_menu(frontier: Sequence[Estimate], chosen: Estimate) -> tuple[Estimate, ...]:
    """Return up to five estimates for the user to choose from, fastest first.

    They include both ends of the frontier and the chosen estimate. Each further estimate is the one that is farthest,
    in log time, from the estimates that have already been selected.
    """
    points = sorted({e.key: e for e in (*frontier, chosen)}.values(), key=lambda e: (e.time_s.mean, tie_break(e)))
    times = [math.log(max(e.time_s.mean, 1e-300)) for e in points]
    taken = {0, len(points) - 1, next(row for row, e in enumerate(points) if e.key == chosen.key)}
    while len(taken) < min(_MENU, len(points)):
        left = [row for row in range(len(points)) if row not in taken]
        taken.add(max(left, key=lambda row: (min(abs(times[row] - times[other]) for other in taken), -row)))
    return tuple(points[row] for row in sorted(taken))


def usd_per_hour_saved(faster: Estimate, slower: Estimate) -> float | None:
    """Return the additional cost of `faster` per hour saved, or None if `faster` saves no time or costs no more."""
    saved_s, more = slower.time_s.mean - faster.time_s.mean, faster.cost_usd.mean - slower.cost_usd.mean
    return more / saved_s * SECONDS_PER_HOUR if saved_s > 0.0 and more > 0.0 else None


def tie_break(estimate: Estimate) -> tuple[int, int, str, int, int, Options]:
    """Return a sort key that makes the choice deterministic: fewer ranks first, then the smaller global batch."""
    c = estimate.configuration
    return (c.world_size, c.global_batch_size, c.instance_type, c.local_batch_size, c.grad_accum_steps, c.options)
