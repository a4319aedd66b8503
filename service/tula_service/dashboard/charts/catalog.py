"""Which charts exist, and the functions that draw them by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tula_service.dashboard.charts import accuracy, breakdown, frontier, memory, tradeoff
from tula_service.dashboard.charts.candidates import Quantity
from tula_service.dashboard.charts.style import Spec
from tula_wire import Job, Ledger, LedgerEntry, Recommendation, Run

_OF_CANDIDATES: Final = {
    "frontier": frontier.frontier,
    "memory": memory.memory,
    "step_breakdown": breakdown.step_breakdown,
}
JOB_CHARTS: Final = ("frontier", "tradeoff", "memory", "step_breakdown", "accuracy")
SERVICE_CHARTS: Final = ("accuracy", "calibration")


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
        return tradeoff.tradeoff(job, recommendation, quantity)
    if name == "accuracy":
        return accuracy.accuracy(job, ledger, trainings)
    return _OF_CANDIDATES[name](job, recommendation)


def service_chart(name: str, outcomes: Sequence[tuple[str, LedgerEntry]]) -> Spec:
    """One of `SERVICE_CHARTS` of outcomes over all jobs, each with what it is of. Raises KeyError for another name."""
    if name == "accuracy":
        return accuracy.accuracy_of_all(outcomes)
    return {"calibration": accuracy.calibration}[name]([entry for _, entry in outcomes])
