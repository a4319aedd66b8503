"""Defines `Client` and `AsyncClient`, their job handles, and `ProfileRun` for runs that the caller measures."""

from __future__ import annotations

import asyncio
import ssl
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

import httpx

from tula_client import _flows
from tula_client import _settings as settings
from tula_client._calls import Calls, EventReader, calls, events, parse_error
from tula_client._errors import ServiceUnavailableError, UnexpectedAnswerError
from tula_client._request import (
    Answer,
    Awaited,
    Blocking,
    Method,
    Question,
    Received,
    Request,
    RetryPolicy,
    Step,
    steps,
)
from tula_wire import (
    MAX_STEPS,
    Configuration,
    Event,
    JobSpec,
    MemoryBreakdown,
    Objective,
    Recommendation,
    Run,
    RunCreate,
    RunPatch,
    SampleBatch,
)

T = TypeVar("T")
C = TypeVar("C", bound="Client | AsyncClient")

TIMEOUT: Final = httpx.Timeout(30.0, connect=5.0)
STREAM_TIMEOUT: Final = httpx.Timeout(10.0, read=60.0)
"""The service sends a comment every few seconds, so a stream of events is never silent for 60 s."""
_BROKEN: Final = (httpx.TransportError, ServiceUnavailableError)
"""Errors after which the client reopens a stream of events."""
MAX_ANSWER_BYTES: Final = 256 * 2**20
"""The largest response body that the client accepts; a Tula service never sends a larger one."""
_MESSAGE_LENGTH: Final = 500


def _options(service: settings.Access, timeout_s: float | None) -> dict[str, Any]:
    """Return keyword arguments for the constructors of `httpx.Client` and `httpx.AsyncClient`."""
    agent = {"User-Agent": f"tula/{settings.package_version()}"}
    return {
        "base_url": service.url,
        "headers": {**agent, "Authorization": f"Bearer {service.token}"} if service.token else agent,
        "timeout": TIMEOUT if timeout_s is None else httpx.Timeout(timeout_s),
        # Plain HTTP uses an empty TLS context, since loading all certificate authorities would take 30 ms.
        "verify": service.url.startswith("https:") or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
    }


def _arguments(request: Request) -> dict[str, Any]:
    """Return the keyword arguments with which the `stream` method of an httpx client sends `request`."""
    return {
        "method": request.method,
        "url": request.path,
        "params": list(request.query) or None,
        "content": request.body,
        "headers": dict(request.headers),
    }


def _append(body: bytearray, part: bytes) -> None:
    body += part
    if len(body) > MAX_ANSWER_BYTES:
        raise UnexpectedAnswerError(f"the response is longer than {MAX_ANSWER_BYTES} bytes: request a smaller page")


