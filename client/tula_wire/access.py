"""Defines models of tokens and projects, which control access to the service."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tula_wire._base import Name, Seconds, Timestamp, WireModel, optional

Scope = Literal["agent", "read", "user", "admin"]


class ProjectCreate(WireModel):
    """A request to create a project."""

    name: Name = Field(description="Name of the project, unique in this service.")


class Project(WireModel):
    """A project. Each job and each user token belongs to exactly one project."""

    id: str = Field(description="Identifier that the service assigned.")
    name: str = Field(description="Name of the project.")
    created_at: Timestamp = Field(description="When the project was created (RFC 3339, with time zone).")


class ProjectList(WireModel):
    """The projects that the caller may see."""

    projects: list[Project] = Field(description="The projects, sorted by name.")


class TokenCreate(WireModel):
    """A request to create a token.

    The scope `agent` requires `job_id`, the scopes `read` and `user` accept `project`, and `admin` accepts neither.
    """

    name: Name = Field(description="The purpose of the token, which is shown in lists of tokens.")
    scope: Scope = Field(
        description=(
            "`agent` may report measurements of one job, `read` may read one project but change nothing, `user` may "
            "read and change one project, and `admin` may do everything."
        )
    )
    project: Name | None = optional("Name of the project to which a `read` or `user` token belongs.")
    job_id: str | None = optional("Job to which an `agent` token is restricted.")
    expires_in_s: Seconds | None = optional("Seconds until the token expires; null if it never expires.")


class Token(WireModel):
    """A token without its secret."""

    id: str = Field(description="Identifier that the service assigned, with which the token can be revoked.")
    name: str = Field(description="What the token is for.")
    scope: Scope = Field(description="What the token may do.")
    project: str | None = optional("Id of the project to which the token belongs; null for administrators.")
    job_id: str | None = optional("Job to which an `agent` token is restricted.")
    created_at: Timestamp = Field(description="When the token was created (RFC 3339, with time zone).")
    expires_at: Timestamp | None = optional("When the token expires; null if it never expires.")
    last_used_at: Timestamp | None = optional("When the token was last used, to the minute; null if it was never used.")
    revoked_at: Timestamp | None = optional("When the token was revoked; null if it was not revoked.")


class TokenCreated(WireModel):
    """A token that was just created; only this response contains the secret."""

    token: Token = Field(description="The token without its secret.")
    secret: str = Field(description="The secret; the service stores only its SHA-256 hash.")


class TokenList(WireModel):
    """The tokens that the caller may see, newest first."""

    tokens: list[Token] = Field(description="The tokens, newest first.")
