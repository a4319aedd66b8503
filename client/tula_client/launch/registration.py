"""Finds the job that a specification describes, changes what may change in it, or registers another."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from tula_client._client import Client
from tula_client.handle import all_jobs
from tula_client.launch.spec import idempotency_key
from tula_client.launch.workdir import WorkDir
from tula_wire import Job, JobPatch, JobSpec

_STATE: Final = "registered"
_MAX_JOBS: Final = 20
"""How many of the newest jobs of one name are compared."""

_CHANGEABLE: Final = re.compile(
    r"objective|usd_per_hour_of_waiting|profiling\.columns|limits\.\w+|cluster.*\.price\.(spot\.)?\w+", re.DOTALL
)
"""Paths that `JobPatch` can change: objective, price of waiting, columns, limits and prices."""

Changes = dict[str, tuple[Any, Any]]


@dataclass(frozen=True)
class Registered:
    """The job, and notes for the user about what changed.

    `first_spec` is the specification under which the job was first registered, if known: the job is found, and its
    failed runs are planned again, only by that one.
    """

    job: Job
    notes: tuple[str, ...]
    first_spec: JobSpec | None

    def save(self, work: WorkDir) -> None:
        """Keep the first specification for the next `tula tune` in this folder."""
        spec = None if self.first_spec is None else self.first_spec.model_dump(mode="json")
        key = None if self.first_spec is None else idempotency_key(self.first_spec)
        work.save(_STATE, {"spec": spec, "key": key})


@dataclass(frozen=True)
class _Comparison:
    """How a registered job differs from the specification: where it can be changed, and where not."""

    job: Job
    changes: Changes
    fixed: tuple[str, ...]


def register(client: Client, spec: JobSpec, work_dir: Path | None = None) -> Registered:
    """The job of `spec`: a job of the same name that is equal, or equal once it is changed, else a new job.

    With `work_dir`, the failed runs of a job that is found are planned again. Raises the client's errors.
    """
    known = [_compare(job, spec) for job in _jobs_named(client, spec.name)]
    job, first_spec = _find(known, spec, work_dir)
    notes: list[str] = []
    if job is None or (first_spec is not None and work_dir is not None and _any_failed(job)):
        first_spec = first_spec or spec
        job = client.register(first_spec, idempotency_key=idempotency_key(first_spec)).job
        if known and job.id not in {one.job.id for one in known}:
            notes.append(_explain_new_job(spec.name, job, known))
    comparison = _compare(job, spec)
    if comparison.changes and not comparison.fixed:
        prices = {cluster.instance_type: cluster.price for cluster in spec.cluster}
        wanted = JobPatch(
            objective=spec.objective,
            usd_per_hour_of_waiting=spec.usd_per_hour_of_waiting,
            limits=spec.limits,
            prices=prices,
        )
        if "profiling.columns" in comparison.changes:
            wanted = wanted.model_copy(update={"columns": spec.profiling.columns})
        job = client.patch_job(job.id, wanted)
        changes = _format_changes(comparison.changes)
        notes.append(f"Changed {job.name} ({job.id}), whose measurements are kept: {changes}.")
    return Registered(job, tuple(notes), first_spec)


def _any_failed(job: Job) -> bool:
    return any(run.state in ("failed", "out_of_memory") for run in job.plan)


def _find(known: list[_Comparison], spec: JobSpec, work_dir: Path | None) -> tuple[Job | None, JobSpec | None]:
    """(the job to use, the specification it was first registered under); None for a job to create, for unknown."""
    usable = [one for one in known if not one.fixed]
    equal = [one.job for one in usable if not one.changes]
    if equal:
        return equal[0], _first_spec(equal[0], work_dir, default=spec)
    if len(usable) == 1:
        return usable[0].job, _first_spec(usable[0].job, work_dir, default=None)
    return None, spec


def _jobs_named(client: Client, name: str) -> list[Job]:
    """The newest jobs of that name that are not archived."""
    if not name.isprintable():  # no search takes it
        return []
    ids = (one.id for one in all_jobs(client, search=name) if one.name == name)
    return [client.job(job_id) for job_id in islice(ids, _MAX_JOBS)]


def _first_spec(job: Job, work_dir: Path | None, *, default: JobSpec | None) -> JobSpec | None:
    """The specification under which `job` was registered, as saved in `work_dir`; `default` if nothing is saved.

    None if it is unknown: a job that was changed is not found by its current specification.
    """
    state = None if work_dir is None else WorkDir(work_dir, job.id).load(_STATE)
    if state is None:
        return default
    try:
        spec = JobSpec.model_validate(state.get("spec"))
    except ValidationError:
        return None
    return spec if idempotency_key(spec) == state.get("key") else None  # another version of Tula may add fields


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
