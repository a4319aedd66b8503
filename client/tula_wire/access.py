"""Tokens and projects: who may do what."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tula_wire._base import Name, Positive, Timestamp, WireModel

Scope = Literal["agent", "user", "admin"]


class ProjectCreate(WireModel):
    """A new tenant."""

    name: Name


class Project(WireModel):
    """A tenant; jobs and user tokens belong to exactly one."""

    id: str
    name: str
    created_at: Timestamp


class ProjectList(WireModel):
    """All projects an administrator sees."""

    projects: list[Project]


class TokenCreate(WireModel):
    """A new token. `agent` needs `job_id`; `user` needs `project`; `admin` needs neither."""

    name: Name
    scope: Scope
    project: Name | None = None
    job_id: str | None = None
    expires_in_s: Positive | None = None


class Token(WireModel):
    """A token without its secret."""

    id: str
    name: str
    scope: Scope
    project: str | None = None
    job_id: str | None = None
    created_at: Timestamp
    expires_at: Timestamp | None = None
    last_used_at: Timestamp | None = None
    revoked_at: Timestamp | None = None


class TokenCreated(WireModel):
    """The only answer that ever holds the secret."""

    token: Token
    secret: str = Field(description="Shown once; the service keeps only its SHA-256.")


class TokenList(WireModel):
    """Tokens, newest first."""

    tokens: list[Token]
