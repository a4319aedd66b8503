"""`/v1/tokens` and `/v1/projects`: API tokens, and the tenants that they belong to."""

from __future__ import annotations

from fastapi import APIRouter, Depends

from tula_service.api.deps import AppServices, Caller, reject_unknown_query
from tula_service.store import TokenRecord
from tula_service.usecases import access
from tula_wire import Project, ProjectCreate, ProjectList, Token, TokenCreate, TokenCreated, TokenList, routes

router = APIRouter(tags=["access"], dependencies=[Depends(reject_unknown_query)])


@router.post(routes.TOKENS, status_code=201)
def create_token(wanted: TokenCreate, caller: Caller, services: AppServices) -> TokenCreated:
    """Make a token; its secret is in this answer and nowhere else."""
    issued = access.issue_token(
        services.store,
        caller,
        name=wanted.name,
        scope=wanted.scope,
        project=wanted.project,
        job_id=wanted.job_id,
        expires_in_s=wanted.expires_in_s,
    )
    services.access.forget()
    return TokenCreated(token=_wire(issued.token), secret=issued.secret)


@router.get(routes.TOKENS)
def list_tokens(caller: Caller, services: AppServices) -> TokenList:
    """Tokens without their secrets: all for an administrator, the project's for a user."""
    return TokenList(tokens=[_wire(token) for token in access.visible_tokens(services.store, caller)])


@router.delete(routes.TOKEN)
def delete_token(token_id: str, caller: Caller, services: AppServices) -> Token:
    """Revoke a token: at once in this worker, within a second in others."""
    revoked = access.revoke_token(services.store, caller, token_id)
    services.access.forget()
    return _wire(revoked)


@router.post(routes.PROJECTS, status_code=201)
def create_project(wanted: ProjectCreate, caller: Caller, services: AppServices) -> Project:
    """Make a project; administrators only."""
    made = access.create_project(services.store, caller, wanted.name)
    return Project(id=made.id, name=made.name, created_at=made.created_at)


@router.get(routes.PROJECTS)
def list_projects(caller: Caller, services: AppServices) -> ProjectList:
    """All projects for an administrator, their own for a user."""
    found = access.visible_projects(services.store, caller)
    return ProjectList(projects=[Project(id=one.id, name=one.name, created_at=one.created_at) for one in found])


def _wire(token: TokenRecord) -> Token:
    return Token(
        id=token.id,
        name=token.name,
        scope=token.scope,
        project=token.project_id,
        job_id=token.job_id,
        created_at=token.created_at,
        expires_at=token.expires_at,
        last_used_at=token.last_used_at,
        revoked_at=token.revoked_at,
    )
