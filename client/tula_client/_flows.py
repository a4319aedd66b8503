"""Questions that take several calls: generators, without I/O, that yield calls and are sent their answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from tula_client import _calls as calls
from tula_client._errors import JobNotFoundError, NotFoundError, TulaError
from tula_client._request import Call, Flow
from tula_client.launch.spec import read_spec
from tula_client.tables import TABLES, Row, Table, candidate_rows, rows, telemetry_rows
from tula_wire import JobSpec, JobSummary, Run

_PAGE: Final = 100
_SAMPLES: Final = 5000
_POINTS: Final = 20_000
"""Most samples on a page, and most points of a series in one answer, that the service sends."""


class _Page(Protocol):
    @property
    def next_cursor(self) -> str | None: ...


_P = TypeVar("_P", bound=_Page)


def job_id(name_or_id: str) -> Flow[str]:
    """The id of a job given by id, or by a name that exactly one job has that is not archived."""
    if not name_or_id.strip():
        raise JobNotFoundError("JOB: give a job's id or name; tula jobs list shows them")
    try:
        return (yield from calls.job(name_or_id)).id
    except NotFoundError:
        pass
    ids = [job.id for job in (yield from jobs_named(name_or_id))]
    if not ids:
        raise JobNotFoundError(f"no job has the id or name {name_or_id!r}: tula jobs list shows them")
    if len(ids) > 1:
        raise TulaError(f"{len(ids)} jobs have the name {name_or_id!r}: give the id of one ({', '.join(ids[:5])})")
    return ids[0]


def job_of(job: str | Path | Mapping[str, Any] | JobSpec) -> Flow[str]:
    """The id of a job given by id or name, or of the one with the specification in a model, mapping or TOML file."""
    if isinstance(job, str):
        return (yield from job_id(job))
    return (yield from calls.register(read_spec(job))).job.id


def jobs_named(name: str) -> Flow[list[JobSummary]]:
    """All jobs of that name that are not archived, newest first."""
    pages = yield from _pages(lambda cursor: calls.jobs(search=name, limit=_PAGE, cursor=cursor))
    return [job for page in pages for job in page.jobs if job.name == name]


def runs(job_id: str) -> Flow[list[Run]]:
    """All runs of a job, newest first."""
    pages = yield from _pages(lambda cursor: calls.runs(job_id, limit=_PAGE, cursor=cursor))
    return [run for page in pages for run in page.runs]


def table(job_id: str, name: Table) -> Flow[list[Row]]:
    """The rows of one of `TABLES`; raises `TulaError` for another name."""
    if name == "candidates":
        return candidate_rows((yield from calls.recommendation(job_id)))
    if name == "runs":
        return rows((yield from runs(job_id)))
    if name == "ledger":
        return rows((yield from calls.ledger(job_id)).entries)
    if name == "samples":
        pages = yield from _pages(lambda cursor: calls.samples(job_id, limit=_SAMPLES, cursor=cursor))
        return rows(sample for page in pages for sample in page.samples)
    if name == "telemetry":
        return (yield from _telemetry(job_id))
    if name == "events":
        return rows((yield from calls.past_events(job_id)))
    raise TulaError(f"table: {name!r} is unknown: use one of {', '.join(TABLES)}")


def _pages(page: Callable[[str | None], Call[_P]]) -> Flow[list[_P]]:
    found = [(yield from page(None))]
    while (cursor := found[-1].next_cursor) is not None:
        found.append((yield from page(cursor)))
    return found


def _telemetry(job_id: str) -> Flow[list[Row]]:
    """Every point of every column that the first rank of each run has reported."""
    found: list[Row] = []
    for run in (yield from runs(job_id)):
        for column in (yield from calls.series(run.id)).available:
            found += yield from _points(run.id, column, None, None)
    return found


def _points(run_id: str, column: str, first: int | None, last: int | None) -> Flow[list[Row]]:
    """The points from step `first` to `last`; a range with more than one answer holds is halved."""
    series = yield from calls.series(run_id, column, max_points=_POINTS, first_step=first, last_step=last)
    if not series.downsampled or series.steps[0] == series.steps[-1]:
        return telemetry_rows(series)
    middle = (series.steps[0] + series.steps[-1]) // 2
    before = yield from _points(run_id, column, first, middle)
    return before + (yield from _points(run_id, column, middle + 1, last))
