"""Loads the telemetry that charts and pages draw."""

from __future__ import annotations

from tula_service.dashboard import charts
from tula_service.errors import NotFound
from tula_service.store import Store
from tula_service.usecases import runs
from tula_service.usecases.access import Principal
from tula_service.usecases.telemetry import SeriesQuery, read_with_trend
from tula_wire import TelemetrySeries

QUALITY_COLUMNS = ("validation_accuracy", "accuracy", "loss")
MAX_QUALITY_RUNS = 24


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


def quality_runs(store: Store, principal: Principal, job_id: str) -> list[charts.QualityRun]:
    """Training runs with the first of accuracy on held-out data, accuracy, or loss that any of them reports."""
    listed = runs.list_runs(store, principal, job_id, kind="train", limit=MAX_QUALITY_RUNS).runs
    for column in QUALITY_COLUMNS:
        series = [(run, *series_of(store, principal, SeriesQuery(run.id, column, max_points=400))) for run in listed]
        found = [charts.QualityRun(run, trend or each) for run, each, trend in series if each is not None]
        if found:
            return found
    return []
