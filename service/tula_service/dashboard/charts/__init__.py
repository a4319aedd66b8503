"""Every chart of Tula, defined once: pure functions from the wire's models to Vega-Lite specifications with their data.

The page, the notebook (`job.plot()`) and PNG or SVG files render the same specification. Nothing here reads a
database or a clock; `api/charts.py` answers `GET .../charts/{name}` with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tula_service.dashboard.charts.accuracy import accuracy, accuracy_of_all, calibration
from tula_service.dashboard.charts.candidates import Quantity, frontier, memory, step_breakdown, tradeoff
from tula_service.dashboard.charts.vega import Spec
from tula_wire import Job, Ledger, LedgerEntry, Recommendation, Run

_OF_CANDIDATES: Final = {"frontier": frontier, "memory": memory, "step_breakdown": step_breakdown}
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
        return tradeoff(job, recommendation, quantity)
    if name == "accuracy":
        return accuracy(job, ledger, trainings)
    return _OF_CANDIDATES[name](job, recommendation)


def service_chart(name: str, outcomes: Sequence[tuple[str, LedgerEntry]]) -> Spec:
    """One of `SERVICE_CHARTS` of outcomes over all jobs, each with what it is of."""
    return accuracy_of_all(outcomes) if name == "accuracy" else calibration([entry for _, entry in outcomes])
