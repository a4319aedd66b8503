"""Gradient scaling: what to tune after a run's telemetry, when to roll that back, and which rule a batch needs. Pure.

A *body* is one stored version of a job's thresholds:

    policy      the policy that a user chose, None: the script's
    set         by policy, the numbers that users set
    tuned       what tuning found for policies with a sensitivity gate: `delta`, and what the next look needs:
                `run_id`, `version` and `from_step` in which it was published, `before` (delta before)
    rolled_back the run whose tuned delta was rolled back
    gradient_noise_scale, gradient_noise_scale_error, reason

The value in force is the script's where it passed one, else the user's, else the tuned one, else the agent's default.

The rule for the learning rate of a larger batch is the best of our experiments on such networks. The evidence is
`experiments/generalization/results/quick.json`; `tests/test_figures.py` compares the rule with all others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

import tula_wire as wire
from tula_service.perfmodel.noise_scale import estimate_noise_scale
from tula_wire.recommendations import ScalingRule

Body: TypeAlias = dict[str, Any]
FloatArray: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.int64]

GATED_POLICIES = ("ags", "static")
"""Policies that scale only below the sensitivity threshold `delta`; `gain` needs none."""

MOST_TIMES = 16.0
"""The largest ratio of batches in the experiments; beyond it a reason says so."""
_MEASURED_OPTIMIZERS = ("sgd", "momentum", "adam")
_DEFAULT_DELTA = 0.5  # of Algorithm 1
_SENSITIVE_SHARE = 0.10  # of steps that the gate should hold back
_DELTA_BOUNDS = (0.05, 2.0)
_HYSTERESIS = 1.25  # a published number moves only by more than this factor
_MIN_STEPS = 32
_MIN_DROP, _EVALUATIONS = 0.01, 2


RECENT_COLUMNS = ("gradient_noise_scale", "gradient_variability")
WHOLE_COLUMNS = ("validation_accuracy", "thresholds_version", "delta", "scripted_delta")
"""Agents send these by evaluation, or only when they change, so that all of them is read."""


@dataclass(frozen=True)
class ScalingTelemetry:
    """What the newest training run has reported up to `last_step`: steps and values of the columns above, by name.

    `delta` is in force at the agent, `scripted_delta` is positive where its script passed it explicitly.
    `thresholds_version` are the versions that its ranks took up.
    """

    run_id: str
    last_step: int
    columns: Mapping[str, tuple[IntArray, FloatArray]]

    def known(self, name: str) -> tuple[IntArray, FloatArray]:
        """A column without its missing values."""
        steps, values = self.columns[name]
        return steps[np.isfinite(values)], values[np.isfinite(values)]

    def newest(self, name: str) -> float | None:
        """The newest positive value of a column; None without one."""
        values = self.columns[name][1]
        return float(values[values > 0.0][-1]) if np.any(values > 0.0) else None


def first_body() -> Body:
    """Version 1: nothing is set or tuned, so the script decides."""
    return {"policy": None, "set": {}, "tuned": {}, "reason": "Nothing was observed or set yet: the script decides."}


def in_force(body: Body, policy: str) -> dict[str, Any]:
    """The numbers served for a policy: the tuned delta of a gated policy, overridden by what a user set."""
    tuned = {"delta": body["tuned"].get("delta")} if policy in GATED_POLICIES else {}
    return {**tuned, **body["set"].get(policy, {})}


def next_body(body: Body, version: int, seen: ScalingTelemetry) -> Body | None:
    """The body to publish after `version`, None while nothing has moved enough. Agents must rarely see a change."""
    body, reasons = {**body}, []
    drop = _accuracy_drop(body, seen)
    if drop is not None:
        before = body["tuned"]["before"].get("delta")
        body |= {"tuned": {} if before is None else {"delta": before}, "rolled_back": seen.run_id}
        reasons.append(f"rolled back: {drop}")
    elif body.get("rolled_back") != seen.run_id:  # after a roll-back, tuning would only return to the same place
        delta = _tuned(body, seen)
        if delta is not None:
            mark = {"run_id": seen.run_id, "version": version + 1, "from_step": seen.last_step}
            body["tuned"] = {"delta": delta, **mark, "before": {"delta": body["tuned"].get("delta")}}
            reasons.append(f"delta = {delta:.2g}, near the 90th percentile of recent gradient variability")
    column, old = seen.columns["gradient_noise_scale"][1], body.get("gradient_noise_scale")
    noise = estimate_noise_scale(column) if column.size else None
    if noise is not None and (old is None or abs(math.log(noise.value / old)) >= math.log(_HYSTERESIS)):
        body |= {"gradient_noise_scale": noise.value, "gradient_noise_scale_error": noise.error}
        reasons.append(
            f"gradient noise scale {noise.value:.3g} (90 % interval {noise.low:.3g} to {noise.high:.3g}) examples"
        )
    return body | {"reason": "; ".join(reasons)} if reasons else None


def _tuned(body: Body, seen: ScalingTelemetry) -> float | None:
    """The delta to publish, if any: not where the script passed one, nor where a user's value hides it.

    A later drop in accuracy would be blamed on a hidden number, although it never was in force.
    """
    policies = [body["policy"]] if body["policy"] in GATED_POLICIES else GATED_POLICIES
    hidden = all("delta" in body["set"].get(policy, {}) for policy in policies)
    if hidden or seen.newest("scripted_delta") is not None:
        return None
    delta = float(body["tuned"].get("delta") or seen.newest("delta") or _DEFAULT_DELTA)
    return tuned_delta(seen.columns["gradient_variability"][1], delta)


def tuned_delta(variability: FloatArray, delta: float) -> float | None:
    """delta from the column `gradient_variability` (equation 5), of shape (steps,); None where `delta` may stay.

    The 90th percentile of the later half, within [0.05, 2]: a fixed 0.5 let 79-99 % of steps through in our runs, so it
    held back nothing. It moves only by more than a quarter, and not with fewer than 32 usable steps. This is a
    heuristic; the roll-back protects from it.
    """
    usable = variability[np.isfinite(variability) & (variability >= 0.0)]
    usable = usable[usable.size // 2 :]
    if usable.size < _MIN_STEPS:
        return None
    high = float(np.quantile(usable, 1.0 - _SENSITIVE_SHARE))
    wanted = min(max(high, _DELTA_BOUNDS[0]), _DELTA_BOUNDS[1])
    return wanted if max(wanted, delta) / min(wanted, delta) > _HYSTERESIS else None


def _accuracy_drop(body: Body, seen: ScalingTelemetry) -> str | None:
    """Why the tuned thresholds hurt validation accuracy (higher is better, any unit); None while they do not.

    They hurt when the last two evaluations, both taken under them, lie below the best one before by more than 0.01 and
    by more than twice the usual change between evaluations (median absolute difference, as a standard deviation).
    """
    tuned = body["tuned"]
    if tuned.get("run_id") != seen.run_id or body.get("rolled_back") == seen.run_id:
        return None
    version_steps, versions = seen.known("thresholds_version")
    taken_up = version_steps[versions >= tuned["version"]]
    steps, accuracy = seen.known("validation_accuracy")
    under = steps >= (taken_up[0] if taken_up.size else tuned["from_step"])
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


def scaling_rule(model: wire.ModelSpec, times: float) -> ScalingRule | None:
    """The rule at `times` the base batch; None at the base batch, and for optimizers that no experiment used."""
    return "gain" if times > 1.0 and model.optimizer in _MEASURED_OPTIMIZERS else None


def learning_rate_factor(model: wire.ModelSpec, times: float, by_noise_scale: float | None) -> float | None:
    """The learning rate over that of the base batch; None where the noise scale, which decides it, is unknown.

    by_noise_scale: the gain, of which Adam takes the root, as `TulaOptimizer` does.
    """
    if times == 1.0:
        return 1.0
    return math.sqrt(by_noise_scale) if by_noise_scale and model.optimizer == "adam" else by_noise_scale


def learning_rate_advice(
    model: wire.ModelSpec, base_batch_size: int, times: float, by_noise_scale: float | None
) -> str:
    """What to do with the learning rate of the base batch, in words; nothing at that batch.

    by_noise_scale: as of `learning_rate_factor`, which is the number in the sentence.
    """
    if times <= 1.0:
        return ""
    start = f"Multiply the learning rate of a batch of {base_batch_size} by"
    number = learning_rate_factor(model, times, by_noise_scale)
    if number is not None:
        found = f"{start} {number:.2g}, which follows from the gradient noise scale; `TulaOptimizer` does it."
    else:
        most = math.sqrt(times) if model.optimizer == "adam" else times
        found = f"{start} 1 to {most:.3g}: the gradient noise scale decides, which `TulaOptimizer` measures."
    if times > MOST_TIMES:
        found += f" No experiment went beyond {MOST_TIMES:g} times the batch"
        found += "; try LARS there too." if model.batch_normalization and model.optimizer != "adam" else "."
    return found
