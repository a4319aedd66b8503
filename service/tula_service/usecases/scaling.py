"""Numbers of gradient scaling: set by users for a job and a policy, served with a version."""

from __future__ import annotations

import math

import tula_wire as wire
from tula_service.errors import InvalidInput
from tula_service.store import Store, Transaction
from tula_service.usecases.access import Principal, visible_job

GATED_POLICIES = ("ags", "static")
"""Policies that scale only below the sensitivity threshold `delta`; `gain` needs none."""
_DEFAULT_S_MIN = 1e-3  # of the agent


def current(store: Store, principal: Principal, job_id: str, policy: wire.ScalingPolicy) -> wire.ScalingThresholds:
    """Return the numbers that are set for a script's policy; version 1 has none."""
    with store.reading() as tx:
        visible_job(tx, principal, job_id)
        return _read(tx, job_id, policy)


def change(
    store: Store, principal: Principal, job_id: str, patch: wire.ScalingPatch, policy: wire.ScalingPolicy
) -> wire.ScalingThresholds:
    """Set numbers of one policy, and return what agents get from now on.

    Numbers that the training script passes stay in force there, and an agent leaves out a bound that crosses a bound of
    its script. Raises InvalidInput if the bounds would cross, or for `delta` of a policy without one.
    """
    if patch.delta is not None and policy not in GATED_POLICIES:
        raise InvalidInput(
            f"delta means nothing under the policy `{policy}`: give it for `ags` or `static` (--policy, in the query "
            "?policy=).",
            field="delta",
        )
    with store.transaction() as tx:
        visible_job(tx, principal, job_id)
        tx.jobs.lock(job_id)
        before = _read(tx, job_id, policy)
        after = before.model_copy(update=patch.model_dump(exclude_unset=True))
        _refuse_crossed(after)
        changed = [f"{name} {_said(value)}" for name, value in after if value != getattr(before, name)]
        if not changed:
            return before
        after = after.model_copy(update={"version": before.version + 1})
        tx.scaling.write(job_id, policy, after.model_dump(exclude={"policy"}))
        reason = f"a user set {policy}: {', '.join(changed)}"
        tx.events.append(job_id, "scaling", data={"version": after.version, "reason": reason})
        return after


def _read(tx: Transaction, job_id: str, policy: wire.ScalingPolicy) -> wire.ScalingThresholds:
    return wire.ScalingThresholds(policy=policy, **(tx.scaling.read(job_id, policy) or {}))


def _refuse_crossed(numbers: wire.ScalingThresholds) -> None:
    """A script's own bounds are not compared: they are unknown here."""
    s_min = _DEFAULT_S_MIN if numbers.s_min is None else numbers.s_min
    s_max = math.inf if numbers.s_max is None else numbers.s_max
    if s_max < s_min:
        text = f"s_max = {s_max:g} would be below s_min = {s_min:g}: give s_max >= s_min."
        raise InvalidInput(text, field="s_max")


def _said(value: float | None) -> str:
    return "free" if value is None else f"= {value:g}"
