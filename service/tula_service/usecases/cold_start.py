"""What is believed of a job before its first run, by instance type: earlier jobs on its hardware, else its figures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import tula_wire as wire
from tula_service.domain import Basis, Collective, Configuration
from tula_service.perfmodel import (
    EarlierScale,
    Hardware,
    ModelFacts,
    Priors,
    StepTimeModel,
    StepTimePrior,
    prior_from_hardware,
    prior_from_jobs,
    prior_from_other_type,
    scale_from_jobs,
)
from tula_service.store import JobRecord, Transaction
from tula_service.usecases.devices import hardware_of

__all__ = ["Lessons", "lessons_of", "prior_of", "remember", "remember_outcome", "warnings_of"]

_UNKNOWN_PARAMETERS = 25_000_000
_FLOPS_PER_PARAMETER = 300.0
_UNKNOWN_FLOPS_SD = 1.0
_MOST_JOBS = 200
_MOST_PRIORS = 10
_MOST_SPEEDS = 50
_MOST_PAIRS = 100
_KEPT = "lesson"
_LESSON_VERSION = "1"


@dataclass(frozen=True)
class Speed:
    """How far the guess that hardware figures make of an earlier job was from what its runs showed: log(c / guess)."""

    cluster: wire.ClusterSpec
    log_ratio: float
    flops_sd: float


@dataclass(frozen=True)
class Lessons:
    """What earlier jobs of the project learnt, by instance type of this job.

    `same` network on the same hardware, `related` networks on it; `elsewhere` is the same network on hardware that this
    job does not have. `speeds` are of all earlier jobs, whatever they trained and where. `pairs` holds (predicted, low,
    high, measured) step times of trainings on this hardware, those of the job itself among them.
    """

    same: Mapping[str, tuple[StepTimePrior, ...]]
    related: Mapping[str, tuple[StepTimePrior, ...]]
    elsewhere: tuple[tuple[StepTimePrior, Hardware], ...]
    speeds: tuple[Speed, ...]
    pairs: tuple[tuple[float, float, float, float], ...]


def lessons_of(tx: Transaction, job: JobRecord, spec: wire.JobSpec) -> Lessons:
    """Read what may be learnt for this job; bounded, however many jobs the project has."""
    here = {(cluster.instance_type, cluster.accelerator, cluster.network_gbps) for cluster in spec.cluster}
    same: dict[str, list[StepTimePrior]] = {}
    related: dict[str, list[StepTimePrior]] = {}
    elsewhere: list[tuple[StepTimePrior, Hardware]] = []
    speeds: list[Speed] = []
    pairs = [*_kept(tx, job.id)["pairs"]]
    for other, body in tx.fits.of_earlier_jobs(
        job.project_id, _KEPT, before=job.cursor, model_version=_LESSON_VERSION, limit=_MOST_JOBS
    ):
        if other.get("collective", "ring") != spec.collective:
            continue
        model, lesson = other["model"], json.loads(body)
        known = (model["name"], model.get("parameters")) == (spec.model.name, spec.model.parameters)
        ran_here = False
        for cluster in (wire.read(wire.ClusterSpec, each) for each in other["cluster"]):
            name = cluster.instance_type
            on_this = (name, cluster.accelerator, cluster.network_gbps) in here
            ran_here |= on_this
            learnt = lesson["types"].get(name)
            if learnt is None:
                continue
            posterior = _read(learnt)
            if len(speeds) < _MOST_SPEEDS:
                speeds.append(_speed(wire.read(wire.ModelSpec, model), cluster, posterior))
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
        speeds=tuple(speeds),
        pairs=tuple(tuple(pair) for pair in pairs[:_MOST_PAIRS]),
    )


def prior_of(lessons: Lessons, spec: wire.JobSpec, candidates: Sequence[Configuration], *, measured: bool) -> Priors:
    """The priors of a job's fit, each instance type its own; generic ones once runs were measured and no earlier job on
    that hardware has anything to add."""
    hardware = {cluster.instance_type: hardware_of(cluster) for cluster in spec.cluster}
    believed: dict[str, StepTimePrior] = {}
    for name in sorted(hardware):
        batches = [c.local_batch_size for c in candidates if c.instance_type == name]
        reference = float(max(batches or [c.local_batch_size for c in candidates]))
        found = _believed(lessons, spec, name, hardware, reference, measured=measured)
        if found is not None:
            believed[name] = found
    return Priors(believed, hardware)


def _believed(
    lessons: Lessons,
    spec: wire.JobSpec,
    name: str,
    hardware: Mapping[str, Hardware],
    reference: float,
    *,
    measured: bool,
) -> StepTimePrior | None:
    """What is believed of one instance type; the most telling source goes first."""
    collective = Collective(spec.collective)
    if name in lessons.same:
        return prior_from_jobs(lessons.same[name], collective=collective)
    if measured and name not in lessons.related:
        return None
    scale = _scale(lessons, spec, name, hardware, reference)
    if name in lessons.related:
        return prior_from_jobs(lessons.related[name], scale=scale, collective=collective)
    return scale


def _scale(
    lessons: Lessons, spec: wire.JobSpec, name: str, hardware: Mapping[str, Hardware], reference: float
) -> StepTimePrior:
    """The same network on other hardware, moved by what the two differ in; without one, hardware figures, corrected by
    how fast earlier jobs ran.

    Either way it is a guess: its basis is `prior`, and only lessons on the same hardware make a transfer.
    """
    collective = Collective(spec.collective)
    near = [(prior, hardware[other]) for other, found in sorted(lessons.same.items()) for prior in found]
    for learnt, there in (*near, *lessons.elsewhere):
        if there.memory_gb_per_s is not None and hardware[name].memory_gb_per_s is not None:
            moved = prior_from_other_type(learnt, there, hardware[name], collective=collective)
            return replace(moved, basis=Basis.PRIOR)
    facts = _facts_of(spec.model)
    guess = prior_from_hardware(facts, hardware[name], reference_batch_size=reference, collective=collective)
    here = {cluster.instance_type: cluster for cluster in spec.cluster}[name]
    earlier = [EarlierScale(s.log_ratio, _same_device(here, s.cluster), s.flops_sd) for s in lessons.speeds]
    return scale_from_jobs(guess, earlier, flops_sd=facts.flops_sd)


def _facts_of(model: wire.ModelSpec) -> ModelFacts:
    parameters = float(model.parameters or _UNKNOWN_PARAMETERS)
    known = model.flops_per_sample
    # The wire counts forward and backward together, the model one forward pass.
    flops = _FLOPS_PER_PARAMETER * parameters if known is None else known / 3.0
    return ModelFacts(parameters, flops, flops_sd=_UNKNOWN_FLOPS_SD if known is None else 0.0)


def _speed(model: wire.ModelSpec, cluster: wire.ClusterSpec, learnt: StepTimePrior) -> Speed:
    """Judged at the job's own reference batch."""
    facts, batch = _facts_of(model), learnt.reference_batch_size
    assert batch is not None, "what is remembered has its batch"
    guess = prior_from_hardware(facts, hardware_of(cluster), reference_batch_size=batch)
    return Speed(cluster, float(learnt.mean[0] - guess.mean[0]), facts.flops_sd)


