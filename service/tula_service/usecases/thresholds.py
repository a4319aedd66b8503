"""Thresholds of gradient scaling: served with a version, tuned from telemetry, taken back when accuracy falls."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tula_service.domain import RunKind, RunState
from tula_service.perfmodel.noise_scale import NoiseScale, critical_batch_size, estimate_noise_scale
from tula_service.perfmodel.threshold_tuning import AccuracyPoint, RollBack, decide_roll_back, tune_thresholds
from tula_service.store import RunRecord, ScalingRecord, Store, Transaction
from tula_service.usecases.access import Principal, visible_job
from tula_service.usecases.scaling_settings import TUNED_POLICIES, first_body, in_force, shown

__all__ = ["TUNE_EVERY_STEPS", "Served", "current", "noise_scale_of"]

TUNE_EVERY_STEPS = 100
"""Telemetry steps between two looks at it; agents poll every few seconds and must not each cost a fit."""

_LOOK_BACK_STEPS = 5_000
_NOISE_MOVED = 1.25
_MARK = "tuning"
_PAPER_DELTA = 0.5


@dataclass(frozen=True)
class Served:
    """Thresholds as JSON with their entity tag (RFC 9110); `body` is None when the caller's tag is still current."""

    etag: str
    body: str | None


def current(
    store: Store, principal: Principal, job_id: str, *, policy: str | None = None, etag: str | None = None
) -> Served:
    """The thresholds in force for a script's policy, looking at new telemetry first if it is due.

    A policy that a user gave the job goes before the script's.
    """
    with store.reading() as tx:
        visible_job(tx, principal, job_id)
        record = tx.scaling.latest(job_id)
        run = _training(tx, job_id)
        due = run is not None and _is_due(tx, run)
    if due and run is not None:
        # Looked at while only reading, so that nobody who writes waits for it.
        with store.reading() as tx:
            found = _look(tx, run)
        if found is not None:
            with store.transaction() as tx:
                tx.jobs.lock(job_id)
                _publish(tx, run, found)
                record = tx.scaling.latest(job_id)
    served = shown(record, policy, run)
    tag = f'"{served.version}-{served.policy}"'
    known = {part.strip().removeprefix("W/") for part in (etag or "").split(",")}
    return Served(tag, None if tag in known or "*" in known else served.model_dump_json())


def noise_scale_of(tx: Transaction, job_id: str) -> float | None:
    """The gradient noise scale that the job's training showed, in examples; None before that."""
    record = tx.scaling.latest(job_id)
    value = None if record is None else record.body.get("gradient_noise_scale")
    return None if value is None else float(value)


@dataclass(frozen=True)
class _Seen:
    """What a look at a run's telemetry up to `last_step` found; `body` is the version to publish after `after`, if any.

    `noise_moved`: the gradient noise scale is another.
    """

    last_step: int
    after: int
    body: dict[str, Any] | None
    noise_moved: bool = False


def _look(tx: Transaction, run: RunRecord) -> _Seen | None:
    """Look at a run's telemetry for something worth publishing; None before there is any. Only reads."""
    last_step = tx.telemetry.last_step(run.key)
    if last_step is None:
        return None
    history = tx.scaling.history(run.job_id)
    body = dict(history[-1].body) if history else first_body()
    settings: dict[str, Any] = {name: dict(values) for name, values in body["policies"].items()}
    first = max(0, last_step - _LOOK_BACK_STEPS)
    _, noise_column = tx.telemetry.read(run.key, "gradient_noise_scale", first_step=first)
    _, variability = tx.telemetry.read(run.key, "gradient_variability", first_step=first)
    noise = estimate_noise_scale(noise_column) if noise_column.size else None
    reasons = []
    taken_back = _take_back(tx, run, history, settings)
    if taken_back is not None:
        reasons.append(taken_back.reason)
        body["restore"] = {"run_id": run.id, "step": taken_back.checkpoint_step}
    elif variability.size:
        reasons += _tuned(tx, settings, run, variability, last_step)
    said = _noise_moved(body, noise)
    if said is not None and noise is not None:
        reasons.append(said)
        body |= {
            "gradient_noise_scale": noise.value,
            "gradient_noise_scale_error": noise.error,
            "critical_batch_size": critical_batch_size(noise).value,
        }
    after = history[-1].version if history else 1
    if not reasons:
        return _Seen(last_step, after, None)
    body |= {"policies": settings, "reason": "; ".join(reasons), "run_id": run.id, "from_step": last_step}
    return _Seen(last_step, after, body, noise_moved=said is not None)


def _publish(tx: Transaction, run: RunRecord, seen: _Seen) -> None:
    """Make what was found the next version, unless another was published since: then the next poll looks again."""
    if seen.body is not None:
        if not tx.scaling.publish(run.job_id, seen.body, after=seen.after):
            return
        data = {"version": seen.after + 1, "reason": seen.body["reason"]}
        tx.events.append(run.job_id, "scaling", run_id=run.id, data=data)
        if seen.noise_moved:
            # What an example is worth enters the recommendation, so no cached one may be used again.
            tx.jobs.bump(run.job_id)
    _mark(tx, run, seen.last_step)


def _training(tx: Transaction, job_id: str) -> RunRecord | None:
    """The newest training run; what it reports is what its agents will use."""
    found = tx.runs.list(job_id, kind=RunKind.TRAIN, limit=1)
    return found[0] if found and found[0].state is not RunState.CANCELLED else None


