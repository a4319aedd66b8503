"""Parameters of gradient scaling, which users set for a job and a policy, and agents read with a version."""

from __future__ import annotations

import math

import tula_wire as wire
from tula_service.errors import InvalidInput
from tula_service.store import Store, Transaction
from tula_service.usecases.access import Principal, visible_job
from tula_service.usecases.job_data import read_spec

GATED_POLICIES = ("ags", "static")
"""Policies that scale only below the sensitivity threshold `delta`; `gain` needs none."""
_DEFAULT_S_MIN = 1e-3  # of the agent


def current(store: Store, principal: Principal, job_id: str, policy: wire.ScalingPolicy) -> wire.ScalingThresholds:
    """Return the numbers that users have set for a script's policy; in version 1, there are none."""
    with store.reading() as tx:
        visible_job(tx, principal, job_id)
        return _read(tx, job_id, policy)


def change(
    store: Store, principal: Principal, job_id: str, patch: wire.ScalingPatch, policy: wire.ScalingPolicy
) -> wire.ScalingThresholds:
    """Set numbers of one policy, and return the numbers that agents get from now on.

    Values set in the training script take precedence there. An agent ignores a bound set here if it contradicts one
    that the script sets. Raises InvalidInput if the lower bound would exceed the upper one, if the policy has no
    `delta`, and for a fixed factor that is too large for every batch of the job.
    """
    if patch.delta is not None and policy not in GATED_POLICIES:
        raise InvalidInput(
            f"delta means nothing under the policy `{policy}`: give it for `ags` or `static` (--policy, in the query "
            "?policy=).",
            field="delta",
        )
    with store.transaction() as tx:
        job = visible_job(tx, principal, job_id)
        tx.jobs.lock(job_id)
        before = _read(tx, job_id, policy)
        after = before.model_copy(update=patch.model_dump(exclude_unset=True))
        _refuse_crossed(after)
        _refuse_beyond_batches(read_spec(job), after)
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
    """Raise InvalidInput if the lower bound exceeds the upper; a script's own bounds are unknown here."""
    s_min = _DEFAULT_S_MIN if numbers.s_min is None else numbers.s_min
    s_max = math.inf if numbers.s_max is None else numbers.s_max
    if s_max < s_min:
        text = f"s_max = {s_max:g} would be below s_min = {s_min:g}: give s_max >= s_min."
        raise InvalidInput(text, field="s_max")


def _refuse_beyond_batches(spec: wire.JobSpec, numbers: wire.ScalingThresholds) -> None:
    """Raise InvalidInput for a fixed factor above the ratio of the largest batch to the smallest, which would ruin
    training.

    Each agent limits the number further by its own batch.
    """
    batch = spec.batch
    smallest = numbers.small_batch_size or batch.min_local_batch_size
    ranks = max(cluster.max_nodes * cluster.ranks_per_node for cluster in spec.cluster)
    steps = batch.grad_accum_steps or batch.max_grad_accum_steps
    per_rank = None if batch.max_local_batch_size is None else batch.max_local_batch_size * steps
    largest = batch.global_batch_size or (spec.dataset.size if per_rank is None else ranks * per_rank)
    most = max(1.0, min(largest, spec.dataset.size) / smallest)
    if (numbers.static_scale or 0.0) > most:
        raise InvalidInput(
            f"static_scale = {numbers.static_scale:g} is more than {most:.4g}, the job's largest batch over the "
            f"smallest ({smallest} examples): give at most that.",
            field="static_scale",
        )


def _said(value: float | None) -> str:
    return "free" if value is None else f"= {value:g}"
