"""Questions that take several calls: generators, without I/O, that yield calls and are sent their answers."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeVar

from tula_client._calls import calls
from tula_client._errors import JobNotFoundError, NotFoundError, TulaError
from tula_client._request import Flow, Question
from tula_client.launch.spec import read_spec
from tula_client.tables import TABLES, Row, Table, altair_chart, candidate_rows, data_frame, save, telemetry_rows
from tula_client.tables import rows as model_rows
from tula_wire import JobSpec, JobSummary, Objective, Recommendation, Run

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


def jobs_named(name: str, limit: int | None = None) -> Flow[list[JobSummary]]:
    """The jobs of that name that are not archived, newest first: all, or the first `limit`."""
    found: list[JobSummary] = []
    cursor: str | None = None
    while limit is None or len(found) < limit:
        page = yield from calls.jobs(search=name, limit=_PAGE, cursor=cursor)
        found += [job for job in page.jobs if job.name == name]
        if (cursor := page.next_cursor) is None:
            break
    return found[:limit]


def runs(job_id: str) -> Flow[list[Run]]:
    """All runs of a job, newest first."""
    pages = yield from _pages(lambda cursor: calls.runs(job_id, limit=_PAGE, cursor=cursor))
    return [run for page in pages for run in page.runs]


def wait(job_id: str, timeout_s: float | None = None, *, poll_s: float = 2.0) -> Flow[Recommendation]:
    """Wait until no profiling run waits or is in progress, and return the recommendation.

    Asks the service every `poll_s` seconds. Raises `TulaError` after `timeout_s` seconds; None waits for ever.
    """
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while (job := (yield from calls.job(job_id))).state == "planning":
        left = deadline - time.monotonic()
        if left <= 0:
            done = f"{job.runs_done} of {job.runs_planned} runs are done"
            raise TulaError(
                f"{job.name} is still profiled ({done}): start them with tula tune, or give a longer timeout_s"
            )
        yield min(poll_s, left)
    return (yield from calls.recommendation(job_id))


def plot(
    job_id: str,
    name: str = "tradeoff",
    output: str | Path | None = None,
    *,
    quantity: Literal["time", "cost"] = "time",
    objective: Objective | None = None,
) -> Flow[Any]:
    """The chart as an Altair object, for notebooks; with `output`, written as PNG, SVG or JSON instead."""
    spec = yield from calls.chart(job_id, name, quantity=quantity, objective=objective)
    if output is None:
        return altair_chart(spec)
    yield functools.partial(save, spec, Path(output))
    return None


def to_dataframe(job_id: str, table: Table = "candidates") -> Flow[Any]:
    """A table as a pandas data frame; raises `MissingExtraError` without pandas."""
    return data_frame((yield from rows(job_id, table)))


def rows(job_id: str, table: Table = "candidates") -> Flow[list[Row]]:
    """A table as a list of dictionaries; raises `TulaError` for an unknown one."""
    if table == "candidates":
        return candidate_rows((yield from calls.recommendation(job_id)))
    if table == "runs":
        return model_rows((yield from runs(job_id)))
    if table == "ledger":
        return model_rows((yield from calls.ledger(job_id)).entries)
    if table == "samples":
        pages = yield from _pages(lambda cursor: calls.samples(job_id, limit=_SAMPLES, cursor=cursor))
        return model_rows(sample for page in pages for sample in page.samples)
    if table == "telemetry":
        return (yield from _telemetry(job_id))
    if table == "events":
        return model_rows((yield from calls.past_events(job_id)))
    raise TulaError(f"table: {table!r} is unknown: use one of {', '.join(TABLES)}")


def _pages(page: Callable[[str | None], Question[_P]]) -> Flow[list[_P]]:
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
