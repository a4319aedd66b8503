"""Reads and sets the versioned gradient-scaling values of each job and policy, which users set and agents read."""

from __future__ import annotations

import math

import tula_wire as wire
from tula_service.errors import InvalidInput
from tula_service.store import Store, Transaction
from tula_service.usecases.access import Principal, visible_job
from tula_service.usecases.job_data import read_spec

GATED_POLICIES = ("ags", "static")
"""Policies that scale gradients only below the sensitivity threshold `delta`; the policy `gain` has no threshold."""
_DEFAULT_S_MIN = 1e-3  # the agent's default


def current(store: Store, principal: Principal, job_id: str, policy: wire.ScalingPolicy) -> wire.ScalingThresholds:
    """Return the gradient-scaling values that users have set for a policy; version 1 means that no values were set."""
    with store.reading() as tx:
        visible_job(tx, principal, job_id)
        return _read(tx, job_id, policy)


def change(
    store: Store, principal: Principal, job_id: str, patch: wire.ScalingPatch, policy: wire.ScalingPolicy
) -> wire.ScalingThresholds:
    """Set gradient-scaling values of a policy, and return all values that agents will receive from now on.

    In the agent, values from the training script take precedence, and a bound is ignored if it contradicts a bound that
    the script sets. Raises InvalidInput if the lower bound would exceed the upper bound, if the policy has no `delta`,
    or if the fixed factor is too large for every batch of the job.
    """
    if patch.delta is not None and policy not in GATED_POLICIES:
        raise InvalidInput(
            f"delta is not used by the policy `{policy}`: set it for `ags` or `static` (with --policy, or ?policy= in "
            "a request).",
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
        reason = f"a user changed {policy}: {', '.join(changed)}"
        tx.events.append(job_id, "scaling", data={"version": after.version, "reason": reason})
        return after


def _read(tx: Transaction, job_id: str, policy: wire.ScalingPolicy) -> wire.ScalingThresholds:
    return wire.ScalingThresholds(policy=policy, **(tx.scaling.read(job_id, policy) or {}))


def _refuse_crossed(numbers: wire.ScalingThresholds) -> None:
    """Raise InvalidInput if the lower bound exceeds the upper bound; bounds in the script cannot be checked here."""
    s_min = _DEFAULT_S_MIN if numbers.s_min is None else numbers.s_min
    s_max = math.inf if numbers.s_max is None else numbers.s_max
    if s_max < s_min:
        text = f"s_max = {s_max:g} would be less than s_min = {s_min:g}: set s_max >= s_min."
        raise InvalidInput(text, field="s_max")


def _refuse_beyond_batches(spec: wire.JobSpec, numbers: wire.ScalingThresholds) -> None:
    """Raise InvalidInput if the fixed factor exceeds the ratio of the largest batch to the smallest.

    A larger factor would ruin the training. Each agent also limits the factor according to its own batch.
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
            f"static_scale = {numbers.static_scale:g} exceeds {most:.4g}, the ratio of the job's largest batch to its "
            f"smallest ({smallest} examples): set at most {most:.4g}.",
            field="static_scale",
        )


def _said(value: float | None) -> str:
    return "unset" if value is None else f"= {value:g}"
