"""Tests on every route that access is denied by default, tenants are separate, and strangers learn nothing useful."""

from __future__ import annotations

import base64
import json
import logging
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
import sqlalchemy as sa
from fastapi.routing import iter_route_contexts
from typer.testing import CliRunner

from tests.service.api.conftest import SPEC, Service, Tenant
from tula_service.__main__ import app
from tula_service.api.auth import AGENT_ROUTES, UNAUTHENTICATED_ROUTES
from tula_service.errors import Unauthenticated
from tula_service.store import Store
from tula_service.store.access import Tokens
from tula_service.store.tables import audit_log
from tula_service.usecases.access import ANONYMOUS, digest, issue_token, revoke_token
from tula_wire import MEDIA_TYPE, ProblemType, routes

CONFIGURATION = {"num_nodes": 1, "local_batch_size": 32}
BODIES: dict[tuple[str, str], dict[str, object]] = {
    ("PATCH", routes.JOB): {"objective": "time"},
    ("PATCH", routes.JOB_SCALING): {},
    ("POST", routes.JOB_CLAIM): {"holder": "h"},
    ("POST", routes.JOB_RUNS): {"kind": "train", "configuration": CONFIGURATION},
    ("PATCH", routes.RUN): {"state": "running", "output": "dGV4dA=="},
    ("POST", routes.RUN_SAMPLES): {"rank": 0, "boot_id": "b", "sequence": [0], "step": [0], "step_time_s": [0.1]},
    ("POST", routes.RUN_TELEMETRY): {"boot_id": "b", "sequence": 0, "steps": [0], "columns": {"loss": [1.0]}},
}


def all_routes(service: Service) -> Iterator[tuple[str, str]]:
    """Yield every method and path that the application answers."""
    for context in iter_route_contexts(service.app.routes):
        for method in sorted(context.methods or ()):
            if method not in ("HEAD", "OPTIONS"):
                yield method, str(context.path)


def concrete(path: str, tenant: Tenant) -> str:
    """Return the path with the tenant's ids, and a plausible value for every other placeholder."""
    known = {"job_id": tenant.job_id, "run_id": tenant.run_id, "token_id": "token-0", "name": "curve"}
    for name, value in known.items():
        path = path.replace("{" + name + "}", value).replace("{" + name + ":path}", value)
    assert "{" not in path, f"give {path} a value for its placeholder"
    return path


def problem(response: httpx.Response, status: int) -> dict[str, object]:
    """Return the problem document of a refusal."""
    assert response.status_code == status, (response.request.url, response.text)
    assert response.headers["content-type"] == MEDIA_TYPE
    found: dict[str, object] = response.json()
    assert str(found["detail"]).strip()
    return found


def test_every_route_refuses_a_stranger(service: Service, red: Tenant) -> None:
    """Once a token exists, only the probes and the login form answer without a token."""
    walked = list(all_routes(service))
    assert len(walked) > 20
    with service.client() as stranger, service.client("tula_wrong") as guesser:
        for method, path in walked:
            if (method, path) in UNAUTHENTICATED_ROUTES:
                continue
            for client in (stranger, guesser):
                answer = client.request(method, concrete(path, red), json={})
                found = problem(answer, 401)
                assert found["type"] == ProblemType.UNAUTHENTICATED
                assert "Bearer" in answer.headers["www-authenticate"]


def test_routes_without_a_guard_are_the_probes_and_what_shows_the_login_form(service: Service) -> None:
    probes = {("GET", routes.HEALTH), ("GET", routes.READY)}
    form = {("GET", "/login"), ("POST", "/login"), ("POST", "/logout"), ("GET", "/static/{name}")}
    assert set(all_routes(service)) >= UNAUTHENTICATED_ROUTES == probes | form


