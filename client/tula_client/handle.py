"""Handles of a job for scripts and notebooks, its recommendation in one call, and search of jobs by name."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tula_client import _flows
from tula_client._errors import TulaError
from tula_client.plots import altair_chart, save
from tula_client.tables import Row, Table, data_frame
from tula_wire import Event, Job, JobSpec, JobSummary, Objective, Predictions, Recommendation, Run

if TYPE_CHECKING:
    from tula_client._client import AsyncClient, Client

PAGE = 100


class JobHandle:
    """One job of one service. Every access queries the service: the handle caches nothing."""

    def __init__(self, client: Client, job_id: str) -> None:
        self.client = client
        self.id = job_id

    def status(self) -> Job:
        """The job with its plan."""
        return self.client.job(self.id)

    def recommendation(self, objective: Objective | None = None) -> Recommendation:
        """The recommended configuration and the reason; by default for the job's objective."""
        return self.client.recommendation(self.id, objective=objective)

    def predict(
        self,
        num_nodes: int | list[int] | None = None,
        global_batch_size: int | list[int] | None = None,
        *,
        local_batch_size: int | list[int] | None = None,
        instance_type: str | list[str] | None = None,
        usd_per_node_hour: float | None = None,
        deadline_s: float | None = None,
    ) -> Predictions:
        """What-if: predictions for all combinations; what is omitted takes every value that the job allows."""
        return self.client.predictions(
            self.id,
            num_nodes=num_nodes,
            global_batch_size=global_batch_size,
            local_batch_size=local_batch_size,
            instance_type=instance_type,
            usd_per_node_hour=usd_per_node_hour,
            deadline_s=deadline_s,
        )

    def wait(self, timeout_s: float | None = None, *, poll_s: float = 2.0) -> Recommendation:
        """Wait until no profiling run waits or is in progress, and return the recommendation.

        Asks the service every `poll_s` seconds. Raises `TulaError` after `timeout_s` seconds; None waits for ever.
        """
        deadline = _deadline(timeout_s)
        while (job := self.status()).state == "planning":
            time.sleep(_pause_s(job, deadline, poll_s))
        return self.recommendation()

    def runs(self) -> list[Run]:
        """All runs, newest first."""
        return all_runs(self.client, self.id)

    def events(self, last_id: int | None = None) -> Iterator[Event]:
        """Events of the job as they happen; ends when the caller stops."""
        return self.client.events(self.id, last_id=last_id)

    def rows(self, table: Table = "candidates") -> list[Row]:
        """A table as a list of dictionaries; raises `TulaError` for an unknown one."""
        return _flows.answered(_flows.table(self.id, table), self.client.send)

    def to_dataframe(self, table: Table = "candidates") -> Any:
        """A table as a pandas data frame; raises `MissingExtraError` without pandas."""
        return data_frame(self.rows(table))

    def chart(
        self, name: str = "tradeoff", *, quantity: Literal["time", "cost"] = "time", objective: Objective | None = None
    ) -> dict[str, Any]:
        """The Vega-Lite specification of a chart with its data; `quantity` is drawn by `tradeoff`."""
        return self.client.chart(self.id, name, quantity=quantity, objective=objective)

    def plot(
        self,
        name: str = "tradeoff",
        output: str | Path | None = None,
        *,
        quantity: Literal["time", "cost"] = "time",
        objective: Objective | None = None,
    ) -> Any:
        """The chart as an Altair object, for notebooks; with `output`, written as PNG, SVG or JSON instead."""
        spec = self.chart(name, quantity=quantity, objective=objective)
        if output is None:
            return altair_chart(spec)
        save(spec, Path(output))
        return None

    def __repr__(self) -> str:
        return f"JobHandle({self.id!r}, url={self.client.url!r})"


