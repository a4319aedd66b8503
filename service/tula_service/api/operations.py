"""`/healthz`, `/readyz` and `/metrics`: is the process alive, can it work, and what has it done."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field

from tula_service.api.services import AppServices
from tula_service.store import Store
from tula_service.usecases.events import check_ready, overview
from tula_wire import routes

router = APIRouter(tags=["operations"])
open_router = APIRouter(tags=["operations"])
"""Probes, which need no token."""


class Status(BaseModel):
    """A probe's answer."""

    status: str = Field(description="`ok` or `ready`.")


@open_router.get(routes.HEALTH)
async def get_health() -> Status:
    """Alive: says nothing of the database, so that an outage there does not restart the process."""
    return Status(status="ok")


@open_router.get(routes.READY)
def get_ready(services: AppServices) -> Status:
    """Ready: the database answers, has the schema of this version and a disk with room; or 503."""
    check_ready(services.store)
    return Status(status="ready")


@router.get(routes.METRICS, response_class=Response)
def get_metrics(services: AppServices) -> Response:
    """Counters of this replica's workers; queue, agents and prediction error over all replicas."""
    lines = "\n".join(_gauges(services.store))
    return Response(services.metrics.render() + lines.encode() + b"\n", media_type=CONTENT_TYPE_LATEST)


def _gauges(store: Store) -> Iterator[str]:
    by_state, num_agents, errors = overview(store)
    gauges: tuple[tuple[str, str, dict[str, float]], ...] = (
        ("tula_runs", "Runs by state.", {f'{{state="{state}"}}': count for state, count in by_state.items()}),
        ("tula_agents_seen", "Processes that measure runs which are running.", {"": num_agents}),
        (
            "tula_prediction_error_recent",
            "Absolute relative error of step time.",
            {f'{{quantile="{share}"}}': value for share, value in errors.items()},
        ),
    )
    for name, about, values in gauges:
        yield f"# HELP {name} {about}"
        yield f"# TYPE {name} gauge"
        for labels, value in sorted(values.items()):
            yield f"{name}{labels} {value:g}"
