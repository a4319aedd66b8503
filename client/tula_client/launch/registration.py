"""Finds the job that a specification describes, changes what may change in it, or registers another."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tula_client import _flows
from tula_client._client import Client
from tula_wire import Job, JobPatch, JobSpec

_MAX_JOBS: Final = 20
"""How many of the newest jobs of one name are compared."""

_CHANGEABLE: Final = re.compile(
    r"objective|usd_per_hour_of_waiting|profiling\.columns|limits\.\w+|cluster.*\.price\.(spot\.)?\w+", re.DOTALL
)
"""Paths that `JobPatch` can change: objective, price of waiting, columns, limits and prices."""

Changes = dict[str, tuple[Any, Any]]


@dataclass(frozen=True)
class Registered:
    """The job, and notes for the user about what changed."""

    job: Job
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Comparison:
    """How a registered job differs from the specification: where it can be changed, and where not."""

    job: Job
    changes: Changes
    fixed: tuple[str, ...]


def register(client: Client, spec: JobSpec, *, retry_failed: bool = False) -> Registered:
    """The job of `spec`: a job of the same name that is equal, or equal once it is changed, else a new job.

    With `retry_failed`, the failed runs of a job that is found are planned again. Raises the client's errors.
    """
    known = [_compare(job, spec) for job in _jobs_named(client, spec.name)]
    job = _find(known)
    notes: list[str] = []
    if job is None:
        job = client.register(spec).job
        if known and job.id not in {one.job.id for one in known}:
            notes.append(_explain_new_job(spec.name, job, known))
    changes = _compare(job, spec).changes
    retried = retry_failed and any(run.state in ("failed", "out_of_memory") for run in job.plan)
    if changes or retried:
        wanted: dict[str, Any] = {
            "objective": spec.objective,
            "usd_per_hour_of_waiting": spec.usd_per_hour_of_waiting,
            "limits": spec.limits,
            "prices": {cluster.instance_type: cluster.price for cluster in spec.cluster},
        }
        if "profiling.columns" in changes:  # a service of an earlier version refuses these two
            wanted["columns"] = spec.profiling.columns
        if retried:
            wanted["retry_failed"] = True
        job = client.patch_job(job.id, JobPatch.model_validate(wanted))
    if changes:
        notes.append(f"Changed {job.name} ({job.id}), whose measurements are kept: {_format_changes(changes)}.")
    return Registered(job, tuple(notes))


def _find(known: list[_Comparison]) -> Job | None:
    """The job to use: the newest equal one, else the only one that can be changed; None for a job to create."""
    usable = [one for one in known if not one.fixed]
    equal = [one.job for one in usable if not one.changes]
    if equal:
        return equal[0]
    return usable[0].job if len(usable) == 1 else None


def _jobs_named(client: Client, name: str) -> list[Job]:
    """The newest jobs of that name that are not archived."""
    if not name.isprintable():  # no search takes it
        return []
    return [client.job(one.id) for one in client.send(_flows.jobs_named(name))[:_MAX_JOBS]]


def _compare(job: Job, spec: JobSpec) -> _Comparison:
    types = [sorted(cluster.instance_type for cluster in one.cluster) for one in (job.spec, spec)]
    before, after = _values_by_path(job.spec), _values_by_path(spec)
    if "columns" not in spec.profiling.model_fields_set:  # off where the script's batches can't be cut
        after["profiling.columns"] = job.spec.profiling.columns
    differ = {
        path: (before.get(path), after.get(path))
        for path in dict.fromkeys([*before, *after])
        if before.get(path) != after.get(path)
    }
    changes = {path: values for path, values in differ.items() if _CHANGEABLE.fullmatch(path)}
    fixed = [path for path in differ if path not in changes]
    if types[0] != types[1]:
        fixed = [path for path in fixed if not path.startswith("cluster")] + ["cluster.instance_type"]
    return _Comparison(job, changes, tuple(fixed))


def _values_by_path(spec: JobSpec) -> dict[str, Any]:
    """Every value by its dotted path; clusters by instance type, so that their order does not matter."""
    values = dict(_flatten("", spec.model_dump(mode="json", exclude={"cluster"})))
    for cluster in spec.cluster:
        plain = cluster.model_dump(mode="json", exclude={"instance_type"})
        path = "cluster" if len(spec.cluster) == 1 else f"cluster[{cluster.instance_type}]"
        values.update(_flatten(path, plain))
    return values


def _flatten(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flatten(f"{path}.{name}" if path else name, inner)
    else:
        yield path, value


def _format_changes(changes: Changes) -> str:
    pairs = changes.items()
    return ", ".join(f"{path} {_format_value(before)} -> {_format_value(after)}" for path, (before, after) in pairs)


def _format_value(value: Any) -> str:
    return "none" if value is None else str(value).removesuffix(".0")


def _explain_new_job(name: str, job: Job, known: list[_Comparison]) -> str:
    """Why another job of this name was registered, and how to address each."""
    nearest = min(known, key=lambda each: len(each.fixed))
    if nearest.fixed:
        why = f"the existing job {nearest.job.id} differs in {', '.join(nearest.fixed)}, which cannot be changed"
    else:
        why = f"several existing jobs match, among them {nearest.job.id}"
    return (
        f"Registered a new job {name!r} ({job.id}): {why}. Use the ids of these jobs instead of their name, or archive "
        f"the other: tula jobs archive {nearest.job.id}."
    )
