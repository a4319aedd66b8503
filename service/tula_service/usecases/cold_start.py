"""What is believed of a job before its first run: earlier jobs on the same hardware, else hardware figures."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import tula_wire as wire
from tula_service.domain import Collective, Configuration
from tula_service.perfmodel import (
    Hardware,
    ModelFacts,
    StepTimeModel,
    StepTimePrior,
    prior_from_hardware,
    prior_from_jobs,
)
from tula_service.store import JobRecord, Transaction

__all__ = ["Lessons", "lessons_of", "prior_of", "remember", "remember_outcome", "warnings_of"]

_PEAK_TFLOPS = {
    "K80": 4.1, "P100": 9.3, "V100": 15.7, "T4": 8.1, "2080": 13.4, "RTX6000": 16.3, "A10": 31.2, "A40": 37.4,
    "A6000": 38.7, "L4": 30.3, "L40": 90.5, "4090": 82.6, "A100": 156.0, "H100": 495.0, "H200": 495.0, "CPU": 0.1,
}  # fmt: skip
"""Dense peak per device from the vendors' data sheets, teraflop/s: fp32 up to Turing, TF32 tensor cores after it."""

_UNKNOWN_TFLOPS = 20.0
_UNKNOWN_GBPS = 10.0
_UNKNOWN_PARAMETERS = 25_000_000
_FLOPS_PER_PARAMETER = 300.0
_UNKNOWN_SD = 1.0
_MOST_JOBS = 200
_MOST_PRIORS = 10
_MOST_PAIRS = 100
_KEPT = "lesson"
_LESSON_VERSION = "1"


@dataclass(frozen=True)
class Lessons:
    """What earlier jobs of the project learnt on this hardware: of the same network, and of others.

    `pairs` holds (predicted, low, high, measured) step times of trainings, those of the job itself among them.
    """

    same: tuple[StepTimePrior, ...]
    related: tuple[StepTimePrior, ...]
    pairs: tuple[tuple[float, float, float, float], ...]


def lessons_of(tx: Transaction, job: JobRecord, spec: wire.JobSpec) -> Lessons:
    """Read what may be learnt for this job; bounded, however many jobs the project has."""
    here = {(cluster.instance_type, cluster.accelerator, cluster.network_gbps) for cluster in spec.cluster}
    same: list[StepTimePrior] = []
    related: list[StepTimePrior] = []
    pairs = [*_kept(tx, job.id)["pairs"]]
    for other, body in tx.fits.of_earlier_jobs(
        job.project_id, _KEPT, before=job.cursor, model_version=_LESSON_VERSION, limit=_MOST_JOBS
    ):
        there = {
            cluster["instance_type"]
            for cluster in other["cluster"]
            if (cluster["instance_type"], cluster.get("accelerator"), cluster.get("network_gbps")) in here
        }
        if not there or other.get("collective", "ring") != spec.collective:
            continue
        model = other["model"]
        known = (model["name"], model.get("parameters")) == (spec.model.name, spec.model.parameters)
        lesson = json.loads(body)
        pairs += lesson["pairs"]
        for name, learnt in lesson["types"].items():
            if name in there:
                (same if known else related).append(_read(learnt))
    return Lessons(
        tuple(same[:_MOST_PRIORS]), tuple(related[:_MOST_PRIORS]), tuple(tuple(pair) for pair in pairs[:_MOST_PAIRS])
    )


def prior_of(
    lessons: Lessons, spec: wire.JobSpec, candidates: Sequence[Configuration], *, measured: bool
) -> StepTimePrior | None:
    """The prior of a job's fit; None once runs were measured and no earlier job has anything to add."""
    collective = Collective(spec.collective)
    reference = float(max(c.local_batch_size for c in candidates))
    if lessons.same:
        return prior_from_jobs(lessons.same, collective=collective)
    hardware = _from_hardware(spec, reference, collective)
    if lessons.related:
        return prior_from_jobs(lessons.related, scale=hardware, collective=collective)
    return None if measured else hardware


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
        if cluster.accelerator is None or _peak(cluster.accelerator) is None:
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


def _from_hardware(spec: wire.JobSpec, reference: float, collective: Collective) -> StepTimePrior:
    cluster = spec.cluster[0]
    parameters = float(spec.model.parameters or _UNKNOWN_PARAMETERS)
    flops = spec.model.flops_per_sample or 3.0 * _FLOPS_PER_PARAMETER * parameters
    peak = _peak(cluster.accelerator)
    prior = prior_from_hardware(
        # The wire counts forward and backward together, the model one forward pass.
        ModelFacts(parameter_count=parameters, flops_per_sample=flops / 3.0),
        Hardware(peak_tflops=peak or _UNKNOWN_TFLOPS, inter_node_gbps=cluster.network_gbps or _UNKNOWN_GBPS),
        reference_batch_size=reference,
        collective=collective,
    )
    guesses = (spec.model.flops_per_sample is None) + (peak is None)
    sd = prior.sd.copy()
    sd[0] = math.hypot(float(sd[0]), _UNKNOWN_SD * guesses)
    return replace(prior, sd=sd)


def _peak(accelerator: str | None) -> float | None:
    if accelerator is None:
        return None
    wanted = accelerator.upper().replace(" ", "").replace("-", "")
    names = sorted(_PEAK_TFLOPS, key=len, reverse=True)
    return next((_PEAK_TFLOPS[name] for name in names if name in wanted), None)
