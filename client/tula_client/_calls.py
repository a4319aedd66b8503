"""Every call of the API: builds its request and parses its answer, without I/O; both clients share them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, ValidationError

import tula_wire as wire
from tula_client._errors import TulaError, UnexpectedAnswerError, from_problem
from tula_client._request import Answer, Call, Request
from tula_wire import read, routes

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")
Query = Mapping[str, "str | float | Sequence[int] | Sequence[str] | None"]

_JSON: Final = "application/json"
_EVENT_STREAM: Final = {"Accept": "text/event-stream"}


@dataclass(frozen=True)
class Scaling:
    """Thresholds of gradient scaling with their ETag; `thresholds` is None if the sent ETag is current."""

    thresholds: wire.ScalingThresholds | None
    etag: str | None


@dataclass
class EventReader:
    """Turns the lines of a stream of server-sent events (WHATWG HTML, section 9.2) into events, each once, in order.

    `last_id` is the `Last-Event-ID` to reconnect with. `retry_s` is the wait that the server asked for. Comments,
    unknown fields and events of unknown kinds are skipped.
    """

    last_id: int | None = None
    retry_s: float = 1.0
    failures: int = 0
    _data: list[str] = field(default_factory=list)
    _pending_id: int | None = None
    _delivered: int = -1

    def feed(self, line: str) -> wire.Event | None:
        """Parse one line without its line ending; the event that it completes, or None."""
        if not line:
            return self._complete()
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "retry" and value.isascii() and value.isdigit():
            self.retry_s = min(60.0, int(value[:9]) / 1000)
        elif name == "id" and value.isascii() and value.isdigit():
            self._pending_id = int(value[:18])
        return None

    def disconnected(self) -> float:
        """Record that the stream ended; seconds to wait before connecting again, doubling up to 30 s."""
        self._data.clear()
        self._pending_id = None
        self.failures += 1
        return min(30.0, self.retry_s * 2.0 ** min(self.failures - 1, 5))

    def _complete(self) -> wire.Event | None:
        text, self._data = "\n".join(self._data), []
        if self._pending_id is not None:
            self.last_id, self._pending_id = max(self.last_id or 0, self._pending_id), None
        if not text:
            return None
        try:
            event = read(wire.Event, text)
        except ValidationError:
            return None
        self.failures = 0
        self.last_id = max(self.last_id or 0, event.id)
        if event.id <= self._delivered:
            return None
        self._delivered = event.id
        return event


def register(spec: wire.JobSpec, *, idempotency_key: str | None = None) -> Call[wire.JobCreated]:
    """Register a job; the same key gives the same job. The default is a random key."""
    headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
    return _call("POST", routes.JOBS, _model(wire.JobCreated), body=spec, headers=headers, idempotent=True)


def jobs(
    *,
    search: str | None = None,
    state: wire.JobState | None = None,
    archived: bool = False,
    limit: int | None = None,
    cursor: str | None = None,
) -> Call[wire.JobPage]:
    """One page of jobs, newest first; `search` matches names, `archived` includes archived jobs."""
    only_if_set = "true" if archived else None
    query = {"search": search, "state": state, "archived": only_if_set, "limit": limit, "cursor": cursor}
    return _call("GET", routes.JOBS, _model(wire.JobPage), query=query)


def job(job_id: str) -> Call[wire.Job]:
    """A job with its specification, plan and progress."""
    return _call("GET", routes.JOB, _model(wire.Job), job_id=job_id)


def patch_job(job_id: str, patch: wire.JobPatch) -> Call[wire.Job]:
    """Change the objective, limits or prices, or archive; omitted fields do not change."""
    return _call("PATCH", routes.JOB, _model(wire.Job), body=patch, job_id=job_id)


def archive_job(job_id: str) -> Call[wire.Job]:
    """Hide a job from lists; `patch_job` restores it."""
    return patch_job(job_id, wire.JobPatch(archived=True))


def delete_job(job_id: str) -> Call[None]:
    """Delete a job with its measurements."""
    return _call("DELETE", routes.JOB, _nothing, job_id=job_id)


def claim(job_id: str, claim: wire.ClaimRequest) -> Call[wire.RunClaimed]:
    """Lease the next profiling run; if there is none, `run` is None and `reason` says why."""
    return _call("POST", routes.JOB_CLAIM, _model(wire.RunClaimed), body=claim, job_id=job_id)


def create_run(job_id: str, run: wire.RunCreate) -> Call[wire.Run]:
    """Register a run outside the plan: a training, or a profiling run of a chosen configuration."""
    return _call("POST", routes.JOB_RUNS, _model(wire.Run), body=run, job_id=job_id)


def runs(
    job_id: str, *, kind: wire.RunKind | None = None, limit: int | None = None, cursor: str | None = None
) -> Call[wire.RunList]:
    """One page of a job's runs, newest first."""
    query = {"kind": kind, "limit": limit, "cursor": cursor}
    return _call("GET", routes.JOB_RUNS, _model(wire.RunList), query=query, job_id=job_id)


