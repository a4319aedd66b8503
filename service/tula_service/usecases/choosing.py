"""The choice among a job's candidates: fitted, priced on demand and on spot, within limits and memory."""

from __future__ import annotations

from dataclasses import dataclass

import tula_wire as wire
from tula_service.domain import Objective
from tula_service.perfmodel.choice import Choice, choose
from tula_service.perfmodel.knee import KneeFinding, find_knee
from tula_service.perfmodel.pricing import Estimate, price
from tula_service.perfmodel.recommend import Goal, tradeoff_curve
from tula_service.perfmodel.step_time_model import StepTimeModel
from tula_service.store import JobRecord, Transaction
from tula_service.usecases import convert, fitting, memory_bounds, planning, quality
from tula_service.usecases.fitting import Evidence
from tula_service.usecases.quality import Efficiency
from tula_wire import Configuration

__all__ = ["Answer", "answer", "priced"]


@dataclass(frozen=True)
class Answer:
    """A choice with everything it rests on; `spot` holds the ids of the estimates on interruptible capacity.

    `spec` is the job's as far as it can be priced (`convert.payable`). `doubtful` candidates may be profiled but not
    recommended: they are not safe enough to fit into memory.
    """

    spec: wire.JobSpec
    evidence: Evidence
    model: StepTimeModel
    estimates: tuple[Estimate, ...]
    choice: Choice
    spot: frozenset[int]
    efficiency: Efficiency | None = None
    doubtful: frozenset[Configuration] = frozenset()


def answer(tx: Transaction, job: JobRecord, spec: wire.JobSpec, objective: str) -> Answer:
    """Fit, price every candidate on demand and on spot, and choose."""
    evidence = fitting.evidence_of(tx, job, spec)
    model = fitting.fit(tx, job, spec, evidence)
    spec = convert.payable(spec, evidence.memory)
    goal = planning.goal_of(spec, objective)
    efficiency = quality.efficiency_of(tx, job, evidence.candidates)
    wants_quality = goal.objective is Objective.TIME_TO_QUALITY
    estimates, spot = priced(
        spec, evidence, model, goal, evidence.candidates, efficiency=efficiency if wants_quality else None
    )
    curve = tradeoff_curve(evidence.candidates, model, goal)
    if curve.global_batch_size.size:
        knee = find_knee(curve.global_batch_size, curve.time_s)
    else:
        knee = KneeFinding(None, "no knee: every candidate has the same global batch.")
    doubtful = frozenset(c for c in evidence.candidates if not _fits(spec, evidence, c))
    eligible = [e for e in estimates if e.configuration not in evidence.unavailable | doubtful]
    choice = choose(goal.objective, eligible or list(estimates), limits=goal.limits, knee=knee)
    return Answer(spec, evidence, model, estimates, choice, spot, efficiency, doubtful if eligible else frozenset())


def _fits(spec: wire.JobSpec, evidence: Evidence, c: Configuration) -> bool:
    probability = evidence.fits(c)
    return c in evidence.measured or probability is None or probability >= memory_bounds.safety_of(spec)


def priced(
    spec: wire.JobSpec,
    evidence: Evidence,
    model: StepTimeModel,
    goal: Goal,
    configurations: tuple[Configuration, ...],
    *,
    efficiency: Efficiency | None = None,
) -> tuple[tuple[Estimate, ...], frozenset[int]]:
    """Estimates of these configurations, on demand and then on spot, and the ids of the latter.

    With `efficiency`, time and cost are those to the quality that the base batch reaches.
    """
    on_demand, spot_offers = convert.offers_of(spec), convert.spot_offers_of(spec)
    estimates: list[Estimate] = []
    spot: set[int] = set()
    for offers in (on_demand, spot_offers):
        rows = [c for c in configurations if c.instance_type in offers]
        if not rows:
            continue
        predicted = model.predict(rows, level=goal.level)
        found = price(
            rows,
            predicted.intervals(),
            goal.training,
            offers,
            peak_bytes=evidence.peaks(rows),
            extrapolated=predicted.extrapolated.tolist(),
            measured=predicted.measured.tolist(),
            terms=predicted.terms(),
            steps_factor=None if efficiency is None else [1.0 / efficiency.of(c) for c in rows],
        )
        estimates += found
        if offers is spot_offers:
            spot |= {id(estimate) for estimate in found}
    return tuple(estimates), frozenset(spot)
