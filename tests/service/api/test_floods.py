"""Tests that a flood from one sender leaves capacity for all others, and that agents are served first."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio.to_thread
import httpx
import pytest
from starlette.types import Message, Scope

from tests.service.api.conftest import HOST, Service, Tenant
from tests.service.api.test_ingest import batch
from tula_service.api import limits, middleware
from tula_wire import routes


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time that a sender beyond its limits waits for the refusal."""
    monkeypatch.setattr(middleware, "LIMITED_S", 0.01)


def as_(token: str) -> dict[str, str]:
    """Return the header with this token."""
    return {"Authorization": f"Bearer {token}"}


class Flood:
    """Requests with bodies that never end, in tasks on the application's event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.waiting: list[asyncio.Task[int | None]] = []

    async def send(self, number: int, method: str, path: str, headers: dict[str, str], piece: bytes = b"{") -> None:
        """Begin this many requests, each with one piece of its body, and wait until each one waits or is answered."""
        self.begun = 0
        for _ in range(number):
            self.waiting.append(asyncio.create_task(self._one(method, path, headers, piece)))
        while self.begun + sum(one.done() for one in self.waiting[-number:]) < number:
            await asyncio.sleep(0.001)

    async def _one(self, method: str, path: str, headers: dict[str, str], piece: bytes) -> int | None:
        sent: list[Message] = []
        pieces: list[Message] = [{"type": "http.request", "body": piece, "more_body": True}]
        stuck = False

        async def receive() -> Message:
            nonlocal stuck
            if not pieces:
                stuck, self.begun = True, self.begun + 1
                await asyncio.Event().wait()
            return pieces.pop()

        async def send(message: Message) -> None:
            sent.append(message)

        scope: Scope = {
            "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
            "client": ("192.0.2.1", 1), "http_version": "1.1", "scheme": "http", "root_path": "",
        }  # fmt: skip
        try:
            await self._service.app(scope, receive, send)
        finally:
            self.begun -= stuck
        return int(sent[0]["status"])

    @property
    def answers(self) -> Counter[int | None]:
        """Return how many requests were answered with each status."""
        return Counter(one.result() for one in self.waiting if one.done())

    async def end(self) -> None:
        """Cancel all requests that wait."""
        for one in self.waiting:
            one.cancel()
        await asyncio.gather(*self.waiting, return_exceptions=True)


async def served(service: Service, tenant: Tenant) -> list[int]:
    """Return the statuses of requests by one tenant's agent and user."""
    run = routes.RUN.format(run_id=tenant.run_id)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(service.app), base_url=HOST) as client:
        agent, user = as_(tenant.agent), as_(tenant.user)
        answers = [
            await client.post(routes.RUN_SAMPLES.format(run_id=tenant.run_id), json=batch(), headers=agent),
            await client.get(run, headers=agent),
            await client.patch(run, json={"state": "running"}, headers=agent),
            await client.get(routes.JOB_SCALING.format(job_id=tenant.job_id), headers=agent),
            await client.get(routes.JOBS, headers=user),
            await client.patch(routes.JOB.format(job_id=tenant.job_id), json={"archived": False}, headers=user),
        ]
    return [answer.status_code for answer in answers]


ALL_SERVED = [202, 200, 200, 200, 200, 200]
SLOW = {
    "a run's change": ("PATCH", routes.RUN),
    "samples": ("POST", routes.RUN_SAMPLES),
    "telemetry": ("POST", routes.RUN_TELEMETRY),
    "a job": ("POST", routes.JOBS),
    "a job's change": ("PATCH", routes.JOB),
}


@pytest.mark.parametrize("slow", SLOW)
def test_a_body_is_not_read_before_its_sender_is_known(service: Service, slow: str) -> None:
    """Requests without a valid token are answered at once, even if there are more than the service has room for."""
    red, (method, route) = service.tenant("red"), SLOW[slow]
    path = route.format(run_id=red.run_id, job_id=red.job_id)

    async def attack() -> None:
        flood = Flood(service)
        await flood.send(300, method, path, {})
        await flood.send(50, method, path, as_("tula_wrong"))
        assert flood.answers == {401: 350}
        assert await served(service, red) == ALL_SERVED

    service.transport.run(asyncio.wait_for(attack(), 60))


