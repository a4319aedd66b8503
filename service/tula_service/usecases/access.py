"""Who is asking, and what they may touch: tokens, projects and the one rule for seeing a job."""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from tula_service.errors import Forbidden, InvalidInput, NotFound, StoreUnavailable, Unauthenticated
from tula_service.store import DEFAULT_PROJECT_ID, JobRecord, RunRecord, Store, TokenRecord, Transaction

__all__ = [
    "ANONYMOUS",
    "Access",
    "IssuedToken",
    "Principal",
    "check_still_valid",
    "digest",
    "issue_token",
    "revoke_token",
    "visible_job",
    "visible_run",
    "visible_tokens",
]

SECRET_BYTES: Final = 32
SECRET_PREFIX: Final = "tula_"
CACHED_TOKENS: Final = 10_000
TOUCH_EVERY_S: Final = 60.0
TRUSTED_S: Final = 60.0


@dataclass(frozen=True)
class Principal:
    """Whoever sent a request: `scope` is agent, user or admin; agents are bound to one job, users to one project."""

    name: str
    scope: str
    token_id: str | None = None
    project_id: str | None = None
    job_id: str | None = None

    @property
    def is_admin(self) -> bool:
        """True when no project binds the caller."""
        return self.scope == "admin"

    @property
    def list_project_id(self) -> str | None:
        """The project to which lists are narrowed; None for administrators, who see all."""
        return None if self.is_admin else self.project_id

    @property
    def home_project_id(self) -> str:
        """The project into which this caller's new jobs go."""
        return self.project_id or DEFAULT_PROJECT_ID

    def may_touch(self, *, job_id: str, project_id: str) -> bool:
        """The one rule: administrators everything, users their project, agents their job."""
        if self.is_admin:
            return True
        if self.scope == "agent":
            return self.job_id == job_id
        return self.project_id == project_id


ANONYMOUS: Final = Principal(name="loopback", scope="admin")
"""The one person on this machine, while no token exists and nobody else can reach the service."""


def visible_job(tx: Transaction, principal: Principal, job_id: str) -> JobRecord:
    """The job, unless it is not the caller's to see. Raises NotFound in both cases, which tells nothing."""
    if not job_id.isprintable():  # Postgres refuses NUL in a text, and no id of ours holds such a thing
        raise NotFound.of("job", job_id)
    job = tx.jobs.get(job_id)
    if not principal.may_touch(job_id=job.id, project_id=job.project_id):
        raise NotFound.of("job", job_id)
    return job


def visible_run(tx: Transaction, principal: Principal, run_id: str) -> RunRecord:
    """The run, unless it is not the caller's to see. Raises NotFound in both cases."""
    if not run_id.isprintable():
        raise NotFound.of("run", run_id)
    run = tx.runs.get(run_id)
    if not principal.may_touch(job_id=run.job_id, project_id=run.project_id):
        raise NotFound.of("run", run_id)
    return run


@dataclass(frozen=True)
class IssuedToken:
    """A new token and, this once, its secret."""

    token: TokenRecord
    secret: str


def digest(secret: str) -> str:
    """What the store keeps. Secrets hold 256 random bits, so a plain hash is as good as a slow one."""
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


def issue_token(
    store: Store,
    actor: Principal,
    *,
    name: str,
    scope: str,
    project: str | None = None,
    job_id: str | None = None,
    expires_in_s: float | None = None,
) -> IssuedToken:
    """Make a token. Administrators make any; users make agent tokens for the jobs of their own project.

    Raises Forbidden, NotFound, or InvalidInput when scope, project and job do not go together.
    """
    if not actor.is_admin and scope != "agent":
        raise Forbidden("Only an administrator makes user and admin tokens: ask one, or make an agent token.")
    if scope == "agent" and job_id is None:
        raise InvalidInput("An agent token belongs to one job: give job_id.", field="job_id")
    if scope != "agent" and job_id is not None:
        raise InvalidInput(f"A {scope} token is not bound to a job: leave job_id out.", field="job_id")
    if scope == "admin" and project is not None:
        raise InvalidInput("An admin token is not bound to a project: leave project out.", field="project")
    secret = SECRET_PREFIX + secrets.token_urlsafe(SECRET_BYTES)
    with store.transaction() as tx:
        project_id: str | None = None
        if scope == "agent":
            project_id = visible_job(tx, actor, str(job_id)).project_id
        elif scope == "user":
            project_id = tx.projects.by_name(project).id if project is not None else DEFAULT_PROJECT_ID
        expires_at = None if expires_in_s is None else tx.now() + timedelta(seconds=min(expires_in_s, 3e9))
        token = tx.tokens.create(
            sha256=digest(secret), name=name, scope=scope, project_id=project_id, job_id=job_id, expires_at=expires_at
        )
        tx.audit.append(
            actor=actor.token_id or actor.name,
            action="token.create",
            target=token.id,
            detail={"name": name, "scope": scope, "project_id": project_id, "job_id": job_id},
        )
    return IssuedToken(token, secret)


def visible_tokens(store: Store, caller: Principal) -> Sequence[TokenRecord]:
    """All tokens for an administrator, those of the caller's project for a user."""
    with store.reading() as tx:
        return tx.tokens.list(project_id=caller.list_project_id)


