"""Gradient scaling: what an example is worth in a larger batch, what to tune after a run's telemetry, when to roll that
back, and which rule a batch needs. Pure.

A *body* is one stored version of a job's thresholds:

    policy      the policy that a user chose, None: the script's
    set         by policy, the numbers that users set
    tuned       what tuning found for policies with a sensitivity gate: `delta`, the `run_id` that it was found in, the
                `version` that published it, and `before` (delta before); without a run after a roll-back
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
from numpy.typing import ArrayLike

import tula_wire as wire
from tula_service.domain import FloatArray, IntArray
from tula_service.perfmodel.intervals import Interval
from tula_wire.bounds import NOISE_WEIGHT
from tula_wire.jobs import ScalingRule

Body: TypeAlias = dict[str, Any]
Columns: TypeAlias = Mapping[str, tuple[IntArray, FloatArray]]
"""Steps and values that a run reported, by the names below."""

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
_MIN_VALUES, _MIN_BLOCKS, _Z_90 = 8, 4, 1.6448536269514722

RECENT_COLUMNS = ("gradient_noise_scale", "gradient_variability")
WHOLE_COLUMNS = ("validation_accuracy", "thresholds_version", "delta", "scripted_delta")
"""Agents send these by evaluation, or only when they change, so that all of them is read: the versions that ranks took
up, the delta in force, and the one that the script passed."""


def first_body() -> Body:
    """Version 1: nothing is set or tuned, so the script decides."""
    return {"policy": None, "set": {}, "tuned": {}, "reason": "Nothing was observed or set yet: the script decides."}


def in_force(body: Body, policy: str) -> dict[str, Any]:
    """The numbers served for a policy: the tuned delta of a gated policy, overridden by what a user set."""
    tuned = {"delta": body["tuned"].get("delta")} if policy in GATED_POLICIES else {}
    return {**tuned, **body["set"].get(policy, {})}


def next_body(body: Body, version: int, run_id: str, columns: Columns) -> Body | None:
    """The body to publish after `version`, None while nothing has moved enough. Agents must rarely see a change.

    columns: of the newest training run.
    """
    changes: Body = {}
    reasons = []
    tuned = body["tuned"]
    drop, delta = _accuracy_drop(tuned, run_id, columns), _tuned(body, columns)
    if drop is not None:
        before = tuned["before"].get("delta")
        changes = {"tuned": {} if before is None else {"delta": before}, "rolled_back": run_id}
        reasons.append(f"rolled back: {drop}")
    elif delta is not None and body.get("rolled_back") != run_id:  # it would only return to what was rolled back
        mark = {"run_id": run_id, "version": version + 1, "before": {"delta": tuned.get("delta")}}
        changes = {"tuned": {"delta": delta, **mark}}
        reasons.append(f"delta = {delta:.2g}, near the 90th percentile of recent gradient variability")
    column, old = columns["gradient_noise_scale"][1], body.get("gradient_noise_scale")
    noise = estimate_noise_scale(column) if column.size else None
    if noise is not None and (old is None or abs(math.log(noise.mean / old)) >= math.log(_HYSTERESIS)):
        changes |= {"gradient_noise_scale": noise.mean, "gradient_noise_scale_error": (noise.high - noise.low) / 2.0}
        reasons.append(
            f"gradient noise scale {noise.mean:.3g} (90 % interval {noise.low:.3g} to {noise.high:.3g}) examples"
        )
    return {**body, **changes, "reason": "; ".join(reasons)} if reasons else None


def _tuned(body: Body, columns: Columns) -> float | None:
    """The delta to publish, if any: not where the script passed one, nor where a user's value hides it.

    A later drop in accuracy would be blamed on a hidden number, although it never was in force.
    """
    policies = [body["policy"]] if body["policy"] in GATED_POLICIES else GATED_POLICIES
    hidden = all("delta" in body["set"].get(policy, {}) for policy in policies)
    if hidden or np.any(columns["scripted_delta"][1] > 0.0):
        return None
    reported = columns["delta"][1]
    known = [_DEFAULT_DELTA, *reported[reported > 0.0][-1:]]
    return tuned_delta(columns["gradient_variability"][1], float(body["tuned"].get("delta") or known[-1]))


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
    wanted = float(np.clip(np.quantile(usable, 1.0 - _SENSITIVE_SHARE), *_DELTA_BOUNDS))
    return wanted if max(wanted, delta) / min(wanted, delta) > _HYSTERESIS else None


def _accuracy_drop(tuned: Body, run_id: str, columns: Columns) -> str | None:
    """Why the tuned delta hurts validation accuracy (higher is better, any unit) of this run; None while it does not.

    It hurts when the last two evaluations, both taken since ranks took it up, lie below the best one before by more
    than 0.01 and by more than twice the usual change between evaluations (median absolute difference, as a standard
    deviation).
    """
    if tuned.get("run_id") != run_id:
        return None
    version_steps, versions = columns["thresholds_version"]
    steps, accuracy = columns["validation_accuracy"]
    taken_up = version_steps[versions >= tuned["version"]]
    under, known = steps >= taken_up.min(initial=2**62), np.isfinite(accuracy)
    before, after = accuracy[known & ~under], accuracy[known & under]
    if not before.size or after.size < _EVALUATIONS:
        return None
    usual = 1.4826 * float(np.median(np.abs(np.diff(before)))) if before.size > 3 else 0.0
    tolerance, best = max(_MIN_DROP, 2.0 * usual), int(before.argmax())
    if float(before[best] - after[-_EVALUATIONS:].max()) <= tolerance:
        return None
    return (
        f"accuracy fell from {before[best]:.4g} at step {steps[known & ~under][best]} to {after[-1]:.4g} "
        f"under thresholds version {tuned['version']}, by more than {tolerance:.2g}"
    )


def estimate_noise_scale(values: ArrayLike) -> Interval | None:
    """B_noise = tr(Sigma) / |G|^2 in examples, from a run's telemetry column `gradient_noise_scale` in step order.

    The geometric mean over the later half: a ratio errs by factors, and it grows during training (McCandlish et al.
    2018, figure 4). The ends are those of a 90 % interval from means of blocks of about sqrt(n) steps, because
    neighbouring values share a moving average. Values that are not finite or not positive (steps without a measurable
    signal) are left out; where they are the majority, the noise scale is above what the run can measure, and the answer
    is None, as with fewer than eight values.
    """
    column = np.asarray(values, dtype=np.float64).ravel()
    tail = column[column.size // 2 :]
    usable = tail[np.isfinite(tail) & (tail > 0.0)]
    if usable.size < _MIN_VALUES or 2 * usable.size < np.count_nonzero(~np.isnan(tail)):
        return None
    logs = np.log(usable)
    num_blocks = max(_MIN_BLOCKS, round(math.sqrt(logs.size)))
    means = np.array([block.mean() for block in np.array_split(logs, num_blocks)])
    half_width = _Z_90 * float(means.std(ddof=1)) / math.sqrt(num_blocks)
    centre = float(logs.mean())
    return Interval(math.exp(centre), math.exp(centre - half_width), math.exp(centre + half_width))


@dataclass(frozen=True)
class StatisticalEfficiency:
    """What a global batch B is worth at a noise scale, both in examples, relative to the base batch B_0."""

    noise_scale: float
    base_batch_size: float

    def of(self, global_batch_size: float) -> float:
        """Progress per example: (B_noise + B_0) / (B_noise + B) (Pollux 2021, equation 7); 1 at B_0, falling with B."""
        return (self.noise_scale + self.base_batch_size) / (self.noise_scale + global_batch_size)

    def learning_rate_factor(self, global_batch_size: float) -> float:
        """By what the learning rate of the base batch grows: as the policy `gain` does, at most B / B_0.

        (1 + c N / B_0) / (1 + c N / B) with N = `noise_scale` and c = NOISE_WEIGHT (AdaScale's gain has c = 1).
        """
        weighted = NOISE_WEIGHT * self.noise_scale
        return (1.0 + weighted / self.base_batch_size) / (1.0 + weighted / global_batch_size)

    @property
    def max_sensible_batch_size(self) -> int:
        """Largest B whose examples keep half of their worth: B_noise + 2 B_0."""
        return int(self.noise_scale + 2.0 * self.base_batch_size + 1e-9)


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