@pytest.mark.parametrize("slow", SLOW)
def test_slow_bodies_of_one_token_take_no_room_of_others(
    sqlite_url: str, start: Callable[..., Service], slow: str
) -> None:
    """The bodies count only against their sender, who may have as many open requests as all agents together."""
    service = start(sqlite_url, max_in_flight=16)
    red, blue, (method, route) = service.tenant("red"), service.tenant("blue"), SLOW[slow]
    path = route.format(run_id=red.run_id, job_id=red.job_id)
    sender = as_(red.agent if red.run_id in path else red.user)

    async def attack() -> None:
        flood = Flood(service)
        await flood.send(100, method, path, sender)
        assert flood.answers == {429: 84}
        assert await served(service, blue) == ALL_SERVED
        await flood.end()
        assert await served(service, red) == ALL_SERVED, "what went away is not counted"

    service.transport.run(asyncio.wait_for(attack(), 60))


def test_slow_bodies_of_one_token_hold_a_bounded_memory(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "ARRIVING_BYTES", 100_000)
    red = service.tenant("red")

    async def attack() -> None:
        flood = Flood(service)
        await flood.send(20, "POST", routes.RUN_SAMPLES.format(run_id=red.run_id), as_(red.agent), bytes(10_000))
        assert flood.answers == {429: 10}
        await flood.end()
        assert await served(service, red) == ALL_SERVED

    service.transport.run(asyncio.wait_for(attack(), 60))


def test_a_slow_form_of_an_address_leaves_room_for_other_addresses(
    sqlite_url: str, start: Callable[..., Service]
) -> None:
    """The login form is read without a token."""
    service = start(sqlite_url, max_in_flight=16)
    red = service.tenant("red")

    async def attack() -> int:
        flood = Flood(service)
        await flood.send(100, "POST", "/login", {})
        assert flood.answers == {429: 84}
        assert await served(service, red) == ALL_SERVED
        async with httpx.AsyncClient(transport=httpx.ASGITransport(service.app), base_url=HOST) as client:
            answer = await client.post("/login", content=f"token={red.user}")
        await flood.end()
        return answer.status_code

    assert service.transport.run(asyncio.wait_for(attack(), 60)) == 303


