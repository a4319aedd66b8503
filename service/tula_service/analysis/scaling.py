"""Thresholds of gradient scaling: what to tune after a run's telemetry, and when to roll that back. Pure.

A *body* is one stored version of a job's thresholds:

    policy      the policy that a user chose, None: the script's
    set         by policy, the numbers that users set
    tuned       what tuning found for policies with a sensitivity gate: `delta`, `small_batch_size`, and what the next
                look needs: `run_id`, `version` and `from_step` in which it was published, `before` (the numbers before)
    rolled_back, restore    the run whose tuned thresholds were rolled back, and the checkpoint that it is to restore
    gradient_noise_scale, gradient_noise_scale_error, reason

The value in force is the script's where it passed one, else the user's, else the tuned one, else the agent's default.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tula_service.perfmodel.noise_scale import NoiseScale, estimate_noise_scale

Body: TypeAlias = dict[str, Any]
FloatArray: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.int64]

GATED_POLICIES = ("ags", "static")
"""Policies that scale only below the sensitivity threshold `delta`; `gain` needs none."""

_DEFAULT_DELTA = 0.5  # of Algorithm 1
_SENSITIVE_SHARE = 0.10  # of steps that the gate should hold back
_DELTA_BOUNDS = (0.05, 2.0)
_HYSTERESIS = 1.25  # a published number moves only by more than this factor
_MIN_STEPS = 32
_CALM, _ROUGH = 0.25, 1.0  # 90th percentile of variability below and above which b_small moves
_MAX_BATCH_RATIO = 64.0  # s_max = sqrt(B / b_small) stays within 8
_MIN_DROP, _EVALUATIONS = 0.01, 2


@dataclass(frozen=True)
class ScalingTelemetry:
    """What the newest training run has reported up to `last_step`; `*_steps` are the steps of the column after them.

    `reported` holds the newest values of `delta` and `small_batch_size` in force at the agent, `scripted` the names
    that its script passed explicitly. `versions` are the thresholds versions that its ranks took up.
    """

    run_id: str
    last_step: int
    local_batch_size: int
    global_batch_size: int
    noise_scale: FloatArray
    variability: FloatArray
    accuracy_steps: IntArray
    accuracy: FloatArray
    version_steps: IntArray
    versions: FloatArray
    reported: Mapping[str, float]
    scripted: Collection[str]


def first_body() -> Body:
    """Version 1: nothing is set or tuned, so the script decides."""
    return {"policy": None, "set": {}, "tuned": {}, "reason": "Nothing was observed or set yet: the script decides."}


def in_force(body: Body, policy: str) -> dict[str, Any]:
    """The numbers served for a policy: the tuned ones of a gated policy, overridden by those that a user set."""
    return {**(_numbers(body) if policy in GATED_POLICIES else {}), **body["set"].get(policy, {})}


def _numbers(body: Body) -> dict[str, Any]:
    return {name: body["tuned"].get(name) for name in ("delta", "small_batch_size")}


def next_body(body: Body, version: int, seen: ScalingTelemetry) -> Body | None:
    """The body to publish after `version`, None while nothing has moved enough. Agents must rarely see a change."""
    body, reasons = {**body}, []
    drop = _accuracy_drop(body, seen)
    if drop is not None:
        body |= _rolled_back(body, seen)
        reasons.append(f"rolled back, from a checkpoint at step {body['restore']['step']} or before: {drop}")
    elif body.get("rolled_back") != seen.run_id:  # after a roll-back, tuning would only return to the same place
        tuned, reason = _tuned(body, seen)
        if tuned:
            mark = {"run_id": seen.run_id, "version": version + 1, "from_step": seen.last_step}
            body["tuned"] = {**body["tuned"], **tuned, **mark, "before": _numbers(body)}
            reasons.append(reason)
    noise = estimate_noise_scale(seen.noise_scale) if seen.noise_scale.size else None
    if noise is not None and _noise_moved(body.get("gradient_noise_scale"), noise):
        body |= {"gradient_noise_scale": noise.value, "gradient_noise_scale_error": noise.error}
        reasons.append(
            f"gradient noise scale {noise.value:.3g} (90 % interval {noise.low:.3g} to {noise.high:.3g}) examples"
        )
    return body | {"reason": "; ".join(reasons)} if reasons else None


def _tuned(body: Body, seen: ScalingTelemetry) -> tuple[dict[str, float], str]:
    """The numbers to publish, and why: none that the script passed, and none that a user's value hides.

    A later drop in accuracy would be blamed on a hidden number, although it never was in force.
    """
    tuned, largest = body["tuned"], seen.global_batch_size
    policies = [body["policy"]] if body["policy"] in GATED_POLICIES else GATED_POLICIES
    fixed = {*seen.scripted}.union(set.intersection(*(set(body["set"].get(policy, {})) for policy in policies)))
    delta = tuned.get("delta") or seen.reported.get("delta") or _DEFAULT_DELTA
    small = tuned.get("small_batch_size") or seen.reported.get("small_batch_size") or seen.local_batch_size
    found = tune_thresholds(
        seen.variability,
        delta=float(delta),
        small_batch_size=max(1, min(int(small), largest)),
        global_batch_size=largest,
    )
    if found is None:
        return {}, ""
    new_delta, new_small, high = found
    moved = {"delta": new_delta} if new_delta != delta else {}
    moved |= {"small_batch_size": new_small} if new_small != small else {}
    kept = {name: value for name, value in moved.items() if name not in fixed and tuned.get(name) != value}
    return kept, f"{', '.join(kept)}: 90 % of recent steps vary by less than {high:.2g}"


def tune_thresholds(
    variability: FloatArray, *, delta: float, small_batch_size: int, global_batch_size: int
) -> tuple[float, int, float] | None:
    """(delta, b_small, 90th percentile) from the column `gradient_variability` (equation 5), of shape (steps,).

    delta becomes the 90th percentile of the later half, within [0.05, 2]: a fixed 0.5 let 79-99 % of steps through in
    our runs, so it held back nothing. b_small acts as a learning-rate knob: it is doubled (milder scaling) where the
    90th percentile exceeds 1, halved where it stays below 0.25, and kept between B/64 and B/2. delta moves only by more
    than a quarter. These are heuristics; the roll-back protects from them. None with fewer than 32 usable steps.
    """
    usable = variability[np.isfinite(variability) & (variability >= 0.0)]
    usable = usable[usable.size // 2 :]
    if usable.size < _MIN_STEPS:
        return None
    high = float(np.quantile(usable, 1.0 - _SENSITIVE_SHARE))
    wanted = min(max(high, _DELTA_BOUNDS[0]), _DELTA_BOUNDS[1])
    moved = max(wanted, delta) / min(wanted, delta) > _HYSTERESIS
    small = 2 * small_batch_size if high > _ROUGH else small_batch_size // 2 if high < _CALM else small_batch_size
    lowest = max(1, math.ceil(global_batch_size / _MAX_BATCH_RATIO))
    return wanted if moved else delta, int(min(max(small, lowest), max(global_batch_size // 2, lowest))), high


def _taken_up(tuned: Body, seen: ScalingTelemetry) -> int | None:
    """The step at which the run's ranks took up the tuned thresholds, as far as the agent has reported it."""
    known = seen.version_steps[np.isfinite(seen.versions) & (seen.versions >= tuned["version"])]
    return int(known[0]) if known.size else None


