"""Tests that a body must be JSON of bounded size and is read whole in a thread, and that its size bounds its cost."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.service.api.conftest import HOST, SPEC, Service, Tenant
from tests.service.api.test_ingest import batch, chunk
from tests.service.api.test_security import all_routes, problem
from tula_service.api import middleware
from tula_service.api.bodies import ORDINARY_BYTES
from tula_wire import MAX_BODY_BYTES, MAX_STEPS, SampleBatch, TelemetryChunk, routes

WORST_S, WORST_BYTES = 5.0, 400 * 2**20
"""What docs/operations.md states of the worst body: CPU seconds, and memory while it is read."""
CLEAR = Path("/proc/self/clear_refs")


def filled(head: bytes, unit: bytes, tail: bytes, size: int) -> bytes:
    """Return a body of about `size` bytes, filled with repetitions of `unit`."""
    return head + unit * ((size - len(head) - len(tail)) // len(unit)) + tail


def numbered(head: bytes, form: str, tail: bytes, size: int) -> bytes:
    """Return a body of about `size` bytes, filled with members that have different names."""
    members: list[bytes] = []
    left = size - len(head) - len(tail)
    while left > 0:
        members.append((form % len(members)).encode())
        left -= len(members[-1]) + 1
    return head + b",".join(members[:-1]) + tail


def hostile(size: int) -> Iterator[tuple[str, bytes]]:
    """Yield the costliest bodies of this size: many lists, maps, members or wrong values, or one long value."""
    column = b'{"boot_id":"b","sequence":0,"steps":[0],"columns":{"a":['
    for unit in (b"[],", b"{},", b"[0],", b"0,", b'"",'):
        yield f"values {unit!r}", filled(column, unit, b"0]}}", size)
    yield "levels", b'{"cluster":' + b"[" * (size - 20)
    yield "clusters", filled(b'{"cluster":[', b"{},", b"{}]}", size)
    yield "unknown members", numbered(b"{", '"%x":[]', b"}", size)
    yield "columns", numbered(b'{"columns":{', '"a%x":[]', b"}}", size)
    yield "wrong columns", filled(b'{"columns":{', b'"":0,', b'"a":0}}', size)
    yield "a text", filled(b'{"state":"failed","message":"', b"\\u0007", b'"}', size)
    yield "digits", b'{"rank":' + b"9" * (size - 20) + b"}"


def peak_bytes() -> int:
    """Return the largest resident memory of this process since the peak was last cleared."""
    sizes = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert sizes is not None
    return int(sizes[1]) * 1024


@pytest.mark.skipif(not CLEAR.exists(), reason="Linux alone tells the largest memory of a while")
def test_the_worst_body_of_each_route_costs_no_more_than_is_stated(service: Service, red: Tenant) -> None:
    admin = {"Authorization": f"Bearer {service.token('admin')}"}
    ids = {"job_id": red.job_id, "run_id": red.run_id}
    with httpx.Client(transport=service.transport, base_url=HOST, headers=admin) as client:
        for method, route in (("POST", routes.JOBS), ("PATCH", routes.RUN), *INGEST):
            for name, body in hostile(MAX_BODY_BYTES if (method, route) in INGEST else ORDINARY_BYTES):
                CLEAR.write_text("5")
                before, began = peak_bytes(), time.process_time()
                answer = client.request(method, route.format(**ids), content=body)
                assert answer.status_code in (200, 422), (route, name, answer.text)
                assert len(answer.content) < 20_000, "the report of what is wrong is bounded too"
                assert time.process_time() - began < WORST_S, (route, name)
                assert peak_bytes() - before < WORST_BYTES, (route, name)


INGEST = (("POST", routes.RUN_SAMPLES), ("POST", routes.RUN_TELEMETRY))


def test_a_larger_body_is_413_on_every_route_declared_or_not(service: Service, red: Tenant) -> None:
    """The service refuses the body before its end, and may close the connection of a client that keeps sending."""
    admin = service.token("admin")

    def undeclared(size: int) -> Iterator[bytes]:
        for _ in range(size // 2**16 + 1):
            yield b" " * 2**16

    with service.client(admin, **{"Content-Type": "application/json"}) as client:
        for method, route in all_routes(service):
            if method in ("GET", "DELETE"):
                continue
            limit = MAX_BODY_BYTES if (method, route) in INGEST else ORDINARY_BYTES
            path = route.format(job_id=red.job_id, run_id=red.run_id)
            for content in (b" " * (limit + 1), undeclared(limit)):
                answer = client.request(method, path, content=content)
                assert answer.status_code == 413, (method, route, answer.text)
                assert answer.headers["connection"] == "close"


def test_the_largest_batch_and_chunk_of_an_agent_are_read(service: Service, red: Tenant) -> None:
    steps = list(range(MAX_STEPS))
    samples = batch(MAX_STEPS, compute_time_s=[0.0123456] * MAX_STEPS, skew_s=[0.0123456] * MAX_STEPS)
    telemetry = chunk(1) | {"steps": steps, "columns": {f"c{n}": [0.123456] * MAX_STEPS for n in range(10)}}
    with service.client(red.agent) as client:
        for route, model, body in (
            (routes.RUN_SAMPLES, SampleBatch, samples),
            (routes.RUN_TELEMETRY, TelemetryChunk, telemetry),
        ):
            text = model.model_validate(body).model_dump_json(exclude_none=True).encode()
            assert len(text) <= MAX_BODY_BYTES
            assert client.post(route.format(run_id=red.run_id), content=text).status_code == 202


@pytest.mark.parametrize(
    "headers", [{"Content-Type": "text/plain"}, {"Content-Type": "application/x+json"}, {"Content-Encoding": "gzip"}]
)
def test_only_plain_json_is_read(service: Service, red: Tenant, headers: dict[str, str]) -> None:
    with service.client(red.agent, **headers) as client:
        answer = client.post(routes.RUN_TELEMETRY.format(run_id=red.run_id), content=json.dumps(chunk()))
        assert "send uncompressed application/json" in str(problem(answer, 415)["detail"])


def test_a_body_without_a_media_type_is_json(service: Service, red: Tenant) -> None:
    with service.client(red.user) as client:
        assert client.post(routes.JOBS, content=SPEC.model_dump_json()).status_code == 201


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xc1", b"null", b"0", b"\x80" * 100])
def test_what_is_no_object_is_422_and_names_the_body(service: Service, red: Tenant, body: bytes) -> None:
    with service.client(red.agent) as client:
        for _, route in INGEST:
            problem(client.post(route.format(run_id=red.run_id), content=body), 422)


def test_a_caller_who_may_not_use_the_route_is_told_so_before_its_body_is_read(service: Service, red: Tenant) -> None:
    with service.client(red.agent) as agent:
        problem(agent.post(routes.JOBS, content=b"{"), 403)


def test_a_slow_body_is_answered_408(service: Service, red: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "BODY_TIMEOUT_S", 0.05)

    async def slow() -> int:
        async def pieces():  # type: ignore[no-untyped-def]
            yield b"{"
            await asyncio.Event().wait()

        transport = httpx.ASGITransport(service.app)
        async with httpx.AsyncClient(transport=transport, base_url=HOST, timeout=30) as client:
            path = routes.RUN_TELEMETRY.format(run_id=red.run_id)
            headers = {"Authorization": f"Bearer {red.agent}"}
            return (await client.post(path, content=pieces(), headers=headers)).status_code

    assert service.transport.run(asyncio.wait_for(slow(), 30)) == 408


def test_measurements_of_a_deleted_run_get_404_and_reach_no_other_run(
    database_url: str, start: Callable[..., Service]
) -> None:
    """SQLite reuses the key of a deleted run for the next run, and a worker may still remember the deleted run."""
    service = start(database_url)
    red = service.tenant("red")

    def send(sequence: int) -> list[httpx.Response]:
        with service.client(service.token("admin")) as agent:
            bodies = (
                (routes.RUN_SAMPLES, batch(boot_id=str(sequence))),
                (routes.RUN_TELEMETRY, chunk(sequence=sequence)),
            )
            return [agent.post(route.format(run_id=red.run_id), json=body) for route, body in bodies]

    assert [answer.status_code for answer in send(0)] == [202, 202]
    with service.client(red.user) as user:
        assert user.delete(routes.JOB.format(job_id=red.job_id)).status_code == 204
    assert [answer.status_code for answer in send(1)] == [404, 404]
    blue = service.tenant("blue")
    assert [answer.status_code for answer in send(2)] == [404, 404]
    with service.store.reading() as tx:
        run = tx.runs.get(blue.run_id)
        assert tx.telemetry.columns(run.key) == []
        assert run.num_samples == 0
