"""Identifies callers by their tokens, and decides which projects and jobs they may access."""

from __future__ import annotations

import hashlib
import math
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from cachetools import LRUCache, TTLCache

from tula_service.domain import RunRecord
from tula_service.errors import Forbidden, InvalidInput, NotFound, StoreUnavailable, Unauthenticated
from tula_service.store import DEFAULT_PROJECT_ID, Store, Transaction
from tula_service.store.access import MADE
from tula_service.store.jobs import JobRecord
from tula_wire import Project, Scope, Token, TokenCreated

SECRET_BYTES: Final = 32
SECRET_PREFIX: Final = "tula_"
SESSION_S: Final = 12 * 3600.0
CACHED: Final = 20_000
TOUCH_EVERY_S: Final = 60.0
ANNOUNCE_EVERY_S: Final = 1.0


@dataclass(frozen=True)
class Principal:
    """The sender of a request; its `scope` is agent, read, user, admin or public.

    An agent is bound to one job. A caller with scope read or user is bound to one project, and lists contain only the
    objects of this project. `api/auth.py` refuses all requests that the scope read does not allow.
    """

    name: str
    scope: str
    token_id: str | None = None
    project_id: str | None = None
    job_id: str | None = None
    sha256: str | None = field(default=None, repr=False, compare=False)
    """Digest of the request's token or session secret, which lets a stream detect that the secret has expired."""

    @property
    def is_admin(self) -> bool:
        """Return True if the caller is an administrator, who is not bound to a project."""
        return self.scope == "admin"

    @property
    def sender(self) -> str:
        """Return the key for counting the caller's requests: the token's id or, without a token, the name."""
        return self.token_id or self.name

    @property
    def home_project_id(self) -> str:
        """Return the id of the project to which the caller's new jobs belong."""
        return self.project_id or DEFAULT_PROJECT_ID

    def may_touch(self, *, job_id: str, project_id: str) -> bool:
        """Return True if the caller may access the job.

        Administrators may access every job, users and readers only the jobs of their project, and agents only their own
        job.
        """
        if self.is_admin:
            return True
        if self.scope == "agent":
            return self.job_id == job_id
        return self.project_id == project_id


ANONYMOUS: Final = Principal(name="loopback", scope="admin")
"""The local user, who needs no token if the service listens only on loopback and no token has been created."""
PUBLIC: Final = Principal(name="public", scope="public")
"""A caller without a token on a read-only service; `api/auth.py` shows such callers only statistics over all jobs."""


def visible_job(tx: Transaction, principal: Principal, job_id: str) -> JobRecord:
    """Return the job with this id.

    Raises NotFound if the job does not exist or the caller may not see it; the error is the same, so that callers
    cannot probe for ids.
    """
    # Unprintable ids are not looked up, since no id contains such characters and Postgres rejects NUL in text.
    job = tx.jobs.get(job_id) if job_id.isprintable() else None
    if job is None or not principal.may_touch(job_id=job.id, project_id=job.project_id):
        raise NotFound.of("job", job_id)
    return job


def visible_run(tx: Transaction, principal: Principal, run_id: str) -> RunRecord:
    """Return the run with this id. Raises NotFound if the run does not exist or the caller may not see it."""
    run = tx.runs.get(run_id) if run_id.isprintable() else None
    if run is None or not principal.may_touch(job_id=run.job_id, project_id=run.project_id):
        raise NotFound.of("run", run_id)
    return run


def digest(secret: str) -> str:
    """Return the SHA-256 hash of a secret. A slow hash is not needed, since secrets have 256 random bits."""
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


def issue_token(
    store: Store,
    actor: Principal,
    *,
    name: str,
    scope: Scope,
    project: str | None = None,
    job_id: str | None = None,
    expires_in_s: float | None = None,
) -> TokenCreated:
    """Create a token and return it with its secret.

    Administrators may create any token, and users may create agent and read tokens for their project. Raises Forbidden,
    NotFound, or InvalidInput if scope, project and job are inconsistent.
    """
    if not actor.is_admin and scope not in ("agent", "read"):
        raise Forbidden(
            "Only administrators can create user and admin tokens: ask an administrator, or create an agent token or a "
            "read token."
        )
    if scope == "agent" and job_id is None:
        raise InvalidInput("An agent token is bound to one job: set job_id.", field="job_id")
    if scope != "agent" and job_id is not None:
        raise InvalidInput(f"A token with scope {scope!r} is not bound to a job: omit job_id.", field="job_id")
    if scope == "admin" and project is not None:
        raise InvalidInput("An admin token is not bound to a project: omit project.", field="project")
    secret = SECRET_PREFIX + secrets.token_urlsafe(SECRET_BYTES)
    with store.transaction() as tx:
        project_id: str | None = None
        if scope == "agent":
            project_id = visible_job(tx, actor, str(job_id)).project_id
        elif scope in ("read", "user"):
            project_id = tx.projects.by_name(project).id if project is not None else actor.home_project_id
            if not actor.is_admin and project_id != actor.project_id:
                raise NotFound.of("project", str(project))
        expires_at = None if expires_in_s is None else tx.now() + timedelta(seconds=min(expires_in_s, 3e9))
        bound_to = {"project": project_id, "job_id": job_id, "expires_at": expires_at}
        token = tx.tokens.create(digest(secret), name, scope, **bound_to)
        tx.audit.append(
            actor=actor.sender,
            action=MADE,
            target=token.id,
            detail={"name": name, "scope": scope, "project_id": project_id, "job_id": job_id},
        )
    return TokenCreated(token=token, secret=secret)


