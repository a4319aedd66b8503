"""Finds the job that a specification describes and updates its changeable fields, or registers a new job."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tula_client import _flows
from tula_client._client import Client
from tula_wire import Job, JobPatch, JobSpec, Price

_MAX_JOBS: Final = 20
"""The number of newest jobs with the same name that are compared with a specification."""

_CHANGEABLE: Final = re.compile(
    r"objective|usd_per_hour_of_waiting|usd_per_kwh|gco2_per_kwh|profiling\.(share_launches|only)|limits\.\w+"
    r"|cluster.*\.price\.(spot\.)?\w+",
    re.DOTALL,
)
"""Matches the paths of fields that `JobPatch` can change: the objective, prices (of waiting, energy and nodes), limits,
how runs are launched, and which options vary.
"""

Differences = dict[str, tuple[Any, Any]]
"""Maps the dotted path of a field to its value in a registered job and its value in a specification."""


@dataclass(frozen=True)
class Registered:
    """A job, and notes that tell the user what changed."""

    job: Job
    notes: tuple[str, ...]


def register(client: Client, spec: JobSpec, *, retry_failed: bool = False) -> Registered:
    """Return the newest job with the name of `spec` that matches it or can be changed to match, or else a new job.

    If `retry_failed` is True, the failed runs of an existing job are planned again. Raises the client's errors.
    """
    differing = [(job, _differences(job, spec)) for job in _jobs_named(client, spec.name)]
    usable = [(job, changes) for job, changes in differing if not _fixed(changes)]
    notes: list[str] = []
    if usable:
        job, changes = next((entry for entry in usable if not entry[1]), usable[0])
    else:
        job = client.register(spec).job
        changes = _differences(job, spec)
        if differing and job.id not in {other.id for other, _ in differing}:
            notes.append(_explain_new_job(spec.name, job, differing))
    retried = retry_failed and any(run.state in ("failed", "out_of_memory") for run in job.plan)
    if changes or retried:
        spec = _completed(spec, job.spec)
        patch: dict[str, Any] = {
            "objective": spec.objective,
            "usd_per_hour_of_waiting": spec.usd_per_hour_of_waiting,
            "usd_per_kwh": spec.usd_per_kwh,
            "gco2_per_kwh": spec.gco2_per_kwh,
            "limits": spec.limits,
            "prices": {cluster.instance_type: cluster.price for cluster in spec.cluster},
            "share_launches": spec.profiling.share_launches,
            "only": spec.profiling.only,
            "retry_failed": retried,
        }
        job = client.patch_job(job.id, JobPatch.model_validate(patch))
    if changes:
        said = ", ".join(f"{path} {_text(before)} -> {_text(after)}" for path, (before, after) in changes.items())
        notes.append(f"Changed the job {job.name} ({job.id}) and kept its measurements: {said}.")
    return Registered(job, tuple(notes))


def _jobs_named(client: Client, name: str) -> list[Job]:
    """Return the newest unarchived jobs with this name."""
    if not name.isprintable():  # the service accepts only printable text in a search
        return []
    return [client.job(summary.id) for summary in client.send(_flows.jobs_named(name, _MAX_JOBS))]


def _differences(job: Job, spec: JobSpec) -> Differences:
    before, after = _values_by_path(job.spec), _values_by_path(_completed(spec, job.spec))
    same_types = before["cluster.instance_type"] == after["cluster.instance_type"]
    return {
        path: (before.get(path), after.get(path))
        for path in dict.fromkeys([*before, *after])
        if before.get(path) != after.get(path)
        and (same_types or path == "cluster.instance_type" or not path.startswith("cluster"))
    }


def _completed(spec: JobSpec, registered: JobSpec) -> JobSpec:
    """Return `spec`; if it omits either of two fields, use the field's value in the registered job.

    These fields may have been set after registration: `tula tune` asks the user for the price of waiting if there are
    prices, and turns `profiling.share_launches` off if a launch measures only its largest batch.
    """
    later: dict[str, Any] = {}
    if "usd_per_hour_of_waiting" not in spec.model_fields_set and any(
        cluster.price != Price() for cluster in spec.cluster
    ):
        later["usd_per_hour_of_waiting"] = registered.usd_per_hour_of_waiting
    if "share_launches" not in spec.profiling.model_fields_set:
        later["profiling"] = spec.profiling.model_copy(update={"share_launches": registered.profiling.share_launches})
    return spec.model_copy(update=later)


def _fixed(differences: Differences) -> list[str]:
    """Return those paths in `differences` whose fields cannot be changed in a registered job."""
    return [path for path in differences if not _CHANGEABLE.fullmatch(path)]


def _values_by_path(spec: JobSpec) -> dict[str, Any]:
    """Return every value in `spec` by its dotted path.

    The path of a cluster contains its instance type instead of an index, since the order of clusters does not matter.
    """
    values = dict(_flatten("", spec.model_dump(mode="json", exclude={"cluster"})))
    values["cluster.instance_type"] = sorted(cluster.instance_type for cluster in spec.cluster)
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


def _text(value: Any) -> str:
    return "none" if value is None else str(value).removesuffix(".0")


def _explain_new_job(name: str, job: Job, differing: list[tuple[Job, Differences]]) -> str:
    """Return a message that explains why another job with this name was registered, and how to refer to each job."""
    nearest, differences = min(differing, key=lambda entry: len(_fixed(entry[1])))
    return (
        f"Registered a new job {name!r} ({job.id}), because the existing job {nearest.id} differs in "
        f"{', '.join(_fixed(differences))}, which cannot be changed. Refer to these jobs by id instead of by name, or "
        f"archive the older job: tula jobs archive {nearest.id}."
    )
