"""The charts of a job by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tula_service.dashboard.charts.accuracy import accuracy
from tula_service.dashboard.charts.breakdown import step_breakdown
from tula_service.dashboard.charts.candidates import Quantity
from tula_service.dashboard.charts.memory import memory
from tula_service.dashboard.charts.spec import Spec, one_at_a_time
from tula_service.dashboard.charts.surface import cost_surface
from tula_service.dashboard.charts.tradeoff import tradeoff
from tula_wire import Job, Ledger, Recommendation, Run

JOB_CHARTS: Final = ("tradeoff", "cost_surface", "memory", "step_breakdown", "accuracy")


@one_at_a_time
def job_chart(
    name: str,
    job: Job,
    recommendation: Recommendation,
    ledger: Ledger,
    *,
    quantity: Quantity = "time",
    trainings: Sequence[Run] = (),
) -> Spec:
    """One of `JOB_CHARTS` as a Vega-Lite specification. Raises KeyError for another name."""
    if name == "tradeoff":
        return tradeoff(job, recommendation, quantity)
    if name == "accuracy":
        return accuracy(job, ledger, trainings)
    return {"cost_surface": cost_surface, "memory": memory, "step_breakdown": step_breakdown}[name](job, recommendation)
