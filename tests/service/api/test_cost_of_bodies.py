"""No body on any route stops the event loop for more than 50 ms, or takes more than 64 MiB."""

from __future__ import annotations

import asyncio
import gzip
import re
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgpack
import pytest

from tests.service.api.conftest import HOST, Service
from tests.service.api.test_ingest import chunk
from tests.service.api.test_security import all_routes
from tula_service.api.bodies import MAX_VALUES, ORDINARY_BYTES, ORDINARY_MEMBERS
from tula_wire import TelemetryChunk, routes

LOOP_S = 0.05
ATTEMPTS = 20
MEMORY_BYTES = 64 * 2**20
LARGE = 8 * 2**20
VALUES = MAX_VALUES[TelemetryChunk]
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def json_bodies() -> Iterator[tuple[str, bytes]]:
    """As many bytes, members, values, levels and digits as each limit allows, and far more."""
    few = ORDINARY_MEMBERS - 10
    for members in (few, 300_000):
        yield f"{members} unknown members", b"{" + b",".join(b'"%x":0' % n for n in range(members)) + b"}"
    yield "lists", b'{"a":[' + b"[]," * few + b"0]}"
    yield "levels", b'{"cluster":' + b"[" * few + b"]" * few + b"}"
    yield "six megabytes of lists", b"[" + b"[]," * 2_000_000 + b"0]"
    for size in (ORDINARY_BYTES, LARGE):
        yield f"a text of {size}", b'{"boot_id":"' + b"x" * (size - 20) + b'"}'
        yield f"{size} of control characters", b'{"state":"failed","message":"' + b"\\u0007" * (size // 6 - 8) + b'"}'
        yield f"{size} digits", b'{"rank":' + b"9" * (size - 20) + b"}"
        yield f"{size} of nothing", b" " * (size - 2) + b"{}"
    for value in (b"0,", b'"",', b'"x",', b"null,", b"1.5,"):
        yield f"values {value!r}", b'{"rank":0,"sequence":0,"columns":{"a":[' + value * (VALUES - 10) + b"0]}}"
        yield f"steps {value!r}", b'{"sequence":[' + value * (VALUES - 10) + b"0]}"


def toml_bodies() -> Iterator[tuple[str, bytes]]:
    """Of a job.toml: lines, keys, dots, of which each is a table, and one long text."""
    yield "keys", b"".join(b"k%d=1\n" % n for n in range(ORDINARY_MEMBERS - 10))
    yield "dots", b"a" + b".a" * (ORDINARY_MEMBERS - 10) + b"=1"
    yield "more dots", b"a" + b".a" * 120_000 + b"=1"
    yield "lines", b"\n" * ORDINARY_BYTES
    yield "a text", b'a="""' + b"\n" * (ORDINARY_BYTES - 20) + b'"""'


def packed_bodies() -> Iterator[tuple[str, dict[str, str], bytes]]:
    """Of measurements: MessagePack, and what gzip makes of small bodies."""
    packed, zipped = {"Content-Type": "application/msgpack"}, {"Content-Encoding": "gzip"}
    yield "packed lists", packed, b"\xdd" + (130_000).to_bytes(4, "big") + b"\x90" * 130_000
    yield "packed texts", packed, msgpack.packb(chunk(1) | {"columns": {f"c{n}": "x" for n in range(400)}})
    yield "a packed text", packed, msgpack.packb(chunk(1) | {"boot_id": "x" * (LARGE - 200)})
    yield "a packed column", packed, msgpack.packb(chunk(1) | {"columns": {"a": bytes(LARGE - 200)}})
    yield "zipped zeros", zipped, gzip.compress(bytes(64 * 2**20))
    yield "a zipped text", zipped, gzip.compress(b'{"boot_id":"' + b"x" * 15 * 2**20 + b'"}')
    yield (
        "zipped texts",
        zipped,
        gzip.compress(b'{"columns":{"a":[' + (b'"' + b"x" * 21 + b'",') * (VALUES - 20) + b"0]}}"),
    )


async def longest_gap(client: httpx.AsyncClient, method: str, path: str, headers: dict[str, str], body: bytes) -> float:
    """Seconds for which the event loop stood still at a time, while the service took or refused this body."""
    answer: asyncio.Task[httpx.Response] = asyncio.create_task(
        client.request(method, path, content=body, headers=headers)
    )
    gap, last = 0.0, time.perf_counter()
    while not answer.done():
        await asyncio.sleep(0)
        now = time.perf_counter()
        gap, last = max(gap, now - last), now
    assert answer.result().status_code < 500, (method, path, answer.result().text)
    return gap


def peak_bytes() -> int:
    """The largest resident memory of this process since it was last cleared."""
    found = re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text())
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.timeout(300)
@pytest.mark.skipif(not CLEAR.exists(), reason="Linux alone tells the largest memory of a while")
def test_no_body_stops_the_loop_or_takes_memory(service: Service) -> None:
    """All routes that read a body; each is sent until the loop ran on once, since other processes stop it as well."""
    red = service.tenant("red")
    admin = {"Authorization": f"Bearer {service.token('admin')}", "Content-Type": "application/json"}
    ids = {"job_id": red.job_id, "run_id": red.run_id}
    readers = [each for each in all_routes(service) if each[0] in ("POST", "PATCH", "PUT") and each[1] != "/logout"]
    assert {path for _, path in readers} >= {routes.JOBS, routes.RUN, routes.RUN_SAMPLES, "/login", "/jobs/new"}

    async def send_all() -> dict[str, float]:
        transport = httpx.ASGITransport(service.app, raise_app_exceptions=False)
        slow: dict[str, float] = {}
        async with httpx.AsyncClient(transport=transport, base_url=HOST, timeout=120) as client:
            for method, route in readers:
                bodies = [(name, admin, body) for name, body in (*json_bodies(), *toml_bodies())]
                if route in (routes.RUN_SAMPLES, routes.RUN_TELEMETRY):
                    bodies += [(name, admin | more, body) for name, more, body in packed_bodies()]
                for name, headers, body in bodies:
                    CLEAR.write_text("5")
                    before = peak_bytes()
                    for _ in range(ATTEMPTS):
                        gap = await longest_gap(client, method, route.format(**ids), headers, body)
                        if gap < LOOP_S:
                            break
                    else:
                        slow[f"{method} {route}: {name}"] = gap
                    assert peak_bytes() - before < MEMORY_BYTES, f"{method} {route}: {name}"
        return slow

    assert service.transport.run(send_all()) == {}