def revoke_token(store: Store, actor: Principal, token_id: str) -> TokenRecord:
    """End a token. Users may end the tokens of their own project. Raises NotFound."""
    with store.transaction() as tx:
        token = tx.tokens.get(token_id)
        if not actor.is_admin and (actor.scope != "user" or token.project_id != actor.project_id):
            raise NotFound.of("token", token_id)
        token = tx.tokens.revoke(token_id)
        tx.audit.append(actor=actor.token_id or actor.name, action="token.revoke", target=token_id)
    return token


def check_still_valid(tx: Transaction, principal: Principal) -> None:
    """Raise Unauthenticated when the token of a caller who was let in before has ended since.

    For whoever stays: a single request is over before that matters.
    """
    if principal.token_id is None:
        ended = tx.tokens.any_usable()  # the loopback's user, until the first token
    else:
        ended = _ended(tx.tokens.get(principal.token_id), tx.now()) is not None
    if ended:
        raise Unauthenticated("This token has ended: create one with `tula token create`.")


def _ended(token: TokenRecord, now: datetime) -> str | None:
    """How a token came to its end, or None while it is good."""
    if token.revoked_at is not None:
        return "was revoked"
    return "has expired" if token.expires_at is not None and token.expires_at <= now else None


class Access:
    """Turns a secret into a principal, remembering it so that ingest costs no query.

    Every `cache_s` one request looks whether tokens have changed anywhere (another worker, replica or command) and if
    so all of the memory goes: that long a revocation may take, in the worker that revokes no time at all. Bounded.
    """

    def __init__(self, store: Store, *, cache_s: float, tokenless_allowed: bool) -> None:
        self._store = store
        self._cache_s = cache_s
        self._tokenless_allowed = tokenless_allowed
        self._lock = threading.Lock()
        self._seen: OrderedDict[str, tuple[float, Principal]] = OrderedDict()
        self._right: OrderedDict[str, None] = OrderedDict()
        self._touched: OrderedDict[str, float] = OrderedDict()
        self._tokenless_until = 0.0
        self._look_again = 0.0
        self._generation: tuple[object, ...] = ()
        self._changes = 0

    def remembered(self, secret: str) -> Principal | None:
        """The principal of a secret that was checked before, None for the one request that has to look; never waits."""
        now = time.monotonic()
        entry = self._seen.get(secret)
        if entry is None or entry[0] <= now:
            return None  # whoever guesses takes no look away from the others
        if now >= self._look_again:
            self._look_again = now + self._cache_s  # the others go on with what is known while this one looks
            return None
        return entry[1]

    def has_seen(self, secret: str) -> bool:
        """True for a secret that was right when it was last asked for: asking again is no guess."""
        return secret in self._right

    def authenticate(self, secret: str) -> Principal:
        """The principal behind a secret. Raises Unauthenticated when it is unknown, expired or revoked."""
        try:
            return self._checked(secret)
        except Unauthenticated:
            with self._lock:
                self._right.pop(secret, None)
            raise

    def _checked(self, secret: str) -> Principal:
        changes = self._changes
        try:
            with self._store.reading() as tx:
                generation = tx.tokens.generation()
                token = tx.tokens.by_hash(digest(secret))
        except StoreUnavailable:
            self._look_again = 0.0
            raise
        with self._lock:
            if generation != self._generation and changes == self._changes:
                self._drop(generation)
            elif generation != self._generation:  # read before a change that is known by now, or after one more
                self._look_again = 0.0
        now = self._store.now()
        if token is None:
            raise Unauthenticated("This token is unknown: create one with `tula token create`.")
        ended = _ended(token, now)
        if ended is not None:
            raise Unauthenticated(f"This token {ended}: create one with `tula token create`.")
        trusted_s = TRUSTED_S
        if token.expires_at is not None:
            trusted_s = min(trusted_s, (token.expires_at - now).total_seconds())
        principal = Principal(token.name, token.scope, token.id, token.project_id, token.job_id)
        self._remember(secret, principal, trusted_s, generation)
        return principal

    def tokenless_now(self) -> Principal | None:
        """The anonymous principal if it was found a moment ago that it may exist; never waits."""
        return ANONYMOUS if time.monotonic() < self._tokenless_until else None

    def tokenless(self) -> Principal | None:
        """The anonymous principal while it may exist: on loopback, before the first token."""
        if not self._tokenless_allowed:
            return None
        with self._store.reading() as tx:
            if tx.tokens.any_usable():
                return None
        self._tokenless_until = time.monotonic() + self._cache_s
        return ANONYMOUS

    def forget(self) -> None:
        """Drop everything remembered, after a token was made or revoked here."""
        with self._lock:
            self._drop(())

    def _drop(self, generation: tuple[object, ...]) -> None:
        self._seen.clear()
        self._tokenless_until = 0.0
        self._generation = generation
        self._changes += 1

    def _remember(self, secret: str, principal: Principal, trusted_s: float, generation: tuple[object, ...]) -> None:
        now = time.monotonic()
        with self._lock:
            if generation == self._generation:  # what was read before a change must not outlive it
                self._seen[secret] = (now + trusted_s, principal)
            while len(self._seen) > CACHED_TOKENS:
                self._seen.popitem(last=False)
            self._right[secret] = None
            while len(self._right) > CACHED_TOKENS:
                self._right.popitem(last=False)
            token_id = str(principal.token_id)
            due = now - self._touched.get(token_id, -TOUCH_EVERY_S) >= TOUCH_EVERY_S
            if due:
                self._touched[token_id] = now
                while len(self._touched) > CACHED_TOKENS:
                    self._touched.popitem(last=False)
        if due:
            with self._store.transaction() as tx:
                tx.tokens.touch(token_id)
