"""Tests that the service accepts data from agents, whatever other requests it handles and however long they take."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import anyio.to_thread
import httpx
import pytest

from tests.service.api.conftest import HOST, SPEC, Service
from tests.service.api.test_ingest import batch, chunk
from tula_service.usecases import planning
from tula_wire import routes

ASKED = 50
ROOM = 40


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return the event that lets fits end, and assert that only one fit runs at a time."""
    compute, at_work, released = planning.report_findings, [], threading.Event()

    def held(*arguments):  # type: ignore[no-untyped-def]
        at_work.append(1)
        assert len(at_work) == 1
        released.wait()
        at_work.pop()
        return compute(*arguments)

    monkeypatch.setattr(planning, "report_findings", held)
    return released


def test_fifty_questions_that_need_a_fit_keep_no_agent_waiting(
    database_url: str, start: Callable[..., Service], fits: threading.Event
) -> None:
    """No fit ends, so all threads and slots for such questions are occupied; agents are still answered."""
    service = start(database_url, threads=4, max_in_flight=ROOM)
    red = service.tenant("red")
    spec = SPEC.model_dump(mode="json")
    with service.store.transaction() as tx:
        jobs = [tx.jobs.create(red.project_id, spec)[0].id for _ in range(ASKED)]

    async def at_once() -> list[int]:
        transport = httpx.ASGITransport(service.app)
        async with httpx.AsyncClient(transport=transport, base_url=HOST) as client:
            asks = [
                asyncio.create_task(client.get(routes.JOB_RECOMMENDATION.format(job_id=job_id), headers=as_(red.user)))
                for job_id in jobs
            ]
            threads = anyio.to_thread.current_default_thread_limiter()
            while threads.available_tokens or sum(ask.done() for ask in asks) < ASKED - ROOM * 3 // 4:
                await asyncio.sleep(0.001)
            for number in range(8):
                answers = await asyncio.wait_for(agents(client, service.token("agent", job_id=red.job_id), number), 60)
                assert [answer.status_code for answer in answers] == [202, 202]
            assert sum(ask.done() for ask in asks) == ASKED - ROOM * 3 // 4, "nothing but refusals was answered"
            fits.set()
            return [answer.status_code for answer in await asyncio.gather(*asks)]

    async def agents(client: httpx.AsyncClient, token: str, number: int) -> list[httpx.Response]:
        """Send data with an uncached token and run, so that every step that may need a thread is executed."""
        bodies = ((routes.RUN_SAMPLES, batch(boot_id=str(number))), (routes.RUN_TELEMETRY, chunk(sequence=number)))
        return [
            await client.post(route.format(run_id=red.run_id), json=body, headers=as_(token)) for route, body in bodies
        ]

    statuses = service.transport.run(at_once())
    assert sorted(set(statuses)) == [200, 503]
    assert statuses.count(200) == ROOM * 3 // 4


def as_(token: str) -> dict[str, str]:
    """Return the header with this token."""
    return {"Authorization": f"Bearer {token}"}
