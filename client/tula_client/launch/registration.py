"""Finding the job that a specification describes, changed where it may be, or registering a new one."""

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
from tula_wire import ClusterSpec, Job, JobPatch, JobSpec

__all__ = ["Registered", "register"]

_STATE: Final = "registered"
_MOST: Final = 20
"""So many of the newest jobs of one name are looked at."""

_CHANGEABLE: Final = re.compile(r"objective|limits\.\w+|cluster.*\.price\.(spot\.)?\w+", re.DOTALL)
"""Paths of what `JobPatch` can change: objective, limits and prices."""

Changes = dict[str, tuple[Any, Any]]


@dataclass(frozen=True)
class Registered:
    """The job, and one line for a person about each thing that they might not expect of it."""

    job: Job
    notes: tuple[str, ...]
    first: JobSpec | None
    """The specification under which the service has first met it, if that is known."""

    def remember(self, work: WorkDir) -> None:
        """Keep the first specification: the job is found, and what failed in it planned anew, only under that."""
        first = None if self.first is None else self.first.model_dump(mode="json")
        key = None if self.first is None else idempotency_key(self.first)
        work.save(_STATE, {"spec": first, "key": key})


def register(client: Client, spec: JobSpec, work_dir: Path | None = None) -> Registered:
    """The job of `spec`: one of its name that differs in nothing, or only in what may change, is changed and used.

    What failed in a job that is found is planned anew, given the `work_dir` of whoever is to run it. Raises what the
    client raises.
    """
    named = _named(client, spec.name)
    differing = [(job, *_differences(job.spec, spec)) for job in named]
    usable = [(job, changed) for job, changed, fixed in differing if not fixed]
    exact = [job for job, changed in usable if not changed]
    notes: list[str] = []
    first: JobSpec | None = spec
    found: Job | None = None
    if exact:
        found, first = exact[0], _first_of(exact[0], work_dir, otherwise=spec)
    elif len(usable) == 1:
        found, first = usable[0][0], _first_of(usable[0][0], work_dir, otherwise=None)
    job = found
    if job is None or (first is not None and work_dir is not None):
        assert first is not None
        job = client.register(first, idempotency_key=idempotency_key(first)).job
        if job.id not in {one.id for one in named} and named:
            notes.append(_another(spec.name, job, differing))
    changed, fixed = _differences(job.spec, spec)
    if changed and not fixed:
        job = client.patch_job(job.id, _patch(changed, spec))
        notes.append(f"{job.name} ({job.id}) is changed, and what was measured for it holds: {_told(changed)}.")
    return Registered(job, tuple(notes), first)


def _named(client: Client, name: str) -> list[Job]:
    """The newest jobs of that name, which are not archived."""
    if not name.isprintable():  # no list can be searched for it
        return []
    same = (one.id for one in all_jobs(client, search=name) if one.name == name)
    return [client.job(job_id) for job_id in islice(same, _MOST)]


def _first_of(job: Job, work_dir: Path | None, *, otherwise: JobSpec | None) -> JobSpec | None:
    """The specification under which `job` was registered, as this folder knows it; `otherwise` where it never met it.

    None where it cannot be known: a job that was changed is not found by what it now is.
    """
    state = None if work_dir is None else WorkDir(work_dir, job.id).load(_STATE)
    if state is None:
        return otherwise
    try:
        first = JobSpec.model_validate(state.get("spec"))
    except ValidationError:
        return None
    return first if idempotency_key(first) == state.get("key") else None  # another version of Tula may read it anew


def _differences(known: JobSpec, wanted: JobSpec) -> tuple[Changes, tuple[str, ...]]:
    """(what differs that a job can change, fields that differ and that none can)."""
    types = [sorted(cluster.instance_type for cluster in spec.cluster) for spec in (known, wanted)]
    before, after = _facts(known), _facts(wanted)
    differ = {
        path: (before.get(path), after.get(path))
        for path in dict.fromkeys([*before, *after])
        if before.get(path) != after.get(path)
    }
    changed = {path: values for path, values in differ.items() if _CHANGEABLE.fullmatch(path)}
    fixed = [path for path in differ if not _CHANGEABLE.fullmatch(path)]
    if types[0] != types[1]:
        fixed = [path for path in fixed if not path.startswith("cluster")] + ["cluster.instance_type"]
    return changed, tuple(fixed)


def _facts(spec: JobSpec) -> dict[str, Any]:
    """Every single value by its dotted path; clusters by instance type, in any order, one alone without it."""
    plain = spec.model_dump(mode="json", exclude={"cluster"})
    facts = dict(_flat("", plain))
    for cluster in spec.cluster:
        facts.update(_flat(_place(cluster, spec), cluster.model_dump(mode="json", exclude={"instance_type"})))
    return facts


def _place(cluster: ClusterSpec, spec: JobSpec) -> str:
    return "cluster" if len(spec.cluster) == 1 else f"cluster[{cluster.instance_type}]"


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flat(f"{path}.{name}" if path else name, inner)
    else:
        yield path, value


def _patch(changed: Changes, spec: JobSpec) -> JobPatch:
    values: dict[str, Any] = {}
    if "objective" in changed:
        values["objective"] = spec.objective
    if any(path.startswith("limits.") for path in changed):
        values["limits"] = spec.limits
    prices = {
        cluster.instance_type: cluster.price
        for cluster in spec.cluster
        if any(path.startswith(f"{_place(cluster, spec)}.price.") for path in changed)
    }
    if prices:
        values["prices"] = prices
    return JobPatch(**values)


def _told(changed: Changes) -> str:
    return ", ".join(f"{path} {_shown(before)} -> {_shown(after)}" for path, (before, after) in changed.items())


def _shown(value: Any) -> str:
    return "none" if value is None else str(value).removesuffix(".0")


def _another(name: str, job: Job, differing: list[tuple[Job, Changes, tuple[str, ...]]]) -> str:
    """Why there is now another job of this name, and how to tell them apart."""
    nearest, _, fixed = min(differing, key=lambda each: len(each[2]))
    if fixed:
        why = f"differs from it in {', '.join(fixed)}, which no job can change"
    else:
        why = "is one of several that this one could be"
    return (
        f"A new job called {name!r} is registered ({job.id}): what was there ({nearest.id}) {why}. Name each by its "
        f"id, or archive the other: tula jobs archive {nearest.id}."
    )
