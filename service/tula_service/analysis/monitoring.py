"""Monitoring of a training run: its speed against the prediction, the cause of a change, its limits, and advice. Pure.

A `Monitor` is what is known of a training between two batches of samples. `usecases/monitoring.py` stores it with the
run and announces what the functions here find.
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
from tula_service.analysis.answer import Analysis, Answer
from tula_service.analysis.explanation import name_of
from tula_service.domain import MEASURES, FloatArray, Measure
from tula_service.perfmodel.choice import Estimate
from tula_service.perfmodel.points import column
from tula_service.perfmodel.step_summary import known_mean, robust_mean
from tula_wire import Configuration
from tula_wire.bounds import MAX_DURATION_S
from tula_wire.format import percent

CHECK_EVERY_STEPS = 50
"""Steps between two projections of deadline and budget."""

_FROM_START_STEPS = 50
_LEAST_SAVING = 0.02
_THRESHOLD = 30.0
_LARGEST_SCORE = 2.0
_LEAST_HALF_WIDTH = 0.05
_LEAST_CHANGE = 0.1  # of the expected step time
_BLOCK = 50
"""Steps whose mean is compared with the interval: where that is wide, a speed just outside adds little to the sums."""
_MOST_OVERLAP = 64.0  # the exponent at which max(compute, communication) is reached
_BYTES_PER_GB = 1e9


@dataclass(frozen=True)
class DriftState:
    """A detector: expected range of log step time, two sums, and the alarm once raised; fold steps in by `watch_drift`.

    `alarm` is "slower", "faster" or None; `alarm_after_steps` counts the steps seen when it was raised. `block_*`: how
    many steps of the block under way were seen, the sum of their scores and of the squares.
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
        """A detector for a predicted interval of step time; one narrower than 5 % either way is widened to that."""
        centre = 0.5 * (math.log(low_s) + math.log(high_s))
        return cls(centre, max(0.5 * (math.log(high_s) - math.log(low_s)), _LEAST_HALF_WIDTH))

    def confirmed_by(self, recent_s: FloatArray) -> bool:
        """True if the mean of these newest steps is off the centre by 10 % and twice its standard error, as alarmed.

        The sums look at single steps. Where fast and slow ones alternate, a few of one speed in a row are no change.
        """
        if self.alarm is None or recent_s.size < 2:
            return False
        expected = math.exp(self.centre)
        change = float(recent_s.mean()) - expected
        doubt = 2.0 * float(recent_s.std(ddof=1)) / math.sqrt(recent_s.size)
        return (change > 0.0) is (self.alarm == "slower") and abs(change) - doubt >= _LEAST_CHANGE * expected

    def rearmed(self) -> DriftState:
        """The same detector without its alarm; the sums begin again if it was theirs, and not if it was a block's."""
        if max(self.slower, self.faster) >= _THRESHOLD:
            return DriftState(self.centre, self.half_width, steps=self.steps)
        return replace(self, alarm=None, alarm_after_steps=None)