def visible_tokens(store: Store, caller: Principal) -> Sequence[Token]:
    """Return all tokens if the caller is an administrator, or only the project's tokens for a user."""
    with store.reading() as tx:
        return tx.tokens.list(project_id=caller.project_id)


def revoke_token(store: Store, actor: Principal, token_id: str) -> Token:
    """Revoke a token. Users may only revoke the tokens of their own project. Raises NotFound."""
    with store.transaction() as tx:
        token = tx.tokens.get(token_id)
        if not actor.is_admin and (actor.scope != "user" or token.project != actor.project_id):
            raise NotFound.of("token", token_id)
        token = tx.tokens.revoke(token_id)
        tx.audit.append(actor=actor.sender, action="token.revoke", target=token_id)
    return token


def open_session(store: Store, principal: Principal) -> str:
    """Open a browser session and return its secret, which has the token's rights until the session ends."""
    secret = SECRET_PREFIX + "session_" + secrets.token_urlsafe(SECRET_BYTES)
    with store.transaction() as tx:
        tx.sessions.create(
            sha256=digest(secret), token_id=str(principal.token_id), expires_at=tx.now() + timedelta(seconds=SESSION_S)
        )
    return secret


def end_session(store: Store, secret: str) -> None:
    """End the browser session with this secret; if there is no such session, write nothing."""
    with store.reading() as tx:
        if not tx.sessions.exists(digest(secret)):
            return
    with store.transaction() as tx:
        tx.sessions.delete(digest(secret))


def create_project(store: Store, actor: Principal, name: str) -> Project:
    """Create a project, record this in the audit log, and return the project.

    Raises Forbidden if the caller is not an administrator, and Conflict if the name is taken.
    """
    if not actor.is_admin:
        raise Forbidden("Only administrators can create projects: ask an administrator.")
    with store.transaction() as tx:
        project = tx.projects.create(name)
        tx.audit.append(actor=actor.sender, action="project.create", target=project.id, detail={"name": name})
    return project


def visible_projects(store: Store, caller: Principal) -> Sequence[Project]:
    """Return all projects if the caller is an administrator, or only the caller's project."""
    with store.reading() as tx:
        if caller.is_admin:
            return tx.projects.list()
        return [tx.projects.get(caller.project_id or DEFAULT_PROJECT_ID)]


def check_still_valid(tx: Transaction, principal: Principal) -> None:
    """Raise Unauthenticated if the caller's token or session is no longer valid.

    Event streams call this function repeatedly, because they stay open for a long time.
    """
    if principal.sha256 is None:
        ended = tx.tokens.ever_made()  # the anonymous user is accepted until the first token is created
    else:
        token = tx.tokens.by_hash(principal.sha256)
        ended = token is None or token_state(token, tx.now()) != "valid"
    if ended:
        raise Unauthenticated("This token has expired or was revoked: create one with `tula token create`.")


def token_state(token: Token, now: datetime) -> str:
    """Return the token's state: "revoked", "expired" or "valid"."""
    if token.revoked_at is not None:
        return "revoked"
    return "expired" if token.expires_at is not None and token.expires_at <= now else "valid"


