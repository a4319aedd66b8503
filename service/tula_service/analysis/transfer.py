"""Transfers results between jobs: computes step-time priors from earlier jobs and exports posteriors for later jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import tula_wire as wire
from tula_service.analysis.hardware import Figures
from tula_service.analysis.job_data import JobData
from tula_service.perfmodel.fabric import Buckets, with_fabric
from tula_service.perfmodel.intervals import LEVEL
from tula_service.perfmodel.points import StepTimeObservations
from tula_service.perfmodel.priors import (
    Hardware,
    Lesson,
    Lessons,
    Priors,
    StepTimePrior,
    generic_prior,
    prior_of_type,
)
from tula_service.perfmodel.step_time_form import COLLECTIVES
from tula_service.perfmodel.step_time_model import StepTimeModel
from tula_service.perfmodel.variants import believed_effect, switched, switches
from tula_wire import Configuration
from tula_wire.configurations import Variant

_STEP_DEFINING_FIELDS = (
    "name", "activation_checkpointing", "sharding", "pipeline_stages", "tensor_parallel_size", "micro_batch_size",
)  # fmt: skip
_MAX_PRIORS = 10
_MAX_SCALES = 20
_MAX_PAIRS = 100
_MIN_PAIRS_TO_CALIBRATE = 3
_TRUST_IN_MODEL = 10.0
_WIDTH_BOUNDS = (0.5, 5.0)


@dataclass(frozen=True)
class EarlierEvidence:
    """The results of the project's earlier jobs that a job can use.

    The scales of `lessons` come from all earlier jobs, but only the newest job counts for each combination of network
    and device, since repeated jobs provide no information about other networks. `pairs` come from training runs on the
    job's hardware, including the job's own runs. `buckets` has the job's gradient buckets by instance type, for types
    on which a run timed the buckets.
    """

    lessons: Lessons = field(default_factory=Lessons)
    pairs: tuple[Sequence[float], ...] = ()
    buckets: Mapping[str, Buckets] = field(default_factory=dict)

    @property
    def interval_scale(self) -> float:
        """Return the factor on the log width of intervals that calibrates them to the measured training runs.

        The score of a pair is |log(measured / predicted)| divided by the half-width of its interval. The factor is the
        90 % quantile of the scores (split conformal prediction, Vovk 2005), shrunk towards 1 with the weight of ten
        pairs and limited to the range 0.5 to 5. If there are fewer than three pairs, the factor is 1.
        """
        if (number := len(self.pairs)) < _MIN_PAIRS_TO_CALIBRATE:
            return 1.0
        predicted, low, high, measured = np.array(self.pairs).T
        half = np.maximum(np.where(measured > predicted, np.log(high / predicted), np.log(predicted / low)), 1e-6)
        scores = np.abs(np.log(measured / predicted)) / half
        quantile = max(float(np.quantile(scores, min(1.0, LEVEL * (number + 1) / number))), 1e-3)
        weight = number / (number + _TRUST_IN_MODEL)
        return float(np.clip(np.exp(weight * np.log(quantile)), *_WIDTH_BOUNDS))


def earlier_evidence(data: JobData, figures: Figures) -> EarlierEvidence:
    """Return the results of earlier jobs, grouped by network and hardware.

    If an earlier job has different base options from this job, its results are corrected by the assumed effects of the
    differing options, including the uncertainty of these effects.
    """
    same: dict[str, list[StepTimePrior]] = {}
    related: dict[str, list[tuple[StepTimePrior, float | None]]] = {}
    elsewhere: list[tuple[StepTimePrior, Hardware]] = []
    scales: dict[tuple[str, int | None, str], Lesson] = {}
    pairs = [*data.prediction_pairs]
    base = data.spec.base_options
    for earlier in figures.earlier:
        model, posteriors = earlier.job.model, earlier.job.posteriors
        same_network = _same_network(model, data.spec.model)
        effects = [believed_effect(switch) for switch in switches(earlier.job.base, base)]
        if any(on_this for _, _, on_this in earlier.types):
            pairs += earlier.job.prediction_pairs
        for name, hardware, on_this in earlier.types:
            if name not in posteriors:
                continue
            learned = _as_prior(posteriors[name])
            if len(scales) < _MAX_SCALES:
                key = (model.name, model.parameters, hardware.device)
                scales.setdefault(key, Lesson(learned, earlier.facts, hardware))
            learned = switched(learned, effects, max(len(effects) - 1, 0))
            if on_this and same_network:
                same.setdefault(name, []).append(learned)
            elif on_this:
                counts = data.spec.model.parameters, model.parameters
                ratio = counts[0] / counts[1] if counts[0] and counts[1] else None
                related.setdefault(name, []).append((learned, ratio))
            elif same_network:
                elsewhere.append((learned, hardware))
    lessons = Lessons(
        same_network={name: tuple(priors[:_MAX_PRIORS]) for name, priors in same.items()},
        other_networks={name: tuple(priors[:_MAX_PRIORS]) for name, priors in related.items()},
        other_hardware=tuple(elsewhere[:_MAX_PRIORS]),
        scales=tuple(scales.values()),
    )
    return EarlierEvidence(lessons, tuple(pairs[:_MAX_PAIRS]), _find_buckets(data))


def build_priors(
    earlier: EarlierEvidence,
    figures: Figures,
    spec: wire.JobSpec,
    candidates: Sequence[Configuration],
    *,
    observed: StepTimeObservations | None,
) -> Priors:
    """Return the priors of a job's fit with the base options, one for each instance type.

    `observed` contains the job's runs. Once the job has runs, an instance type starts from the generic prior unless
    earlier jobs ran on its hardware, and results of other networks are used only until three cluster sizes of the type
    have been measured. Where a probe of a type's links is more certain than the prior of its collectives, the probe
    replaces the prior; this requires either gradient buckets timed in a run or `model.parameters`.
    """
    believed: dict[str, StepTimePrior] = {}
    base = spec.base_options
    probed = set()
    # This is the size of an all-reduce that sends as many bytes over a link as a step does.
    reduced_bytes = figures.facts.parameter_bytes * figures.facts.volumes / 2.0
    counted = None if spec.model.parameters is None else Buckets.of(reduced_bytes)
    for cluster in spec.cluster:
        name = cluster.instance_type
        batches = [c.local_batch_size for c in candidates if c.instance_type == name]
        own = None if observed is None else observed.points.take(observed.points.find_rows(Variant(name, base)))
        prior = prior_of_type(
            name,
            figures.facts,
            figures.hardware,
            earlier.lessons,
            reference_batch_size=float(max(batches or [c.local_batch_size for c in candidates])),
            measured=observed is not None,
            measured_clusters=0 if own is None else len(set(own.world_size.tolist())),
        )
        fabric, buckets = figures.fabrics.get(name), earlier.buckets.get(name) or counted
        if fabric is not None and buckets is not None:
            prior = with_fabric(
                prior or generic_prior(),
                fabric,
                buckets=buckets,
                max_nodes=cluster.max_nodes,
                ranks_per_node=cluster.ranks_per_node,
            )
        # The first run on a type measures its buckets; before that run, the probe is used without them.
        usable = buckets is not None or own is None or not own.world_size.size
        if fabric is not None and fabric.num_nodes > 1 and cluster.max_nodes > 1 and usable:
            probed.add(name)
        if prior is not None:
            believed[name] = prior
    return Priors(believed, figures.hardware, frozenset(probed), figures.slow_from, base)


def export_posteriors(model: StepTimeModel) -> dict[str, dict[str, Any]]:
    """Return each instance type's posterior from the job's runs with the base options, as JSON for later jobs.

    The parameters are in the order of `perfmodel.step_time_form.AT`. `_as_prior` converts the JSON back.
    """
    learned = {
        variant.instance_type: posterior.without_prior()
        for variant, posterior in sorted(model.posteriors.items(), key=lambda entry: entry[0])
        if variant.options == model.priors.base
    }
    return {
        name: {
            "mean": prior.mean.tolist(),
            "sd": prior.sd.tolist(),
            "reference_batch_size": prior.reference_batch_size or 1.0,
        }
        for name, prior in learned.items()
    }


def _find_buckets(data: JobData) -> dict[str, Buckets]:
    """Return the timed buckets of each instance type, from the run with the fewest ranks and the base options.

    The run with the fewest ranks is used because its ranks wait least for one another. If several runs have the fewest
    ranks, the run with the largest batch is used.
    """
    of_base = [run for run in data.summaries if run.configuration.options == data.spec.base_options]
    timed = [(run.configuration, run.timeline) for run in of_base if run.timeline is not None]
    usable = [(c, timeline) for c, timeline in timed if min(*timeline.bucket_bytes, *timeline.ready_s) > 0.0]
    best_first = sorted(usable, key=lambda row: (row[0].world_size, -row[0].local_batch_size))
    return {c.instance_type: Buckets(np.array(t.bucket_bytes), np.array(t.ready_s)) for c, t in reversed(best_first)}


def _as_prior(learned: Mapping[str, Any]) -> StepTimePrior:
    return StepTimePrior(
        np.array(learned["mean"]),
        np.array(learned["sd"]),
        absolute=True,
        reference_batch_size=float(learned["reference_batch_size"]),
        in_seconds=COLLECTIVES,
    )


def _same_network(one: wire.ModelSpec, other: wire.ModelSpec) -> bool:
    """Return True if all fields that define a step are equal.

    A parameter count or precision that is not specified is treated as equal to any other.
    """
    if any(getattr(one, name) != getattr(other, name) for name in _STEP_DEFINING_FIELDS):
        return False
    pairs = ((one.parameters, other.parameters), (one.precision, other.precision))
    return all(first == second or None in (first, second) for first, second in pairs)
