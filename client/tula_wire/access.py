"""Tokens and projects: access to the service."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tula_wire._base import Name, Seconds, Timestamp, WireModel

Scope = Literal["agent", "user", "admin"]


class ProjectCreate(WireModel):
    """A new project."""

    name: Name


class Project(WireModel):
    """A project; each job and each user token belongs to exactly one."""

    id: str
    name: str
    created_at: Timestamp


class ProjectList(WireModel):
    """Projects that the caller may see."""

    projects: list[Project]


class TokenCreate(WireModel):
    """A new token. `agent` needs `job_id`; `user` needs `project`; `admin` needs neither."""

    name: Name
    scope: Scope
    project: Name | None = None
    job_id: str | None = None
    expires_in_s: Seconds | None = None


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
    """A created token; only this answer holds its secret."""

    token: Token
    secret: str = Field(description="The service stores only its SHA-256 hash.")


class TokenList(WireModel):
    """Tokens, newest first."""

    tokens: list[Token]
