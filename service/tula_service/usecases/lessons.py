"""What jobs leave behind for those that come after them, and what a job may learn from its project's earlier ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import tula_wire as wire
from tula_service.perfmodel.priors import Hardware, StepTimePrior
from tula_service.perfmodel.step_time_model import StepTimeModel
from tula_service.store import JobRecord, Transaction
from tula_service.usecases.devices import described_alike, device_of, hardware_of

__all__ = ["Lessons", "Speed", "lessons_of", "remember", "remember_outcome"]

_MOST_JOBS = 200
_MOST_PRIORS = 10
_MOST_SPEEDS = 20
_MOST_PAIRS = 100
_KEPT = "lesson"
_LESSON_VERSION = "1"


@dataclass(frozen=True)
class Speed:
    """What an earlier job trained, where, and what its runs showed."""

    model: dict[str, Any]
    cluster: wire.ClusterSpec
    learnt: StepTimePrior


@dataclass(frozen=True)
class Lessons:
    """What earlier jobs of the project learnt, by instance type of this job.

    `same` network on the same hardware, `related` networks on it; `elsewhere` is the same network on hardware that this
    job does not have. `speeds` are of all earlier jobs, whatever they trained and where: of each network the newest on
    each device, since the same one again says nothing about others. `pairs` holds (predicted, low, high, measured) step
    times of trainings on this hardware, those of the job itself among them.
    """

    same: Mapping[str, tuple[StepTimePrior, ...]]
    related: Mapping[str, tuple[StepTimePrior, ...]]
    elsewhere: tuple[tuple[StepTimePrior, Hardware], ...]
    speeds: tuple[Speed, ...]
    pairs: tuple[tuple[float, float, float, float], ...]


def lessons_of(tx: Transaction, job: JobRecord, spec: wire.JobSpec) -> Lessons:
    """Read what may be learnt for this job; bounded, however many jobs the project has."""
    same: dict[str, list[StepTimePrior]] = {}
    related: dict[str, list[StepTimePrior]] = {}
    elsewhere: list[tuple[StepTimePrior, Hardware]] = []
    speeds: dict[tuple[str, int | None, str], Speed] = {}
    pairs = [*_kept(tx, job.id)["pairs"]]
    for other, body in tx.fits.of_earlier_jobs(
        job.project_id, _KEPT, before=job.cursor, model_version=_LESSON_VERSION, limit=_MOST_JOBS
    ):
        model, lesson = other["model"], json.loads(body)
        network = (model["name"], model.get("parameters"))
        known = _same_network(network, (spec.model.name, spec.model.parameters))
        ran_here = False
        for cluster in (wire.read(wire.ClusterSpec, each) for each in other["cluster"]):
            name = cluster.instance_type
            on_this = any(described_alike(cluster, mine) for mine in spec.cluster)
            ran_here |= on_this
            learnt = lesson["types"].get(name)
            if learnt is None:
                continue
            posterior = _read(learnt)
            if len(speeds) < _MOST_SPEEDS:
                speeds.setdefault((*network, device_of(cluster)), Speed(model, cluster, posterior))
            if on_this:
                (same if known else related).setdefault(name, []).append(posterior)
            elif known:
                elsewhere.append((posterior, hardware_of(cluster)))
        if ran_here:
            pairs += lesson["pairs"]
    return Lessons(
        same={name: tuple(found[:_MOST_PRIORS]) for name, found in same.items()},
        related={name: tuple(found[:_MOST_PRIORS]) for name, found in related.items()},
        elsewhere=tuple(elsewhere[:_MOST_PRIORS]),
        speeds=tuple(speeds.values()),
        pairs=tuple(tuple(pair) for pair in pairs[:_MOST_PAIRS]),
    )


def _same_network(one: tuple[str, int | None], other: tuple[str, int | None]) -> bool:
    """The name, and the parameters where both tell them."""
    return one[0] == other[0] and (one[1] == other[1] or None in (one[1], other[1]))


def remember(tx: Transaction, job: JobRecord, model: StepTimeModel) -> None:
    """Keep what a job's runs taught, by instance type, for jobs that come after it."""
    learnt = {}
    for name in sorted(model.posteriors):
        posterior = model.as_prior(name)
        learnt[name] = {
            "mean": posterior.mean.tolist(),
            "sd": posterior.sd.tolist(),
            "reference_batch_size": posterior.reference_batch_size,
        }
    _keep(tx, job.id, _kept(tx, job.id) | {"types": learnt})


def remember_outcome(tx: Transaction, job_id: str, predicted: tuple[float, float, float], measured: float) -> None:
    """Keep what training measured after a prediction, for the width of later intervals."""
    lesson = _kept(tx, job_id)
    _keep(tx, job_id, lesson | {"pairs": [[*predicted, measured], *lesson["pairs"]][:_MOST_PAIRS]})


def _kept(tx: Transaction, job_id: str) -> dict[str, Any]:
    body = tx.fits.get(job_id, _KEPT, data_version=0, model_version=_LESSON_VERSION)
    found: dict[str, Any] = {"types": {}, "pairs": []} if body is None else json.loads(body)
    return found


def _keep(tx: Transaction, job_id: str, lesson: dict[str, Any]) -> None:
    # Version 0 on purpose: later jobs want the newest lesson, whatever data it rests on.
    tx.fits.put(job_id, _KEPT, data_version=0, model_version=_LESSON_VERSION, body=json.dumps(lesson))


def _read(learnt: dict[str, Any]) -> StepTimePrior:
    return StepTimePrior(
        np.array(learnt["mean"]),
        np.array(learnt["sd"]),
        absolute=True,
        reference_batch_size=float(learnt["reference_batch_size"]),
    )