def watch_drift(state: DriftState, step_times_s: Sequence[float] | FloatArray) -> DriftState:
    """The state after these steps, in order; the sums continue, and an alarm stays.

    Page's test on the distance of log step time from the interval's centre in half-widths: a step at the interval's end
    adds nothing, one step adds at most 2, and the sum must reach 30. So single stragglers (one in ten, however slow)
    never accumulate, a speed inside the interval never alarms, and one far outside does after 15 steps. One just
    outside does after 50 to 99: the mean distance of each 50 steps raises the alarm where it is beyond the interval by
    twice its standard error. An alarm counts once the newest steps confirm it (`DriftState.confirmed_by`).
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
    """True if the mean of a block's scores is beyond 1, the interval's end, by twice its standard error."""
    mean = total / _BLOCK
    return abs(mean) - 2.0 * math.sqrt(max(0.0, squares - total * mean)) / _BLOCK > 1.0


@dataclass(frozen=True)
class Alarm:
    """A change of speed that was noticed, with what diagnosis and advice need of that moment.

    `kind` is "slower" or "faster", `after_steps` the steps until the detector raised it, `level_s` the robust mean of
    the newest step times, `compute_s` and `input_s` those of their compute and of their waits for data if the agent
    reports them. `examples_left` is None if it is unknown.
    """

    kind: str
    step: int
    after_steps: int
    from_start: bool
    level_s: float
    compute_s: float | None
    examples_left: float | None
    input_s: float | None = None


@dataclass(frozen=True)
class Monitor:
    """The state of monitoring one run; without a prediction there is no detector, and only limits are checked.

    `low_s`, `high_s`: the predicted step time. `restart_s`: time from the run's start to its first steps. `checked_at`:
    the step of the last projection. `announced`: limits whose violation was announced. `changed`: the detector has
    fired before. `elapsed_s` is the run's own time; `spent_s` and `spent_usd` are those of the runs that it continues.
    """

    detector: DriftState | None = None
    low_s: float = 0.0
    high_s: float = 0.0
    restart_s: float | None = None
    checked_at: int = 0
    announced: list[str] = field(default_factory=list)
    alarm: Alarm | None = None
    changed: bool = False
    peak_bytes: float | None = None
    elapsed_s: float = 0.0
    spent_s: float = 0.0
    spent_usd: float = 0.0

    @classmethod
    def start(cls, expected: Estimate | None, *, spent_s: float, spent_usd: float) -> Monitor:
        """The state of a run that is about to start."""
        monitor = cls(spent_s=spent_s, spent_usd=spent_usd)
        if expected is None:
            return monitor
        low_s, high_s = expected.step_time_s.low, expected.step_time_s.high
        peak_bytes = None if expected.peak_bytes is None else expected.peak_bytes.mean
        detector = DriftState.expecting(low_s, high_s)
        return replace(monitor, detector=detector, low_s=low_s, high_s=high_s, peak_bytes=peak_bytes)

    @classmethod
    def read(cls, state: dict[str, Any]) -> Monitor:
        """The inverse of `to_json`; other names, which a replica of another version has stored, are left out."""
        return _MONITOR.validate_python(state)

    def to_json(self) -> dict[str, Any]:
        """What the run stores."""
        return asdict(self)

    def observe(self, step_times_s: FloatArray, *, elapsed_s: float | None, warmup: bool) -> Monitor:
        """The state after these steps of one rank."""
        monitor = self
        if elapsed_s is not None:
            restart_s = self.restart_s
            if restart_s is None:
                restart_s = max(elapsed_s - float(step_times_s.sum()), 0.0)
            monitor = replace(monitor, elapsed_s=elapsed_s, restart_s=restart_s)
        if monitor.detector is not None and not warmup:
            monitor = replace(monitor, detector=watch_drift(monitor.detector, step_times_s))
        return monitor

    def raise_alarm(
        self,
        step: int,
        recent_s: FloatArray,
        compute_s: FloatArray | None,
        input_s: FloatArray | None,
        examples_left: float | None,
    ) -> Monitor:
        """The state once the detector has fired: rearmed around the new level, with an alarm unless it recovered."""
        level_s = robust_mean(recent_s)[0]
        if self.detector is None or self.detector.alarm is None or level_s is None:
            return self
        after_steps = self.detector.alarm_after_steps or recent_s.size
        width = max(self.high_s / self.low_s, 1.0) ** 0.5
        monitor = replace(self, detector=DriftState.expecting(level_s / width, level_s * width))
        from_start = not self.changed and after_steps <= _FROM_START_STEPS
        if self.low_s <= level_s <= self.high_s:
            return replace(monitor, alarm=None, changed=True)
        alarm = Alarm(
            kind=self.detector.alarm,
            step=step,
            after_steps=after_steps,
            from_start=from_start,
            level_s=level_s,
            compute_s=known_mean(compute_s),
            examples_left=examples_left,
            input_s=known_mean(input_s),
        )
        return replace(monitor, alarm=alarm, changed=True)

    @property
    def fired(self) -> bool:
        """True if the detector has noticed a change of speed."""
        return self.detector is not None and self.detector.alarm is not None

    def limits_due(self, step: int) -> bool:
        """True if deadline and budget are to be projected at this step; steps restart with the run's processes."""
        return step < self.checked_at or step >= self.checked_at + CHECK_EVERY_STEPS

    def event(self, kind: str, *, step: int, after_steps: int | None, level_s: float) -> dict[str, Any]:
        """The fields that every `drift` event has."""
        return {
            "alarm": kind,
            "step": step,
            "after_steps": after_steps,
            "step_time_s": level_s,
            "expected_low_s": self.low_s,
            "expected_high_s": self.high_s,
        }


