"""Defines operations that need several calls, as generators that yield calls and receive the responses.

The module also builds tables and charts. Its only I/O is to write files that the user named.
"""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeVar, get_args

from pydantic import BaseModel

from tula_client._calls import calls
from tula_client._errors import JobNotFoundError, MissingExtraError, NotFoundError, TulaError, UsageError
from tula_client._request import Flow, Question
from tula_client._spec import load_spec, model_in
from tula_wire import Candidate, Configuration, Estimate, JobSpec, JobSummary, Objective, Recommendation, Run

Cell = str | int | float | bool | None
Row = dict[str, Cell]
Table = Literal["candidates", "runs", "ledger", "samples", "telemetry", "events"]

TABLES: Final[tuple[Table, ...]] = get_args(Table)
_ESTIMATE: Final = (("", "value"), ("_low", "low"), ("_high", "high"))
_PAGE: Final = 100
_SAMPLES: Final = 5000
_POINTS: Final = 20_000
"""The maximum numbers of samples on a page (`_SAMPLES`) and of points of a series in one response (`_POINTS`)."""


class _Page(Protocol):
    @property
    def next_cursor(self) -> str | None: ...


_P = TypeVar("_P", bound=_Page)


def job_id(name_or_id: str) -> Flow[str]:
    """Return a job's id, given its id or a name that exactly one unarchived job has."""
    if not name_or_id.strip():
        raise JobNotFoundError("JOB is empty: give a job's id or name, which tula jobs list shows")
    try:
        return (yield from calls.job(name_or_id)).id
    except NotFoundError:
        pass
    ids = [job.id for job in (yield from jobs_named(name_or_id))]
    if not ids:
        raise JobNotFoundError(f"no job has the id or name {name_or_id!r}: tula jobs list shows all jobs")
    if len(ids) > 1:
        raise UsageError(f"{len(ids)} jobs have the name {name_or_id!r}: give one job's id ({', '.join(ids[:5])})")
    return ids[0]


def resolve_job(job: str | Path | Mapping[str, Any] | JobSpec) -> Flow[str]:
    """Return the id of a job, given its id, its name or its specification (a `JobSpec`, a mapping or a TOML file)."""
    if isinstance(job, str):
        return (yield from job_id(job))
    return (yield from calls.register(load_spec(job))).job.id


def jobs_named(name: str, limit: int | None = None) -> Flow[list[JobSummary]]:
    """Return the unarchived jobs with this name, newest first; if `limit` is given, return at most that many jobs."""
    summaries: list[JobSummary] = []
    cursor: str | None = None
    while limit is None or len(summaries) < limit:
        page = yield from calls.jobs(search=name, limit=_PAGE, cursor=cursor)
        summaries += [job for job in page.jobs if job.name == name]
        if (cursor := page.next_cursor) is None:
            break
    return summaries[:limit]


def runs(job_id: str) -> Flow[list[Run]]:
    """Return all runs of a job, newest first."""
    pages = yield from _pages(lambda cursor: calls.runs(job_id, limit=_PAGE, cursor=cursor))
    return [run for page in pages for run in page.runs]


