"""`Client` and `AsyncClient`: one list of calls, and two ways to move their bytes."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

import httpx
from typing_extensions import Self

from tula_client import _calls as calls
from tula_client import _settings as settings
from tula_client._calls import Call
from tula_client._errors import ServiceUnavailableError, ServiceUnreachableError
from tula_client._events import EventReader
from tula_client._retry import RetryPolicy
from tula_client._transport import AsyncTransport, SyncTransport
from tula_wire import Event, JobSpec

if TYPE_CHECKING:
    from tula_client.handle import JobHandle

__all__ = ["AsyncClient", "Client"]

P = ParamSpec("P")
T = TypeVar("T")

TIMEOUT = httpx.Timeout(30.0, connect=5.0)
BREAKS = (ServiceUnreachableError, ServiceUnavailableError)


class _Sync(Generic[P, T]):
    """A method that makes the call which `build` describes."""

    def __init__(self, build: Callable[P, Call[T]]) -> None:
        self.build = build

    def __get__(self, client: Client, owner: type[Client]) -> Callable[P, T]:
        @functools.wraps(self.build)
        def method(*args: P.args, **kwargs: P.kwargs) -> T:
            return client.send(self.build(*args, **kwargs))

        return method


class _Async(Generic[P, T]):
    """The same, awaited."""

    def __init__(self, build: Callable[P, Call[T]]) -> None:
        self.build = build

    def __get__(self, client: AsyncClient, owner: type[AsyncClient]) -> Callable[P, Coroutine[Any, Any, T]]:
        @functools.wraps(self.build)
        async def method(*args: P.args, **kwargs: P.kwargs) -> T:
            return await client.send(self.build(*args, **kwargs))

        return method


def _how_to_reach(url: str, token: str | None, timeout_s: float | None) -> dict[str, Any]:
    """What both kinds of client tell httpx of the service."""
    return {
        "base_url": url,
        "headers": settings.headers(token),
        "timeout": TIMEOUT if timeout_s is None else httpx.Timeout(timeout_s),
        "verify": settings.authorities(url),
    }


class Client:
    """A service, call by call. `url` and `token` default to TULA_URL and TULA_TOKEN; safe to share among threads.

    Every method raises `TulaError`: `ServiceUnreachableError` without an answer, a `ProblemError` on a refusal.
    Waits and refusals to serve are retried as `retry` says, and only where a repetition can do no harm.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        timeout_s: float | None = None,
        retry: RetryPolicy | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url = settings.service_url(url)
        http = httpx.Client(**_how_to_reach(self.url, token, timeout_s), transport=transport)
        self._transport = SyncTransport(http, retry or RetryPolicy())

    register = _Sync(calls.register)
    jobs = _Sync(calls.jobs)
    job = _Sync(calls.job)
    patch_job = _Sync(calls.patch_job)
    archive_job = _Sync(calls.archive_job)
    delete_job = _Sync(calls.delete_job)
    claim = _Sync(calls.claim)
    create_run = _Sync(calls.create_run)
    runs = _Sync(calls.runs)
    run = _Sync(calls.run)
    patch_run = _Sync(calls.patch_run)
    send_samples = _Sync(calls.send_samples)
    send_telemetry = _Sync(calls.send_telemetry)
    samples = _Sync(calls.samples)
    series = _Sync(calls.series)
    recommendation = _Sync(calls.recommendation)
    predictions = _Sync(calls.predictions)
    scaling = _Sync(calls.scaling)
    patch_scaling = _Sync(calls.patch_scaling)
    ledger = _Sync(calls.ledger)
    chart = _Sync(calls.chart)
    run_chart = _Sync(calls.run_chart)
    projects = _Sync(calls.projects)
    create_project = _Sync(calls.create_project)
    tokens = _Sync(calls.tokens)
    create_token = _Sync(calls.create_token)
    revoke_token = _Sync(calls.revoke_token)
    health = _Sync(calls.health)
    ready = _Sync(calls.ready)

    def send(self, call: Call[T]) -> T:
        """Make any call; the methods above are this with the call filled in."""
        return self._transport.send(call)

    def handle(self, job: str | JobSpec) -> JobHandle:
        """A job to work with: by id or by name, or registered from its specification."""
        from tula_client.handle import JobHandle

        return JobHandle.of(self, job)

    def events(self, job_id: str, *, last_id: int | None = None, reconnect: bool = True) -> Iterator[Event]:
        """Events of a job as they happen, each once; reconnects after a break and resumes where it was.

        Ends only when the caller stops, or at the end of the stream with `reconnect=False`.
        """
        reader = EventReader(last_id=last_id)
        while True:
            try:
                for line in self._transport.lines(calls.events(job_id, last_id=reader.last_id)):
                    if (event := reader.feed(line)) is not None:
                        yield event
            except BREAKS:
                if not reconnect:
                    raise
            if not reconnect:
                return
            self._transport.sleep(reader.broken())

    def close(self) -> None:
        """Close the connections."""
        self._transport.http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class AsyncClient:
    """As `Client`, every method awaited."""

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        timeout_s: float | None = None,
        retry: RetryPolicy | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = settings.service_url(url)
        http = httpx.AsyncClient(**_how_to_reach(self.url, token, timeout_s), transport=transport)
        self._transport = AsyncTransport(http, retry or RetryPolicy())

    register = _Async(calls.register)
    jobs = _Async(calls.jobs)
    job = _Async(calls.job)
    patch_job = _Async(calls.patch_job)
    archive_job = _Async(calls.archive_job)
    delete_job = _Async(calls.delete_job)
    claim = _Async(calls.claim)
    create_run = _Async(calls.create_run)
    runs = _Async(calls.runs)
    run = _Async(calls.run)
    patch_run = _Async(calls.patch_run)
    send_samples = _Async(calls.send_samples)
    send_telemetry = _Async(calls.send_telemetry)
    samples = _Async(calls.samples)
    series = _Async(calls.series)
    recommendation = _Async(calls.recommendation)
    predictions = _Async(calls.predictions)
    scaling = _Async(calls.scaling)
    patch_scaling = _Async(calls.patch_scaling)
    ledger = _Async(calls.ledger)
    chart = _Async(calls.chart)
    run_chart = _Async(calls.run_chart)
    projects = _Async(calls.projects)
    create_project = _Async(calls.create_project)
    tokens = _Async(calls.tokens)
    create_token = _Async(calls.create_token)
    revoke_token = _Async(calls.revoke_token)
    health = _Async(calls.health)
    ready = _Async(calls.ready)

    async def send(self, call: Call[T]) -> T:
        """Make any call."""
        return await self._transport.send(call)

    async def events(self, job_id: str, *, last_id: int | None = None, reconnect: bool = True) -> AsyncIterator[Event]:
        """As `Client.events`."""
        reader = EventReader(last_id=last_id)
        while True:
            try:
                async for line in self._transport.lines(calls.events(job_id, last_id=reader.last_id)):
                    if (event := reader.feed(line)) is not None:
                        yield event
            except BREAKS:
                if not reconnect:
                    raise
            if not reconnect:
                return
            await asyncio.sleep(reader.broken())

    async def aclose(self) -> None:
        """Close the connections."""
        await self._transport.http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()
