"""Builds the request and parses the response of every API call without I/O; both clients use this module."""
# mypy: disable-error-code="empty-body"

from __future__ import annotations

import functools
import inspect
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, Final, Literal, ParamSpec, TypeVar, get_args, get_type_hints
from urllib.parse import quote

from pydantic import BaseModel, ValidationError

import tula_wire as wire
from tula_client._errors import ForeignAnswerError, TulaError, UnexpectedAnswerError, from_problem
from tula_client._request import Answer, Call, Method, Question, Request, Unsent
from tula_wire import read, routes

P = ParamSpec("P")
M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

_ACCEPT: Final = "application/json, text/event-stream"
_HEADERS: Final = {"idempotency_key": "Idempotency-Key", "etag": "If-None-Match", "last_id": "Last-Event-ID"}
"""Maps the arguments that are sent as headers to the header names."""


@dataclass(frozen=True)
class Scaling:
    """A job's gradient-scaling values and their ETag; `thresholds` is None if the ETag in the request is current."""

    thresholds: wire.ScalingThresholds | None
    etag: str | None


@dataclass
class EventReader:
    """Parses the lines of a stream of server-sent events (WHATWG HTML, section 9.2) into events, in order and without
    duplicates.

    `last_id` is the `id` of the last event, which the client sends as `Last-Event-ID` when it reconnects. `retry_s` is
    the delay before reconnecting, which the server can set. Comments and unknown fields are skipped.
    """

    last_id: int | None = None
    retry_s: float = 1.0
    failures: int = 0
    _data: list[str] = field(default_factory=list)

    def feed(self, line: str) -> wire.Event | None:
        """Parse one line, given without its line ending; return the event that the line completes, or None."""
        if line:
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "data":
                self._data.append(value)
            elif name == "retry" and value.isascii() and value.isdigit():
                self.retry_s = min(60.0, int(value[:9]) / 1000)
            return None
        text, self._data = "\n".join(self._data), []
        try:
            event = read(wire.Event, text)
        except ValidationError:  # an empty text is not valid either
            return None
        self.failures = 0
        if self.last_id is not None and event.id <= self.last_id:
            return None
        self.last_id = event.id
        return event

    def disconnected(self) -> float:
        """Record that the stream ended, and return the seconds to wait before reconnecting.

        The wait doubles with each consecutive failure, up to 30 s.
        """
        self._data.clear()
        self.failures += 1
        return min(30.0, self.retry_s * 2.0 ** min(self.failures - 1, 5))


def _endpoint(
    method: Literal["GET", "POST", "PATCH", "DELETE"], route: str, *, idempotent: bool = False
) -> Callable[[Callable[Concatenate[Any, P], Call[T]]], Method[P, T]]:
    """Return a decorator that turns the declaration of an API call into a `Method`.

    Arguments named in `route` go into the path, a Pydantic model becomes the body, and all other arguments form the
    query. The response is parsed as the declared return type.
    """

    def declared(declaration: Callable[Concatenate[Any, P], Call[T]]) -> Method[P, T]:
        signature = inspect.signature(declaration)

        @functools.wraps(declaration)
        def build(owner: Any, /, *args: P.args, **kwargs: P.kwargs) -> Call[T]:
            bound = signature.bind(owner, *args, **kwargs)
            bound.apply_defaults()
            arguments = {
                name: value
                for name, value in list(bound.arguments.items())[1:]
                if f"{{{name}}}" in route or value is not signature.parameters[name].default
            }
            if "idempotency_key" in signature.parameters:
                arguments.setdefault("idempotency_key", uuid.uuid4().hex)
            answer = get_args(get_type_hints(declaration)["return"])[0]
            parse = _PARSERS.get(answer) or functools.partial(_model, answer)
            return Call(_request(method, route, arguments, idempotent=idempotent), parse)

        return Method(build)

    return declared


