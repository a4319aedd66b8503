"""Detects changes in the speed of a training run, and compares its projected time and cost with its limits.

All functions are pure. A `Monitor` holds the state of a training run between two batches of samples;
`usecases/monitoring.py` stores this state with the run, and emits an event for each change that the monitor detects.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from pydantic import TypeAdapter

import tula_wire as wire
from tula_service.analysis import job_data
from tula_service.domain import FloatArray
from tula_service.perfmodel.points import column
from tula_service.perfmodel.pricing import Estimate
from tula_wire import Configuration
from tula_wire.bounds import MAX_DURATION_S
from tula_wire.format import duration, money

CHECK_EVERY_STEPS = 50
"""The number of steps between two projections of time and cost against the deadline and the budget."""

_FROM_START_STEPS = 50
_THRESHOLD = 30.0
_LARGEST_SCORE = 2.0
_LEAST_HALF_WIDTH = 0.05
_LEAST_CHANGE = 0.1  # of the expected step time
_BLOCK = 50
"""The steps per block, whose mean is also tested, since the sums grow slowly for a speed just outside the interval."""
_BYTES_PER_GB = 1e9
_ADVICE = "To compare other configurations, run `tula predict JOB` or use the what-if on the job's page."


@dataclass(frozen=True)
class DriftState:
    """The state of a drift detector, which `watch_drift` updates with new steps.

    `centre` and `half_width` define the expected range of log step time; `slower` and `faster` are the two sums of
    Page's test. `alarm` is "slower", "faster" or None; `alarm_after_steps` is the number of steps after which the alarm
    was raised. The `block_*` fields contain the number of steps in the current block, and the sums of their scores and
    squared scores.
    """

    centre: float
    half_width: float
    slower: float = 0.0
    faster: float = 0.0
    steps: int = 0
    alarm: str | None = None
    alarm_after_steps: int | None = None
    block_steps: int = 0
    block_sum: float = 0.0
    block_squares: float = 0.0

    @classmethod
    def expecting(cls, low_s: float, high_s: float) -> DriftState:
        """Return a detector for a predicted step-time interval, which is widened to at least 5 % on each side."""
        centre = 0.5 * (math.log(low_s) + math.log(high_s))
        return cls(centre, max(0.5 * (math.log(high_s) - math.log(low_s)), _LEAST_HALF_WIDTH))

    def confirmed_by(self, recent_s: FloatArray) -> bool:
        """Return True if the newest steps confirm the alarm.

        The steps confirm the alarm if their mean differs from the expected step time, in the direction of the alarm,
        by at least 10 % plus twice the standard error of the mean. Without this check, if fast and slow steps
        alternated, a few consecutive slow steps would be mistaken for a change of speed.
        """
        if self.alarm is None or recent_s.size < 2:
            return False
        expected = math.exp(self.centre)
        change = float(recent_s.mean()) - expected
        doubt = 2.0 * float(recent_s.std(ddof=1)) / math.sqrt(recent_s.size)
        return (change > 0.0) is (self.alarm == "slower") and abs(change) - doubt >= _LEAST_CHANGE * expected

    def rearmed(self) -> DriftState:
        """Return this detector without its alarm; the sums are reset only if they raised the alarm."""
        if max(self.slower, self.faster) >= _THRESHOLD:
            return DriftState(self.centre, self.half_width, steps=self.steps)
        return replace(self, alarm=None, alarm_after_steps=None)


def watch_drift(state: DriftState, step_times_s: Sequence[float] | FloatArray) -> DriftState:
    """Return the state after these consecutive steps; the sums are carried over, and an existing alarm is kept.

    This is Page's test. The score of a step is the distance of its log step time from the centre of the interval, in
    half-widths. Each step adds its score minus 1, limited to 2, to a sum that is never negative, and a sum of 30 raises
    the alarm. If one step in ten straggles, the sum does not accumulate, however slow that step is, because the scores
    of the other steps reduce it. A speed inside the interval never raises the alarm, and a speed far outside raises the
    alarm after 15 steps. For a speed just outside the interval, the alarm is raised if the mean score of a block of 50
    steps exceeds 1 by more than twice its standard error, which takes 50 to 99 steps. An alarm is announced only after
    the newest steps confirm it (`DriftState.confirmed_by`).
    """
    times = column("step_times_s", step_times_s, above=0.0)
    slower, faster, alarm, after = state.slower, state.faster, state.alarm, state.alarm_after_steps
    count, total, squares = state.block_steps, state.block_sum, state.block_squares
    for seen, log_time in enumerate(np.log(times).tolist(), start=1):
        score = (log_time - state.centre) / state.half_width
        slower = max(0.0, slower + min(score - 1.0, _LARGEST_SCORE))
        faster = max(0.0, faster + min(-score - 1.0, _LARGEST_SCORE))
        counted = min(max(score, -1.0 - _LARGEST_SCORE), 1.0 + _LARGEST_SCORE)
        count, total, squares = count + 1, total + counted, squares + counted**2
        off = max(slower, faster) >= _THRESHOLD or (count == _BLOCK and _is_off(total, squares))
        if off and alarm is None:
            alarm, after = "slower" if slower >= faster else "faster", state.steps + seen
        if count == _BLOCK:
            count, total, squares = 0, 0.0, 0.0
    steps = state.steps + times.size
    return DriftState(state.centre, state.half_width, slower, faster, steps, alarm, after, count, total, squares)


def _is_off(total: float, squares: float) -> bool:
    """Return True if the absolute mean score of a block exceeds 1 by more than twice its standard error."""
    mean = total / _BLOCK
    return abs(mean) - 2.0 * math.sqrt(max(0.0, squares - total * mean)) / _BLOCK > 1.0


@dataclass(frozen=True)
class DriftAlarm:
    """A lasting change in speed; `sentence` is None if the training run has returned to its predicted speed.

    `event` is the content of the `drift` event. `from_start` is True if the training run has had this speed since its
    start, in which case all its samples describe the same speed.
    """

    sentence: str | None
    from_start: bool
    event: dict[str, Any]


@dataclass(frozen=True)
class Monitor:
    """The monitoring state of one run; if the run has no prediction, there is no detector, and only limits are checked.

    `low_s` and `high_s` are the ends of the interval of the predicted step time, and `checked_at` is the step of the
    last projection. `announced` contains the names of the limits whose violation has been announced. `changed` is True
    if an alarm has been confirmed before. `elapsed_s` is the time that this run has taken; `spent_s` and `spent_usd`
    are the time and cost of the earlier runs that it continues. `step` is the newest step, or None before the first
    step. `epochs_before` is the number of epochs that earlier processes trained, or None if unknown.
    """

    detector: DriftState | None = None
    low_s: float = 0.0
    high_s: float = 0.0
    checked_at: int = 0
    announced: list[str] = field(default_factory=list)
    changed: bool = False
    peak_bytes: float | None = None
    elapsed_s: float = 0.0
    spent_s: float = 0.0
    spent_usd: float = 0.0
    step: int | None = None
    epochs_before: float | None = None

    @classmethod
    def start(cls, expected: Estimate | None, *, spent_s: float, spent_usd: float) -> Monitor:
        """Return the initial state of a run; `expected` is its prediction, if it has one."""
        monitor = cls(spent_s=spent_s, spent_usd=spent_usd)
        if expected is None:
            return monitor
        low_s, high_s = expected.step_time_s.low, expected.step_time_s.high
        peak_bytes = None if expected.peak_bytes is None else expected.peak_bytes.mean
        detector = DriftState.expecting(low_s, high_s)
        return replace(monitor, detector=detector, low_s=low_s, high_s=high_s, peak_bytes=peak_bytes)

    @classmethod
    def read(cls, state: dict[str, Any]) -> Monitor:
        """Return the state from the JSON of `to_json`, ignoring fields that only other versions of the service use."""
        return _MONITOR.validate_python(state)

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON, in the form that is stored with the run."""
        return asdict(self)

    def observe(self, step_times_s: FloatArray, *, elapsed_s: float | None, warmup: bool) -> Monitor:
        """Return the updated state after these steps of one rank."""
        monitor = self if elapsed_s is None else replace(self, elapsed_s=elapsed_s)
        if monitor.detector is not None and not warmup:
            monitor = replace(monitor, detector=watch_drift(monitor.detector, step_times_s))
        return monitor

    def at(self, step: int, epochs_before: float | None) -> Monitor:
        """Return the state with `step` as its newest step."""
        return replace(self, step=step, epochs_before=epochs_before)

    def examples_left(self, spec: wire.JobSpec, c: Configuration) -> float | None:
        """Return the number of examples still to be read.

        The result is None before the first step, or if it is unknown how many epochs earlier processes trained.
        """
        if self.step is None or (self.epochs_before is None and self.spent_s > 0.0):
            return None
        return examples_left(spec, c, self.step, self.epochs_before)

    def expecting(self, level_s: float) -> Monitor:
        """Return the state after a confirmed alarm, with a detector that expects the new step time `level_s`."""
        width = max(self.high_s / self.low_s, 1.0) ** 0.5
        return replace(self, detector=DriftState.expecting(level_s / width, level_s * width), changed=True)

    def alarm(self, step: int, level_s: float) -> DriftAlarm:
        """Return the announcement of a confirmed alarm; `level_s` is the current step time in seconds."""
        assert self.detector is not None
        kind, after_steps = self.detector.alarm or "slower", self.detector.alarm_after_steps or 0
        from_start = not self.changed and after_steps <= _FROM_START_STEPS
        sentence = None
        if self.low_s <= level_s <= self.high_s:
            kind = "recovered"
        else:
            now = "slower" if level_s > self.high_s else "faster"
            sentence = f"{'Training has always been' if from_start else 'Training has become'} {now} than predicted"
            if now != kind:
                sentence = f"Training has become {kind}, but is still {now} than predicted"
            sentence += f": {duration(level_s)} per step instead of {duration(self.low_s)} to {duration(self.high_s)}"
        event = {
            "alarm": kind,
            "step": step,
            "after_steps": after_steps,
            "step_time_s": level_s,
            "expected_low_s": self.low_s,
            "expected_high_s": self.high_s,
            "sentence": "Training runs at the predicted speed again." if sentence is None else f"{sentence}. {_ADVICE}",
        }
        return DriftAlarm(sentence, from_start, event)

    @property
    def fired(self) -> bool:
        """Return True if the detector has noticed a change of speed."""
        return self.detector is not None and self.detector.alarm is not None

    def limits_due(self, step: int) -> bool:
        """Return True if time and cost must be projected at this step; each process numbers its steps from zero."""
        return step < self.checked_at or step >= self.checked_at + CHECK_EVERY_STEPS


