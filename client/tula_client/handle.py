"""Handles of a job for scripts and notebooks: `JobHandle` and `AsyncJobHandle`, with the same methods."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

from tula_client import _calls as calls
from tula_client import _flows as flows
from tula_client._request import Awaited, Blocking, of_job
from tula_wire import Event

if TYPE_CHECKING:
    from tula_client._client import AsyncClient, Client


class _JobMethods:
    """What both handles can do: calls and flows that take the job's id first."""

    client: Client | AsyncClient
    id: str

    status = of_job(calls.job)
    recommendation = of_job(calls.recommendation)
    predict = of_job(calls.predictions)
    chart = of_job(calls.chart)
    wait = of_job(flows.wait)
    runs = of_job(flows.runs)
    rows = of_job(flows.rows)
    to_dataframe = of_job(flows.to_dataframe)
    plot = of_job(flows.plot)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r}, url={self.client.url!r})"


class JobHandle(_JobMethods, Blocking):
    """One job of one service. Every access queries the service: the handle caches nothing."""

    def __init__(self, client: Client, job_id: str) -> None:
        self.client: Client = client
        self.id = job_id

    def events(self, last_id: int | None = None) -> Iterator[Event]:
        """Events of the job as they happen; ends when the caller stops."""
        return self.client.events(self.id, last_id=last_id)


class AsyncJobHandle(_JobMethods, Awaited):
    """Like `JobHandle`, with methods to await."""

    def __init__(self, client: AsyncClient, job_id: str) -> None:
        self.client: AsyncClient = client
        self.id = job_id

    def events(self, last_id: int | None = None) -> AsyncIterator[Event]:
        """Like `JobHandle.events`."""
        return self.client.events(self.id, last_id=last_id)
