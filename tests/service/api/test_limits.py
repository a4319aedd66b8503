"""Tests the limits on requests per token, and on wrong tokens per address."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace

import httpx
import pytest

from tests.service.api.conftest import HOST, Service
from tula_service.api import limits, middleware
from tula_service.api.limits import RequestLimits
from tula_service.app import AUTH_THREADS
from tula_service.errors import Busy
from tula_service.usecases.access import Access, Principal
from tula_wire import routes


def admitted(counts: RequestLimits, sender: str, times: int, *, ingest: bool = False) -> int:
    """Return how many of `times` requests are admitted before the first refusal."""
    for number in range(times):
        try:
            counts.count_request(sender, ingest=ingest)
        except Busy:
            return number
    return times


def test_a_refusal_says_when_to_come_back_by_a_clock_that_no_one_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the wall clock were set back by a day, a window of wall time would last a day longer."""
    clock = SimpleNamespace(time=lambda: 2e9, monotonic=lambda: 100.0)
    monkeypatch.setattr(limits, "time", clock)
    counts = RequestLimits(requests_per_minute=1, ingest_per_minute=1)
    counts.count_request("token-1")
    clock.time, clock.monotonic = lambda: 2e9 - 86_400, lambda: 130.0
    with pytest.raises(Busy) as refused:
        counts.count_request("token-1")
    assert refused.value.limited
    assert refused.value.retry_after_s == 30
    clock.monotonic = lambda: 161.0
    counts.count_request("token-1")


def test_a_token_beyond_its_limit_takes_nothing_from_another_nor_from_its_own_measurements() -> None:
    counts = RequestLimits(requests_per_minute=10, ingest_per_minute=40)
    assert admitted(counts, "token-1", 12) == 10
    assert admitted(counts, "token-2", 6) == 6
    assert admitted(counts, "token-1", 50, ingest=True) == 40


def test_valid_tokens_of_one_address_are_not_counted_as_guesses(
    sqlite_url: str, start: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a proxy all agents have one address, and after each new token the workers check all tokens again."""
    monkeypatch.setattr(limits, "FAILED_PER_MINUTE", 5)
    service = start(sqlite_url)
    agents = [service.client(service.token("user")) for _ in range(12)]
    assert {agent.get(routes.JOBS).status_code for agent in agents} == {200}
    statuses = [service.client("tula_wrong").get(routes.JOBS).status_code for _ in range(7)]
    assert statuses == [401] * 5 + [429] * 2
    service.app.state.services.access.forget_all()
    fresh = service.client(service.token("user"))
    assert {agent.get(routes.JOBS).status_code for agent in (*agents, fresh)} == {200}, "wrong tokens lock out no right"


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer tula_wrong"}, {"Authorization": "Token x"}])
def test_a_refusal_without_a_right_token_asks_for_one_and_is_no_latency_of_the_service(
    sqlite_url: str, start: Callable[..., Service], monkeypatch: pytest.MonkeyPatch, header: dict[str, str]
) -> None:
    """Missing, wrong and malformed tokens count alike. A 429 is delayed, so its time must not count as latency."""
    monkeypatch.setattr(limits, "FAILED_PER_MINUTE", 1)
    monkeypatch.setattr(middleware, "LIMITED_S", 0.01)
    service = start(sqlite_url)
    boss = service.client(service.token("admin"))
    answers = [service.client(**header).get(routes.JOBS) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [401, 429, 429]
    assert "failed to authenticate within a minute: set TULA_TOKEN" in answers[-1].json()["detail"]
    text = boss.get(routes.METRICS).text
    assert 'tula_requests_total{method="GET",route="unmatched",status="429"} 2.0' in text
    assert 'tula_request_seconds_count{route="unmatched"} 1.0' in text


@pytest.mark.parametrize("page", [False, True])
def test_a_burst_of_wrong_tokens_is_answered_up_to_the_limit(
    sqlite_url: str, start: Callable[..., Service], monkeypatch: pytest.MonkeyPatch, page: bool
) -> None:
    """A few tokens at a time are looked up, since one may be valid; attempts on the login page count as well."""
    monkeypatch.setattr(limits, "FAILED_PER_MINUTE", 5)
    service = start(sqlite_url)
    service.token("user")
    check, checked, released = Access.authenticate, [], threading.Event()

    def held(access: Access, secret: str) -> Principal:
        checked.append(secret)
        released.wait()
        return check(access, secret)

    monkeypatch.setattr(Access, "authenticate", held)

    async def burst() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(service.app), base_url=HOST) as client:
            guesses = [asyncio.create_task(guess(client, f"tula_wrong{number}")) for number in range(7)]
            while len(checked) < AUTH_THREADS:
                await asyncio.sleep(0.001)
            released.set()
            return sorted([(await one).status_code for one in guesses])

    async def guess(client: httpx.AsyncClient, secret: str) -> httpx.Response:
        if page:
            return await client.post("/login", content=f"token={secret}")
        return await client.get(routes.JOBS, headers={"Authorization": f"Bearer {secret}"})

    statuses = service.transport.run(burst())
    assert len(checked) == 7
    assert statuses == [401] * 5 + [429] * 2
