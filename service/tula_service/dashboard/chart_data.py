"""Loads the telemetry that charts and pages draw."""

from __future__ import annotations

from dataclasses import dataclass

from tula_service.dashboard import charts
from tula_service.errors import NotFound
from tula_service.store import Store
from tula_service.usecases import runs
from tula_service.usecases.access import Principal
from tula_service.usecases.telemetry import SeriesQuery, columns_of, read_with_trend
from tula_wire import TelemetrySeries

QUALITY_COLUMNS = ("validation_accuracy", "accuracy", "loss")
MAX_COMPARED = 24


def series_of(
    store: Store, principal: Principal, query: SeriesQuery
) -> tuple[TelemetrySeries, TelemetrySeries | None] | tuple[None, None]:
    """A column and its trend (None for a short one), or (None, None) when the run never reported it."""
    try:
        return read_with_trend(store, principal, query)
    except NotFound as missing:
        if missing.field != "column":
            raise
        return None, None


@dataclass(frozen=True)
class Comparison:
    """Training runs by one column; `columns` are all that any of the job's newest training runs has reported."""

    column: str
    columns: list[str]
    runs: list[charts.QualityRun]


def compare_runs(store: Store, principal: Principal, job_id: str, column: str | None = None) -> Comparison:
    """The newest training runs that reported `column`; without one, the first that any reported of accuracy on held-out
    data, accuracy, loss and whatever else."""
    listed = runs.list_runs(store, principal, job_id, kind="train", limit=MAX_COMPARED).runs
    columns = sorted({name for run in listed for name in columns_of(store, principal, run.id)})
    wanted = column or next((name for name in (*QUALITY_COLUMNS, *columns) if name in columns), QUALITY_COLUMNS[0])
    series = [(run, *series_of(store, principal, SeriesQuery(run.id, wanted, max_points=400))) for run in listed]
    found = [charts.QualityRun(run, trend or each) for run, each, trend in series if each is not None]
    return Comparison(wanted, columns, found)
