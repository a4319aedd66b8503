"""Limits of requests per token, and of wrong tokens per address."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace

import httpx
import pytest

from tests.service.api.conftest import HOST, Service
from tula_service.api import deps, middleware
from tula_service.api.deps import Limiter
from tula_service.app import LOOKUPS
from tula_service.errors import Busy
from tula_service.usecases.access import Access, Principal
from tula_wire import routes

SOMEONE = Principal("someone", "user", token_id="token-1", project_id="default")
OTHER = Principal("other", "user", token_id="token-2", project_id="default")


def admitted(limiter: Limiter, principal: Principal, times: int, *, ingest: bool = False) -> int:
    """How many of `times` requests are admitted before the first refusal."""
    for number in range(times):
        try:
            limiter.admit(principal, ingest=ingest)
        except Busy:
            return number
    return times


def test_a_refusal_says_when_to_come_back() -> None:
    limiter = Limiter(requests_per_minute=1, ingest_per_minute=1)
    limiter.admit(SOMEONE, ingest=False)
    with pytest.raises(Busy) as refused:
        limiter.admit(SOMEONE, ingest=False)
    assert refused.value.limited
    assert 1 <= refused.value.retry_after_s <= 60


def test_a_clock_that_is_set_back_locks_no_caller_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows are of a clock that no one sets: after a day back, one of wall time would last a day longer."""
    clock = SimpleNamespace(time=lambda: 2e9, monotonic=lambda: 100.0)
    monkeypatch.setattr(deps, "time", clock)
    limited = Limiter(requests_per_minute=1, ingest_per_minute=1)
    limited.admit(SOMEONE, ingest=False)
    clock.time = lambda: 2e9 - 86_400
    with pytest.raises(Busy) as refused:
        limited.admit(SOMEONE, ingest=False)
    assert refused.value.retry_after_s <= 60
    clock.monotonic = lambda: 161.0
    limited.admit(SOMEONE, ingest=False)


def test_a_token_beyond_its_limit_takes_nothing_from_another() -> None:
    limiter = Limiter(requests_per_minute=10, ingest_per_minute=3)
    assert admitted(limiter, SOMEONE, 12) == 10
    assert admitted(limiter, OTHER, 6) == 6


def test_ingest_has_a_limit_separate_from_other_requests() -> None:
    limiter = Limiter(requests_per_minute=1, ingest_per_minute=40)
    assert admitted(limiter, SOMEONE, 50, ingest=True) == 40
    assert admitted(limiter, SOMEONE, 2) == 1


def test_valid_tokens_of_one_address_are_not_counted_as_guesses(
    sqlite_url: str, start: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a proxy all agents have one address, and each new token makes workers check all tokens again."""
    monkeypatch.setattr(deps, "WRONG_PER_MINUTE", 5)
    service = start(sqlite_url)
    agents = [service.client(service.token("user")) for _ in range(12)]
    assert {agent.get(routes.JOBS).status_code for agent in agents} == {200}
    statuses = [service.client("tula_wrong").get(routes.JOBS).status_code for _ in range(7)]
    assert statuses == [401] * 5 + [429] * 2
    service.app.state.services.access.forget()
    fresh = service.client(service.token("user"))
    assert {agent.get(routes.JOBS).status_code for agent in (*agents, fresh)} == {200}, "wrong tokens lock out no right"


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer tula_wrong"}, {"Authorization": "Token x"}])
def test_a_refusal_without_a_right_token_asks_for_one_and_is_no_latency_of_the_service(
    sqlite_url: str, start: Callable[..., Service], monkeypatch: pytest.MonkeyPatch, header: dict[str, str]
) -> None:
    """Missing, wrong and malformed tokens count alike. Answers 429 wait, which would look like a slow service."""
    monkeypatch.setattr(deps, "WRONG_PER_MINUTE", 1)
    monkeypatch.setattr(middleware, "LIMITED_S", 0.01)
    service = start(sqlite_url)
    boss = service.client(service.token("admin"))
    answers = [service.client(**header).get(routes.JOBS) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [401, 429, 429]
    assert "had no right token: set TULA_TOKEN" in answers[-1].json()["detail"]
    text = boss.get(routes.METRICS).text
    assert f'tula_requests_total{{method="GET",route="{routes.JOBS}",status="429"}} 2.0' in text
    assert f'tula_request_seconds_count{{route="{routes.JOBS}"}} 1.0' in text


@pytest.mark.parametrize("page", [False, True])
def test_a_burst_of_wrong_tokens_is_answered_up_to_the_limit(
    sqlite_url: str, start: Callable[..., Service], monkeypatch: pytest.MonkeyPatch, page: bool
) -> None:
    """All are looked up, since a right one may be among them, a few at a time; the login page counts as well."""
    monkeypatch.setattr(deps, "WRONG_PER_MINUTE", 5)
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
            while len(checked) < (7 if page else LOOKUPS):
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