class KnownRuns:
    """Caches each run's key, job and project, which never change, and limits the rate of its `samples` events.

    Request threads share an instance, so its methods acquire `_lock` to access the caches.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._runs: LRUCache[str, tuple[int, str, str]] = LRUCache(CACHED)
        self._announced: TTLCache[str, bool] = TTLCache(CACHED, ANNOUNCE_EVERY_S)

    def authorise(self, principal: Principal, run_id: str) -> tuple[int, str]:
        """Return the run's key and job id. Raises NotFound if there is no run that the caller may access."""
        with self._lock:
            entry = self._runs.get(run_id)
        if entry is None:
            with self._store.reading() as tx:
                entry = tx.telemetry.run_key(run_id)
            with self._lock:
                self._runs[run_id] = entry
        run_key, job_id, project_id = entry
        if not principal.may_touch(job_id=job_id, project_id=project_id):
            raise NotFound.of("run", run_id)
        return run_key, job_id

    def forget(self, run_id: str) -> None:
        """Remove a deleted run from the cache."""
        with self._lock:
            self._runs.pop(run_id, None)

    def should_emit_event(self, run_id: str) -> bool:
        """Return True at most once per second for each run, since event readers need no more frequent events."""
        with self._lock:
            is_due = run_id not in self._announced
            if is_due:
                self._announced[run_id] = True
        return is_due


class _Trusted(NamedTuple):
    """A cached principal, with the monotonic times of its secret's next check and expiry."""

    check_at: float
    ends_at: float
    principal: Principal


class Access:
    """Authenticates secrets and caches the results for `cache_s` seconds, so that ingest needs few queries.

    A revocation takes effect immediately in the worker that handles it (`forget_all`), and within `cache_s` in other
    workers. Request threads share an instance, so its methods acquire `_lock` to access the caches. A thread that
    queried the database before `forget_all` was called writes its result to the old cache, which is no longer read.
    """

    def __init__(self, store: Store, *, cache_s: float, tokenless_allowed: bool) -> None:
        self._store = store
        self.cache_s = cache_s
        self.tokenless_allowed = tokenless_allowed
        self._lock = threading.Lock()
        self._touched: TTLCache[str, bool] = TTLCache(CACHED, TOUCH_EVERY_S)
        self.forget_all()

    def cached(self, secret: str | None) -> Principal | None:
        """Return the principal of a secret if the secret was checked recently, else None; never query the database.

        If the secret is None, the caller has no token.
        """
        now = time.monotonic()
        with self._lock:
            trusted = self._trusted.get(secret)
            if trusted is None or trusted.ends_at <= now:
                return None
            if trusted.check_at <= now:
                # While this request checks the secret, other requests use the cached result.
                self._trusted[secret] = trusted._replace(check_at=trusted.ends_at)
                return None
            return trusted.principal

    def authenticate(self, secret: str) -> Principal:
        """Return the principal of a secret. Raises Unauthenticated if the secret is unknown, expired or revoked."""
        cache = self._trusted
        with self._store.reading() as tx:
            token, now = tx.tokens.by_hash(digest(secret)), tx.now()
        state = "unknown" if token is None else token_state(token, now)
        if token is None or state != "valid":
            with self._lock:
                cache.pop(secret, None)
            raise Unauthenticated(f"This token is {state}: create one with `tula token create`.")
        left_s = math.inf if token.expires_at is None else (token.expires_at - now).total_seconds()
        principal = Principal(token.name, token.scope, token.id, token.project, token.job_id, digest(secret))
        self._trust(cache, secret, principal, left_s)
        if token.last_used_at is None or (now - token.last_used_at).total_seconds() >= TOUCH_EVERY_S:
            self._touch(token.id)
        return principal

    def tokenless(self) -> Principal | None:
        """Return the anonymous principal if the service listens only on loopback and no token was ever created.

        Otherwise, return None.
        """
        if not self.tokenless_allowed:
            return None
        cache = self._trusted
        with self._store.reading() as tx:
            if tx.tokens.ever_made():
                self.tokenless_allowed = False  # permanent, so later requests need no query
                return None
        return self._trust(cache, None, ANONYMOUS, math.inf)

    def _touch(self, token_id: str) -> None:
        """Store the time of the token's last use at most once a minute; ignore an error if this write fails."""
        with self._lock:
            if token_id in self._touched:
                return
            self._touched[token_id] = True
        with suppress(StoreUnavailable), self._store.transaction() as tx:
            tx.tokens.touch(token_id)

    def forget(self, secret: str | None) -> None:
        """Remove a secret from the cache, so that it is checked at its next use; None means no token."""
        with self._lock:
            self._trusted.pop(secret, None)

    def forget_all(self) -> None:
        """Clear the cache; call this method after revoking a token in this process."""
        self._trusted: LRUCache[str | None, _Trusted] = LRUCache(CACHED)

    def _trust(
        self, cache: LRUCache[str | None, _Trusted], secret: str | None, principal: Principal, left_s: float
    ) -> Principal:
        now = time.monotonic()
        with self._lock:
            cache[secret] = _Trusted(now + self.cache_s, now + min(2 * self.cache_s, left_s), principal)
        return principal