def _request(method: str, route: str, arguments: Mapping[str, Any], *, idempotent: bool = False) -> Request:
    """Build the request for `route`, quoting each path argument so that it remains a single segment.

    Every method except POST is treated as idempotent, including PATCH, since a patch sets absolute values.
    """
    path: dict[str, str] = {}
    query: list[tuple[str, str]] = []
    headers = {"Accept": _ACCEPT}
    content = None
    for name, value in arguments.items():
        if f"{{{name}}}" in route:
            if value in ("", ".", ".."):
                raise ValueError(f"{name} must be a name or an id, not {value!r}")
            path[name] = quote(value, safe="")
        elif isinstance(value, BaseModel):
            content = value.model_dump_json(exclude_unset=True).encode()
            headers["Content-Type"] = "application/json"
        elif name in _HEADERS:
            headers[_HEADERS[name]] = str(value)
        elif value is not None:
            many = [value] if isinstance(value, (str, int, float)) else value
            query += [(name, str(item)) for item in many]
    return Request(method, route.format(**path), tuple(query), content, headers, idempotent or method != "POST")


def events(job_id: str, *, last_id: int | None = None) -> Request:
    """Return the request that streams a job's events after the event `last_id`, by default from the beginning."""
    resume = {} if last_id is None else {"last_id": last_id}
    return _request("GET", routes.JOB_EVENTS, {"job_id": job_id, **resume})


def parse_error(answer: Answer) -> TulaError:
    """Return the exception that describes an unsuccessful response."""
    try:
        return from_problem(read(wire.Problem, answer.body))
    except ValidationError:
        pass
    if answer.status in (502, 503, 504):
        detail = f"a proxy in front of the service returned status {answer.status}: try again in a moment"
        return from_problem(
            wire.Problem(type=wire.ProblemType.UNAVAILABLE, title="Unavailable", status=answer.status, detail=detail)
        )
    return ForeignAnswerError(
        f"the server returned status {answer.status} without a problem document: is TULA_URL the address of a Tula "
        "service?"
    )


def _body(answer: Answer) -> bytes:
    if not 200 <= answer.status < 300:
        raise parse_error(answer)
    return answer.body


