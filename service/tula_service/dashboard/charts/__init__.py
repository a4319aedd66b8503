"""Every chart of Tula, defined once: pure functions from the wire's models to Vega-Lite specifications with their data.

The page, the notebook (`job.plot()`) and PNG or SVG files render the same specification. Nothing here reads a
database or a clock; `api/charts.py` answers `GET .../charts/{name}` with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tula_service.dashboard.charts.accuracy import accuracy, accuracy_of_all, calibration
from tula_service.dashboard.charts.candidates import (
    Quantity,
    frontier,
    memory,
    named_candidates,
    step_breakdown,
    tradeoff,
)
from tula_service.dashboard.charts.render import javascript, png, svg
from tula_service.dashboard.charts.runs import (
    RUN_CHARTS,
    Over,
    QualityRun,
    columns_of,
    quality_chart,
    rank_memory,
    run_chart,
)
from tula_service.dashboard.charts.vega import PALETTE, Spec
from tula_wire import Job, Ledger, LedgerEntry, Recommendation, Run

__all__ = [
    "JOB_CHARTS",
    "PALETTE",
    "RUN_CHARTS",
    "SERVICE_CHARTS",
    "Over",
    "QualityRun",
    "Quantity",
    "Spec",
    "columns_of",
    "javascript",
    "job_chart",
    "named_candidates",
    "png",
    "quality_chart",
    "rank_memory",
    "run_chart",
    "service_chart",
    "svg",
]

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