class AsyncJobHandle:
    """Like `JobHandle`, with methods to await."""

    def __init__(self, client: AsyncClient, job_id: str) -> None:
        self.client = client
        self.id = job_id

    async def status(self) -> Job:
        """The job with its plan."""
        return await self.client.job(self.id)

    async def recommendation(self, objective: Objective | None = None) -> Recommendation:
        """Like `JobHandle.recommendation`."""
        return await self.client.recommendation(self.id, objective=objective)

    async def predict(
        self,
        num_nodes: int | list[int] | None = None,
        global_batch_size: int | list[int] | None = None,
        *,
        local_batch_size: int | list[int] | None = None,
        instance_type: str | list[str] | None = None,
        usd_per_node_hour: float | None = None,
        deadline_s: float | None = None,
    ) -> Predictions:
        """Like `JobHandle.predict`."""
        return await self.client.predictions(
            self.id,
            num_nodes=num_nodes,
            global_batch_size=global_batch_size,
            local_batch_size=local_batch_size,
            instance_type=instance_type,
            usd_per_node_hour=usd_per_node_hour,
            deadline_s=deadline_s,
        )

    async def wait(self, timeout_s: float | None = None, *, poll_s: float = 2.0) -> Recommendation:
        """Like `JobHandle.wait`."""
        deadline = _deadline(timeout_s)
        while (job := await self.status()).state == "planning":
            await asyncio.sleep(_pause_s(job, deadline, poll_s))
        return await self.recommendation()

    async def runs(self) -> list[Run]:
        """All runs, newest first."""
        return await _flows.answered_async(_flows.runs(self.id), self.client.send)

    def events(self, last_id: int | None = None) -> AsyncIterator[Event]:
        """Events of the job as they happen; ends when the caller stops."""
        return self.client.events(self.id, last_id=last_id)

    async def rows(self, table: Table = "candidates") -> list[Row]:
        """Like `JobHandle.rows`."""
        return await _flows.answered_async(_flows.table(self.id, table), self.client.send)

    async def to_dataframe(self, table: Table = "candidates") -> Any:
        """Like `JobHandle.to_dataframe`."""
        return data_frame(await self.rows(table))

    async def chart(
        self, name: str = "tradeoff", *, quantity: Literal["time", "cost"] = "time", objective: Objective | None = None
    ) -> dict[str, Any]:
        """Like `JobHandle.chart`."""
        return await self.client.chart(self.id, name, quantity=quantity, objective=objective)

    def __repr__(self) -> str:
        return f"AsyncJobHandle({self.id!r}, url={self.client.url!r})"


def recommend(
    spec: JobSpec | Mapping[str, Any] | str | Path,
    *,
    objective: Objective | None = None,
    url: str | None = None,
    token: str | None = None,
) -> Recommendation:
    """The recommendation for a job given as a `JobSpec`, a mapping, or the path of a TOML file.

    Registers the job unless the service has one with this specification. `url` and `token` are as of `Client`. Raises
    `TulaError`.
    """
    from tula_client._client import Client

    with Client(url, token) as client:
        return client.handle(Path(spec) if isinstance(spec, str) else spec).recommendation(objective)


def _deadline(timeout_s: float | None) -> float:
    return math.inf if timeout_s is None else time.monotonic() + timeout_s


def _pause_s(job: Job, deadline: float, poll_s: float) -> float:
    """Seconds until the next question, not beyond `deadline`; raises `TulaError` when that has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        runs = f"{job.runs_done} of {job.runs_planned} runs are done"
        raise TulaError(f"{job.name} is still profiled ({runs}): start them with tula tune, or give a longer timeout_s")
    return min(poll_s, left)


def find_job(client: Client, name_or_id: str) -> str:
    """The id of a job given by id, or by a name that exactly one job has that is not archived."""
    return _flows.answered(_flows.job_id(name_or_id), client.send)


def all_jobs(client: Client, *, search: str | None = None, archived: bool = False) -> Iterator[JobSummary]:
    """All jobs that match, over all pages."""
    cursor: str | None = None
    while True:
        page = client.jobs(search=search, archived=archived, limit=PAGE, cursor=cursor)
        yield from page.jobs
        if (cursor := page.next_cursor) is None:
            return


def all_runs(client: Client, job_id: str) -> list[Run]:
    """All runs of a job, newest first."""
    return _flows.answered(_flows.runs(job_id), client.send)
