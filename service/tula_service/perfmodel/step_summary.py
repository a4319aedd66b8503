"""What the steps of a run say: robust figures for a fit, whether enough were measured, whether the training no longer
runs at the predicted speed (a two-sided cumulative sum), and long series as few points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy import special
from tsdownsample import MinMaxDownsampler

from tula_service.perfmodel.points import FloatArray, ObservationError, column

_FEWEST_STEPS = 5
_MEAN_OFF_MEDIAN = 0.1  # beyond it some steps are of another kind, and a few steps may not hold their share of them
_BATCHES = 5
_LEVEL = 0.95
_THRESHOLD = 30.0
_LARGEST_SCORE = 2.0
_LEAST_HALF_WIDTH = 0.05
_LEAST_CHANGE = 0.1  # of the expected step time
_BLOCK = 50
"""Steps whose mean is compared with the interval: where that is wide, a speed just outside adds little to the sums."""

TREND_POINTS = 150

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StepTimeSummary:
    """Figures of a run in seconds; None where nothing was measured.

    Times are robust means, so that slow steps that recur count as they do in a long run. `relative_sd` is the standard
    error of `step_time_s` over it (None below two steps).
    """

    num_steps: int
    step_time_s: float | None
    relative_sd: float | None
    straggler_rank: int | None
    compute_time_s: float | None = None
    comm_time_s: float | None = None
    exposed_comm_time_s: float | None = None
    input_time_s: float | None = None
    optimizer_time_s: float | None = None
    skew_s: float | None = None


def summarise(
    step: IntArray,
    step_time_s: FloatArray,
    *,
    straggler_rank: IntArray | None = None,
    **components: FloatArray | None,
) -> StepTimeSummary:
    """Average each step over its ranks, then take the robust mean over steps; of the components, over what was read.

    One row for each step and rank, NaN (and -1 of `straggler_rank`) where not measured. Ranks of one step wait for each
    other, so only steps count as independent in the standard error. A straggler is named when it was the slowest rank
    in more than half of the steps.
    """
    per_step = _by_step(step, step_time_s)
    mean, error = robust_mean(per_step)
    ranks = straggler_rank[straggler_rank >= 0] if straggler_rank is not None else np.zeros(0, np.int64)
    slowest, times = np.unique(ranks, return_counts=True)  # never an array as long as the highest rank
    return StepTimeSummary(
        num_steps=int(per_step.size),
        step_time_s=mean,
        relative_sd=None if mean is None or error is None else error / mean,
        straggler_rank=int(slowest[times.argmax()]) if ranks.size and 2 * times.max() > ranks.size else None,
        **{name: known_mean(values) for name, values in components.items()},
    )


def robust_mean(values: FloatArray) -> tuple[float | None, float | None]:
    """The mean of `values` and its standard error, robust against one outlier: time and money are sums over steps.

    Where the largest value lies farther above the second largest than all others spread, it counts as the second
    largest: one checkpoint or collector pause. Two such values are a pattern and count in full.
    """
    if values.size == 0:
        return None, None
    capped = _without_outlier(values)
    return float(capped.mean()), float(capped.std(ddof=1) / np.sqrt(capped.size)) if capped.size > 1 else None


def _without_outlier(values: FloatArray) -> FloatArray:
    if values.size < 3:
        return values
    second, largest = np.partition(values, (-2, -1))[-2:]
    alone = largest - second > second - values.min()
    return np.minimum(values, second) if alone else values


def measured_precisely_enough(step_times_s: Sequence[float] | FloatArray, precision: float = 0.02) -> bool:
    """True when the 95 % interval of the mean step time is within +- `precision` (relative): the run may end.

    Needs at least five steps after warm-up. Steps that resemble their neighbours count for less: the error is at least
    that of the means of five successive batches. Never true while the plain mean is more than 10 % off the median: one
    slow step among few may recur. Raises ObservationError on a step that is not positive and finite.
    """
    column("precision", [precision], above=0.0)
    times = column("step_times_s", step_times_s, above=0.0)
    mean, error = robust_mean(times)
    if mean is None or error is None or times.size < _FEWEST_STEPS:
        return False
    middle = float(np.median(times))
    if abs(float(times.mean()) - middle) > _MEAN_OFF_MEDIAN * middle:
        return False
    if times.size >= 2 * _BATCHES:
        means = [float(part.mean()) for part in np.array_split(_without_outlier(times), _BATCHES)]
        error = max(error, float(np.std(means, ddof=1)) / np.sqrt(_BATCHES))
    dof = min(times.size, _BATCHES) - 1 if times.size < 4 * _BATCHES else times.size - 1
    return float(special.stdtrit(dof, 0.5 + _LEVEL / 2.0)) * error / mean <= precision


def _by_step(step: IntArray, step_time_s: FloatArray) -> FloatArray:
    steps, which = np.unique(step, return_inverse=True)
    sums = np.bincount(which, weights=step_time_s, minlength=steps.size)
    return np.asarray(sums / np.maximum(np.bincount(which, minlength=steps.size), 1), dtype=np.float64)


def known_mean(values: FloatArray | None) -> float | None:
    """The robust mean of the finite values; None where there are none."""
    return None if values is None else robust_mean(values[np.isfinite(values)])[0]


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
        column("interval", [low_s, high_s], above=0.0)
        if high_s < low_s:
            raise ObservationError("interval: high_s is below low_s; give the ends in order.")
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


def trend(steps: IntArray, values: FloatArray, points: int = TREND_POINTS) -> tuple[IntArray, FloatArray] | None:
    """The medians of as many intervals as `points`, of equally many points each, at its middle step.

    A running mean would follow a single straggling step, and a mean of downsampled points would follow the peaks that
    downsampling keeps. None if an interval would hold fewer than three points, and with no interval.
    """
    known = ~np.isnan(values)
    if not bool(known.all()):
        steps, values = steps[known], values[known]
    if not 0 < 3 * points <= steps.size:
        return None
    edges = np.linspace(0, steps.size, points + 1).astype(np.int64)
    starts, widths, medians = edges[:-1], np.diff(edges), np.empty(points)
    for width in np.unique(widths):  # at most two: a median of many rows at once costs little more than of one
        same = widths == width
        medians[same] = np.median(values[starts[same, None] + np.arange(width)], axis=1)
    return steps[(edges[:-1] + edges[1:]) // 2], medians


def downsample(steps: IntArray, values: FloatArray, max_points: int) -> tuple[IntArray, FloatArray]:
    """At most `max_points` of the points: minimum and maximum of every interval, and the first and the last point.

    Steps without a value are dropped first, so that a column with few values (validation accuracy) keeps them.
    """
    if steps.size <= max_points:
        return steps, values
    known = ~np.isnan(values)
    if bool(known.any()) and not bool(known.all()):
        steps, values = steps[known], values[known]
    if steps.size <= max_points:
        return steps, values
    ends = np.array([0, steps.size - 1])
    if max_points < 4:
        return steps[ends], values[ends]
    kept = MinMaxDownsampler().downsample(np.ascontiguousarray(values), n_out=(max_points - 2) // 2 * 2)
    kept = np.union1d(kept.astype(np.int64), ends)
    return steps[kept], values[kept]
