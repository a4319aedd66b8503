"""Tests that a session and its open streams end at sign-out, and that the oldest session ends if there are too many."""

from __future__ import annotations

import pytest

import tula_wire as wire
from tests.service.store.examples import a_job
from tests.service.usecases.cluster import Cluster
from tests.support.clock import ManualClock
from tula_service.errors import Unauthenticated
from tula_service.store import Store
from tula_service.store.access import MAX_SESSIONS
from tula_service.usecases import events, runs
from tula_service.usecases.access import ANONYMOUS, Access, Principal, digest, end_session, issue_token, open_session
from tula_wire.bounds import LAUNCH_TOKEN_S


@pytest.fixture
def token(store: Store) -> Principal:
    """Return the principal of a new token."""
    secret = issue_token(store, ANONYMOUS, name="reader", scope="read").secret
    return Access(store, cache_s=0.0, tokenless_allowed=False).authenticate(secret)


def signed_in(store: Store, token: Principal) -> tuple[str, Principal]:
    """Return the secret of a new session, and its principal."""
    secret = open_session(store, token)
    return secret, Access(store, cache_s=0.0, tokenless_allowed=False).authenticate(secret)


def test_an_event_stream_ends_with_the_session_that_opened_it(store: Store, token: Principal) -> None:
    job = a_job(store)
    (secret, left), (_, stays) = signed_in(store, token), signed_in(store, token)
    assert events.read_on(store, left, job.id, 0) == []
    end_session(store, secret)
    with pytest.raises(Unauthenticated):
        events.read_on(store, left, job.id, 0)
    assert events.read_on(store, stays, job.id, 0) == events.read_on(store, token, job.id, 0) == []


def test_a_token_has_a_bounded_number_of_sessions(store: Store, token: Principal, clock: ManualClock) -> None:
    secrets = []
    for _ in range(MAX_SESSIONS + 2):
        clock.advance(1.0)
        secrets.append(open_session(store, token))
    with store.reading() as tx:
        open_ones = [secret for secret in secrets if tx.sessions.exists(digest(secret))]
    assert open_ones == secrets[2:]


def test_the_token_of_a_launch_lives_as_long_as_its_lease_is_renewed(cluster: Cluster, clock: ManualClock) -> None:
    run = runs.claim(cluster.store, ANONYMOUS, cluster.register().job.id, wire.ClaimRequest(holder="launcher")).run
    assert run is not None
    of_launch = {"scope": "agent", "job_id": run.job_id, "expires_in_s": LAUNCH_TOKEN_S}
    secret, other = (
        issue_token(cluster.store, ANONYMOUS, name=name, **of_launch).secret for name in ("launcher", "another")
    )
    access = Access(cluster.store, cache_s=0.0, tokenless_allowed=False)
    for _ in range(5):
        cluster.patch(run.id, "running", lease_s=600.0)
        clock.advance(0.9 * LAUNCH_TOKEN_S)
        assert access.authenticate(secret).job_id == run.job_id
    agent = access.authenticate(secret)
    runs.patch(cluster.store, agent, run.id, wire.RunPatch(state="running", holder="launcher"))
    clock.advance(0.2 * LAUNCH_TOKEN_S)
    for ended in (secret, other):
        with pytest.raises(Unauthenticated, match="expired"):
            access.authenticate(ended)