def test_a_token_finds_nothing_of_what_it_is_not_bound_to_on_any_route(
    service: Service, red: Tenant, blue: Tenant
) -> None:
    """Tokens of another project, and of another job of red, get the same response for red's ids as for unknown ids."""
    beside = {"name": "beside", "scope": "agent", "job_id": service.another_job(red)}
    with service.client(red.user) as client:
        of_another_job = client.post(routes.TOKENS, json=beside).json()["secret"]
    foreigners = (blue.user, blue.agent, service.token("read", project="blue"), of_another_job)
    checked = 0
    for method, path in all_routes(service):
        if "{job_id}" not in path and "{run_id}" not in path:
            continue
        body = BODIES.get((method, path))
        asked = {"column": "loss"} if path == routes.RUN_TELEMETRY else None
        for token in foreigners:
            with service.client(token) as client:
                foreign = client.request(method, concrete(path, red), json=body, params=asked)
                assert foreign.status_code in (403, 404), (method, path, foreign.text)
                assert red.project_id not in foreign.text
                nowhere = concrete(path, Tenant("", "job-nowhere", "run-nowhere", "", ""))
                absent = client.request(method, nowhere, json=body, params=asked)
                assert absent.status_code == foreign.status_code, "an answer must not tell that an id exists"
                checked += 1
    assert checked >= 80
    with service.store.reading() as tx:
        run = tx.runs.get(red.run_id)
        assert run is not None
        assert (run.num_samples, tx.runs.output(run.key)) == (0, None)


def test_lists_hold_only_the_tenants_own(service: Service, red: Tenant, blue: Tenant) -> None:
    with service.client(blue.user) as client:
        for path in (routes.JOBS, routes.TOKENS, routes.PROJECTS):
            text = client.get(path).text
            assert red.job_id not in text
            assert red.project_id not in text
            assert blue.project_id in text or blue.job_id in text


def test_an_agent_token_reaches_its_job_and_the_five_routes_it_needs(service: Service, red: Tenant) -> None:
    """All other routes answer 403, so that a token in a job's environment gives nothing away."""
    with service.client(red.agent) as agent:
        for method, path in all_routes(service):
            if (method, path) in UNAUTHENTICATED_ROUTES:
                continue
            answer = agent.request(method, concrete(path, red), json=BODIES.get((method, path), {}))
            if (method, path) in AGENT_ROUTES:
                assert answer.status_code < 300, (method, path, answer.text)
            else:
                problem(answer, 403)


def test_a_read_token_reads_its_project_and_changes_nothing(service: Service, red: Tenant, blue: Tenant) -> None:
    """The token may GET all of its project except the list and the page of tokens; it may use no other method."""
    read = service.token("read", project="red")
    with service.client(read) as reader:
        for method, path in all_routes(service):
            if (method, path) in UNAUTHENTICATED_ROUTES or path == routes.JOB_EVENTS:  # the stream never ends by itself
                continue
            answer = reader.request(method, concrete(path, red), json=BODIES.get((method, path)))
            if method != "GET" or path in (routes.TOKENS, "/admin"):
                problem(answer, 403)
            else:
                assert answer.status_code not in (401, 403), (path, answer.text)
        assert reader.get(routes.JOB.format(job_id=red.job_id)).status_code == 200
        assert "/admin" not in reader.get("/").text
        problem(reader.get(routes.JOB.format(job_id=blue.job_id)), 404)


def test_users_make_read_tokens_of_their_own_project_only(service: Service, red: Tenant) -> None:
    """Another project is not found; if the request names no project, the token is for the user's project."""
    with service.client(red.user) as user:
        made = user.post(routes.TOKENS, json={"name": "viewer", "scope": "read"})
        assert made.status_code == 201
        assert made.json()["token"]["project"] == red.project_id
        named = {"name": "viewer", "scope": "read", "project": "red"}
        assert user.post(routes.TOKENS, json=named).status_code == 201
        service.tenant("green")
        problem(user.post(routes.TOKENS, json={**named, "project": "green"}), 404)


def test_users_make_agent_tokens_for_their_own_jobs_only(service: Service, red: Tenant, blue: Tenant) -> None:
    """A user cannot create a token for an administrator or for another project."""
    with service.client(red.user) as user:
        made = user.post(routes.TOKENS, json={"name": "a", "scope": "agent", "job_id": red.job_id})
        assert made.status_code == 201
        problem(user.post(routes.TOKENS, json={"name": "a", "scope": "agent", "job_id": blue.job_id}), 404)
        problem(user.post(routes.TOKENS, json={"name": "a", "scope": "admin"}), 403)
        problem(user.post(routes.TOKENS, json={"name": "a", "scope": "user", "project": "blue"}), 403)
        problem(user.post(routes.PROJECTS, json={"name": "mine"}), 403)
        foreign = [token.id for token in _tokens(service) if token.project == blue.project_id]
        problem(user.delete(routes.TOKEN.format(token_id=foreign[0])), 404)


