"""Thresholds of gradient scaling: served with a version, set by users, tuned and rolled back after new telemetry."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import tula_wire as wire
from tula_service.analysis import scaling
from tula_service.domain import RunRecord
from tula_service.errors import InvalidInput
from tula_service.store import Store, Transaction
from tula_service.usecases.access import Principal, visible_job
from tula_wire.enums import FINAL_STATES

TUNE_EVERY_STEPS = 100
"""Telemetry steps between two looks at it; agents poll every few seconds, and a look reads whole columns."""

_LOOK_BACK_STEPS = 5_000
_DEFAULT_POLICY = "gain"
_DEFAULT_S_MIN = 1e-3  # of the agent


@dataclass(frozen=True)
class Served:
    """Thresholds as JSON with their entity tag (RFC 9110); `body` is None when the caller's tag is still current."""

    etag: str
    body: str | None


def current(
    store: Store, principal: Principal, job_id: str, *, policy: str | None = None, etag: str | None = None
) -> Served:
    """The thresholds in force for a script's policy, after a look at new telemetry if one is due.

    A policy that a user set for the job overrides the script's.
    """
    with store.reading() as tx:
        visible_job(tx, principal, job_id)
        version, body = _latest(tx, job_id)
        run = next(iter(tx.runs.list(job_id, kind="train", limit=1)), None)
        seen = None if run is None or run.state == "cancelled" else _due_telemetry(tx, run)
    if run is not None and seen is not None:
        version, body = _look(store, run, version, body, seen)
    thresholds = _view(version, body, policy)
    tag = f'"{thresholds.version}-{thresholds.policy}"'
    known = {part.strip().removeprefix("W/") for part in (etag or "").split(",")}
    return Served(tag, None if tag in known or "*" in known else thresholds.model_dump_json())


def change(
    store: Store, principal: Principal, job_id: str, patch: wire.ScalingPatch, *, policy: str | None = None
) -> wire.ScalingThresholds:
    """Set the job's policy, or numbers of one policy, and return what agents get from now on.

    Numbers that the training script passes stay in force there, and an agent leaves out a bound that crosses a bound of
    its script. Raises InvalidInput if the bounds that users set would cross, or the job's policy be `static` without a
    factor, since agents would refuse them, or for `delta` of a policy without one.
    """
    with store.transaction() as tx:
        visible_job(tx, principal, job_id)
        tx.jobs.lock(job_id)
        version, body = _latest(tx, job_id)
        body, changed = _patched(body, patch, policy)
        if changed:
            body["reason"] = "set by a user: " + ", ".join(changed)
            _publish(tx, job_id, body, after=version)
        return _view(*_latest(tx, job_id), policy or patch.policy)


def _latest(tx: Transaction, job_id: str) -> tuple[int, scaling.Body]:
    """The version in force and its body."""
    return tx.scaling.latest(job_id) or (1, scaling.first_body())


def _look(
    store: Store, run: RunRecord, version: int, old: scaling.Body, seen: scaling.ScalingTelemetry
) -> tuple[int, scaling.Body]:
    """Publish what new telemetry asks for. If another version was published meanwhile, the next poll looks again."""
    body = scaling.next_body(old, version, seen)
    with store.transaction() as tx:
        tx.jobs.lock(run.job_id)
        if body is None or _publish(tx, run.job_id, body, after=version, run_id=run.id):
            tx.runs.update(run.id, scaling_step=seen.last_step)
            if body is not None and body.get("gradient_noise_scale") != old.get("gradient_noise_scale"):
                tx.jobs.bump(run.job_id)  # recommendations rest on the noise scale
        return _latest(tx, run.job_id)


def _publish(tx: Transaction, job_id: str, body: scaling.Body, *, after: int, run_id: str | None = None) -> bool:
    """Make `body` the next version; False if that version exists already."""
    if not tx.scaling.publish(job_id, body, after=after):
        return False
    tx.events.append(job_id, "scaling", run_id=run_id, data={"version": after + 1, "reason": body["reason"]})
    return True


def _due_telemetry(tx: Transaction, run: RunRecord) -> scaling.ScalingTelemetry | None:
    """The run's telemetry, None while too little is new since the last look."""
    last_step = tx.telemetry.last_step(run.key)
    if last_step is None:
        return None
    new = last_step if run.scaling_step is None else last_step - run.scaling_step
    if run.scaling_step is not None and new < (1 if run.state in FINAL_STATES else TUNE_EVERY_STEPS):
        return None
    first = max(0, last_step - _LOOK_BACK_STEPS)
    columns = {name: tx.telemetry.read(run.key, name, first_step=first) for name in scaling.RECENT_COLUMNS}
    columns |= {name: tx.telemetry.read(run.key, name) for name in scaling.WHOLE_COLUMNS}
    return scaling.ScalingTelemetry(run.id, last_step, columns)


def _view(version: int, body: scaling.Body, policy: str | None) -> wire.ScalingThresholds:
    """The thresholds for an agent whose script runs `policy`."""
    wanted = body["policy"] or policy or _DEFAULT_POLICY
    fields = {**body, **scaling.in_force(body, wanted), "version": version, "policy": wanted}
    # The critical batch is the noise scale (McCandlish et al. 2018).
    fields["critical_batch_size"] = body.get("gradient_noise_scale")
    return wire.read(wire.ScalingThresholds, fields)


def _patched(body: scaling.Body, patch: wire.ScalingPatch, policy: str | None) -> tuple[scaling.Body, list[str]]:
    """The body with a user's changes, and one phrase for each."""
    changed = []
    if "policy" in patch.model_fields_set and body["policy"] != patch.policy:
        body = {**body, "policy": patch.policy}
        changed.append(f"policy = {patch.policy or 'the script decides'}")
    target = policy or patch.policy or body["policy"] or _DEFAULT_POLICY
    if patch.delta is not None and target not in scaling.GATED_POLICIES:
        raise InvalidInput(
            f"delta means nothing under the policy `{target}`: give policy=ags or policy=static with it, or name the "
            "policy that it belongs to (--policy, in the query ?policy=).",
            field="delta",
        )
    by_user: dict[str, Any] = dict(body["set"].get(target, {}))
    for name in sorted(patch.model_fields_set - {"policy"}):
        value = getattr(patch, name)
        if value == by_user.get(name):
            continue
        by_user[name] = value
        number = f"{value:g}" if isinstance(value, float) else value
        changed.append(f"{target}: {name} {'free' if value is None else f'= {number}'}")
    # A script's own bounds are not compared.
    s_min, s_max = by_user.get("s_min", _DEFAULT_S_MIN), by_user.get("s_max", math.inf)
    if patch.model_fields_set & {"s_min", "s_max"} and s_max < s_min:
        raise InvalidInput(
            f"s_max = {s_max:g} would be below s_min = {s_min:g}: give s_max >= s_min.",
            field="s_max" if "s_max" in by_user else "s_min",
        )
    by_user = {name: value for name, value in by_user.items() if value is not None}
    body = {**body, "set": {**body["set"], target: by_user}}
    if changed and body["policy"] == "static" and "static_scale" not in body["set"].get("static", {}):
        text = "The policy `static` needs its factor: give static_scale (a script that passes its own keeps that)."
        raise InvalidInput(text, field="static_scale")
    return body, changed
