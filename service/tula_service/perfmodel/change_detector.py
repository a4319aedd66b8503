"""Notice from live step times that training no longer runs at the predicted speed: a two-sided cumulative sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tula_service.perfmodel.points import FloatArray, ObservationError, column

_THRESHOLD = 30.0
_LARGEST_SCORE = 2.0
_LEAST_HALF_WIDTH = 0.05
_LEAST_CHANGE = 0.1  # of the expected step time
_BLOCK = 50
"""Steps whose mean is compared with the interval: where that is wide, a speed just outside adds little to the sums."""


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