def test_a_token_is_stored_as_its_hash_and_returned_once(service: Service) -> None:
    """The token has 256 random bits; the database contains only its SHA-256 hash."""
    admin = service.token("admin")
    with service.client(admin) as client:
        made = client.post(routes.TOKENS, json={"name": "n", "scope": "user"}).json()
        secret = made["secret"]
        assert len(base64.urlsafe_b64decode(secret.removeprefix("tula_") + "==")) == 32
        assert secret not in client.get(routes.TOKENS).text
    with service.store.reading() as tx:
        found = tx.tokens.by_hash(digest(secret))
        assert found is not None
        assert found.id == made["token"]["id"]
    assert secret.encode() not in _database_bytes(service)


def test_revocation_works_at_once_where_it_is_asked_for(service: Service) -> None:
    """The cache of tokens never outlives a revocation in the same process."""
    admin, user = service.token("admin"), service.token("user")
    with service.client(user) as client, service.client(admin) as boss:
        assert client.get(routes.JOBS).status_code == 200
        (own,) = [token for token in boss.get(routes.TOKENS).json()["tokens"] if token["scope"] == "user"]
        assert own["last_used_at"] is not None
        assert boss.delete(routes.TOKEN.format(token_id=own["id"])).status_code == 200
        assert "revoked" in str(problem(client.get(routes.JOBS), 401)["detail"])


def test_revocation_reaches_every_other_worker_soon(
    database_url: str, start: Callable[..., Service], open_store: Callable[..., Store]
) -> None:
    """Another worker, another replica or `tula token revoke` may have written the revocation to the database."""
    worker, elsewhere = start(database_url, token_cache_s=0.2), open_store(database_url)
    kept, ended = worker.token("user"), worker.token("user")
    with worker.client(kept) as good, worker.client(ended) as bad:
        assert (good.get(routes.JOBS).status_code, bad.get(routes.JOBS).status_code) == (200, 200)
        with elsewhere.transaction() as tx:
            found = tx.tokens.by_hash(digest(ended))
            assert found is not None
            tx.tokens.revoke(found.id)
        revoked_at = time.monotonic()
        while bad.get(routes.JOBS).status_code == 200:
            assert time.monotonic() - revoked_at < 15, "a revoked token is trusted on and on"
        assert good.get(routes.JOBS).status_code == 200


def test_a_token_made_elsewhere_ends_the_first_start(sqlite_url: str, start: Callable[..., Service]) -> None:
    """After `tula token create`, a running service refuses everyone without a token."""
    worker = start(sqlite_url, token_cache_s=0.2)
    with worker.client() as stranger:
        assert stranger.get(routes.JOBS).status_code == 200
        issue_token(worker.store, ANONYMOUS, name="first", scope="admin")
        made_at = time.monotonic()
        while stranger.get(routes.JOBS).status_code == 200:
            assert time.monotonic() - made_at < 15, "strangers are let in on and on"


