"""One sender's flood leaves room for all others: slow bodies, images, event streams, and the two kinds of requests."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.types import Message, Scope

from tests.service.api.conftest import HOST, Service
from tests.service.api.test_ingest import batch
from tula_service.api import errors
from tula_service.api.instruments import Metrics
from tula_service.api.middleware import RequestMiddleware
from tula_service.dashboard import charts
from tula_service.settings import Settings
from tula_wire import routes


def as_(token: str) -> dict[str, str]:
    """The header of this token."""
    return {"Authorization": f"Bearer {token}"}


class Caller:
    """Sends requests to the middleware alone; a body that is not complete stays on its way."""

    def __init__(self, settings: Settings) -> None:
        app = FastAPI()
        errors.install(app)

        @app.post("/{path:path}")
        async def read(request: Request) -> dict[str, int]:
            return {"bytes": len(await request.body())}

        self.app = RequestMiddleware(app, settings=settings, metrics=Metrics())

    async def post(self, path: str, sender: str, body: bytes | None) -> int:
        """The status; None as the body never completes."""
        sent: list[Message] = []

        async def receive() -> Message:
            if body is None:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            sent.append(message)

        scope: Scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": [], "client": (sender, 1), "http_version": "1.1", "scheme": "http", "root_path": "",
        }  # fmt: skip
        await self.app(scope, receive, send)
        return int(sent[0]["status"])


def test_slow_bodies_of_one_sender_take_no_room_of_others() -> None:
    """They are read before anyone can be asked for a token."""

    async def flood() -> None:
        caller = Caller(Settings(max_in_flight=16))
        slow = [asyncio.create_task(caller.post("/v1/jobs", "192.0.2.1", None)) for _ in range(100)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        refused = [one.result() for one in slow if one.done()]
        assert refused == [503] * 97, "all but a quarter of the room of other requests"
        for _ in range(20):
            assert await caller.post("/v1/jobs", "192.0.2.2", b"{}") == 200
        assert await caller.post("/v1/jobs", "192.0.2.1", b"{}") == 503
        for one in slow:
            one.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        assert await caller.post("/v1/jobs", "192.0.2.1", b"{}") == 200, "what went away is not counted"

    asyncio.run(asyncio.wait_for(flood(), 30))


def test_requests_of_agents_and_others_do_not_take_each_others_room(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lease renewals and polls of thresholds are answered while every thread and all room for others is taken."""
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
            ]
            refused = [ask.result().status_code for ask in asks if ask.done()]
            released.set()
            await asyncio.gather(*asks)
            return [answer.status_code for answer in answers], refused

    statuses, refused = service.transport.run(asyncio.wait_for(at_once(), 60))
    assert statuses == [200, 200, 200, 202]
    assert set(refused) == {503}


def test_images_of_one_token_leave_threads_and_turns_for_others(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of one token, six in all; the others are refused at once, and what needs no image is answered."""
    red, blue, released = service.tenant("red"), service.tenant("blue"), threading.Event()
    monkeypatch.setattr(charts, "png", lambda _: released.wait() and b"png")

    async def at_once() -> tuple[list[int], list[int]]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(service.app), base_url=HOST) as client:

            def ask(tenant: Any) -> asyncio.Task[httpx.Response]:
                path = routes.RUN_CHART.format(run_id=tenant.run_id, name="loss")
                return asyncio.create_task(client.get(path, params={"format": "png"}, headers=as_(tenant.user)))

            asks = [ask(red) for _ in range(20)]
            while sum(one.done() for one in asks) < 18:
                await asyncio.sleep(0.001)
            others = ask(blue)
            listed = await client.get(routes.JOBS, headers=as_(blue.user))
            released.set()
            return [(await one).status_code for one in asks], [listed.status_code, (await others).status_code]

    ours, others = service.transport.run(asyncio.wait_for(at_once(), 60))
    assert sorted(ours) == [200, 200] + [503] * 18
    assert others == [200, 200]
    assert service.app.state.services.drawings == []


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
        assert [await first_status(red) for _ in range(5)] == [200, 200, 200, 503, 503]
        assert await first_status(blue) == 200
        for one in open_streams:
            one.cancel()
        await asyncio.gather(*open_streams, return_exceptions=True)
        assert service.app.state.services.streams == []

    service.transport.run(asyncio.wait_for(flood(), 30))


def test_a_path_with_a_slash_too_many_is_not_found_and_redirects_nowhere(service: Service) -> None:
    """A redirect would send a client to the host that the request named, before it is authorised."""
    with service.client(Host="evil.example") as client:
        answer = client.get("/v1/jobs/", follow_redirects=False)
    assert (answer.status_code, "location" in answer.headers) == (404, False)


def test_an_image_of_a_chart_opened_as_a_page_runs_no_script(service: Service) -> None:
    red = service.tenant("red")
    with service.client(red.user) as client:
        path = routes.RUN_CHART.format(run_id=red.run_id, name="loss")
        answer = client.get(path, params={"format": "svg"})
    assert answer.headers["content-type"].startswith("image/svg")
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert json.loads(json.dumps(answer.status_code)) == 200
