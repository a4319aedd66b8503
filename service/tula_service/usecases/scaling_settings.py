"""What is set for a job's gradient scaling by users, tuning or nobody, and how that is shown and changed."""

from __future__ import annotations

from typing import Any

import tula_wire as wire
from tula_service.errors import InvalidInput
from tula_service.store import RunRecord, ScalingRecord, Store
from tula_service.usecases.access import Principal, visible_job

__all__ = ["TUNED_POLICIES", "change", "first_body", "in_force", "shown"]

TUNED_POLICIES = ("ags", "static")
"""Those with a sensitivity gate; `gain` needs no threshold."""

_POLICIES = ("gain", "ags", "static", "none")
_DEFAULT_POLICY = "gain"
_DEFAULT_S_MIN = 1e-3  # of the agent, where nobody named one
_SET = "set"


def first_body() -> dict[str, Any]:
    """Of version 1: nothing is tuned, nothing is set, every script has its own way."""
    policies = {policy: {"delta": None, "small_batch_size": None} for policy in _POLICIES}
    return {"policies": policies, "policy": None, "reason": "Nothing was observed or set yet: the script decides."}


def in_force(own: dict[str, Any], name: str) -> Any:
    """A policy's number: what a user set, else what tuning found, else None."""
    by_user = own.get(_SET, {})
    return by_user[name] if name in by_user else own.get(name)


def shown(record: ScalingRecord | None, policy: str | None, run: RunRecord | None) -> wire.ScalingThresholds:
    """The thresholds for an agent whose script runs `policy`; `run` is the job's newest training run."""
    body = first_body() if record is None else record.body
    wanted = body["policy"] or policy or _DEFAULT_POLICY
    own = body["policies"][wanted]
    restore = body.get("restore")
    if restore and (run is None or restore["run_id"] != run.id):
        restore = None
    return wire.ScalingThresholds.model_validate(
        {
            **own.get(_SET, {}),
            "version": 1 if record is None else record.version,
            "policy": wanted,
            "delta": in_force(own, "delta"),
            "small_batch_size": in_force(own, "small_batch_size"),
            "restore_step": restore["step"] if restore else None,
            "restore_run_id": restore["run_id"] if restore else None,
            "gradient_noise_scale": body.get("gradient_noise_scale"),
            "gradient_noise_scale_error": body.get("gradient_noise_scale_error"),
            "critical_batch_size": body.get("critical_batch_size"),
            "reason": body["reason"],
        }
    )


def change(
    store: Store, principal: Principal, job_id: str, patch: wire.ScalingPatch, *, policy: str | None = None
) -> wire.ScalingThresholds:
    """Take in what a user wants and answer what agents get from now on.

    Raises InvalidInput when the bounds would cross.
    """
    with store.transaction() as tx:
        visible_job(tx, principal, job_id)
        tx.jobs.lock(job_id)
        record = tx.scaling.latest(job_id)
        body = dict(record.body) if record is not None else first_body()
        changed = _patched(body, patch, policy)
        if changed:
            body["reason"] = "set by a user: " + ", ".join(changed)
            after = 1 if record is None else record.version
            tx.scaling.publish(job_id, body, after=after)
            tx.events.append(job_id, "scaling", data={"version": after + 1, "reason": body["reason"]})
            record = tx.scaling.latest(job_id)
        return shown(record, policy or patch.policy, None)


def _patched(body: dict[str, Any], patch: wire.ScalingPatch, policy: str | None) -> list[str]:
    """Change `body`; says what differs now, one phrase a field."""
    changed = []
    if "policy" in patch.model_fields_set and body["policy"] != patch.policy:
        body["policy"] = patch.policy
        changed.append(f"policy = {patch.policy or 'as the script says'}")
    target = policy or patch.policy or body["policy"] or _DEFAULT_POLICY
    own = dict(body["policies"][target])
    by_user = dict(own.get(_SET, {}))
    for name in sorted(patch.model_fields_set - {"policy"}):
        value = getattr(patch, name)
        if value == by_user.get(name):
            continue
        if value is None:
            del by_user[name]
            changed.append(f"{target}: {name} free")
        else:
            by_user[name] = value
            changed.append(f"{target}: {name} = {value:g}" if name != "granularity" else f"{target}: {name} = {value}")
    s_min, s_max = by_user.get("s_min", _DEFAULT_S_MIN), by_user.get("s_max")
    if s_max is not None and s_max < s_min:
        raise InvalidInput(f"s_max would be {s_max:g}, below s_min = {s_min:g}: give s_max >= s_min.", field="s_max")
    body["policies"] = {**body["policies"], target: {**own, _SET: by_user}}
    return changed
