"""Serves the routes `/v1/tokens` and `/v1/projects`, which manage API tokens and the projects they belong to."""

from __future__ import annotations

from fastapi import APIRouter, Depends

from tula_service.api.auth import Caller, CurrentUser
from tula_service.api.bodies import JsonRoute
from tula_service.api.queries import reject_unknown_query
from tula_service.api.services import AppServices
from tula_service.usecases import access
from tula_wire import Project, ProjectCreate, ProjectList, Token, TokenCreate, TokenCreated, TokenList, routes

router = APIRouter(route_class=JsonRoute, tags=["access"], dependencies=[Depends(reject_unknown_query)])


@router.post(routes.TOKENS, status_code=201)
def create_token(request: TokenCreate, caller: Caller, services: AppServices) -> TokenCreated:
    """Create a token. Only this response contains the token's secret."""
    issued = access.issue_token(services.store, caller, **dict(request))
    services.access.forget(None)
    return issued


@router.get(routes.TOKENS)
def list_tokens(user: CurrentUser) -> TokenList:
    """List tokens without their secrets: all tokens for an administrator, the project's tokens for a user."""
    return TokenList(tokens=list(access.visible_tokens(*user)))


@router.delete(routes.TOKEN)
def delete_token(token_id: str, caller: Caller, services: AppServices) -> Token:
    """Revoke a token. Other workers may still accept the token for up to a second."""
    revoked = access.revoke_token(services.store, caller, token_id)
    services.access.forget_all()
    return revoked


@router.post(routes.PROJECTS, status_code=201)
def create_project(request: ProjectCreate, user: CurrentUser) -> Project:
    """Create a project. Only administrators may do this."""
    return access.create_project(*user, request.name)


@router.get(routes.PROJECTS)
def list_projects(user: CurrentUser) -> ProjectList:
    """List all projects for an administrator, or only the caller's own project."""
    return ProjectList(projects=list(access.visible_projects(*user)))