def _model(model: type[M], answer: Answer) -> M:
    body = _body(answer)
    try:
        return read(model, body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        raise UnexpectedAnswerError(
            f"the response is not a {model.__name__} ({where}: {first['msg'].lower()}): "
            "is TULA_URL the address of a Tula service of this version?"
        ) from None


def _object(answer: Answer) -> dict[str, Any]:
    try:
        parsed = json.loads(_body(answer))
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise UnexpectedAnswerError("the response is not a JSON object: is TULA_URL the address of a Tula service?")
    return parsed


def _events(answer: Answer) -> list[wire.Event]:
    reader = EventReader()
    events = map(reader.feed, _body(answer).decode().splitlines())
    return [event for event in events if event is not None]


def _nothing(answer: Answer) -> None:
    _body(answer)


def _scaling(answer: Answer) -> Scaling:
    if answer.status == 304:
        return Scaling(None, answer.headers.get("etag"))
    return Scaling(_model(wire.ScalingThresholds, answer), answer.headers.get("etag"))


_PARSERS: Final[dict[Any, Callable[[Answer], Any]]] = {
    dict[str, Any]: _object,
    list[wire.Event]: _events,
    type(None): _nothing,
    Scaling: _scaling,
}
"""Parsers of the responses that are not Pydantic models."""


class Calls(Unsent):
    """Declares the route, arguments and response of every API call; `_endpoint` builds the calls from them.

    Arguments that are None or equal to their default are omitted, as are unset fields of a body.
    """

    @_endpoint("POST", routes.JOBS, idempotent=True)
    def register(self, spec: wire.JobSpec, *, idempotency_key: str | None = None) -> Call[wire.JobCreated]:
        """Register a job; repeating the call with the same idempotency key returns the same job.

        The default key is random.
        """

    @_endpoint("GET", routes.JOBS)
    def jobs(
        self,
        *,
        search: str | None = None,
        state: wire.JobState | None = None,
        archived: bool = False,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> Call[wire.JobPage]:
        """Return one page of jobs, newest first.

        `search` selects jobs whose name contains this text; `archived=True` includes archived jobs.
        """

    @_endpoint("GET", routes.JOB)
    def job(self, job_id: str) -> Call[wire.Job]:
        """Return a job with its specification, plan and progress."""

    @_endpoint("PATCH", routes.JOB)
    def patch_job(self, job_id: str, patch: wire.JobPatch) -> Call[wire.Job]:
        """Change a job's objective, limits or prices, or archive it; omitted fields keep their values."""

    @Method
    def archive_job(self, job_id: str) -> Question[wire.Job]:
        """Archive a job, which hides it from lists; `patch_job` can restore it."""
        return calls.patch_job(job_id, wire.JobPatch(archived=True))

    @_endpoint("DELETE", routes.JOB)
    def delete_job(self, job_id: str) -> Call[None]:
        """Delete a job and its measurements."""

    @_endpoint("POST", routes.JOB_CLAIM)
    def claim(self, job_id: str, claim: wire.ClaimRequest) -> Call[wire.RunClaimed]:
        """Lease the next profiling run; if there is none, `run` is None and `reason` says why."""

    @_endpoint("POST", routes.JOB_RUNS)
    def create_run(self, job_id: str, run: wire.RunCreate) -> Call[wire.Run]:
        """Register a run that is not in the plan: a training run, or a profiling run of a chosen configuration."""

    @_endpoint("GET", routes.JOB_RUNS)
    def runs(
        self, job_id: str, *, kind: wire.RunKind | None = None, limit: int | None = None, cursor: str | None = None
    ) -> Call[wire.RunList]:
        """Return one page of a job's runs, newest first."""

    @_endpoint("GET", routes.RUN)
    def run(self, run_id: str) -> Call[wire.Run]:
        """Return the run with this id."""

    @_endpoint("GET", routes.RUN_PROGRESS)
    def progress(self, run_id: str) -> Call[wire.Progress]:
        """Return the progress of a training run: examples read, seconds remaining and money spent."""

    @_endpoint("GET", routes.RUN_VERDICT)
    def verdict(self, run_id: str) -> Call[wire.Verdict]:
        """Return the verdict on a run: what limits the run's speed, the evidence, and what to do next."""

    @_endpoint("PATCH", routes.RUN)
    def patch_run(self, run_id: str, patch: wire.RunPatch) -> Call[wire.Run]:
        """Change the state of a run; the state `running` also renews the run's lease."""

    @_endpoint("POST", routes.RUN_SAMPLES, idempotent=True)
    def send_samples(self, run_id: str, batch: wire.SampleBatch) -> Call[wire.SamplesAccepted]:
        """Store measured steps; repeating the call is harmless, since the service ignores rows that it already has."""

    @_endpoint("POST", routes.RUN_TELEMETRY, idempotent=True)
    def send_telemetry(self, run_id: str, chunk: wire.TelemetryChunk) -> Call[wire.TelemetryAccepted]:
        """Store a chunk of telemetry series; repeating the call is harmless."""

    @_endpoint("GET", routes.JOB_SAMPLES)
    def samples(
        self,
        job_id: str,
        *,
        run_id: str | None = None,
        rank: int | None = None,
        warmup: bool | None = None,
        first_step: int | None = None,
        last_step: int | None = None,
        cursor: str | None = None,
        limit: int | None = None,
    ) -> Call[wire.SamplePage]:
        """Return one page of a job's measured steps.

        If `warmup` is True, the page contains only steps that the fit discards; if False, only steps that the fit uses.
        """

    @_endpoint("GET", routes.RUN_TELEMETRY)
    def series(
        self,
        run_id: str,
        column: str | None = None,
        *,
        max_points: int | None = None,
        rank: int | None = None,
        first_step: int | None = None,
        last_step: int | None = None,
    ) -> Call[wire.TelemetrySeries]:
        """Return one telemetry column of a run, downsampled to at most `max_points` points.

        Without `column`, the response lists the names of the available columns and has no points.
        """

    @_endpoint("GET", routes.JOB_EVENTS + "?after=0&follow=false")
    def past_events(self, job_id: str) -> Call[list[wire.Event]]:
        """Return all past events of a job, oldest first."""

    @_endpoint("GET", routes.JOB_RECOMMENDATION)
    def recommendation(self, job_id: str, objective: wire.Objective | None = None) -> Call[wire.Recommendation]:
        """Return the recommended configuration with its predictions and the reason for it.

        `objective` overrides the job's objective.
        """

    @_endpoint("GET", routes.JOB_PREDICTIONS)
    def predictions(
        self,
        job_id: str,
        num_nodes: Sequence[int] | int | None = None,
        global_batch_size: Sequence[int] | int | None = None,
        *,
        local_batch_size: Sequence[int] | int | None = None,
        instance_type: Sequence[str] | str | None = None,
        option: Sequence[str] | str | None = None,
        usd_per_node_hour: float | None = None,
        deadline_s: float | None = None,
    ) -> Call[wire.Predictions]:
        """Predict every combination of the given values (what-if analysis).

        If an argument is omitted, all values that the job allows are used. `option` contains values such as
        `precision=bf16`; omitted options have their recommended values.
        """

    @_endpoint("GET", routes.JOB_SCHEDULE)
    def schedule(
        self, job_id: str, objective: wire.Objective | None = None, *, beta2: float = 0.999
    ) -> Call[wire.BatchSchedule]:
        """Return a batch schedule that follows the gradient noise measured by a training run.

        `write_schedule` converts the schedule for a training program. `beta2` is Adam's beta2 at the base batch.
        """

    @_endpoint("GET", routes.JOB_SCALING)
    def scaling(self, job_id: str, *, policy: wire.ScalingPolicy = "gain", etag: str | None = None) -> Call[Scaling]:
        """Return the gradient-scaling values of a policy.

        If `etag` is the current ETag, the service does not send the values again.
        """

    @_endpoint("PATCH", routes.JOB_SCALING)
    def patch_scaling(
        self, job_id: str, patch: wire.ScalingPatch, *, policy: wire.ScalingPolicy = "gain"
    ) -> Call[wire.ScalingThresholds]:
        """Set gradient-scaling values of a policy.

        Each run reads the values when it starts and, with the policies `ags` and `static`, after each epoch.
        """

    @_endpoint("GET", routes.JOB_LEDGER)
    def ledger(self, job_id: str, *, limit: int | None = None) -> Call[wire.Ledger]:
        """Return past recommendations with the measurements of the training runs that used them, newest first."""

    @_endpoint("GET", routes.JOB_CHART)
    def chart(
        self,
        job_id: str,
        name: str = "tradeoff",
        *,
        quantity: Literal["time", "cost"] = "time",
        objective: wire.Objective | None = None,
    ) -> Call[dict[str, Any]]:
        """Return a chart of a job as a Vega-Lite specification with its data; only `tradeoff` uses `quantity`."""

    @_endpoint("GET", routes.RUN_CHART)
    def run_chart(self, run_id: str, name: str) -> Call[dict[str, Any]]:
        """Return a chart of a run as a Vega-Lite specification with its data."""

    @_endpoint("POST", routes.FABRICS)
    def send_probe(self, probe: wire.FabricProbe) -> Call[wire.Fabric]:
        """Store a probe's measurements of a fabric, and return the fabric with the line fitted to the measurements."""

    @_endpoint("GET", routes.FABRICS)
    def fabrics(self) -> Call[wire.FabricList]:
        """Return the newest probe of each fabric in the project."""

    @_endpoint("GET", routes.PROJECTS)
    def projects(self) -> Call[wire.ProjectList]:
        """Return all projects; requires an admin token."""

    @_endpoint("POST", routes.PROJECTS)
    def create_project(self, project: wire.ProjectCreate) -> Call[wire.Project]:
        """Create a project; requires an admin token."""

    @_endpoint("GET", routes.TOKENS)
    def tokens(self) -> Call[wire.TokenList]:
        """Return all tokens that the caller may see, without their secrets."""

    @_endpoint("POST", routes.TOKENS)
    def create_token(self, token: wire.TokenCreate) -> Call[wire.TokenCreated]:
        """Create a token; only this response contains the secret."""

    @_endpoint("DELETE", routes.TOKEN)
    def revoke_token(self, token_id: str) -> Call[None]:
        """Revoke a token immediately."""

    @_endpoint("GET", routes.HEALTH)
    def health(self) -> Call[dict[str, Any]]:
        """Return normally if the service process responds; otherwise raise `TulaError`."""

    @_endpoint("GET", routes.READY)
    def ready(self) -> Call[dict[str, Any]]:
        """Return normally if the database and its schema are ready; otherwise raise `ServiceUnavailableError`."""


calls: Final = Calls()