class Client(Calls, Blocking):
    """A client of one service, safe to share between threads.

    `url` and `token` default to TULA_URL and TULA_TOKEN from the environment. If these are unset, they are read from
    `.env` in the working directory; failing that, `url` and `token` are read from the user's config file.

    Every method may raise a `TulaError`: `ServiceUnreachableError` if no response arrived, or a `ProblemError` if the
    service rejected the request. Failed requests are retried according to `retry`, but only if a retry is harmless.
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
        self._http = httpx.Client(**_options(service, timeout_s), transport=transport)
        self._retry = retry or RetryPolicy()

    def send(self, question: Question[T]) -> T:
        """Send a call, or all calls of a flow, and return the result; every API method uses this method."""
        todo = steps(question, self._retry, self.url)
        received: Received = None
        try:
            while True:
                received = self._do(todo.send(received))
        except StopIteration as end:
            result: T = end.value
            return result

    def _do(self, step: Step) -> Received:
        if callable(step):
            step()
            return None
        if not isinstance(step, Request):
            time.sleep(step)
            return None
        try:
            with self._http.stream(**_arguments(step)) as response:
                body = bytearray()
                for part in response.iter_bytes():
                    _append(body, part)
                return Answer(response.status_code, response.headers, bytes(body))
        except httpx.TransportError as error:
            return error

    def handle(self, job: str | Path | Mapping[str, Any] | JobSpec) -> JobHandle:
        """Return a handle for a job, given its id, name or specification (a `JobSpec`, a mapping or a TOML file).

        If no job has the given specification, the job is registered. Raises `TulaError` if a name is ambiguous.
        """
        return JobHandle(self, self.send(_flows.resolve_job(job)))

    def profile_run(self, job: str, configuration: Configuration) -> ProfileRun:
        """Return a context manager for a profiling run whose steps the caller measures; `job` is an id or a name."""
        return ProfileRun(self, job, configuration)

    def events(self, job_id: str, *, last_id: int | None = None) -> Iterator[Event]:
        """Yield each event of a job once, until the caller stops iterating.

        If the connection is lost, the client reconnects and continues after the last event. To get only the past
        events, use `past_events`.
        """
        reader = EventReader(last_id=last_id)
        while True:
            arguments = _arguments(events(job_id, last_id=reader.last_id))
            with suppress(*_BROKEN), self._http.stream(**arguments, timeout=STREAM_TIMEOUT) as response:
                if response.status_code != 200:
                    raise parse_error(Answer(response.status_code, response.headers, response.read()))
                for line in response.iter_lines():
                    if (event := reader.feed(line)) is not None:
                        yield event
            time.sleep(reader.disconnected())

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient(Calls, Awaited):
    """Like `Client`, but with coroutine methods and without `profile_run`."""

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
        self._http = httpx.AsyncClient(**_options(service, timeout_s), transport=transport)
        self._retry = retry or RetryPolicy()

    async def send(self, question: Question[T]) -> T:
        """Send a call, or all calls of a flow, and return the result, in the same way as `Client.send`."""
        todo = steps(question, self._retry, self.url)
        received: Received = None
        try:
            while True:
                received = await self._do(todo.send(received))
        except StopIteration as end:
            result: T = end.value
            return result

    async def _do(self, step: Step) -> Received:
        if callable(step):
            await asyncio.to_thread(step)
            return None
        if not isinstance(step, Request):
            await asyncio.sleep(step)
            return None
        try:
            async with self._http.stream(**_arguments(step)) as response:
                body = bytearray()
                async for part in response.aiter_bytes():
                    _append(body, part)
                return Answer(response.status_code, response.headers, bytes(body))
        except httpx.TransportError as error:
            return error

    async def handle(self, job: str | Path | Mapping[str, Any] | JobSpec) -> AsyncJobHandle:
        """Return a handle with coroutine methods, in the same way as `Client.handle`."""
        return AsyncJobHandle(self, await self.send(_flows.resolve_job(job)))

    async def events(self, job_id: str, *, last_id: int | None = None) -> AsyncIterator[Event]:
        """Yield each event of a job once, in the same way as `Client.events`."""
        reader = EventReader(last_id=last_id)
        while True:
            arguments = _arguments(events(job_id, last_id=reader.last_id))
            with suppress(*_BROKEN):
                async with self._http.stream(**arguments, timeout=STREAM_TIMEOUT) as response:
                    if response.status_code != 200:
                        raise parse_error(Answer(response.status_code, response.headers, await response.aread()))
                    async for line in response.aiter_lines():
                        if (event := reader.feed(line)) is not None:
                            yield event
            await asyncio.sleep(reader.disconnected())

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class _JobMethods(Generic[C]):
    """The methods that both handles share: calls and flows whose first argument is the job's id."""

    def __init__(self, client: C, job_id: str) -> None:
        self.client: C = client
        self.id = job_id

    status = Method(calls.job, "id")
    recommendation = Method(calls.recommendation, "id")
    predict = Method(calls.predictions, "id")
    schedule = Method(calls.schedule, "id")
    chart = Method(calls.chart, "id")
    wait = Method(_flows.wait, "id")
    runs = Method(_flows.runs, "id")
    rows = Method(_flows.rows, "id")
    to_dataframe = Method(_flows.to_dataframe, "id")
    plot = Method(_flows.plot, "id")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r}, url={self.client.url!r})"