def test_a_cached_token_costs_no_query_until_it_is_read_again(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    read = Tokens.by_hash
    monkeypatch.setattr(Tokens, "by_hash", lambda tokens, sha256: reads.append(sha256) or read(tokens, sha256))
    service.app.state.services.access.cache_s = 3600.0
    secrets = [service.token("user") for _ in range(5)]
    clients = [service.client(secret) for secret in secrets]
    for client in clients * 4:
        assert client.get(routes.JOBS).status_code == 200
    assert len(reads) == len(secrets)


def test_one_request_checks_a_token_that_others_use_meanwhile(service: Service) -> None:
    access, secret = service.app.state.services.access, service.token("user")
    access.cache_s = 0.5
    access.authenticate(secret)
    while access.cached(secret) is not None:
        pass  # until a check is due
    assert access.cached(secret) is not None, "the request that got None checks"
    revoke_token(service.store, ANONYMOUS, access.cached(secret).token_id)
    with pytest.raises(Unauthenticated):
        access.authenticate(secret)
    assert access.cached(secret) is None, "and what it finds holds for all"


def test_a_token_is_right_where_its_time_of_last_use_cannot_be_written(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a full disk, pages and lists can still be read, and not every check of a token attempts a write."""
    touches: list[str] = []

    def full(_: Tokens, token_id: str) -> None:
        touches.append(token_id)
        raise sa.exc.OperationalError("UPDATE", {}, sqlite3.OperationalError("database or disk is full"))

    monkeypatch.setattr(Tokens, "touch", full)
    service.app.state.services.access.cache_s = 0.0
    with service.client(service.token("user")) as client:
        assert [client.get(routes.JOBS).status_code for _ in range(4)] == [200] * 4
    assert len(touches) == 1


def test_a_token_read_before_its_revocation_is_not_cached_after_it(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that read its token just before the revocation is the last one that is admitted."""
    access, secret = service.app.state.services.access, service.token("user")
    access.cache_s = 3600.0
    read = Tokens.by_hash

    def revoked_meanwhile(tokens: Tokens, sha256: str) -> object:
        found = read(tokens, sha256)
        monkeypatch.setattr(Tokens, "by_hash", read)
        assert found is not None
        revoke_token(service.store, ANONYMOUS, found.id)
        access.forget_all()
        return found

    monkeypatch.setattr(Tokens, "by_hash", revoked_meanwhile)
    with service.client(secret) as client:
        client.get(routes.JOBS)
        assert "revoked" in str(problem(client.get(routes.JOBS), 401)["detail"])


def test_an_expired_token_is_refused_even_when_it_was_cached(service: Service) -> None:
    admin = service.token("admin")
    with service.client(admin) as boss:
        made = boss.post(routes.TOKENS, json={"name": "n", "scope": "user", "expires_in_s": 2.0}).json()
    with service.client(made["secret"]) as client:
        assert client.get(routes.JOBS).status_code == 200
        time.sleep(2.05)  # the claim is about time itself; a busy machine takes some of it for the first request
        assert "expired" in str(problem(client.get(routes.JOBS), 401)["detail"])


def test_administrative_acts_are_written_down(service: Service) -> None:
    """The audit log says who did what to which object."""
    admin = service.token("admin")
    with service.client(admin) as boss:
        project = boss.post(routes.PROJECTS, json={"name": "green"}).json()["id"]
        made = boss.post(routes.TOKENS, json={"name": "n", "scope": "user", "project": "green"}).json()["token"]["id"]
        boss.delete(routes.TOKEN.format(token_id=made))
        job = boss.post(routes.JOBS, json=SPEC.model_dump(mode="json")).json()["job"]["id"]
        boss.delete(routes.JOB.format(job_id=job))
        assert boss.post(routes.PROJECTS, json={"name": "green"}).status_code == 409
    with service.store.reading() as tx:
        newest = sa.select(audit_log).order_by(audit_log.c.id.desc()).limit(4)
        acts = tx.connection.execute(newest).all()
    expected = [("project.create", project), ("token.create", made), ("token.revoke", made), ("job.delete", job)]
    assert [(act.action, act.target) for act in reversed(acts)] == expected, "and what was refused is not among them"
    assert len({act.actor for act in acts}) == 1
    assert acts[0].actor.startswith("token-")


class TestLoopback:
    """Tests that the first start works without a token, but only for users of this machine."""

    def test_without_any_token_the_local_user_is_served(self, service: Service) -> None:
        with service.client() as client:
            assert client.get(routes.JOBS).status_code == 200
            assert client.post(routes.JOBS, json=SPEC.model_dump(mode="json")).status_code == 201

    @pytest.mark.parametrize(
        "headers",
        [
            {"Host": "evil.example"},
            {"X-Forwarded-For": "203.0.113.9"},
            {"Forwarded": "for=203.0.113.9"},
            {"Origin": "http://evil.example"},
            {"Sec-Fetch-Site": "cross-site"},
        ],
    )
    def test_without_any_token_proxied_rebound_and_cross_site_requests_are_refused(
        self, service: Service, headers: dict[str, str]
    ) -> None:
        with service.client(**headers) as client:
            problem(client.get(routes.JOBS), 401)

    def test_the_first_token_ends_access_without_a_token(self, service: Service) -> None:
        with service.client() as client:
            assert client.post(routes.TOKENS, json={"name": "me", "scope": "admin"}).status_code == 201
            problem(client.get(routes.JOBS), 401)

    def test_access_without_a_token_does_not_come_back_when_the_last_token_ends(
        self, sqlite_url: str, start: Callable[..., Service]
    ) -> None:
        """The only token first expires and is then deleted with its job."""
        service = start(sqlite_url, token_cache_s=0.0)
        with service.client() as client:
            job = client.post(routes.JOBS, json=SPEC.model_dump(mode="json")).json()["job"]["id"]
            made = {"name": "a", "scope": "agent", "job_id": job, "expires_in_s": 0.2}
            assert client.post(routes.TOKENS, json=made).status_code == 201
            time.sleep(0.25)  # the claim is about time itself
            problem(client.get(routes.JOBS), 401)
            with service.store.transaction() as tx:
                tx.jobs.delete(job)
            assert _tokens(service) == []
            problem(client.get(routes.JOBS), 401)
            problem(client.post(routes.TOKENS, json={"name": "b", "scope": "admin"}), 401)

    def test_a_user_who_revokes_the_last_token_is_not_let_in_without_one(self, service: Service) -> None:
        with service.client() as client:
            made = client.post(routes.TOKENS, json={"name": "me", "scope": "admin"}).json()
        with service.client(made["secret"]) as boss:
            assert boss.delete(routes.TOKEN.format(token_id=made["token"]["id"])).status_code in (200, 204)
            problem(boss.get(routes.JOBS), 401)
        with service.client() as client:
            problem(client.post(routes.TOKENS, json={"name": "b", "scope": "admin"}), 401)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "myhost"])
