"""Small bodies that would grow large: what is read is bounded by what it becomes, not by its bytes alone."""

from __future__ import annotations

import gzip
import json
import time
import tracemalloc
from collections.abc import Callable

import httpx
import msgpack
import numpy as np
import pytest
from pydantic import ValidationError

from tests.service.api.conftest import SPEC, Service, Tenant
from tests.service.api.test_ingest import batch, chunk
from tula_service.api.bodies import JSON, MAX_VALUES, MSGPACK, Body, parse, unpack
from tula_service.errors import InvalidInput, TooLarge
from tula_service.usecases.telemetry import chunk_from_packed
from tula_wire import MAX_STEPS, SampleBatch, TelemetryChunk, routes

MANY = 2_000_000
KEYS_AND_VALUES = b"".join(b"\xa2%c%c\xc0" % (32 + number % 64, 32 + number // 64) for number in range(4096))


@pytest.mark.parametrize(
    "hostile",
    [
        (b'{"columns":{"a":[' + b"[]," * MANY + b"0]}}"),
        (b'{"columns":{"a":[' + b'"",' * MANY + b"0]}}"),
        (b'{"columns":{"a":[' + b"0," * MANY + b"0]}}"),
    ],
    ids=["lists", "texts", "numbers"],
)
def test_a_body_of_many_small_values_takes_no_memory_of_their_number(hostile: bytes) -> None:
    """Read and reported, each would take hundreds of bytes: gigabytes of a few megabytes, or of kilobytes zipped."""
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge, match="smaller batches"):
            parse(TelemetryChunk, Body(JSON, "identity", hostile))
        assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    finally:
        tracemalloc.stop()


def test_the_largest_chunk_is_accepted_and_a_larger_one_refused() -> None:
    """64 full columns are as many values as a body may hold."""
    steps = list(range(MAX_STEPS))
    full = chunk(steps=1) | {"steps": steps, "columns": {f"c{n}": steps for n in range(64)}}
    text = TelemetryChunk.model_validate(full).model_dump_json().encode()
    assert text.count(b",") < MAX_VALUES[TelemetryChunk]
    assert len(parse(TelemetryChunk, Body(JSON, "identity", text)).columns) == 64
    packed = np.arange(MAX_STEPS).tobytes()
    columns = dict.fromkeys(full["columns"], packed)
    body = Body(MSGPACK, "identity", msgpack.packb(full | {"steps": packed, "columns": columns}))
    assert chunk_from_packed(unpack(body)).values.shape == (64, MAX_STEPS)


@pytest.mark.parametrize(
    "hostile",
    [
        b"\xdd" + MANY.to_bytes(4, "big") + b"\x90" * MANY,
        b"\xdd" + MANY.to_bytes(4, "big") + b"\xa2ab" * MANY,
        b"\xdc\x10\x00" + (b"\xdc\x10\x00" + b"\xa2ab" * 4096) * 4096,
        b"\xdc\x10\x00" + (b"\xde\x10\x00" + KEYS_AND_VALUES) * 4096,
        b"\xdf" + (600_000).to_bytes(4, "big") + b"".join(b"\xa6%06x\x00" % n for n in range(600_000)),
        b"\xde\x01\xf4" + b"".join(b"\xa3%03x\x80" % n for n in range(500)),
        b"\x81\xa1a" * MANY + b"\x80",
    ],
    ids=["lists", "texts", "lists of lists", "maps in a list", "a wide map", "maps in a map", "a deep map"],
)
def test_packed_bodies_hold_two_maps_and_no_list(hostile: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises((InvalidInput, TooLarge)):
            unpack(Body(MSGPACK, "identity", hostile))
        assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
    finally:
        tracemalloc.stop()


def test_an_error_report_names_one_wrong_value_per_column() -> None:
    """The report is as long as the form, not as the body."""
    with pytest.raises(ValidationError) as samples:
        SampleBatch.model_validate(batch(MAX_STEPS) | {"step": ["x"] * MAX_STEPS, "skew_s": ["y"] * MAX_STEPS})
    assert [error["loc"] for error in samples.value.errors()] == [("step", 0), ("skew_s", 0)]
    with pytest.raises(ValidationError) as telemetry:
        TelemetryChunk.model_validate(chunk(MAX_STEPS) | {"columns": {"loss": ["x"] * MAX_STEPS}})
    assert len(telemetry.value.errors()) == 1


@pytest.mark.parametrize("text", [b"x" * 100_000, b"\\" * 100_000, b'x\\"' * 40_000, b"\\\\" * 50_000])
@pytest.mark.parametrize("end", [b'"}', b""])
def test_a_long_text_is_refused_unread(text: bytes, end: bytes) -> None:
    """With escaped quotation marks in it or not, whether it ends or not."""
    with pytest.raises(TooLarge, match=r"text|members"):
        parse(TelemetryChunk, Body(JSON, "identity", b'{"rank": 0, "boot_id": "' + text + end))


def test_a_short_text_may_hold_quotation_marks_and_brackets() -> None:
    awkward = chunk(2) | {"boot_id": '\\"]],[{"\\'}
    assert parse(TelemetryChunk, Body(JSON, "identity", json.dumps(awkward).encode())).boot_id == awkward["boot_id"]


def test_only_what_agents_send_may_be_large(service: Service, red: Tenant) -> None:
    """All other bodies are read on the event loop: a large one is refused before it is read as anything."""
    large = b'{"name": "' + b"x" * 300_000 + b'"}'
    with service.client(red.user, **{"Content-Type": "application/json"}) as client:
        for method, path in (("POST", routes.JOBS), ("PATCH", routes.JOB), ("POST", routes.JOB_CLAIM)):
            assert client.request(method, path.format(job_id=red.job_id), content=large).status_code == 413
        assert client.post(routes.JOBS, content=SPEC.model_dump_json()).status_code == 201
    with service.client(red.agent, **{"Content-Type": "application/json"}) as agent:
        sent = agent.post(routes.RUN_TELEMETRY.format(run_id=red.run_id), content=b" " * 300_000 + b"{}")
        assert sent.status_code == 422


def test_a_zipped_body_of_many_small_values_is_413_over_http(service: Service, red: Tenant) -> None:
    body = gzip.compress(b'{"columns":{"a":[' + b"[]," * MANY + b"0]}}")
    assert len(body) < 20_000
    more = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    with service.client(red.agent, **more) as agent:
        for route in (routes.RUN_TELEMETRY, routes.RUN_SAMPLES):
            assert agent.post(route.format(run_id=red.run_id), content=body).status_code == 413


def test_measurements_of_a_deleted_run_get_404_and_reach_no_other_run(
    database_url: str, start: Callable[..., Service]
) -> None:
    """SQLite gives the key of a deleted run to the next one: a worker that knew the old one must not confuse them."""
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


@pytest.mark.parametrize(
    "hostile",
    [
        b"{" + b",".join(b'"%x":0' % number for number in range(600_000)) + b"}",
        b'{"columns":{' + b",".join(b'"%x":[]' % number for number in range(100_000)) + b"}}",
    ],
    ids=["unknown members", "columns"],
)
def test_a_body_of_many_members_is_refused_before_an_error_is_made_for_each(hostile: bytes) -> None:
    """Pydantic would make an error of hundreds of bytes for each, in seconds."""
    tracemalloc.start()
    began = time.thread_time()
    try:
        with pytest.raises(TooLarge, match=r"members|list"):
            parse(TelemetryChunk, Body(JSON, "identity", hostile))
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
        assert time.thread_time() - began < 0.5
    finally:
        tracemalloc.stop()