_MONITOR = TypeAdapter(Monitor)


def examples_left(spec: wire.JobSpec, c: Configuration, step: int, epochs_before: float | None) -> float:
    """Return how many of the examples in all epochs remain to be read after `step`.

    Each process counts its steps from zero. `epochs_before`, the progress of earlier processes, is in epochs, which do
    not depend on the batch size; None is treated as zero.
    """
    epochs_done = (epochs_before or 0.0) + (step + 1) * c.global_batch_size / spec.dataset.size
    return max(0.0, spec.epochs - epochs_done) * spec.dataset.size


def usd_per_s(spec: wire.JobSpec, c: Configuration, peak_bytes: float | None) -> float | None:
    """Return the price per second of this configuration, or None if the price is unknown.

    The result is the on-demand price or, if there is none, the spot price. A price per GB-hour can be applied only if
    `peak_bytes`, the peak memory of one rank, is known.
    """
    if not job_data.has_prices(spec):
        return None
    offer = {**job_data.list_spot_offers(spec), **job_data.list_offers(spec)}[c.instance_type]
    if offer.usd_per_gb_hour and peak_bytes is None:
        return None
    return offer.usd_per_s(c, gb_per_rank=(peak_bytes or 0.0) / _BYTES_PER_GB)


def time_limit_s(spec: wire.JobSpec, c: Configuration, monitor: Monitor) -> float | None:
    """Return the seconds that the deadline and budget leave for a new training run, or None if no limit can stop it.

    A result of zero or less means that the deadline has passed or the budget is spent. The budget is ignored if the
    price per second is unknown.
    """
    if spec.limits.on_breach != "stop":
        return None
    left = [] if spec.limits.deadline_s is None else [spec.limits.deadline_s - monitor.spent_s]
    rate = usd_per_s(spec, c, monitor.peak_bytes)
    if spec.limits.budget_usd is not None and rate:
        left.append(min((spec.limits.budget_usd - monitor.spent_usd) / rate, MAX_DURATION_S))
    return min(left, default=None)