def test_requests_of_agents_and_others_do_not_take_each_others_room(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lease renewals, polls and sign-in are answered although every thread and slot for other requests is occupied."""
    red, released = service.tenant("red"), threading.Event()
    monkeypatch.setattr("tula_service.api.jobs.jobs.get", lambda *_: released.wait() and None)

    async def at_once() -> tuple[list[int], list[int]]:
        transport = httpx.ASGITransport(service.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=HOST) as client:
            path = routes.JOB.format(job_id=red.job_id)
            asks = [asyncio.create_task(client.get(path, headers=as_(red.user))) for _ in range(250)]
            while sum(ask.done() for ask in asks) < 250 - service.settings.max_ordinary_in_flight:
                await asyncio.sleep(0.001)
            run = routes.RUN.format(run_id=red.run_id)
            answers = [
                await client.patch(run, json={"state": "running"}, headers=as_(red.agent)),
                await client.get(run, headers=as_(red.agent)),
                await client.get(routes.JOB_SCALING.format(job_id=red.job_id), headers=as_(red.agent)),
                await client.post(routes.RUN_SAMPLES.format(run_id=red.run_id), json=batch(), headers=as_(red.agent)),
                await client.get("/static/app.css"),
                await client.post("/login", content=f"token={red.user}"),
            ]
            refused = [ask.result().status_code for ask in asks if ask.done()]
            released.set()
            await asyncio.gather(*asks)
            return [answer.status_code for answer in answers], refused

    statuses, refused = service.transport.run(asyncio.wait_for(at_once(), 60))
    assert statuses == [200, 200, 200, 202, 200, 303]
    assert set(refused) == {503}


def test_refusals_probes_and_static_files_wait_for_no_ordinary_thread(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A liveness probe that waited for slow requests would cause a restart; a refused agent would wait as long."""
    red, released = service.tenant("red"), threading.Event()
    monkeypatch.setattr("tula_service.api.jobs.jobs.get", lambda *_: released.wait() and None)

    async def at_once() -> list[int]:
        transport = httpx.ASGITransport(service.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=HOST) as client:
            path = routes.JOB.format(job_id=red.job_id)
            asks = [asyncio.create_task(client.get(path, headers=as_(red.user))) for _ in range(20)]
            threads = anyio.to_thread.current_default_thread_limiter()
            while threads.available_tokens:
                await asyncio.sleep(0.001)
            answers = [
                await client.get(routes.HEALTH),
                await client.get(routes.READY),
                await client.get(routes.JOBS),
                await client.get("/nowhere", headers=as_(red.user)),
                await client.post(routes.JOBS, content=b"{}", headers=as_(red.agent)),
                await client.post(routes.RUN_SAMPLES.format(run_id=red.run_id), content=b"{", headers=as_(red.agent)),
                await client.get("/static/app.css"),
                await client.get("/login"),
                await client.post("/login", content=f"token={red.user}"),
            ]
            released.set()
            await asyncio.gather(*asks)
            return [answer.status_code for answer in answers]

    statuses = service.transport.run(asyncio.wait_for(at_once(), 60))
    assert statuses == [200, 200, 401, 404, 403, 422, 200, 200, 303]


BEYOND = {"a wrong token": {401: 5}, "no token": {401: 5}, "requests": {200: 10}}
"""What is answered at once of as many requests of one sender as there is room for."""


@pytest.mark.parametrize("flood", BEYOND)
def test_a_sender_beyond_its_limits_waits_for_that_answer_and_takes_no_room(
    sqlite_url: str, start: Callable[..., Service], monkeypatch: pytest.MonkeyPatch, flood: str
) -> None:
    """Refusals at full speed once occupied the whole event loop."""
    monkeypatch.setattr(middleware, "LIMITED_S", 600.0)
    monkeypatch.setattr(limits, "FAILED_PER_MINUTE", 5)
    service = start(sqlite_url, max_in_flight=54, requests_per_minute=10 if flood == "requests" else 6000)
    senders = service.settings.max_ordinary_in_flight
    red, blue = service.tenant("red"), service.tenant("blue")
    url = HOST + routes.RUN_CHART.format(run_id=red.run_id, name="loss")
    headers = {"a wrong token": as_("tula_wrong"), "no token": {}}.get(flood, as_(red.user))

    async def attack() -> Counter[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(service.app)) as client:
            asks = [asyncio.create_task(client.get(url, headers=headers)) for _ in range(senders)]
            while sum(one.done() for one in asks) < sum(BEYOND[flood].values()):
                await asyncio.sleep(0.001)
            while await served(service, blue) != ALL_SERVED:
                await asyncio.sleep(0.001)
            answered = Counter(one.result().status_code for one in asks if one.done())
            for one in asks:
                one.cancel()
            await asyncio.gather(*asks, return_exceptions=True)
            return answered

    assert service.transport.run(asyncio.wait_for(attack(), 60)) == BEYOND[flood]


def test_one_token_takes_a_quarter_of_the_event_streams(sqlite_url: str, start: Callable[..., Service]) -> None:
    service = start(sqlite_url, max_in_flight=32)
    red, blue = service.tenant("red"), service.tenant("blue")
    assert service.settings.max_streams == 12

    async def first_status(tenant: Any) -> int:
        sent: list[Message] = []
        path = routes.JOB_EVENTS.format(job_id=tenant.job_id)
        scope: Scope = {
            "type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": [(b"authorization", f"Bearer {tenant.user}".encode())], "client": ("127.0.0.1", 1),
            "http_version": "1.1", "scheme": "http", "root_path": "", "server": ("localhost", 80),
        }  # fmt: skip

        async def receive() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        started = asyncio.Event()

        async def send(message: Message) -> None:
            sent.append(message)
            if message["type"] == "http.response.body" or message["status"] != 200:
                started.set()

        open_streams.append(asyncio.create_task(service.app(scope, receive, send)))
        await started.wait()
        return int(sent[0]["status"])

    open_streams: list[asyncio.Task[None]] = []

    async def flood() -> None:
        assert [await first_status(red) for _ in range(5)] == [200, 200, 200, 429, 429]
        assert await first_status(blue) == 200
        for one in open_streams:
            one.cancel()
        await asyncio.gather(*open_streams, return_exceptions=True)
        assert service.app.state.services.streams == []

    service.transport.run(asyncio.wait_for(flood(), 30))


def test_a_path_with_a_slash_too_many_is_not_found_and_redirects_nowhere(service: Service) -> None:
    """A redirect would send a client to the host that the request names, before the client is authorised."""
    with service.client(service.token("user"), Host="evil.example") as client:
        answer = client.get("/v1/jobs/", follow_redirects=False)
    assert (answer.status_code, "location" in answer.headers) == (404, False)
