"""Questions that take several calls: generators, without I/O, that yield calls and are sent their answers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from tula_client import _calls as calls
from tula_client._errors import JobNotFoundError, NotFoundError, TulaError
from tula_client._request import Call
from tula_client.launch.spec import read_spec
from tula_client.tables import TABLES, Row, Table, candidate_rows, rows, telemetry_rows
from tula_wire import JobCreated, JobSpec, Ledger, Run, TelemetrySeries

T = TypeVar("T")
Flow = Generator[Call[Any], Any, T]

_PAGE: Final = 100
_SAMPLES: Final = 5000
_POINTS: Final = 20_000
"""Most samples on a page, and most points of a series in one answer, that the service sends."""


def answered(flow: Flow[T], send: Callable[[Call[Any]], Any]) -> T:
    """The result of `flow`, each of its calls sent by `send`; an error of `send` is raised where the flow asked."""
    advance: Callable[[], Call[Any]] = flow.__next__
    while True:
        try:
            call = advance()
        except StopIteration as end:
            result: T = end.value
            return result
        try:
            advance = _sender(flow, send(call))
        except TulaError as error:
            advance = _thrower(flow, error)


async def answered_async(flow: Flow[T], send: Callable[[Call[Any]], Any]) -> T:
    """Like `answered`, with a `send` to await."""
    advance: Callable[[], Call[Any]] = flow.__next__
    while True:
        try:
            call = advance()
        except StopIteration as end:
            result: T = end.value
            return result
        try:
            advance = _sender(flow, await send(call))
        except TulaError as error:
            advance = _thrower(flow, error)


def _sender(flow: Flow[Any], answer: Any) -> Callable[[], Call[Any]]:
    return lambda: flow.send(answer)


def _thrower(flow: Flow[Any], error: TulaError) -> Callable[[], Call[Any]]:
    return lambda: flow.throw(error)


def job_id(name_or_id: str) -> Flow[str]:
    """The id of a job given by id, or by a name that exactly one job has that is not archived."""
    if not name_or_id.strip():
        raise JobNotFoundError("JOB: give a job's id or name; tula jobs list shows them")
    try:
        found = yield calls.job(name_or_id)
    except NotFoundError:
        jobs = yield from _pages(lambda cursor: calls.jobs(search=name_or_id, limit=_PAGE, cursor=cursor), "jobs")
        ids = [job.id for job in jobs if job.name == name_or_id]
    else:
        ids = [found.id]
    if not ids:
        raise JobNotFoundError(f"no job has the id or name {name_or_id!r}: tula jobs list shows them")
    if len(ids) > 1:
        raise TulaError(f"{len(ids)} jobs have the name {name_or_id!r}: give the id of one ({', '.join(ids[:5])})")
    return str(ids[0])


def job_of(job: str | Path | Mapping[str, Any] | JobSpec) -> Flow[str]:
    """The id of a job given by id or name, or of the one with the specification in a model, mapping or TOML file."""
    if isinstance(job, str):
        return (yield from job_id(job))
    created: JobCreated = yield calls.register(read_spec(job))
    return created.job.id


def runs(job_id: str) -> Flow[list[Run]]:
    """All runs of a job, newest first."""
    return _pages(lambda cursor: calls.runs(job_id, limit=_PAGE, cursor=cursor), "runs")


def table(job_id: str, name: Table) -> Flow[list[Row]]:
    """The rows of one of `TABLES`; raises `TulaError` for another name."""
    if name == "candidates":
        return candidate_rows((yield calls.recommendation(job_id)))
    if name == "runs":
        return rows((yield from runs(job_id)))
    if name == "ledger":
        ledger: Ledger = yield calls.ledger(job_id)
        return rows(ledger.entries)
    if name == "samples":
        pages = _pages(lambda cursor: calls.samples(job_id, limit=_SAMPLES, cursor=cursor), "samples")
        return rows((yield from pages))
    if name == "telemetry":
        return (yield from _telemetry(job_id))
    if name == "events":
        return rows((yield calls.past_events(job_id)))
    raise TulaError(f"table: {name!r} is unknown: use one of {', '.join(TABLES)}")


def _pages(page: Callable[[str | None], Call[Any]], items: str) -> Flow[list[Any]]:
    found: list[Any] = []
    cursor = None
    while True:
        answer = yield page(cursor)
        found += getattr(answer, items)
        if (cursor := answer.next_cursor) is None:
            return found


def _telemetry(job_id: str) -> Flow[list[Row]]:
    """Every point of every column that the first rank of each run has reported."""
    found: list[Row] = []
    for run in (yield from runs(job_id)):
        names: TelemetrySeries = yield calls.series(run.id)
        for column in names.available:
            found += yield from _points(run.id, column, None, None)
    return found


def _points(run_id: str, column: str, first: int | None, last: int | None) -> Flow[list[Row]]:
    """The points from step `first` to `last`; a range with more than one answer holds is halved."""
    series: TelemetrySeries = yield calls.series(run_id, column, max_points=_POINTS, first_step=first, last_step=last)
    if not series.downsampled or series.steps[0] == series.steps[-1]:
        return telemetry_rows(series)
    middle = (series.steps[0] + series.steps[-1]) // 2
    before = yield from _points(run_id, column, first, middle)
    return before + (yield from _points(run_id, column, middle + 1, last))