_MONITOR = TypeAdapter(Monitor)


def diagnose(analysis: Analysis, c: Configuration, monitor: Monitor, alarm: Alarm) -> dict[str, Any]:
    """Which part of the step changed, by which factor, and a sentence: `{"part", "factor", "sentence"}`.

    Without a model of the job, the sentence alone. Where waits for data are more than half of what a step takes longer,
    they are the part. Measured compute decides next: with more than half of the excess (in log) in it, that is the
    part. Else a run of several ranks blames communication, which is what changes under a running job.
    """
    if not isinstance(analysis, Answer):
        return {"sentence": f"{_speed(monitor, alarm)}, and no model can say why: {analysis.reason}"}
    predicted = analysis.model.predict([c])
    columns = (predicted.compute_s, predicted.comm_s, predicted.mean_s, predicted.input_s)
    compute, comm, mean, waits_s = (float(column[0]) for column in columns)
    if alarm.input_s is not None and alarm.input_s - waits_s > 0.5 * (alarm.level_s - mean) > 0.0:
        shares = f"{percent(alarm.input_s / alarm.level_s, digits=0)} of the time"
        shares += f", by prediction {percent(waits_s / mean, digits=0)}"
        sentence = f"{_speed(monitor, alarm)}: it waits for data {shares}"
        return {"part": "input", "factor": alarm.level_s / mean, "sentence": sentence}
    part, factor = "compute", alarm.level_s / mean
    computing = abs(math.log((alarm.compute_s or compute) / compute)) > 0.5 * abs(math.log(factor))
    if c.world_size > 1 and comm > 1e-9 * mean and not computing:
        level_s = alarm.level_s - (waits_s if alarm.input_s is None else alarm.input_s)
        part, factor = "communication", _comm_factor(compute, comm, mean - waits_s, c.grad_accum_steps, level_s)
    times, word = (factor, "slower") if factor >= 1 else (1 / factor, "faster")
    sentence = f"{_speed(monitor, alarm)}: {part} is {times:.2g} times {word} than when it was profiled"
    return {"part": part, "factor": factor, "sentence": sentence}


def _speed(monitor: Monitor, alarm: Alarm) -> str:
    """How fast the training is by its prediction, which after an earlier change may differ from what it has become."""
    now = "slower" if alarm.level_s > monitor.high_s else "faster"
    if now != alarm.kind:
        return f"Training has become {alarm.kind}, but is still {now} than predicted"
    return f"{'Since its start training is' if alarm.from_start else 'Training has become'} {now} than predicted"


def _comm_factor(compute: float, comm: float, mean: float, micro_steps: int, step_time_s: float) -> float:
    """By how much communication must have changed, from t = (m-1) T_g + (T_g^g + T_s^g)^(1/g) (docs/model.md)."""
    from scipy.optimize import brentq  # imported on use: it doubles what scipy adds to the service's start

    last = compute / micro_steps
    overlapped, now = mean - (compute - last), step_time_s - (compute - last)

    def excess(g: float) -> float:
        return float(np.linalg.norm([last, comm], g)) - overlapped

    if excess(1.0) <= 0.0:
        g = 1.0
    else:
        g = _MOST_OVERLAP if excess(_MOST_OVERLAP) >= 0.0 else float(brentq(excess, 1.0, _MOST_OVERLAP))
    largest = max(now, last)
    comm_now = largest * max((now / largest) ** g - (last / largest) ** g, 0.0) ** (1.0 / g) if now > 0.0 else 0.0
    return max(comm_now / comm, 1e-4)


def examples_left(spec: wire.JobSpec, c: Configuration, step: int, epochs_before: float | None) -> float:
    """Examples that the training still has to read after `step`, which each process counts from zero; E * D at first.

    Earlier progress is reported in epochs, which do not depend on the batch size; None counts as none.
    """
    epochs_done = (epochs_before or 0.0) + (step + 1) * c.global_batch_size / spec.dataset.size
    return max(0.0, spec.epochs - epochs_done) * spec.dataset.size


