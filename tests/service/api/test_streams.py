"""Tests that a stream of events lasts only as long as the caller may read it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.service.api.conftest import Service, Tenant
from tula_service.api import events
from tula_service.usecases.access import ANONYMOUS, Principal, digest, issue_token, revoke_token
from tula_service.usecases.jobs import delete_job


def revoke(service: Service, _red: Tenant, token_id: str) -> None:
    """Revoke the token."""
    revoke_token(service.store, ANONYMOUS, token_id)


def delete(service: Service, red: Tenant, _token_id: str) -> None:
    """Delete the job with its events."""
    delete_job(service.store, ANONYMOUS, red.job_id)


def expire(service: Service, red: Tenant, token_id: str) -> None:
    """Do nothing, since the token expires by itself."""


@pytest.mark.parametrize("end", [revoke, delete, expire])
def test_a_stream_ends_with_the_token_and_with_the_job(
    service: Service, red: Tenant, end: Callable[[Service, Tenant, str], None]
) -> None:
    """The stream ends within one poll after its caller has lost the right to read it."""
    life_s = 2.0 if end is expire else None
    issued = issue_token(service.store, ANONYMOUS, name="u", scope="user", project="red", expires_in_s=life_s)
    caller = Principal("u", "user", issued.token.id, red.project_id, sha256=digest(issued.secret))
    assert asyncio.run(pieces(service, red, caller, end, issued.token.id)) == ["retry", "job"]


def test_a_stream_of_the_first_start_ends_with_the_first_token(service: Service) -> None:
    """On loopback, no token is needed until one exists."""
    with service.client() as client:
        assert client.get("/v1/jobs").status_code == 200
    red = service.tenant("red")
    with service.store.reading() as tx:
        found = tx.tokens.by_hash(digest(red.user))
    assert found is not None
    assert asyncio.run(pieces(service, red, ANONYMOUS, expire, found.id)) == ["retry"]


async def pieces(
    service: Service, red: Tenant, caller: Principal, end: Callable[[Service, Tenant, str], None], token_id: str
) -> list[str | None]:
    """Return the kinds of a stream's events; `end` is called after the first event and ends the stream."""
    with service.store.transaction() as tx:
        tx.events.append(red.job_id, "job", data={})
    got: list[str | None] = []

    async def read() -> None:
        async for event in events.stream_events(red.job_id, caller, service.app.state.services, 0):
            got.append("retry" if event.retry else event.event)
            if event.id is not None:
                end(service, red, token_id)

    await asyncio.wait_for(read(), 30)
    return got
