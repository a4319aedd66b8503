"""Loads the telemetry that charts and pages draw."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tula_service.dashboard import charts
from tula_service.errors import NotFound
from tula_service.store import Store
from tula_service.usecases import runs
from tula_service.usecases.access import Principal
from tula_service.usecases.telemetry import SeriesQuery, columns_of_runs, read_of_runs, read_with_trend
from tula_wire import TelemetrySeries

QUALITY_COLUMNS = ("validation_accuracy", "accuracy", "loss")
MAX_COMPARED = 200
MAX_POINTS, _MIN_POINTS, _POINTS_OF_ALL = 400, 30, 6_000


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
    """Training runs by one column; `columns` are all that any of them has reported, `next_cursor` is of older runs."""

    column: str
    columns: list[str]
    runs: list[charts.QualityRun]
    next_cursor: str | None


def compare_runs(
    store: Store,
    principal: Principal,
    job_id: str,
    column: str | None = None,
    *,
    trend: int = 150,
    cursor: str | None = None,
    only: Collection[str] = (),
) -> Comparison:
    """The newest 200 training runs, or those before the cursor, that reported `column`; `only` some of them, by id.

    Without a column, the first that any reported of accuracy on held-out data, accuracy, loss and whatever else. The
    more runs, the fewer points of each.
    """
    page = runs.list_runs(store, principal, job_id, kind="train", cursor=cursor, limit=MAX_COMPARED)
    listed = [run for run in page.runs if not only or run.id in only]
    columns = sorted({name for names in columns_of_runs(store, principal, job_id, listed).values() for name in names})
    wanted = column or next((name for name in (*QUALITY_COLUMNS, *columns) if name in columns), QUALITY_COLUMNS[0])
    points = min(MAX_POINTS, max(_MIN_POINTS, _POINTS_OF_ALL // max(1, len(listed))))
    query = SeriesQuery("", wanted, max_points=points, trend_points=min(trend, points))
    series = read_of_runs(store, principal, job_id, listed, query)
    found = [charts.QualityRun(run, series[run.id]) for run in listed if run.id in series]
    return Comparison(wanted, columns, found, page.next_cursor)
