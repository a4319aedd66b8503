"""Time and cost of a whole training from a predicted step time (equations 4a and 4b), spot interruptions included."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tula_service.perfmodel.intervals import Interval
from tula_service.perfmodel.points import ObservationError
from tula_wire.configurations import DEFAULT_INSTANCE_TYPE, Configuration

_SECONDS_PER_HOUR = 3600.0
_BYTES_PER_GB = 1e9
_HOPELESS_EXPONENT = 50.0


@dataclass(frozen=True)
class Spot:
    """Interruptible capacity: Poisson interruptions per node, work since the last checkpoint is lost at each."""

    interruptions_per_node_hour: float
    checkpoint_interval_s: float = 600.0
    restart_s: float = 120.0

    def __post_init__(self) -> None:
        """Raise ObservationError on a negative rate or restart, or an interval that is not positive."""
        _finite("interruptions_per_node_hour", self.interruptions_per_node_hour, minimum=0.0)
        _finite("checkpoint_interval_s", self.checkpoint_interval_s, minimum=1e-9)
        _finite("restart_s", self.restart_s, minimum=0.0)


@dataclass(frozen=True)
class Offer:
    """What one instance type costs; prices add up, and zero means "not charged this way"."""

    instance_type: str = DEFAULT_INSTANCE_TYPE
    usd_per_node_hour: float = 0.0
    usd_per_gb_hour: float = 0.0
    usd_per_rank_hour: float = 0.0
    spot: Spot | None = None

    def __post_init__(self) -> None:
        """Raise ObservationError on a negative or non-finite price."""
        _finite("usd_per_node_hour", self.usd_per_node_hour, minimum=0.0)
        _finite("usd_per_gb_hour", self.usd_per_gb_hour, minimum=0.0)
        _finite("usd_per_rank_hour", self.usd_per_rank_hour, minimum=0.0)

    def usd_per_s(self, configuration: Configuration, *, gb_per_rank: float = 0.0) -> float:
        """What a configuration costs in a second when each rank holds so many gigabytes of memory."""
        per_rank = self.usd_per_rank_hour + gb_per_rank * self.usd_per_gb_hour
        hourly = configuration.num_nodes * self.usd_per_node_hour + configuration.world_size * per_rank
        return hourly / _SECONDS_PER_HOUR


@dataclass(frozen=True)
class Training:
    """How much there is to train: E epochs over D examples (equation 4a)."""

    dataset_size: float
    epochs: float = 1.0

    def __post_init__(self) -> None:
        """Raise ObservationError unless both are positive and finite."""
        _finite("dataset_size", self.dataset_size, minimum=1e-9)
        _finite("epochs", self.epochs, minimum=1e-9)


@dataclass(frozen=True)
class Estimate:
    """One candidate with everything that a choice looks at; `terms` splits the mean step time, in seconds.

    A candidate has one estimate on demand and one on interruptible capacity (`spot`), where both have a price.
    """

    configuration: Configuration
    step_time_s: Interval
    time_s: Interval
    cost_usd: Interval
    epoch_time_s: Interval
    peak_bytes: Interval | None
    extrapolated: bool
    measured: bool
    terms: Mapping[str, float]
    spot: bool = False

    @property
    def key(self) -> tuple[Configuration, bool]:
        """Unique among the estimates of one choice."""
        return self.configuration, self.spot


def spot_slowdown(spot: Spot | None, num_nodes: int) -> float:
    """Expected wall time over uninterrupted time of a synchronous job on `num_nodes` interruptible nodes.

    With rate L = num_nodes * rate, a stretch of length tau between checkpoints takes (1/L + R) * (exp(L tau) - 1) in
    expectation (Daly 2006, without checkpoint cost); infinite when the job would practically never get through.
    """
    if spot is None:
        return 1.0
    rate = num_nodes * spot.interruptions_per_node_hour / _SECONDS_PER_HOUR
    expected = rate * spot.checkpoint_interval_s
    if expected > _HOPELESS_EXPONENT:
        return math.inf
    # The same, written so that a rate near 0 divides by nothing.
    growth = math.expm1(expected) / expected if expected > 0.0 else 1.0
    return (1.0 + rate * spot.restart_s) * growth


def price(
    configurations: Sequence[Configuration],
    step_times: Sequence[Interval],
    training: Training,
    offers: Mapping[str, Offer],
    *,
    peak_bytes: Sequence[Interval | None] | None = None,
    extrapolated: Sequence[bool] | None = None,
    measured: Sequence[bool] | None = None,
    terms: Sequence[Mapping[str, float]] | None = None,
    steps_factor: Sequence[float] | None = None,
) -> tuple[Estimate, ...]:
    """Time (4a) and cost (4b) of every candidate.

    T = E * D / B * t_step * spot slowdown * steps factor; C = T * (n * usd_per_node_hour
    + world_size * (usd_per_rank_hour + peak_GB * usd_per_gb_hour)). `steps_factor` (one per candidate) is how many more
    steps it needs for the same quality; 1 when absent. Raises ObservationError when an instance type has no offer.
    """
    estimates = []
    for row, configuration in enumerate(configurations):
        offer = offers.get(configuration.instance_type)
        if offer is None:
            raise ObservationError(f"no price for instance type {configuration.instance_type!r}; add an offer for it.")
        peak = peak_bytes[row] if peak_bytes is not None else None
        slowdown = spot_slowdown(offer.spot, configuration.num_nodes)
        epoch_steps = training.dataset_size / configuration.global_batch_size
        epoch_steps *= steps_factor[row] if steps_factor is not None else 1.0
        epoch = step_times[row].scaled(epoch_steps * slowdown)
        time_s = epoch.scaled(training.epochs)
        cost = time_s.scaled(offer.usd_per_s(configuration))
        if offer.usd_per_gb_hour > 0.0:
            if peak is None:
                raise ObservationError("usd_per_gb_hour needs predicted memory; profile a run that reports its peak.")
            gb_usd = configuration.world_size * offer.usd_per_gb_hour / _SECONDS_PER_HOUR / _BYTES_PER_GB
            cost = cost.plus(time_s.times(peak).scaled(gb_usd))
        estimates.append(
            Estimate(
                configuration=configuration,
                step_time_s=step_times[row],
                time_s=time_s,
                cost_usd=cost,
                epoch_time_s=epoch,
                peak_bytes=peak,
                extrapolated=bool(extrapolated[row]) if extrapolated is not None else False,
                measured=bool(measured[row]) if measured is not None else False,
                terms=dict(terms[row]) if terms is not None else {},
                spot=offer.spot is not None,
            )
        )
    return tuple(estimates)


def _finite(name: str, value: float, *, minimum: float) -> None:
    if not math.isfinite(value) or value < minimum:
        raise ObservationError(f"{name} is {value!r}; give a finite number of at least {minimum:g}.")
