"""`/healthz`, `/readyz` and `/metrics`: is the process alive, can it work, and what has it done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

from anyio import to_thread
from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field

from tula_service.api.services import AppServices
from tula_service.errors import ServiceError
from tula_service.store import Store
from tula_service.usecases.events import check_ready, overview
from tula_wire import routes

router = APIRouter(tags=["operations"])
open_router = APIRouter(tags=["operations"])
"""Probes, which need no token."""


READY_CHECK_S: Final = 1.0
"""How long one check of the database answers all who ask."""


class Status(BaseModel):
    """A probe's answer."""

    status: str = Field(description="`ok` or `ready`.")


@open_router.get(routes.HEALTH)
async def get_health() -> Status:
    """Alive: says nothing of the database, so that an outage there does not restart the process."""
    return Status(status="ok")


@open_router.get(routes.READY)
async def get_ready(services: AppServices) -> Status:
    """Ready: the database answers, has the schema of this version and a disk with room; or 503."""
    async with services.readiness.lock:  # many may ask at once, and one check answers all of them
        if time.monotonic() >= services.readiness.checked_at + READY_CHECK_S:
            services.readiness.error = None
            try:
                await to_thread.run_sync(check_ready, services.store, limiter=services.auth_threads)
            except ServiceError as error:
                services.readiness.error = error
            services.readiness.checked_at = time.monotonic()
    if services.readiness.error is not None:
        raise services.readiness.error
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