def broken_limits(
    spec: wire.JobSpec, c: Configuration, monitor: Monitor, step: int, left: float, step_time_s: float
) -> Iterator[dict[str, Any]]:
    """Yield an `advice` event for each unannounced limit that will be exceeded at the current speed."""
    steps_left = left / c.global_batch_size
    run_s = monitor.elapsed_s + steps_left * step_time_s
    rate = None if spec.limits.budget_usd is None else usd_per_s(spec, c, monitor.peak_bytes)
    earlier = f", including {duration(monitor.spent_s)} of earlier starts" if monitor.spent_s else ""
    for name, value, limit, unit, text in (
        ("deadline", monitor.spent_s + run_s, spec.limits.deadline_s, "s", duration),
        ("budget", None if rate is None else monitor.spent_usd + rate * run_s, spec.limits.budget_usd, "USD", money),
    ):
        if limit is None or value is None or value <= limit or name in monitor.announced:
            continue
        yield {
            "kind": name,
            "step": step,
            "steps_left": steps_left,
            "projected": value,
            "limit": limit,
            "unit": unit,
            "sentence": f"At {duration(step_time_s)} per step, with {steps_left:,.0f} steps left, training will reach "
            f"a total of {text(value)}{earlier}, which exceeds the {name} of {text(limit)}.",
        }
