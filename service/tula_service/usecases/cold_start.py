"""What is believed of a job before its first run, by instance type: earlier jobs on its hardware, else its figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import tula_wire as wire
from tula_service.domain import Basis
from tula_service.perfmodel.priors import (
    EarlierScale,
    Hardware,
    ModelFacts,
    Priors,
    StepTimePrior,
    prior_from_hardware,
    prior_from_jobs,
    prior_from_other_type,
    scale_from_jobs,
)
from tula_service.usecases.devices import KNOWN_DEVICES, device_of, hardware_of
from tula_service.usecases.lessons import Lessons, Speed
from tula_wire import Configuration

__all__ = ["prior_of", "warnings_of"]

_UNKNOWN_PARAMETERS = 25_000_000
_FLOPS_PER_PARAMETER = 300.0
_UNKNOWN_FLOPS_SD = 1.0


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
    if name in lessons.same:
        return prior_from_jobs(lessons.same[name])
    if measured and name not in lessons.related:
        return None
    # Once runs were measured they tell the scale, so that nobody needs to be asked how fast others were.
    scale = _scale(lessons, spec, name, hardware, reference, speeds=() if measured else lessons.speeds)
    if name in lessons.related:
        return prior_from_jobs(lessons.related[name], scale=scale)
    return scale


def _scale(
    lessons: Lessons,
    spec: wire.JobSpec,
    name: str,
    hardware: Mapping[str, Hardware],
    reference: float,
    *,
    speeds: Sequence[Speed],
) -> StepTimePrior:
    """The same network on other hardware, moved by what the two differ in, where that tells more than hardware figures;
    else those, corrected by how fast earlier jobs ran.

    Either way it is a guess: its basis is `prior`, and only lessons on the same hardware make a transfer.
    """
    facts = _facts_of(spec.model)
    guess = prior_from_hardware(facts, hardware[name], reference_batch_size=reference)
    near = [(prior, hardware[other]) for other, found in sorted(lessons.same.items()) for prior in found]
    moved = [
        prior_from_other_type(learnt, there, hardware[name])
        for learnt, there in (*near, *lessons.elsewhere)
        if there.memory_gb_per_s is not None and hardware[name].memory_gb_per_s is not None
    ]
    # A laptop, of which hardly anything is known, says less of a device than its data sheet does.
    nearest = min((guess, *moved), key=lambda prior: float(prior.sd[0]))
    if nearest is not guess:
        return replace(nearest, basis=Basis.PRIOR)
    here = {cluster.instance_type: cluster for cluster in spec.cluster}[name]
    return scale_from_jobs(
        guess,
        [_earlier(speed) for speed in speeds],
        device=device_of(here),
        flops_sd=facts.flops_sd,
        device_sd=hardware[name].device_sd,
    )


def _facts_of(model: wire.ModelSpec) -> ModelFacts:
    parameters = float(model.parameters or _UNKNOWN_PARAMETERS)
    known = model.flops_per_sample
    # The wire counts forward and backward together, the model one forward pass.
    flops = _FLOPS_PER_PARAMETER * parameters if known is None else known / 3.0
    return ModelFacts(parameters, flops, flops_sd=_UNKNOWN_FLOPS_SD if known is None else 0.0)


def _earlier(speed: Speed) -> EarlierScale:
    """How far off the guess was that would have been made of that job, at the batch that it was learnt at."""
    facts, hardware = _facts_of(wire.read(wire.ModelSpec, speed.model)), hardware_of(speed.cluster)
    batch = speed.learnt.reference_batch_size or 1.0
    guess = prior_from_hardware(facts, hardware, reference_batch_size=batch)
    return EarlierScale(
        float(speed.learnt.mean[0] - guess.mean[0]),
        device_of(speed.cluster),
        math.hypot(facts.flops_sd, float(speed.learnt.sd[0])),
        hardware.device_sd,
    )


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
                if cluster.accelerator is None
                else f"{cluster.accelerator} has no data sheet here and its speed was guessed: if it is like one of "
                f"{', '.join(KNOWN_DEVICES)}, give that as cluster.accelerator."
            )
        if cluster.network_gbps is None and cluster.max_nodes > 1:
            sentences.append(f"The network of {cluster.instance_type} was guessed: give cluster.network_gbps.")
    return sentences
