"""Limits of a token: counted once over all workers of a replica, whichever of them it meets."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.support.server import make_token
from tests.service.api.conftest import HOST, Service
from tests.support.server import serving
from tula_service.api.security import limiter
from tula_service.api.security.counts import SharedCounts
from tula_service.api.security.limiter import INGEST_BLOCK, Limiter
from tula_service.errors import Busy
from tula_service.usecases.access import Access, Principal
from tula_wire import routes

SOMEONE = Principal("someone", "user", token_id="token-1", project_id="default")
OTHER = Principal("other", "user", token_id="token-2", project_id="default")


def admitted(limiter: Limiter, principal: Principal, times: int, *, ingest: bool = False) -> int:
    """How many of so many requests get in, before the first that does not."""
    for number in range(times):
        try:
            limiter.admit(principal, ingest=ingest)
        except Busy:  # noqa: PERF203 - the count is the point
            return number
    return times


def test_a_refusal_says_when_to_come_back() -> None:
    limiter = Limiter(requests_per_minute=1, ingest_per_minute=1)
    limiter.admit(SOMEONE, ingest=False)
    with pytest.raises(Busy) as refused:
        limiter.admit(SOMEONE, ingest=False)
    assert refused.value.limited
    assert 1 <= refused.value.retry_after_s <= 60


def test_workers_that_share_a_file_share_the_limit(tmp_path: Path) -> None:
    workers = [Limiter(requests_per_minute=10, ingest_per_minute=10**6, counts=tmp_path / "counts") for _ in range(3)]
    assert sum(admitted(worker, SOMEONE, 6) for worker in workers) == 10
    assert admitted(workers[0], OTHER, 6) == 6, "another token has a limit of its own"
    for worker in workers:
        worker.close()


def test_ingest_is_counted_over_workers_in_blocks(tmp_path: Path) -> None:
    limit = 4 * INGEST_BLOCK
    workers = [Limiter(requests_per_minute=1, ingest_per_minute=limit, counts=tmp_path / "counts") for _ in range(2)]
    assert sum(admitted(worker, SOMEONE, limit, ingest=True) for worker in workers) == limit
    for worker in workers:
        worker.close()


def test_a_worker_alone_needs_no_file() -> None:
    assert admitted(Limiter(requests_per_minute=3, ingest_per_minute=1), SOMEONE, 9) == 3


def test_a_window_ends(tmp_path: Path) -> None:
    counts = SharedCounts(tmp_path / "counts")
    assert [counts.incr("key", 0.05) for _ in range(3)] == [1, 2, 3]
    ends = counts.get_expiry("key")
    while time.time() < ends:
        time.sleep(0.005)
    assert counts.get("key") == 0
    assert counts.incr("key", 60, 5) == 5
    counts.clear("key")
    assert counts.get("key") == 0
    counts.close()


@given(keys=st.lists(st.sampled_from("abcdefgh"), max_size=60))
def test_counts_are_those_of_a_dictionary(keys: list[str]) -> None:
    counts, expected = SharedCounts(), dict.fromkeys("abcdefgh", 0)
    for key in keys:
        expected[key] += 1
        assert counts.incr(key, 60) == expected[key]
    assert {key: counts.get(key) for key in expected} == expected
    for key in expected:
        counts.take_back(key, counts.get_expiry(key))
    assert {key: counts.get(key) for key in expected} == {key: max(0, count - 1) for key, count in expected.items()}
    counts.reset()
    assert not any(counts.get(key) for key in expected)


def test_a_count_is_taken_back_only_from_its_own_window() -> None:
    """A check may take longer than a window: whoever guessed wrong since keeps the count of that."""
    counts = SharedCounts()
    _, earlier = counts.count("address", 0.0)
    _, later = counts.count("address", 60)
    counts.take_back("address", earlier)
    assert counts.get("address") == 1
    counts.take_back("address", later)
    assert counts.get("address") == 0


def test_more_keys_than_places_stay_bounded() -> None:
    """Whoever sends from ever new addresses gets no memory for it."""
    counts = SharedCounts()
    before = len(counts._table)
    for number in range(40_000):
        assert counts.incr(f"address-{number}", 60) >= 1
    assert len(counts._table) == before


@pytest.mark.parametrize("workers", [1, 2])
def test_a_real_service_lets_exactly_the_limit_in(sqlite_url: str, workers: int) -> None:
    """Forty requests over forty connections, which the kernel deals out to the workers."""
    headers = {"Authorization": f"Bearer {make_token(sqlite_url)}"}
    statuses: list[int] = []
    with serving(sqlite_url, workers=workers, requests_per_minute=15) as server:

        def ask() -> None:
            statuses.append(httpx.get(server.url + routes.JOBS, headers=headers, timeout=30).status_code)

        threads = [threading.Thread(target=ask) for _ in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (statuses.count(200), statuses.count(429)) == (15, 25)


def test_right_tokens_are_no_guesses_however_many_come_from_one_address(
    sqlite_url: str, start: Callable[..., Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a balancer all agents have one address, and a token that is made anywhere makes workers look again."""
    monkeypatch.setattr(limiter, "GUESSES_PER_MINUTE", 5)
    service = start(sqlite_url)
    agents = [service.client(service.token("user")) for _ in range(12)]
    assert {agent.get(routes.JOBS).status_code for agent in agents} == {200}
    statuses = [service.client("tula_wrong").get(routes.JOBS).status_code for _ in range(7)]
    assert statuses == [401] * 5 + [429] * 2
    service.app.state.services.access.forget()
    assert {agent.get(routes.JOBS).status_code for agent in agents} == {200}, "and guesses keep nobody else out"


@pytest.mark.parametrize("page", [False, True])
def test_a_burst_of_guesses_gets_no_further_than_the_limit(
    sqlite_url: str, start: Callable[..., Service], monkeypatch: pytest.MonkeyPatch, page: bool
) -> None:
    """All of them are under way before the first is found to be wrong; the page that asks for a token counts too."""
    monkeypatch.setattr(limiter, "GUESSES_PER_MINUTE", 5)
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
            while len(checked) + sum(one.done() for one in guesses) < 7:
                await asyncio.sleep(0.001)
            released.set()
            return sorted([(await one).status_code for one in guesses])

    async def guess(client: httpx.AsyncClient, secret: str) -> httpx.Response:
        if page:
            return await client.post("/login", content=f"token={secret}")
        return await client.get(routes.JOBS, headers={"Authorization": f"Bearer {secret}"})

    statuses = service.transport._loop.run_until_complete(burst())
    assert len(checked) == 5
    assert statuses == ([401] * 7 if page else [401] * 5 + [429] * 2)
