"""What is set for a job's gradient scaling by users, tuning or nobody, and how that is shown and changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tula_wire as wire
from tula_service.domain import RunKind
from tula_service.errors import InvalidInput
from tula_service.store import RunRecord, ScalingRecord, Store, Transaction
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

    Raises InvalidInput when the bounds would cross, those among them that the training script named: its agents
    would refuse them.
    """
    with store.transaction() as tx:
        visible_job(tx, principal, job_id)
        tx.jobs.lock(job_id)
        record = tx.scaling.latest(job_id)
        body = dict(record.body) if record is not None else first_body()
        changed = _patched(body, patch, policy, _scripted_bounds(tx, job_id))
        if changed:
            body["reason"] = "set by a user: " + ", ".join(changed)
            after = 1 if record is None else record.version
            tx.scaling.publish(job_id, body, after=after)
            tx.events.append(job_id, "scaling", data={"version": after + 1, "reason": body["reason"]})
            record = tx.scaling.latest(job_id)
        return shown(record, policy or patch.policy, None)


def _scripted_bounds(tx: Transaction, job_id: str) -> dict[str, float]:
    """The bounds that the script of the job's newest training named, as far as its agent has said."""
    newest = tx.runs.list(job_id, kind=RunKind.TRAIN, limit=1)
    found: dict[str, float] = {}
    for name in ("s_min", "s_max") if newest else ():
        _, values = tx.telemetry.read(newest[0].key, f"scripted_{name}")
        known = values[values > 0.0]  # neither NaN nor what no bound can be
        if known.size:
            found[name] = float(known[-1])
    return found


def _patched(
    body: dict[str, Any], patch: wire.ScalingPatch, policy: str | None, scripted: Mapping[str, float]
) -> list[str]:
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
    if patch.model_fields_set & {"s_min", "s_max"}:
        _refuse_crossing(by_user, scripted)
    body["policies"] = {**body["policies"], target: {**own, _SET: by_user}}
    return changed


def _refuse_crossing(by_user: Mapping[str, Any], scripted: Mapping[str, float]) -> None:
    """Raise InvalidInput when the bounds in force, a user's before the script's, leave no factor between them."""
    bounds = {"s_min": _DEFAULT_S_MIN, **scripted, **by_user}
    s_min, s_max = bounds["s_min"], bounds.get("s_max")
    if s_max is None or s_max >= s_min:
        return
    of_script = {name: " of the training script" if name not in by_user else "" for name in ("s_min", "s_max")}
    if "s_max" in by_user:
        raise InvalidInput(
            f"s_max would be {s_max:g}, below s_min = {s_min:g}{of_script['s_min']}: give s_max >= s_min, or both.",
            field="s_max",
        )
    raise InvalidInput(
        f"s_min would be {s_min:g}, above s_max = {s_max:g}{of_script['s_max']}: give s_min <= s_max, or both.",
        field="s_min",
    )
