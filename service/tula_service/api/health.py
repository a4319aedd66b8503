"""`/healthz` and `/readyz`: is the process alive, and can it work."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel

from tula_service.api.deps import AppServices
from tula_service.usecases.events import check_ready
from tula_wire import routes

router = APIRouter(tags=["operations"])


class Status(BaseModel):
    """A probe's answer."""

    status: str


@router.get(routes.HEALTH)
def get_health() -> Status:
    """Alive: says nothing of the database, so that an outage there does not restart the process."""
    return Status(status="ok")


@router.get(routes.READY)
def get_ready(services: AppServices) -> Status:
    """Ready: the database answers and its schema is the one this version needs; 503 otherwise."""
    check_ready(services.store)
    return Status(status="ready")
