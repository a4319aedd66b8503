"""Estimates of the performance model as the wire's candidates."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import tula_wire as wire
from tula_service.perfmodel.choice import Choice
from tula_service.perfmodel.pricing import Estimate
from tula_service.perfmodel.step_time_model import StepTimeModel
from tula_service.usecases import convert
from tula_service.usecases.fitting import MODEL_VERSION, Evidence
from tula_service.usecases.quality import Efficiency
from tula_wire import Configuration

__all__ = ["Renderer", "model_report"]


class Renderer:
    """Turns estimates of one job into candidates; remembers what is the same for all of them."""

    def __init__(
        self,
        spec: wire.JobSpec,
        evidence: Evidence,
        *,
        choice: Choice | None = None,
        spot: Collection[int] = (),
        efficiency: Efficiency | None = None,
        doubtful: Collection[Configuration] = (),
    ) -> None:
        self._priced = convert.has_prices(spec)
        self._evidence = evidence
        self._spot = frozenset(spot)
        self._efficiency = efficiency
        self._doubtful = frozenset(doubtful)
        self._excluded: dict[int, str] = {}
        self._frontier: frozenset[int] | None = None
        if choice is not None:
            self._excluded = {id(found.estimate): found.sentence for found in choice.excluded}
            self._frontier = frozenset(id(estimate) for estimate in choice.frontier)

    def candidate(self, estimate: Estimate) -> wire.Candidate:
        """One candidate with everything that is expected of it."""
        c = estimate.configuration
        (memory,) = self._evidence.peaks([c])
        excluded = self._evidence.ruled_out.get(c) or self._excluded.get(id(estimate))
        if excluded is None and c in self._doubtful:
            excluded = f"it fits into memory with a probability of {self._evidence.fits(c):.0%} only."
        if excluded is None and c in self._evidence.unavailable:
            excluded = "its profiling run failed; fix the cause and register the job again to retry it."
        return wire.Candidate(
            configuration=c,
            global_batch_size=c.global_batch_size,
            step_time_s=convert.wire_estimate(estimate.step_time_s),
            epoch_time_s=convert.wire_estimate(estimate.epoch_time_s),
            total_time_s=convert.wire_estimate(estimate.time_s),
            cost_usd=convert.wire_estimate(estimate.cost_usd) if self._priced else None,
            memory_bytes=None if memory is None else convert.wire_estimate(memory),
            memory_fits=self._evidence.fits(c),
            terms=_terms(estimate),
            spot=id(estimate) in self._spot,
            profiled=estimate.measured,
            extrapolated=estimate.extrapolated,
            dominated=self._frontier is not None and excluded is None and id(estimate) not in self._frontier,
            excluded_by=excluded,
            statistical_efficiency=None if self._efficiency is None else self._efficiency.of(c),
            measured_step_time_s=self._evidence.measured.get(c),
        )

    def optional(self, estimate: Estimate | None) -> wire.Candidate | None:
        """The same for one that may be missing."""
        return None if estimate is None else self.candidate(estimate)


def model_report(
    model: StepTimeModel, evidence: Evidence, warnings: Sequence[str], *, cross_validated_error: float | None = None
) -> wire.ModelReport:
    """Which model spoke, on what, and what it cannot say."""
    memory = [note for name in sorted(evidence.memory) for note in evidence.memory[name].notes]
    return wire.ModelReport(
        form=model.form.value,
        version=MODEL_VERSION,
        num_runs=evidence.num_runs,
        num_samples=evidence.num_samples,
        cross_validated_error=cross_validated_error,
        warnings=list(dict.fromkeys((*warnings, *model.notes, *memory, *evidence.warnings))),
    )


def _terms(estimate: Estimate) -> wire.Terms | None:
    if "compute_s" not in estimate.terms:
        return None
    return wire.Terms(
        compute_time_s=estimate.terms["compute_s"], exposed_comm_time_s=max(0.0, estimate.terms["exposed_comm_s"])
    )
