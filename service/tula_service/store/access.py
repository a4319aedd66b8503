"""Stores projects, tokens, browser sessions and the audit log."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Final

import sqlalchemy as sa

from tula_service.domain import JsonObject
from tula_service.errors import Conflict, NotFound
from tula_service.store._base import Repository, new_id
from tula_service.store.tables import audit_log, projects, sessions, tokens
from tula_wire import Project, Scope, Token

_TOKEN = [tokens.c[name] for name in Token.model_fields if name != "project"] + [tokens.c.project_id.label("project")]

DEFAULT_PROJECT_ID: Final = "default"
"""The id of the project that the first migration creates, so that a single user need not create a project."""


MADE: Final = "token.create"
"""The name in the audit log for the creation of a token."""


MAX_SESSIONS: Final = 20
"""Maximum number of open sessions per token; opening another one ends the oldest."""


class Projects(Repository):
    """Stores projects, which separate the service's tenants."""

    def create(self, name: str) -> Project:
        """Create a project and return it. Raises Conflict if the name is taken."""
        statement = (
            self._insert(projects)
            .values(id=new_id("project"), name=name, created_at=self._now())
            .on_conflict_do_nothing(index_elements=["name"])
            .returning(projects.c.id)
        )
        if self._row(statement) is None:
            raise Conflict(f"A project named {name!r} already exists: choose another name.", field="name")
        return self.by_name(name)

    def get(self, project_id: str) -> Project:
        """Return the project with this id. Raises NotFound if there is none."""
        return self._one(projects.c.id == project_id, project_id)

    def by_name(self, name: str) -> Project:
        """Return the project with this name. Raises NotFound if there is none."""
        return self._one(projects.c.name == name, name)

    def list(self) -> list[Project]:
        """Return all projects, sorted by name."""
        return [Project(**row) for row in self._rows(sa.select(projects).order_by(projects.c.name))]

    def _one(self, condition: sa.ColumnElement[bool], name: str) -> Project:
        row = self._row(sa.select(projects).where(condition))
        if row is None:
            raise NotFound.of("project", name)
        return Project(**row)


class Tokens(Repository):
    """Stores API tokens with the SHA-256 hash of their secrets; the secrets themselves are never stored."""

    def create(self, sha256: str, name: str, scope: Scope, **bound_to: Any) -> Token:
        """Create a token and return it; `bound_to` may contain `project`, `job_id` and `expires_at` (see `Token`)."""
        token = Token(id=new_id("token"), name=name, scope=scope, created_at=self._now(), **bound_to)
        values = token.model_dump(exclude={"project"}) | {"project_id": token.project, "sha256": sha256}
        self._connection.execute(sa.insert(tokens).values(values))
        return token

    def get(self, token_id: str) -> Token:
        """Return the token with this id. Raises NotFound if there is none."""
        row = self._row(sa.select(*_TOKEN).where(tokens.c.id == token_id))
        if row is None:
            raise NotFound.of("token", token_id)
        return Token(**row)

    def by_hash(self, sha256: str) -> Token | None:
        """Return the token whose secret or open session has this hash; the token may be expired or revoked."""
        session = sa.select(sessions.c.token_id).where(sessions.c.sha256 == sha256, sessions.c.expires_at > self._now())
        condition = (tokens.c.sha256 == sha256) | (tokens.c.id == session.scalar_subquery())
        row = self._row(sa.select(*_TOKEN).where(condition))
        return None if row is None else Token(**row)

    def list(self, *, project_id: str | None = None) -> list[Token]:
        """Return all tokens, or the tokens of one project, newest first."""
        statement = sa.select(*_TOKEN).order_by(tokens.c.created_at.desc(), tokens.c.id)
        if project_id is not None:
            statement = statement.where(tokens.c.project_id == project_id)
        return [Token(**row) for row in self._rows(statement)]

    def revoke(self, token_id: str) -> Token:
        """Revoke a token and return it; the time of an earlier revocation is not changed. Raises NotFound."""
        self._connection.execute(
            sa.update(tokens)
            .where(tokens.c.id == token_id, tokens.c.revoked_at.is_(None))
            .values(revoked_at=self._now())
        )
        return self.get(token_id)

    def extend(self, job_id: str, name: str, until: datetime) -> None:
        """Extend the job's valid agent tokens with this name to `until` if they expire more than an hour earlier."""
        column = tokens.c
        own = (column.job_id == job_id, column.name == name, column.scope == "agent", column.revoked_at.is_(None))
        due = (column.expires_at > self._now(), column.expires_at < until - timedelta(hours=1))
        self._connection.execute(sa.update(tokens).where(*own, *due).values(expires_at=until))

    def touch(self, token_id: str) -> None:
        """Record that the token was used just now."""
        self._connection.execute(sa.update(tokens).where(tokens.c.id == token_id).values(last_used_at=self._now()))

    def ever_made(self) -> bool:
        """Return True if any token was ever created.

        The audit log is read because it also contains tokens that were deleted with their job.
        """
        made = sa.select(audit_log.c.id).where(audit_log.c.action == MADE)
        return self._row(sa.select(tokens.c.id).limit(1)) is not None or self._row(made.limit(1)) is not None


class Sessions(Repository):
    """Stores browser sessions with the SHA-256 hash of their secrets; `Tokens.by_hash` returns a session's token."""

    def create(self, *, sha256: str, token_id: str, expires_at: datetime) -> None:
        """Store a session; delete all expired sessions, and the token's oldest sessions beyond MAX_SESSIONS."""
        now = self._now()
        own = sa.select(sessions.c.sha256).where(sessions.c.token_id == token_id)
        older = own.order_by(sessions.c.created_at.desc()).offset(MAX_SESSIONS - 1)
        ended = (sessions.c.expires_at <= now) | sessions.c.sha256.in_(older)
        self._connection.execute(sa.delete(sessions).where(ended))
        values = {"sha256": sha256, "token_id": token_id, "created_at": now, "expires_at": expires_at}
        self._connection.execute(sa.insert(sessions).values(values))

    def exists(self, sha256: str) -> bool:
        """Return True if there is a session with this hash."""
        return self._row(sa.select(sessions.c.token_id).where(sessions.c.sha256 == sha256)) is not None

    def delete(self, sha256: str) -> None:
        """End the session with this hash, if there is one."""
        self._connection.execute(sa.delete(sessions).where(sessions.c.sha256 == sha256))


class Audit(Repository):
    """The append-only log of administrative actions."""

    def append(self, *, actor: str, action: str, target: str, detail: JsonObject | None = None) -> None:
        """Record an action; call this method in the transaction that performs the action."""
        self._connection.execute(
            sa.insert(audit_log).values(at=self._now(), actor=actor, action=action, target=target, detail=detail or {})
        )
