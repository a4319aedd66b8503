"""Time and cost of a whole training from a predicted step time (equations 4a and 4b), spot interruptions included."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tula_service.perfmodel.intervals import Interval
from tula_service.perfmodel.points import ObservationError
from tula_wire.configurations import DEFAULT_INSTANCE_TYPE, Configuration

SECONDS_PER_HOUR = 3600.0
_BYTES_PER_GB = 1e9
_HOPELESS_EXPONENT = 50.0


@dataclass(frozen=True)
class Spot:
    """Interruptible capacity: Poisson interruptions per node, work since the last checkpoint is lost at each."""

    interruptions_per_node_hour: float
    checkpoint_interval_s: float = 600.0
    restart_s: float = 120.0


@dataclass(frozen=True)
class Offer:
    """What one instance type costs; prices add up, and zero means "not charged this way"."""

    instance_type: str = DEFAULT_INSTANCE_TYPE
    usd_per_node_hour: float = 0.0
    usd_per_gb_hour: float = 0.0
    usd_per_rank_hour: float = 0.0
    spot: Spot | None = None

    def usd_per_s(self, configuration: Configuration, *, gb_per_rank: float = 0.0) -> float:
        """What a configuration costs in a second when each rank holds so many gigabytes of memory."""
        per_rank = self.usd_per_rank_hour + gb_per_rank * self.usd_per_gb_hour
        hourly = configuration.num_nodes * self.usd_per_node_hour + configuration.world_size * per_rank
        return hourly / SECONDS_PER_HOUR


@dataclass(frozen=True)
class Training:
    """How much there is to train: E epochs over D examples (equation 4a)."""

    dataset_size: float
    epochs: float = 1.0


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
    rate = num_nodes * spot.interruptions_per_node_hour / SECONDS_PER_HOUR
    expected = rate * spot.checkpoint_interval_s
    if expected > _HOPELESS_EXPONENT:
        return math.inf
    # The same, written so that a rate near 0 divides by nothing.
    growth = math.expm1(expected) / expected if expected > 0.0 else 1.0
    return (1.0 + rate * spot.restart_s) * growth


def price(
    configuration: Configuration,
    step_time_s: Interval,
    training: Training,
    offer: Offer,
    *,
    peak_bytes: Interval | None = None,
    extrapolated: bool = False,
    measured: bool = False,
    terms: Mapping[str, float] | None = None,
    steps_factor: float = 1.0,
) -> Estimate:
    """Time (4a) and cost (4b) of one candidate.

    T = E * D / B * t_step * spot slowdown * steps factor; C = T * (n * usd_per_node_hour
    + world_size * (usd_per_rank_hour + peak_GB * usd_per_gb_hour)). `steps_factor` is how many more steps it needs for
    the same quality. Raises ObservationError when a price needs a peak that is not known.
    """
    slowdown = spot_slowdown(offer.spot, configuration.num_nodes)
    epoch_steps = training.dataset_size / configuration.global_batch_size * steps_factor
    epoch = step_time_s.scaled(epoch_steps * slowdown)
    time_s = epoch.scaled(training.epochs)
    cost = time_s.scaled(offer.usd_per_s(configuration))
    if offer.usd_per_gb_hour > 0.0:
        if peak_bytes is None:
            raise ObservationError("usd_per_gb_hour needs predicted memory; profile a run that reports its peak.")
        gb_usd = configuration.world_size * offer.usd_per_gb_hour / SECONDS_PER_HOUR / _BYTES_PER_GB
        cost = cost.plus(time_s.times(peak_bytes).scaled(gb_usd))
    return Estimate(
        configuration=configuration,
        step_time_s=step_time_s,
        time_s=time_s,
        cost_usd=cost,
        epoch_time_s=epoch,
        peak_bytes=peak_bytes,
        extrapolated=extrapolated,
        measured=measured,
        terms=terms or {},
        spot=offer.spot is not None,
    )