def _same_device(one: wire.ClusterSpec, other: wire.ClusterSpec) -> bool:
    if one.accelerator is None:
        return one.instance_type == other.instance_type
    return one.accelerator == other.accelerator


def remember(tx: Transaction, job: JobRecord, model: StepTimeModel) -> None:
    """Keep what a job's runs taught, by instance type, for jobs that come after it."""
    learnt = {}
    for name in sorted(model.posteriors):
        posterior = model.posterior(name)
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


def warnings_of(spec: wire.JobSpec) -> list[str]:
    """What was guessed for want of facts, one sentence each with its remedy."""
    sentences = []
    if spec.model.flops_per_sample is None:
        sentences.append("The model's FLOPs per sample are unknown and were guessed: give model.flops_per_sample.")
    for cluster in spec.cluster:
        if hardware_of(cluster).peak_tflops is None:
            sentences.append(
                f"The accelerator of {cluster.instance_type} is not known and its speed was guessed: "
                "give cluster.accelerator, for example V100-16GB."
            )
        if cluster.network_gbps is None and cluster.max_nodes > 1:
            sentences.append(f"The network of {cluster.instance_type} was guessed: give cluster.network_gbps.")
    return sentences


def _read(learnt: dict[str, Any]) -> StepTimePrior:
    return StepTimePrior(
        np.array(learnt["mean"]),
        np.array(learnt["sd"]),
        absolute=True,
        reference_batch_size=float(learnt["reference_batch_size"]),
    )
