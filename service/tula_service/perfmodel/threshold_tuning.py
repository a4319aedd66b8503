"""Thresholds of gradient scaling, tuned from what a run reports, and taken back when validation accuracy drops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from tula_service.perfmodel.points import ObservationError

_SENSITIVE_SHARE = 0.10  # of steps that the gate should hold back
_DELTA_BOUNDS = (0.05, 2.0)
_HYSTERESIS = 1.25  # a threshold moves only by more than this factor
_MIN_STEPS = 32
_CALM, _ROUGH = 0.25, 1.0  # 90th percentile of variability below and above which b_small moves
_MAX_BATCH_RATIO = 64.0  # s_max = sqrt(B / b_small) stays within 8


@dataclass(frozen=True)
class TunedThresholds:
    """New `delta` and `small_batch_size`; `changed` says whether they differ from those in force, `reason` why."""

    delta: float
    small_batch_size: int
    changed: bool
    reason: str


def tune_thresholds(
    variability: ArrayLike, *, delta: float, small_batch_size: int, global_batch_size: int
) -> TunedThresholds:
    """From a run's column `gradient_variability` (equation 5, in step order) and the thresholds in force.

    delta becomes the 90th percentile of the later half, within [0.05, 2]: a fixed 0.5 let 79-99 % of steps through in
    our runs, so it held back nothing. b_small acts as a learning-rate knob: it is doubled (milder scaling) where the
    90th percentile exceeds 1, halved where it stays below 0.25, and kept between B/64 and B/2. A threshold moves only
    by more than a quarter. These are heuristics: `decide_roll_back` is what protects from them.
    Raises ObservationError for batch sizes that make no sense.
    """
    if small_batch_size < 1 or global_batch_size < small_batch_size:
        raise ObservationError(
            f"small_batch_size is {small_batch_size}, global_batch_size {global_batch_size}: give 1 <= small <= global"
        )
    column = np.asarray(variability, dtype=np.float64).ravel()
    usable = column[np.isfinite(column) & (column >= 0.0)]
    usable = usable[usable.size // 2 :]
    if usable.size < _MIN_STEPS:
        return TunedThresholds(
            delta, small_batch_size, False, f"only {usable.size} steps of gradient variability: {_MIN_STEPS} needed"
        )
    high = float(np.quantile(usable, 1.0 - _SENSITIVE_SHARE))
    wanted_delta = min(max(high, _DELTA_BOUNDS[0]), _DELTA_BOUNDS[1])
    new_delta = wanted_delta if _differs(wanted_delta, delta) else delta
    wanted_small = (
        2 * small_batch_size if high > _ROUGH else small_batch_size // 2 if high < _CALM else small_batch_size
    )
    lowest = max(1, math.ceil(global_batch_size / _MAX_BATCH_RATIO))
    highest = max(1, global_batch_size // 2)
    new_small = int(min(max(wanted_small, lowest), max(highest, lowest)))
    changed = new_delta != delta or new_small != small_batch_size
    reason = f"90 % of recent steps vary by less than {high:.2g}"
    return TunedThresholds(new_delta, new_small, changed, reason + ("" if changed else ", as the thresholds expect"))


@dataclass(frozen=True)
class AccuracyPoint:
    """Validation accuracy (higher is better, any unit) at a step, and the version of thresholds in force there."""

    step: int
    accuracy: float
    thresholds_version: int


@dataclass(frozen=True)
class RollBack:
    """Go back to `to_version`, from a checkpoint at or before `checkpoint_step`, because of `reason`."""

    to_version: int
    checkpoint_step: int
    reason: str


def decide_roll_back(
    history: Sequence[AccuracyPoint], *, min_drop: float = 0.01, evaluations: int = 2
) -> RollBack | None:
    """Whether the newest thresholds hurt: judged by the last `evaluations` points, all taken under them.

    They hurt when each of those lies below the best accuracy under the version before by more than `min_drop` and more
    than twice the usual change between two evaluations (median absolute difference before the change, scaled to a
    standard deviation). None while there is too little to go by. Raises ObservationError for a NaN accuracy.
    """
    points = sorted(history, key=lambda point: point.step)
    for point in points:
        if not math.isfinite(point.accuracy):
            raise ObservationError(f"accuracy at step {point.step} is {point.accuracy}: report finite numbers")
    if not points:
        return None
    newest = points[-1].thresholds_version
    after = [point for point in points if point.thresholds_version == newest]
    before = [point for point in points if point.step < after[0].step]
    if not before or len(after) < evaluations:
        return None
    best = max(before, key=lambda point: (point.accuracy, -point.step))
    changes = np.abs(np.diff([point.accuracy for point in before]))
    usual = 1.4826 * float(np.median(changes)) if changes.size >= 3 else 0.0
    tolerance = max(min_drop, 2.0 * usual)
    drops = [best.accuracy - point.accuracy for point in after[-evaluations:]]
    if min(drops) <= tolerance:
        return None
    return RollBack(
        to_version=before[-1].thresholds_version,
        checkpoint_step=before[-1].step,
        reason=(
            f"accuracy fell from {best.accuracy:.4g} at step {best.step} to {after[-1].accuracy:.4g} "
            f"under thresholds version {newest}, by more than {tolerance:.2g}"
        ),
    )


def _differs(new: float, old: float) -> bool:
    return max(new, old) / min(new, old) > _HYSTERESIS