def _is_due(tx: Transaction, run: RunRecord) -> bool:
    last_step = tx.telemetry.last_step(run.key)
    if last_step is None:
        return False
    kept = tx.fits.get(run.job_id, _MARK, data_version=0, model_version="1")
    mark = json.loads(kept) if kept is not None else {}
    if mark.get("run_id") != run.id:
        return True
    return bool(last_step - mark["step"] >= TUNE_EVERY_STEPS) or (run.state.is_final and last_step > mark["step"])


def _mark(tx: Transaction, run: RunRecord, last_step: int) -> None:
    body = json.dumps({"run_id": run.id, "step": last_step})
    tx.fits.put(run.job_id, _MARK, data_version=0, model_version="1", body=body)


def _tuned(
    tx: Transaction, settings: dict[str, Any], run: RunRecord, variability: np.ndarray[Any, Any], step: int
) -> list[str]:
    """Move delta and b_small where no user set them, unless a roll-back has settled them for this run."""
    reasons = []
    largest = run.configuration.global_batch_size
    for policy in TUNED_POLICIES:
        own = settings[policy]
        if own.get("settled_by") == run.id:
            continue
        # What nobody set here is the script's, and its agent says what that is.
        delta = in_force(own, "delta") or _last(tx, run, "delta") or _PAPER_DELTA
        small = in_force(own, "small_batch_size") or _last(tx, run, "small_batch_size")
        found = tune_thresholds(
            variability,
            delta=delta,
            small_batch_size=max(1, min(int(small or run.configuration.local_batch_size), largest)),
            global_batch_size=largest,
        )
        free = {"delta": found.delta, "small_batch_size": found.small_batch_size}
        free = {name: value for name, value in free.items() if name not in own.get("set", {})}
        if found.changed and any(own[name] != value for name, value in free.items()):
            own |= free | {"from_step": step, "run_id": run.id}
            reasons.append(f"{policy}: {found.reason}")
    return reasons


def _last(tx: Transaction, run: RunRecord, column: str) -> float | None:
    """The newest usable value that the run reported; agents send these columns only where they change."""
    _, values = tx.telemetry.read(run.key, column)
    known = values[values > 0.0]  # neither NaN nor what no threshold can be
    return float(known[-1]) if known.size else None


def _take_back(
    tx: Transaction, run: RunRecord, history: Sequence[ScalingRecord], settings: dict[str, Any]
) -> RollBack | None:
    """Return to the settings before the newest ones when validation accuracy fell under those; once a run at most."""
    if all(settings[policy].get("settled_by") == run.id for policy in TUNED_POLICIES):
        return None
    steps, accuracy = tx.telemetry.read(run.key, "validation_accuracy")
    known = np.isfinite(accuracy)
    steps, accuracy = steps[known], accuracy[known]
    if not steps.size:
        return None
    changes = [(record.body["from_step"], record) for record in _setting_changes(history, run.id)]
    if not changes:
        return None
    started = changes[0][1].version - 1
    switched = _switches(tx, run, history)
    points = [
        AccuracyPoint(
            int(step),
            float(value),
            max([r.version for at, r in changes if switched.get(r.version, at) <= step], default=started),
        )
        for step, value in zip(steps, accuracy, strict=True)
    ]
    found = decide_roll_back(points)
    if found is None:
        return None
    # Weights from just before the ranks switched know nothing of the harm yet.
    last_good = switched.get(points[-1].thresholds_version, found.checkpoint_step)
    before = next((record.body["policies"] for record in history if record.version == found.to_version), None)
    for policy in TUNED_POLICIES:
        if settings[policy].get("settled_by") == run.id:
            continue
        by_user = settings[policy].get("set", {})  # never tuned, so not what hurt
        settings[policy] = {**(before or first_body()["policies"])[policy], "set": by_user}
        # Once taken back, this run keeps what it had: tuning it again would only repeat the harm.
        settings[policy] |= {"settled_by": run.id, "run_id": run.id}
    reason = (
        f"taken back to version {found.to_version}, from a checkpoint at step {last_good} or before: {found.reason}"
    )
    return replace(found, checkpoint_step=last_good, reason=reason)


def _switches(tx: Transaction, run: RunRecord, history: Sequence[ScalingRecord]) -> dict[int, int]:
    """By version, the step at which the run's ranks took it, or a later one, up; agents report it where it changes.

    Only of versions that exist: what an agent reports may be any number.
    """
    steps, versions = tx.telemetry.read(run.key, "thresholds_version")
    known = np.isfinite(versions)
    steps, newest = steps[known], np.maximum.accumulate(versions[known])
    found = {record.version: int(np.searchsorted(newest, record.version)) for record in history}
    return {version: int(steps[at]) for version, at in found.items() if at < steps.size}


def _setting_changes(history: Sequence[ScalingRecord], run_id: str) -> list[ScalingRecord]:
    """Versions in which this run's settings, and not only what was observed, changed."""
    found = []
    before: dict[str, Any] = first_body()["policies"]
    for record in history:
        policies = record.body["policies"]
        differs = any(
            policies[policy][name] != before[policy][name]
            for policy in TUNED_POLICIES
            for name in ("delta", "small_batch_size")
        )
        settled = any(policies[policy].get("settled_by") == run_id for policy in TUNED_POLICIES)
        if differs and not settled and record.body.get("run_id") == run_id:
            found.append(record)
        before = policies
    return found


def _noise_moved(body: dict[str, Any], noise: NoiseScale | None) -> str | None:
    if noise is None:
        return None
    old = body.get("gradient_noise_scale")
    if old is not None and abs(math.log(noise.value / old)) < math.log(_NOISE_MOVED):
        return None
    return f"gradient noise scale {noise.value:.3g} (90 % interval {noise.low:.3g} to {noise.high:.3g}) examples"
