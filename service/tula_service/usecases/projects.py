"""Making and listing tenants."""

from __future__ import annotations

from collections.abc import Sequence

from tula_service.errors import Forbidden
from tula_service.store import DEFAULT_PROJECT_ID, ProjectRecord, Store
from tula_service.usecases.access import Principal

__all__ = ["create_project", "visible_projects"]


def create_project(store: Store, actor: Principal, name: str) -> ProjectRecord:
    """A new project, written down in the audit log. Raises Forbidden, or Conflict when the name is taken."""
    if not actor.is_admin:
        raise Forbidden("Only an administrator makes projects: ask one.")
    with store.transaction() as tx:
        project = tx.projects.create(name)
        tx.audit.append(
            actor=actor.token_id or actor.name, action="project.create", target=project.id, detail={"name": name}
        )
    return project


def visible_projects(store: Store, caller: Principal) -> Sequence[ProjectRecord]:
    """Every project for an administrator, the caller's own for anyone else."""
    with store.reading() as tx:
        if caller.is_admin:
            return tx.projects.list()
        return [tx.projects.get(caller.project_id or DEFAULT_PROJECT_ID)]
