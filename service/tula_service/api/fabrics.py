"""`/v1/fabrics`: what probes measured of the links between ranks."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends

from tula_service.api.bodies import json_of, request_body
from tula_service.api.deps import reject_unknown_query
from tula_service.dashboard.session import CurrentUser
from tula_service.usecases import fabrics
from tula_wire import Fabric, FabricList, FabricProbe, routes

router = APIRouter(tags=["fabrics"], dependencies=[Depends(reject_unknown_query)])


@router.post(routes.FABRICS, status_code=201, openapi_extra=request_body(FabricProbe))
def create_fabric(probe: Annotated[FabricProbe, json_of(FabricProbe)], user: CurrentUser) -> Fabric:
    """Store a probe for the jobs of the project on nodes like these."""
    return fabrics.add(*user, probe)


@router.get(routes.FABRICS)
def list_fabrics(user: CurrentUser) -> FabricList:
    """The newest 200 probes: of all projects for an administrator, of the project for others."""
    return fabrics.list_fabrics(*user)
