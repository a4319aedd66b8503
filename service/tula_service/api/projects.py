"""`/v1/projects`: tenants."""

from __future__ import annotations

from fastapi import APIRouter

from tula_service.api.deps import Caller, Current
from tula_service.usecases.access import create_project, visible_projects
from tula_wire import Project, ProjectCreate, ProjectList, routes

__all__ = ["router"]

router = APIRouter(tags=["access"])


@router.post(routes.PROJECTS, status_code=201)
def post_project(wanted: ProjectCreate, caller: Caller, have: Current) -> Project:
    """Make a project; administrators only."""
    made = create_project(have.store, caller, wanted.name)
    return Project(id=made.id, name=made.name, created_at=made.created_at)


@router.get(routes.PROJECTS)
def get_projects(caller: Caller, have: Current) -> ProjectList:
    """All projects for an administrator, their own for a user."""
    found = visible_projects(have.store, caller)
    return ProjectList(projects=[Project(id=one.id, name=one.name, created_at=one.created_at) for one in found])