def wait(job_id: str, timeout_s: float | None = None, *, poll_s: float = 2.0) -> Flow[Recommendation]:
    """Wait until no profiling run is pending or in progress, then return the recommendation.

    The service is queried every `poll_s` seconds. Raises `TulaError` after `timeout_s` seconds; if `timeout_s` is None,
    the wait has no time limit.
    """
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    while (job := (yield from calls.job(job_id))).state == "planning":
        left = deadline - time.monotonic()
        if left <= 0:
            done = f"{job.runs_done} of {job.runs_planned} runs are done"
            raise TulaError(
                f"{job.name} is still being profiled ({done}): start its runs with tula tune, or increase timeout_s"
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
    """Return a chart as an Altair object for notebooks; with `output`, write it to a PNG, SVG or JSON file instead."""
    spec = yield from calls.chart(job_id, name, quantity=quantity, objective=objective)
    if output is None:
        with needs_extra("a plot in a notebook"):
            import altair
        return altair.Chart.from_dict(spec)
    yield functools.partial(save, spec, Path(output))
    return None


def to_dataframe(job_id: str, table: Table = "candidates") -> Flow[Any]:
    """Return a table as a pandas data frame. Raises `MissingExtraError` if pandas is not installed."""
    table_rows = yield from rows(job_id, table)
    with needs_extra("a data frame"):
        import pandas
    return pandas.DataFrame(table_rows)


def rows(job_id: str, table: Table = "candidates") -> Flow[list[Row]]:
    """Return a table as a list of dictionaries whose keys are field names of the API.

    A configuration becomes one column per field, plus `world_size` and `global_batch_size`. An estimate becomes three
    columns: its value, and the ends of its interval with the suffixes `_low` and `_high`. Any other object becomes one
    column per field; lists and mappings become JSON text. Raises `TulaError` for an unknown table.
    """
    if table == "candidates":
        answer = yield from calls.recommendation(job_id)
        return [_row(Candidate, candidate) | roles(candidate, answer) for candidate in answer.candidates]
    if table == "runs":
        return _rows((yield from runs(job_id)))
    if table == "ledger":
        return _rows((yield from calls.ledger(job_id)).entries)
    if table == "samples":
        pages = yield from _pages(lambda cursor: calls.samples(job_id, limit=_SAMPLES, cursor=cursor))
        return _rows(sample for page in pages for sample in page.samples)
    if table == "telemetry":
        return (yield from _telemetry(job_id))
    if table == "events":
        return _rows((yield from calls.past_events(job_id)))
    raise TulaError(f"table: {table!r} is unknown: use one of {', '.join(TABLES)}")


def _pages(page: Callable[[str | None], Question[_P]]) -> Flow[list[_P]]:
    pages = [(yield from page(None))]
    while (cursor := pages[-1].next_cursor) is not None:
        pages.append((yield from page(cursor)))
    return pages


def _telemetry(job_id: str) -> Flow[list[Row]]:
    """Return all points of all telemetry columns that the first rank of each run has reported."""
    points: list[Row] = []
    for run in (yield from runs(job_id)):
        for column in (yield from calls.series(run.id)).available:
            points += yield from _points(run.id, column, None, None)
    return points


def _points(run_id: str, column: str, first: int | None, last: int | None) -> Flow[list[Row]]:
    """Return the points from step `first` to `last`, splitting the range in two if one response cannot hold it."""
    series = yield from calls.series(run_id, column, max_points=_POINTS, first_step=first, last_step=last)
    if not series.downsampled or series.steps[0] == series.steps[-1]:
        same: Row = {"run_id": series.run_id, "rank": series.rank, "column": series.column}
        points = zip(series.steps, series.values, strict=True)
        return [{**same, "step": step, "value": value} for step, value in points]
    middle = (series.steps[0] + series.steps[-1]) // 2
    before = yield from _points(run_id, column, first, middle)
    return before + (yield from _points(run_id, column, middle + 1, last))


def _rows(models: Iterable[BaseModel]) -> list[Row]:
    return [_row(type(model), model) for model in models]


def roles(candidate: Candidate, recommendation: Recommendation) -> dict[str, bool]:
    """Return, for each role such as `chosen` or `knee`, whether the candidate has that role in the recommendation."""

    def is_same(other: Candidate | None) -> bool:
        return other is not None and (other.configuration, other.spot) == (candidate.configuration, candidate.spot)

    return {
        "chosen": is_same(recommendation.chosen),
        "least_time": is_same(recommendation.least_time),
        "least_cost": is_same(recommendation.least_cost),
        "knee": recommendation.knee.found and recommendation.knee.configuration == candidate.configuration,
    }


def _row(kind: type[BaseModel], model: BaseModel | None) -> Row:
    """Return one or more columns for each field of `kind`, with the values of `model`.

    If `model` is None, every value is None.
    """
    row: Row = {}
    for name, field in kind.model_fields.items():
        value = getattr(model, name, None)
        inner = model_in(field.annotation)
        if name == "configuration":
            row |= _configuration(value)
        elif inner is Estimate:
            row |= {name + end: getattr(value, part, None) for end, part in _ESTIMATE}
        elif inner is not None:
            row |= _row(inner, value)
        else:
            row[name] = _cell(value)
    return row


def _configuration(value: Configuration | None) -> Row:
    if value is None:
        return dict.fromkeys((*Configuration.__annotations__, "world_size", "global_batch_size"))
    sizes: Row = {"world_size": value.world_size, "global_batch_size": value.global_batch_size}
    return value.as_json() | {"options": _cell(dict(value.options))} | sizes


def _cell(value: Any) -> Cell:
    if isinstance(value, datetime):
        return value.isoformat()
    return value if value is None or isinstance(value, (str, int, float, bool)) else json.dumps(value)


def save(spec: dict[str, Any], path: Path) -> None:
    """Write a Vega-Lite specification to a PNG, SVG or JSON file; the suffix of `path` selects the format.

    Rendering needs no network. Raises `UsageError` for any other suffix or if the file cannot be written, and
    `MissingExtraError` if the renderer is not installed.
    """
    kind = check_suffix(path, ".png", ".svg", ".json")
    content = json.dumps(spec, indent=1).encode() if kind == "json" else _render(spec, kind)
    write_file(path, content)


def check_suffix(path: Path, *kinds: str) -> str:
    """Return the suffix of `path` without the dot. Raises `UsageError` if the suffix is not one of `kinds`."""
    if path.suffix.lower() not in kinds:
        raise UsageError(f"--output: {path.name!r} must end in one of {', '.join(kinds)}")
    return path.suffix.lower()[1:]


def write_file(path: Path, content: bytes) -> None:
    """Write a file that the user named. Raises `UsageError` if the file cannot be written."""
    try:
        path.write_bytes(content)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from None


@contextmanager
def needs_extra(what: str, extra: str = "notebook") -> Iterator[None]:
    """If an import in the `with` block fails, raise a `MissingExtraError` that names the extra to install."""
    try:
        yield
    except ImportError:
        raise MissingExtraError(what, extra) from None


def _render(spec: dict[str, Any], kind: str) -> bytes:
    with needs_extra(f"a chart as {kind.upper()}"):
        import vl_convert
    try:
        if kind == "png":
            return bytes(vl_convert.vegalite_to_png(json.dumps(spec), scale=2.0, allowed_base_urls=[]))
        return str(vl_convert.vegalite_to_svg(json.dumps(spec), allowed_base_urls=[])).encode()
    except ValueError as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else "unknown"
        raise TulaError(f"the chart could not be drawn ({first}): save it as .json to inspect it") from None
