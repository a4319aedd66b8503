"""Thresholds of gradient scaling: served with a version, set by users, tuned and rolled back after new telemetry."""

from __future__ import annotations

import math

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


def current(store: Store, principal: Principal, job_id: str, *, policy: str | None = None) -> wire.ScalingThresholds:
    """The thresholds in force for a script's policy, after a look at new telemetry if one is due.

    A policy that a user set for the job overrides the script's.
    """
    with store.reading() as tx:
        visible_job(tx, principal, job_id)
        version, body = _latest(tx, job_id)
        newest = tx.runs.list(job_id, kind="train", limit=1)
        run = newest[0] if newest and newest[0].state != "cancelled" else None
        last_step = None if run is None else _due_step(tx, run)
        columns = {} if run is None or last_step is None else _columns(tx, run, last_step)
    if run is not None and last_step is not None:
        found = scaling.next_body(body, version, run.id, columns)
        with store.transaction() as tx:
            tx.jobs.lock(job_id)
            # If another version was published meanwhile, the next poll looks again.
            if found is None or _publish(tx, job_id, found, after=version, run_id=run.id):
                tx.runs.update(run.id, scaling_step=last_step)
                if found is not None and found.get("gradient_noise_scale") != body.get("gradient_noise_scale"):
                    tx.jobs.bump(job_id)  # recommendations rest on the noise scale
            version, body = _latest(tx, job_id)
    return _view(version, body, policy)


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


def _publish(tx: Transaction, job_id: str, body: scaling.Body, *, after: int, run_id: str | None = None) -> bool:
    """Make `body` the next version; False if that version exists already."""
    if not tx.scaling.publish(job_id, body, after=after):
        return False
    tx.events.append(job_id, "scaling", run_id=run_id, data={"version": after + 1, "reason": body["reason"]})
    return True


def _due_step(tx: Transaction, run: RunRecord) -> int | None:
    """The last step of the run's telemetry, None while too little is new since the last look."""
    last_step = tx.telemetry.last_step(run.key)
    if last_step is None or run.scaling_step is None:
        return last_step
    return last_step if last_step - run.scaling_step >= (1 if run.state in FINAL_STATES else TUNE_EVERY_STEPS) else None


def _columns(tx: Transaction, run: RunRecord, last_step: int) -> scaling.Columns:
    first = max(0, last_step - _LOOK_BACK_STEPS)
    recent = {name: tx.telemetry.read(run.key, name, first_step=first) for name in scaling.RECENT_COLUMNS}
    return recent | {name: tx.telemetry.read(run.key, name) for name in scaling.WHOLE_COLUMNS}


def _view(version: int, body: scaling.Body, policy: str | None) -> wire.ScalingThresholds:
    """The thresholds for an agent whose script runs `policy`."""
    wanted = body["policy"] or policy or _DEFAULT_POLICY
    fields = {**body, **scaling.in_force(body, wanted), "version": version, "policy": wanted}
    # The critical batch is the noise scale (McCandlish et al. 2018).
    fields["critical_batch_size"] = body.get("gradient_noise_scale")
    return wire.read(wire.ScalingThresholds, fields)


def _patched(body: scaling.Body, patch: wire.ScalingPatch, policy: str | None) -> tuple[scaling.Body, list[str]]:
    """The body with a user's changes, and one phrase for each."""
    given = patch.model_dump(exclude_unset=True)
    of_job = given.pop("policy", body["policy"])
    target = policy or of_job or _DEFAULT_POLICY
    before = body["set"].get(target, {})
    by_user = {name: value for name, value in {**before, **given}.items() if value is not None}
    by_policy = {**body["set"], target: by_user}
    changed = [f"policy = {of_job or 'the script decides'}"] if of_job != body["policy"] else []
    for name, value in sorted(given.items()):
        if value != before.get(name):
            number = f"{value:g}" if isinstance(value, float) else value
            changed.append(f"{target}: {name} {'free' if value is None else f'= {number}'}")
    if patch.delta is not None and target not in scaling.GATED_POLICIES:
        raise InvalidInput(
            f"delta means nothing under the policy `{target}`: give policy=ags or policy=static with it, or name the "
            "policy that it belongs to (--policy, in the query ?policy=).",
            field="delta",
        )
    # A script's own bounds are not compared.
    s_min, s_max = by_user.get("s_min", _DEFAULT_S_MIN), by_user.get("s_max", math.inf)
    if s_max < s_min:
        text = f"s_max = {s_max:g} would be below s_min = {s_min:g}: give s_max >= s_min."
        raise InvalidInput(text, field="s_max")
    if changed and of_job == "static" and "static_scale" not in by_policy.get("static", {}):
        text = "The policy `static` needs its factor: give static_scale (a script that passes its own keeps that)."
        raise InvalidInput(text, field="static_scale")
    return {**body, "policy": of_job, "set": by_policy}, changed