class JobHandle(_JobMethods[Client], Blocking):
    """A handle for a job on a service. Every method queries the service, and no result is cached."""

    def events(self, last_id: int | None = None) -> Iterator[Event]:
        """Yield the job's events as they happen, until the caller stops iterating."""
        return self.client.events(self.id, last_id=last_id)


class AsyncJobHandle(_JobMethods[AsyncClient], Awaited):
    """Like `JobHandle`, but with coroutine methods."""

    def events(self, last_id: int | None = None) -> AsyncIterator[Event]:
        """Yield the job's events as they happen, in the same way as `JobHandle.events`."""
        return self.client.events(self.id, last_id=last_id)


class ProfileRun:
    """A context manager that registers a run of `configuration` on entry, and on exit reports whether it succeeded.

    Usage: `with client.profile_run(job, configuration) as run: run.log_steps([...])`. `job` is the job's id or name.
    `run.run` is the registered run. If the block raises an exception, the run is reported as failed.
    """

    run: Run

    def __init__(self, client: Client, job: str, configuration: Configuration) -> None:
        self.client = client
        self._job = job
        self._configuration = configuration
        self._boot_id = uuid.uuid4().hex
        self._steps = 0

    def __enter__(self) -> Self:
        job_id = self.client.send(_flows.job_id(self._job))
        create = RunCreate(kind="profile", configuration=self._configuration)
        self.run = self.client.create_run(job_id, create)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        patch = RunPatch(state="succeeded")
        if isinstance(error, Exception):
            patch = RunPatch(state="failed", message=f"{type(error).__name__}: {error}"[:_MESSAGE_LENGTH])
        elif error is not None:
            patch = RunPatch(state="cancelled", message="The run was stopped before it finished.")
        self.run = self.client.patch_run(self.run.id, patch)

    def log_steps(
        self,
        step_time_s: Sequence[float],
        *,
        compute_time_s: Sequence[float] | None = None,
        exposed_comm_time_s: Sequence[float] | None = None,
        input_time_s: Sequence[float] | None = None,
        peak_bytes: int | None = None,
        warmup: bool = False,
    ) -> bool:
        """Store the times of the next steps, in seconds; return True once the service needs no more steps of this run.

        `warmup` marks steps that the fit discards; `peak_bytes` is the peak memory of a rank. Raises `TulaError` if a
        request fails, and `pydantic.ValidationError` if a value is out of range or if the columns differ in length.
        """
        if not hasattr(self, "run"):
            raise RuntimeError("the run has not started: call log_steps inside `with client.profile_run(...) as run`")
        columns = {
            "step_time_s": step_time_s,
            "compute_time_s": compute_time_s,
            "exposed_comm_time_s": exposed_comm_time_s,
            "input_time_s": input_time_s,
        }
        given = {name: list(column) for name, column in columns.items() if column is not None}
        memory = None if peak_bytes is None else MemoryBreakdown(method="reported", peak_bytes=peak_bytes)
        stop = False
        for first in range(0, len(step_time_s), MAX_STEPS):
            part = {name: column[first : first + MAX_STEPS] for name, column in given.items()}
            numbers = list(range(self._steps, self._steps + len(part["step_time_s"])))
            batch = SampleBatch.model_validate(
                {"rank": 0, "boot_id": self._boot_id, "sequence": numbers, "step": numbers, **part}
                | {"memory": memory, "warmup": warmup}
            )
            stop = self.client.send_samples(self.run.id, batch).stop
            self._steps += len(numbers)
        return stop


def recommend(
    spec: JobSpec | Mapping[str, Any] | str | Path,
    *,
    objective: Objective | None = None,
    url: str | None = None,
    token: str | None = None,
) -> Recommendation:
    """Return the recommendation for a job, given as a `JobSpec`, a mapping, or the path of a TOML file.

    The job is registered unless the service already has a job with this specification. `url` and `token` have the same
    meaning as for `Client`. Raises `TulaError` if a request fails.
    """
    with Client(url, token) as client:
        return client.handle(Path(spec) if isinstance(spec, str) else spec).recommendation(objective)
