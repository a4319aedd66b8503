"""Tokens and projects: access to the service."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tula_wire._base import Name, Seconds, Timestamp, WireModel, optional

Scope = Literal["agent", "read", "user", "admin"]


class ProjectCreate(WireModel):
    """A new project."""

    name: Name = Field(description="Name of the project, unique in this service.")


class Project(WireModel):
    """A project. Each job and each user token belongs to exactly one project."""

    id: str = Field(description="Identifier that the service assigned.")
    name: str = Field(description="Name of the project.")
    created_at: Timestamp = Field(description="When it was created (RFC 3339, with time zone).")


class ProjectList(WireModel):
    """Projects that the caller may see."""

    projects: list[Project] = Field(description="The projects, by name.")


class TokenCreate(WireModel):
    """A new token. `agent` needs `job_id`; `read` and `user` take `project`; `admin` needs neither."""

    name: Name = Field(description="The purpose of the token, as people will read it in a list.")
    scope: Scope = Field(
        description=(
            "`agent` measures for one job, `read` reads one project and changes nothing, `user` works in one project, "
            "`admin` may do everything."
        )
    )
    project: Name | None = optional("Name of the project to which a `read` or `user` token belongs.")
    job_id: str | None = optional("Job that an `agent` token is bound to.")
    expires_in_s: Seconds | None = optional("Seconds until the token expires; null: never.")


class Token(WireModel):
    """A token without its secret."""

    id: str = Field(description="Identifier that the service assigned; revokes the token.")
    name: str = Field(description="What the token is for.")
    scope: Scope = Field(description="What the token may do.")
    project: str | None = optional("Id of the project that the token belongs to; null for administrators.")
    job_id: str | None = optional("Job that an `agent` token is bound to.")
    created_at: Timestamp = Field(description="When it was created (RFC 3339, with time zone).")
    expires_at: Timestamp | None = optional("When it expires; null: never.")
    last_used_at: Timestamp | None = optional("When it was last used, to the minute; null: never.")
    revoked_at: Timestamp | None = optional("When it was revoked; null: it is valid.")


class TokenCreated(WireModel):
    """A created token; only this answer contains its secret."""

    token: Token = Field(description="The token without its secret.")
    secret: str = Field(description="The service stores only its SHA-256 hash.")


class TokenList(WireModel):
    """Tokens, newest first."""

    tokens: list[Token] = Field(description="The tokens, newest first.")