def _accuracy_drop(body: Body, seen: ScalingTelemetry) -> str | None:
    """Why the tuned thresholds hurt validation accuracy (higher is better, any unit); None while they do not.

    They hurt when the last two evaluations, both taken under them, lie below the best one before by more than 0.01 and
    by more than twice the usual change between evaluations (median absolute difference, as a standard deviation).
    """
    tuned = body["tuned"]
    if tuned.get("run_id") != seen.run_id or body.get("rolled_back") == seen.run_id:
        return None
    taken_up = _taken_up(tuned, seen)
    known = np.isfinite(seen.accuracy)
    steps, accuracy = seen.accuracy_steps[known], seen.accuracy[known]
    under = steps >= (tuned["from_step"] if taken_up is None else taken_up)
    before, after = accuracy[~under], accuracy[under]
    if not before.size or after.size < _EVALUATIONS:
        return None
    usual = 1.4826 * float(np.median(np.abs(np.diff(before)))) if before.size > 3 else 0.0
    tolerance, best = max(_MIN_DROP, 2.0 * usual), int(before.argmax())
    if float(before[best] - after[-_EVALUATIONS:].max()) <= tolerance:
        return None
    return (
        f"accuracy fell from {before[best]:.4g} at step {steps[~under][best]} to {after[-1]:.4g} "
        f"under thresholds version {tuned['version']}, by more than {tolerance:.2g}"
    )


def _rolled_back(body: Body, seen: ScalingTelemetry) -> Body:
    """Restore the numbers before the newest tuning, and the weights from before the ranks took it up."""
    tuned = body["tuned"]
    step = _taken_up(tuned, seen)
    if step is None:
        known = seen.accuracy_steps[np.isfinite(seen.accuracy) & (seen.accuracy_steps < tuned["from_step"])]
        step = int(known[-1])
    before = {name: value for name, value in tuned["before"].items() if value is not None}
    return {"tuned": before, "rolled_back": seen.run_id, "restore": {"run_id": seen.run_id, "step": step}}


def _noise_moved(old: float | None, noise: NoiseScale) -> bool:
    return old is None or abs(math.log(noise.value / old)) >= math.log(_HYSTERESIS)