def test_any_other_address_is_refused_until_a_token_exists(host: str, sqlite_url: str) -> None:
    """The service does not start, and says which command to run."""
    done = CliRunner().invoke(app, ["serve", "--database", sqlite_url, "--host", host, "--port", "0"])
    assert done.exit_code == 2
    assert "tula token create" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("header", ["Bearer", "Bearer ", "Token x", "Basic !!!", "Basic Og==", "\x00"])
def test_a_broken_authorization_header_is_refused(service: Service, header: str) -> None:
    """The header must not be treated as missing, which would admit a stranger on loopback."""
    with service.client(Authorization=header) as client:
        assert client.get(routes.JOBS).status_code == 401


def test_a_token_beyond_its_limit_gets_429_with_retry_after(sqlite_url: str, start: Callable[..., Service]) -> None:
    """Another token is still served."""
    service = start(sqlite_url, requests_per_minute=5, ingest_per_minute=40)
    first, second = service.token("user"), service.token("user")
    with service.client(first) as client:
        answers = [client.get(routes.JOBS) for _ in range(7)]
        assert [answer.status_code for answer in answers].count(200) == 5
        assert problem(answers[-1], 429)["type"] == ProblemType.TOO_MANY_REQUESTS
        assert 1 <= int(answers[-1].headers["retry-after"]) <= 60
    with service.client(second) as client:
        assert client.get(routes.JOBS).status_code == 200


def test_pages_and_answers_carry_security_headers(service: Service) -> None:
    """The headers forbid framing, sniffing, referrers, foreign content on pages, and, by default, caching."""
    with service.client() as client:
        page, answer = client.get("/docs"), client.get(routes.JOBS)
    for response in (page, answer):
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["x-frame-options"] == "DENY"
        assert response.headers["permissions-policy"].startswith("camera=()")
        assert response.headers["cache-control"] == "no-store"
        assert response.headers["x-request-id"]
    assert "default-src 'self'" in page.headers["content-security-policy"]


def test_no_secret_reaches_the_log(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever is sent, log lines contain request ids but no token."""
    secret = service.token("user")
    with caplog.at_level(logging.DEBUG), service.client(secret, **{"X-Request-Id": "req-1"}) as client:
        client.get(routes.JOBS, params={"search": "x"})
        client.post(routes.JOBS, content=b"{")
        client.post(routes.TOKENS, json={"name": secret, "scope": "nonsense"})
    lines = [json.dumps(vars(record), default=str) for record in caplog.records if record.name.startswith("tula")]
    assert any("req-1" in line for line in lines)
    assert not any(secret in line for line in lines)


def _tokens(service: Service) -> list:  # type: ignore[type-arg]
    with service.store.reading() as tx:
        return tx.tokens.list()


def _database_bytes(service: Service) -> bytes:
    from pathlib import Path

    path = Path(service.settings.database.removeprefix("sqlite:///"))
    return b"".join(each.read_bytes() for each in path.parent.glob(path.name + "*"))


def test_a_taken_port_is_refused_in_one_sentence(sqlite_url: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        done = CliRunner().invoke(app, ["serve", "--database", sqlite_url, "--port", port])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"tula: Cannot listen on 127.0.0.1:{port}")
    assert len(done.stderr.splitlines()) == 1