def run(run_id: str) -> Call[wire.Run]:
    """One run."""
    return _call("GET", routes.RUN, _model(wire.Run), run_id=run_id)


def patch_run(run_id: str, patch: wire.RunPatch) -> Call[wire.Run]:
    """Change the state of a run, or renew its lease with the state `running`."""
    return _call("PATCH", routes.RUN, _model(wire.Run), body=patch, run_id=run_id)


def send_samples(run_id: str, batch: wire.SampleBatch) -> Call[wire.SamplesAccepted]:
    """Store measured steps; stored rows count as duplicates, so a repetition is harmless."""
    return _call("POST", routes.RUN_SAMPLES, _model(wire.SamplesAccepted), body=batch, idempotent=True, run_id=run_id)


def send_telemetry(run_id: str, chunk: wire.TelemetryChunk) -> Call[wire.TelemetryAccepted]:
    """Store a chunk of series; a repetition is harmless."""
    return _call(
        "POST", routes.RUN_TELEMETRY, _model(wire.TelemetryAccepted), body=chunk, idempotent=True, run_id=run_id
    )


def samples(
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
    """One page of the stored steps of a job; `warmup` selects those that the fit discards (True) or uses (False)."""
    query: Query = {
        "run_id": run_id,
        "rank": rank,
        "warmup": warmup,
        "first_step": first_step,
        "last_step": last_step,
        "cursor": cursor,
        "limit": limit,
    }
    return _call("GET", routes.JOB_SAMPLES, _model(wire.SamplePage), query=query, job_id=job_id)


def series(
    run_id: str,
    column: str | None = None,
    *,
    max_points: int | None = None,
    rank: int | None = None,
    first_step: int | None = None,
    last_step: int | None = None,
) -> Call[wire.TelemetrySeries]:
    """One column of a run, down-sampled by the service to `max_points`; without `column`, only the names of all."""
    query = {"column": column, "max_points": max_points, "rank": rank, "first_step": first_step, "last_step": last_step}
    return _call("GET", routes.RUN_TELEMETRY, _model(wire.TelemetrySeries), query=query, run_id=run_id)


def recommendation(job_id: str, objective: wire.Objective | None = None) -> Call[wire.Recommendation]:
    """The recommended configuration with predictions, knee, frontier and reason; by default for the job's objective."""
    query = {"objective": objective}
    return _call("GET", routes.JOB_RECOMMENDATION, _model(wire.Recommendation), query=query, job_id=job_id)


def predictions(
    job_id: str,
    num_nodes: Sequence[int] | int | None = None,
    global_batch_size: Sequence[int] | int | None = None,
    *,
    local_batch_size: Sequence[int] | int | None = None,
    instance_type: Sequence[str] | str | None = None,
    usd_per_node_hour: float | None = None,
    deadline_s: float | None = None,
) -> Call[wire.Predictions]:
    """What-if: predictions for all combinations of the values; an omitted one takes every value that the job allows."""
    query: Query = {
        "num_nodes": num_nodes,
        "global_batch_size": global_batch_size,
        "local_batch_size": local_batch_size,
        "instance_type": instance_type,
        "usd_per_node_hour": usd_per_node_hour,
        "deadline_s": deadline_s,
    }
    return _call("GET", routes.JOB_PREDICTIONS, _model(wire.Predictions), query=query, job_id=job_id)


def scaling(job_id: str, *, policy: wire.ScalingPolicy | None = None, etag: str | None = None) -> Call[Scaling]:
    """Thresholds of gradient scaling; with the `etag` of the last answer, unchanged ones are not sent again.

    `policy` is the script's; a policy that was set for the job takes precedence.
    """
    headers = {"If-None-Match": etag} if etag else {}
    return _call("GET", routes.JOB_SCALING, _scaling, query={"policy": policy}, headers=headers, job_id=job_id)


def patch_scaling(
    job_id: str, patch: wire.ScalingPatch, *, policy: wire.ScalingPolicy | None = None
) -> Call[wire.ScalingThresholds]:
    """Set the policy of a job's gradient scaling, or numbers of `policy`; running training follows within seconds."""
    parse, query = _model(wire.ScalingThresholds), {"policy": policy}
    return _call("PATCH", routes.JOB_SCALING, parse, query=query, body=patch, job_id=job_id)


def ledger(job_id: str, *, limit: int | None = None) -> Call[wire.Ledger]:
    """Past recommendations with the measurements that followed, newest first."""
    return _call("GET", routes.JOB_LEDGER, _model(wire.Ledger), query={"limit": limit}, job_id=job_id)


def chart(
    job_id: str,
    name: str = "tradeoff",
    *,
    quantity: Literal["time", "cost"] = "time",
    objective: wire.Objective | None = None,
) -> Call[dict[str, Any]]:
    """A Vega-Lite specification of a job's chart, with its data; `quantity` is what `tradeoff` draws."""
    query: Query = {"quantity": None if quantity == "time" else quantity, "objective": objective}
    return _call("GET", routes.JOB_CHART, _object, query=query, job_id=job_id, name=name)


def run_chart(run_id: str, name: str) -> Call[dict[str, Any]]:
    """A Vega-Lite specification of a run's chart, with its data."""
    return _call("GET", routes.RUN_CHART, _object, run_id=run_id, name=name)


def send_probe(probe: wire.FabricProbe) -> Call[wire.Fabric]:
    """Store what a probe measured of a fabric; the answer has the line through it."""
    return _call("POST", routes.FABRICS, _model(wire.Fabric), body=probe)


def fabrics() -> Call[wire.FabricList]:
    """The newest probes of the project's fabrics."""
    return _call("GET", routes.FABRICS, _model(wire.FabricList))


def projects() -> Call[wire.ProjectList]:
    """All projects; for administrators."""
    return _call("GET", routes.PROJECTS, _model(wire.ProjectList))


def create_project(project: wire.ProjectCreate) -> Call[wire.Project]:
    """Create a project; for administrators."""
    return _call("POST", routes.PROJECTS, _model(wire.Project), body=project)


def tokens() -> Call[wire.TokenList]:
    """All tokens that the caller may see, without secrets."""
    return _call("GET", routes.TOKENS, _model(wire.TokenList))


def create_token(token: wire.TokenCreate) -> Call[wire.TokenCreated]:
    """Create a token; only this answer holds its secret."""
    return _call("POST", routes.TOKENS, _model(wire.TokenCreated), body=token)


def revoke_token(token_id: str) -> Call[None]:
    """Revoke a token at once."""
    return _call("DELETE", routes.TOKEN, _nothing, token_id=token_id)


def health() -> Call[dict[str, Any]]:
    """Succeeds if the service's process answers."""
    return _call("GET", routes.HEALTH, _object)


def ready() -> Call[dict[str, Any]]:
    """Succeeds if database and schema are ready; else raises `ServiceUnavailableError`."""
    return _call("GET", routes.READY, _object)


def past_events(job_id: str) -> Call[list[wire.Event]]:
    """All events of a job until now, oldest first."""
    query: Query = {"after": 0, "follow": "false"}
    return _call("GET", routes.JOB_EVENTS, _events, query=query, headers=_EVENT_STREAM, job_id=job_id)


def events(job_id: str, *, last_id: int | None = None) -> Request:
    """The request for a job's stream of events, after the event `last_id`."""
    resume = {} if last_id is None else {"Last-Event-ID": str(last_id)}
    headers = _EVENT_STREAM | {"Cache-Control": "no-store"} | resume
    return _call("GET", routes.JOB_EVENTS, _nothing, headers=headers, job_id=job_id).request


def _call(
    method: Literal["GET", "POST", "PATCH", "DELETE"],
    route: str,
    parse: Callable[[Answer], T],
    *,
    query: Query | None = None,
    body: BaseModel | None = None,
    headers: Mapping[str, str] | None = None,
    idempotent: bool = False,
    **names: str,
) -> Call[T]:
    """A call of `route`; each of the `names` in it, whatever it holds, stays one segment of the path.

    Omits query values that are None and fields of `body` that were not set. Of the methods, only POST is not
    idempotent: PATCH sets absolute values.
    """
    for name, value in names.items():
        if value in ("", ".", ".."):
            raise ValueError(f"{name} must name something, not {value!r}")
    path = route.format(**{name: quote(value, safe="") for name, value in names.items()})
    content = None if body is None else body.model_dump_json(exclude_unset=True).encode()
    sent = {"Accept": _JSON, **({} if content is None else {"Content-Type": _JSON}), **(headers or {})}
    return Call(Request(method, path, tuple(_pairs(query or {})), content, sent, idempotent or method != "POST"), parse)


def _pairs(query: Query) -> Iterator[tuple[str, str]]:
    for name, value in query.items():
        if value is not None:
            many = value if not isinstance(value, (str, int, float)) else [value]
            yield from ((name, str(one)) for one in many)


def parse_error(answer: Answer) -> TulaError:
    """The exception of an answer whose status is not a success."""
    try:
        return from_problem(read(wire.Problem, answer.body))
    except ValidationError:
        pass
    if answer.status in (502, 503, 504):
        detail = f"a proxy in front of the service answered {answer.status}: try again in a moment"
        return from_problem(
            wire.Problem(type=wire.ProblemType.UNAVAILABLE, title="Unavailable", status=answer.status, detail=detail)
        )
    return UnexpectedAnswerError(
        f"answered {answer.status} without a problem document: is TULA_URL the address of a Tula service?"
    )


def _body(answer: Answer) -> bytes:
    if not 200 <= answer.status < 300:
        raise parse_error(answer)
    return answer.body


def _model(model: type[M]) -> Callable[[Answer], M]:
    def parse(answer: Answer) -> M:
        body = _body(answer)
        try:
            return read(model, body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "body"
            raise UnexpectedAnswerError(
                f"the answer is no {model.__name__} ({where}: {first['msg'].lower()}): "
                "is TULA_URL the address of a Tula service of this version?"
            ) from None

    return parse


def _object(answer: Answer) -> dict[str, Any]:
    try:
        parsed = json.loads(_body(answer))
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise UnexpectedAnswerError("the answer is no JSON object: is TULA_URL the address of a Tula service?")
    return parsed


def _events(answer: Answer) -> list[wire.Event]:
    reader = EventReader()
    found = map(reader.feed, _body(answer).decode().splitlines())
    return [event for event in found if event is not None]


def _nothing(answer: Answer) -> None:
    _body(answer)


def _scaling(answer: Answer) -> Scaling:
    if answer.status == 304:
        return Scaling(None, answer.headers.get("etag"))
    return Scaling(_model(wire.ScalingThresholds)(answer), answer.headers.get("etag"))
