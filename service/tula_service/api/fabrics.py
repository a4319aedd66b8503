"""Serves the route `/v1/fabrics`, which stores and lists probes: measurements of the links between ranks."""

from __future__ import annotations

from fastapi import APIRouter, Depends

from tula_service.api.auth import CurrentUser
from tula_service.api.bodies import JsonRoute
from tula_service.api.queries import reject_unknown_query
from tula_service.usecases import fabrics
from tula_wire import Fabric, FabricList, FabricProbe, routes

router = APIRouter(route_class=JsonRoute, tags=["fabrics"], dependencies=[Depends(reject_unknown_query)])


@router.post(routes.FABRICS, status_code=201)
def create_fabric(probe: FabricProbe, user: CurrentUser) -> Fabric:
    """Store a probe, which the project's jobs on the same hardware then use."""
    return fabrics.add(*user, probe)


@router.get(routes.FABRICS)
def list_fabrics(user: CurrentUser) -> FabricList:
    """List the newest 200 probes of the caller's project, or of all projects for an administrator."""
    return fabrics.list_fabrics(*user)