def usd_per_s(spec: wire.JobSpec, c: Configuration, peak_bytes: float | None) -> float | None:
    """The price of a second of this configuration with its memory; None if a price or the memory is unknown.

    On demand if that price is known, else on spot capacity. `peak_bytes` is of one rank.
    """
    if not job_data.has_prices(spec):
        return None
    offer = {**job_data.spot_offers_of(spec), **job_data.offers_of(spec)}[c.instance_type]
    if offer.usd_per_gb_hour and peak_bytes is None:
        return None
    return offer.usd_per_s(c, gb_per_rank=(peak_bytes or 0.0) / _BYTES_PER_GB)


def time_limit_s(spec: wire.JobSpec, c: Configuration, monitor: Monitor) -> float | None:
    """Seconds that deadline and budget leave to a training that is about to start; None if it need not stop at them.

    Zero or less: one of them is spent. A budget limits nothing where the price of a second is unknown.
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
    """An `advice` event for each limit that will be exceeded at the present speed and was not announced before."""
    steps_left = left / c.global_batch_size
    run_s = monitor.elapsed_s + steps_left * step_time_s
    rate = None if spec.limits.budget_usd is None else usd_per_s(spec, c, monitor.peak_bytes)
    earlier = f", {monitor.spent_s:.4g} s of earlier starts included" if monitor.spent_s else ""
    for name, value, limit, unit in (
        ("deadline", monitor.spent_s + run_s, spec.limits.deadline_s, "s"),
        ("budget", None if rate is None else monitor.spent_usd + rate * run_s, spec.limits.budget_usd, "USD"),
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
            "sentence": f"At {step_time_s:.3g} s a step, with {steps_left:.0f} steps left, training ends at "
            f"{value:.4g} {unit}{earlier}, beyond the {name} of {limit:.4g} {unit}.",
        }


def reconfigure(analysis: Analysis, c: Configuration, monitor: Monitor, alarm: Alarm) -> dict[str, Any] | None:
    """An `advice` event: restart with the chosen configuration if that saves more than the restart costs, else stay.

    `analysis` rests on what was measured since the change. None without a choice, if the present configuration is the
    chosen one, or if it is not known how much is left.
    """
    left = alarm.examples_left
    if not isinstance(analysis, Answer) or left is None:
        return None
    chosen = analysis.choice.chosen
    if chosen is None or chosen.configuration == c:
        return None
    restart_s = monitor.restart_s or 0.0
    stay_s = left / c.global_batch_size * alarm.level_s
    move_s = left / chosen.configuration.global_batch_size * chosen.step_time_s.mean
    stay, move, unit = stay_s, move_s + restart_s, "s"
    if MEASURES[analysis.objective] is Measure.COST:
        peak = None if chosen.peak_bytes is None else chosen.peak_bytes.mean
        both = (c, monitor.peak_bytes), (chosen.configuration, peak)
        rates = [usd_per_s(analysis.spec, each, peak_bytes) for each, peak_bytes in both]
        unit = "USD"
        if rates[0] is None or rates[1] is None:
            rates, unit = [c.num_nodes / 3600, chosen.configuration.num_nodes / 3600], "node-hours"
        stay, move = stay * (rates[0] or 0.0), move * (rates[1] or 0.0)
    pays = stay > 0 and stay - move > _LEAST_SAVING * stay
    return {
        "kind": "reconfigure" if pays else "stay",
        "step": alarm.step,
        "from": asdict(c),
        "to": asdict(chosen.configuration),
        "remaining_examples": left,
        "step_time_s": alarm.level_s,
        "predicted_step_time_s": chosen.step_time_s.mean,
        "stay_s": stay_s,
        "move_s": move_s,
        "restart_s": restart_s,
        "saving": stay - move,
        "unit": unit,
        "sentence": (
            f"{'Restart with' if pays else 'Stay; not worth moving to'} {name_of(chosen.configuration)}: "
            f"the rest takes {stay:.4g} {unit} as it is and {move:.4g} {unit} there, "
            f"{restart_s:.3g} s of restart included."
        ),
    }
