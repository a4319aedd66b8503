"""`Client` and `AsyncClient`, handles of a job, and runs that the caller measures: each for two transports."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from tula_client import _calls as calls
from tula_client import _flows
from tula_client import _settings as settings
from tula_client._errors import ServiceUnavailableError, ServiceUnreachableError
from tula_client._request import Awaited, Blocking, Call, Flow, Method, Question, RetryPolicy, flow, of_job
from tula_client._transport import AsyncTransport, SyncTransport
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
from tula_wire.text import printable

T = TypeVar("T")

TIMEOUT = httpx.Timeout(30.0, connect=5.0)
_MESSAGE_LENGTH = 500
CONNECTION_ERRORS = (ServiceUnreachableError, ServiceUnavailableError)


class _Methods:
    """Every call of the API (`_calls`) as a method, for both clients."""

    register = Method(calls.register)
    jobs = Method(calls.jobs)
    job = Method(calls.job)
    patch_job = Method(calls.patch_job)
    archive_job = Method(calls.archive_job)
    delete_job = Method(calls.delete_job)
    claim = Method(calls.claim)
    create_run = Method(calls.create_run)
    runs = Method(calls.runs)
    run = Method(calls.run)
    patch_run = Method(calls.patch_run)
    send_samples = Method(calls.send_samples)
    send_telemetry = Method(calls.send_telemetry)
    samples = Method(calls.samples)
    series = Method(calls.series)
    past_events = Method(calls.past_events)
    recommendation = Method(calls.recommendation)
    predictions = Method(calls.predictions)
    scaling = Method(calls.scaling)
    patch_scaling = Method(calls.patch_scaling)
    ledger = Method(calls.ledger)
    chart = Method(calls.chart)
    run_chart = Method(calls.run_chart)
    send_probe = Method(calls.send_probe)
    fabrics = Method(calls.fabrics)
    projects = Method(calls.projects)
    create_project = Method(calls.create_project)
    tokens = Method(calls.tokens)
    create_token = Method(calls.create_token)
    revoke_token = Method(calls.revoke_token)
    health = Method(calls.health)
    ready = Method(calls.ready)


def _http_options(service: settings.Access, timeout_s: float | None) -> dict[str, Any]:
    """Arguments of `httpx.Client` and `httpx.AsyncClient`."""
    return {
        "base_url": service.url,
        "headers": settings.headers(service.token),
        "timeout": TIMEOUT if timeout_s is None else httpx.Timeout(timeout_s),
        "verify": settings.tls_verification(service.url),
    }


class Client(_Methods, Blocking):
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

    def send(self, question: Question[T]) -> T:
        """Send a call, or all calls of a flow, for its result; each method of the API builds its call and sends it."""
        return self._transport.send(question)

    def handle(self, job: str | Path | Mapping[str, Any] | JobSpec) -> JobHandle:
        """A handle of a job given by id or name, or by its specification: a `JobSpec`, a mapping or a TOML file.

        A specification finds the job that has the same one, else registers it. Raises `TulaError` if a name is
        ambiguous.
        """
        return JobHandle(self, self.send(_flows.job_of(job)))

    def profile_run(self, job: str, configuration: Configuration) -> ProfileRun:
        """A profiling run whose steps the caller measures itself, for use in `with`; `job` is an id or a name."""
        return ProfileRun(self, job, configuration)

    def events(self, job_id: str, *, last_id: int | None = None, reconnect: bool = True) -> Iterator[Event]:
        """Events of a job, each once; after a lost connection, reconnects and resumes after the last event.

        Ends when the caller stops, or with `reconnect=False` at the end of the stream.
        """
        reader = calls.EventReader(last_id=last_id)
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


class AsyncClient(_Methods, Awaited):
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

    async def send(self, question: Question[T]) -> T:
        """Like `Client.send`."""
        return await self._transport.send(question)

    async def handle(self, job: str | Path | Mapping[str, Any] | JobSpec) -> AsyncJobHandle:
        """Like `Client.handle`, with a handle whose methods are to be awaited."""
        return AsyncJobHandle(self, await self.send(_flows.job_of(job)))

    def profile_run(self, job: str, configuration: Configuration) -> AsyncProfileRun:
        """Like `Client.profile_run`, for use in `async with`."""
        return AsyncProfileRun(self, job, configuration)

    async def events(self, job_id: str, *, last_id: int | None = None, reconnect: bool = True) -> AsyncIterator[Event]:
        """Like `Client.events`."""
        reader = calls.EventReader(last_id=last_id)
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


class _JobMethods:
    """What both handles can do: calls and flows that take the job's id first."""

    client: Client | AsyncClient
    id: str

    status = of_job(calls.job)
    recommendation = of_job(calls.recommendation)
    predict = of_job(calls.predictions)
    chart = of_job(calls.chart)
    wait = of_job(_flows.wait)
    runs = of_job(_flows.runs)
    rows = of_job(_flows.rows)
    to_dataframe = of_job(_flows.to_dataframe)
    plot = of_job(_flows.plot)

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


