"""`Client` and `AsyncClient`: the same methods over two transports."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Self, TypeVar, overload

import httpx

from tula_client import _calls as calls
from tula_client import _flows
from tula_client import _settings as settings
from tula_client._errors import ServiceUnavailableError, ServiceUnreachableError
from tula_client._events import EventReader
from tula_client._request import Call
from tula_client._retry import RetryPolicy
from tula_client._transport import AsyncTransport, SyncTransport
from tula_wire import Configuration, Event, JobSpec

if TYPE_CHECKING:
    from tula_client.handle import AsyncJobHandle, JobHandle
    from tula_client.profile_run import AsyncProfileRun, ProfileRun

P = ParamSpec("P")
T = TypeVar("T")

TIMEOUT = httpx.Timeout(30.0, connect=5.0)
CONNECTION_ERRORS = (ServiceUnreachableError, ServiceUnavailableError)


class _Method(Generic[P, T]):
    """A method that sends the call which `build` describes: `Client` returns its answer, `AsyncClient` awaits it.

    The protocol does no I/O: `build` makes a `Call`, that is a request (bytes and strings) and a function that parses
    the answer. `send` of either client passes the request to its transport and the answer to that function.
    """

    def __init__(self, build: Callable[P, Call[T]]) -> None:
        self.build = build
        signature = inspect.signature(build)
        answer = str(signature.return_annotation).removeprefix("Call[").removesuffix("]")
        self.signature = signature.replace(return_annotation=answer)  # for notebooks and `help`

    @overload
    def __get__(self, client: Client, owner: type[Client]) -> Callable[P, T]: ...

    @overload
    def __get__(self, client: AsyncClient, owner: type[AsyncClient]) -> Callable[P, Coroutine[Any, Any, T]]: ...

    def __get__(self, client: Any, owner: Any) -> Any:
        @functools.wraps(self.build)
        def method(*args: P.args, **kwargs: P.kwargs) -> Any:
            return client.send(self.build(*args, **kwargs))

        method.__signature__ = self.signature  # type: ignore[attr-defined]
        return method


class _Methods:
    """Every call of the API (`_calls`) as a method, for both clients."""

    register = _Method(calls.register)
    jobs = _Method(calls.jobs)
    job = _Method(calls.job)
    patch_job = _Method(calls.patch_job)
    archive_job = _Method(calls.archive_job)
    delete_job = _Method(calls.delete_job)
    claim = _Method(calls.claim)
    create_run = _Method(calls.create_run)
    runs = _Method(calls.runs)
    run = _Method(calls.run)
    patch_run = _Method(calls.patch_run)
    send_samples = _Method(calls.send_samples)
    send_telemetry = _Method(calls.send_telemetry)
    samples = _Method(calls.samples)
    series = _Method(calls.series)
    past_events = _Method(calls.past_events)
    recommendation = _Method(calls.recommendation)
    predictions = _Method(calls.predictions)
    scaling = _Method(calls.scaling)
    patch_scaling = _Method(calls.patch_scaling)
    ledger = _Method(calls.ledger)
    chart = _Method(calls.chart)
    run_chart = _Method(calls.run_chart)
    send_probe = _Method(calls.send_probe)
    fabrics = _Method(calls.fabrics)
    projects = _Method(calls.projects)
    create_project = _Method(calls.create_project)
    tokens = _Method(calls.tokens)
    create_token = _Method(calls.create_token)
    revoke_token = _Method(calls.revoke_token)
    health = _Method(calls.health)
    ready = _Method(calls.ready)


def _http_options(service: settings.Access, timeout_s: float | None) -> dict[str, Any]:
    """Arguments of `httpx.Client` and `httpx.AsyncClient`."""
    return {
        "base_url": service.url,
        "headers": settings.headers(service.token),
        "timeout": TIMEOUT if timeout_s is None else httpx.Timeout(timeout_s),
        "verify": settings.tls_verification(service.url),
    }


class Client(_Methods):
    """A client of one service. Threads may share a client.

    `url` and `token` default to TULA_URL and TULA_TOKEN, of the environment, else of `.env` in the working directory,
    else to `url` and `token` of the user's config file.

    Every method raises `TulaError`: `ServiceUnreachableError` if no answer came, a `ProblemError` if the service
    rejected the request. Failures are retried as `retry` says, and only if a repetition is harmless.
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
        service = settings.access(url, token)
        self.url = service.url
        http = httpx.Client(**_http_options(service, timeout_s), transport=transport)
        self._transport = SyncTransport(http, retry or RetryPolicy())

    def send(self, call: Call[T]) -> T:
        """Send `call`; each method of the API builds its call and sends it."""
        return self._transport.send(call)

    def handle(self, job: str | Path | Mapping[str, Any] | JobSpec) -> JobHandle:
        """A handle of a job given by id or name, or by its specification: a `JobSpec`, a mapping or a TOML file.

        A specification finds the job that has the same one, else registers it. Raises `TulaError` if a name is
        ambiguous.
        """
        from tula_client.handle import JobHandle

        return JobHandle(self, _flows.answered(_flows.job_of(job), self.send))

    def profile_run(self, job: str, configuration: Configuration) -> ProfileRun:
        """A profiling run whose steps the caller measures itself, for use in `with`; `job` is an id or a name."""
        from tula_client.profile_run import ProfileRun

        return ProfileRun(self, job, configuration)

    def events(self, job_id: str, *, last_id: int | None = None, reconnect: bool = True) -> Iterator[Event]:
        """Events of a job, each once; after a lost connection, reconnects and resumes after the last event.

        Ends when the caller stops, or with `reconnect=False` at the end of the stream.
        """
        reader = EventReader(last_id=last_id)
        while True:
            try:
                for line in self._transport.lines(calls.events(job_id, last_id=reader.last_id)):
                    if (event := reader.feed(line)) is not None:
                        yield event
            except CONNECTION_ERRORS:
                if not reconnect:
                    raise
            if not reconnect:
                return
            self._transport.sleep(reader.disconnected())

    def close(self) -> None:
        """Close the connections."""
        self._transport.http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class AsyncClient(_Methods):
    """Like `Client`, with methods to await."""

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        timeout_s: float | None = None,
        retry: RetryPolicy | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        service = settings.access(url, token)
        self.url = service.url
        http = httpx.AsyncClient(**_http_options(service, timeout_s), transport=transport)
        self._transport = AsyncTransport(http, retry or RetryPolicy())

    async def send(self, call: Call[T]) -> T:
        """Send `call`."""
        return await self._transport.send(call)

    async def handle(self, job: str | Path | Mapping[str, Any] | JobSpec) -> AsyncJobHandle:
        """Like `Client.handle`, with a handle whose methods are to be awaited."""
        from tula_client.handle import AsyncJobHandle

        return AsyncJobHandle(self, await _flows.answered_async(_flows.job_of(job), self.send))

    def profile_run(self, job: str, configuration: Configuration) -> AsyncProfileRun:
        """Like `Client.profile_run`, for use in `async with`."""
        from tula_client.profile_run import AsyncProfileRun

        return AsyncProfileRun(self, job, configuration)

    async def events(self, job_id: str, *, last_id: int | None = None, reconnect: bool = True) -> AsyncIterator[Event]:
        """Like `Client.events`."""
        reader = EventReader(last_id=last_id)
        while True:
            try:
                async for line in self._transport.lines(calls.events(job_id, last_id=reader.last_id)):
                    if (event := reader.feed(line)) is not None:
                        yield event
            except CONNECTION_ERRORS:
                if not reconnect:
                    raise
            if not reconnect:
                return
            await asyncio.sleep(reader.disconnected())

    async def aclose(self) -> None:
        """Close the connections."""
        await self._transport.http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()