class _Steps:
    """What both kinds of run keep, and the calls that they send."""

    run: Run

    def __init__(self, job: str, configuration: Configuration) -> None:
        self._job = job
        self._configuration = configuration
        self._boot_id = uuid.uuid4().hex
        self._steps = 0

    @flow
    def log_steps(
        self,
        step_time_s: Sequence[float],
        *,
        compute_time_s: Sequence[float] | None = None,
        exposed_comm_time_s: Sequence[float] | None = None,
        input_time_s: Sequence[float] | None = None,
        peak_bytes: int | None = None,
        warmup: bool = False,
    ) -> Flow[bool]:
        """Store the next steps, one number each in seconds; True when the service knows the run precisely enough.

        `warmup` marks steps that the fit discards; `peak_bytes` is the largest memory of a rank. Raises `TulaError`,
        and `pydantic.ValidationError` for a number out of range or columns of different lengths.
        """
        if not hasattr(self, "run"):
            raise RuntimeError("the run has not begun: call log_steps inside `with client.profile_run(...) as run`")
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
            stop = (yield from calls.send_samples(self.run.id, batch)).stop
            self._steps += len(numbers)
        return stop

    def _begun(self) -> Flow[Run]:
        job_id = yield from _flows.job_id(self._job)
        return (yield from calls.create_run(job_id, RunCreate(kind="profile", configuration=self._configuration)))

    def _ended(self, error: BaseException | None) -> Call[Run]:
        patch = RunPatch(state="succeeded")
        if isinstance(error, Exception):
            patch = RunPatch(state="failed", message=printable(f"{type(error).__name__}: {error}")[:_MESSAGE_LENGTH])
        elif error is not None:
            patch = RunPatch(state="cancelled", message="It was stopped before its end.")
        return calls.patch_run(self.run.id, patch)


class ProfileRun(_Steps, Blocking):
    """Registers a run of `configuration` on entry and ends it on exit: succeeded, or failed with the exception.

    `with client.profile_run(job, configuration) as run: run.log_steps([...])`; `job` is an id or a name. `run.run` is
    the registered run.
    """

    def __init__(self, client: Client, job: str, configuration: Configuration) -> None:
        super().__init__(job, configuration)
        self.client = client

    def __enter__(self) -> Self:
        self.run = self.client.send(self._begun())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.run = self.client.send(self._ended(error))


class AsyncProfileRun(_Steps, Awaited):
    """Like `ProfileRun`, for `async with`, with a method to await."""

    def __init__(self, client: AsyncClient, job: str, configuration: Configuration) -> None:
        super().__init__(job, configuration)
        self.client = client

    async def __aenter__(self) -> Self:
        self.run = await self.client.send(self._begun())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.run = await self.client.send(self._ended(error))


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
    with Client(url, token) as client:
        return client.handle(Path(spec) if isinstance(spec, str) else spec).recommendation(objective)
