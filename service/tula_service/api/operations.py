"""Serves `/healthz` (liveness), `/readyz` (readiness) and `/metrics` (metrics for Prometheus)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Final, TypeAlias

from anyio import to_thread
from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from pydantic import BaseModel, Field

from tula_service import __version__
from tula_service.api.auth import CurrentUser
from tula_service.api.services import AppServices
from tula_service.errors import ServiceError
from tula_service.store import Store
from tula_service.usecases.access import Principal
from tula_service.usecases.events import check_ready, overview
from tula_service.usecases.monitoring import running_trainings
from tula_wire import routes

router = APIRouter(tags=["operations"])
open_router = APIRouter(tags=["operations"])
"""The routes of the probes, which require no token."""


READY_CHECK_S: Final = 1.0
"""Seconds for which the result of a database check is reused."""


class Status(BaseModel):
    """The response to a liveness or readiness probe."""

    status: str = Field(description="`ok` or `ready`.")


@open_router.get(routes.HEALTH)
async def get_health() -> Status:
    """Return 200 while the process is alive. The database is not checked, since its outage must not cause a restart."""
    return Status(status="ok")


@open_router.get(routes.READY)
async def get_ready(services: AppServices) -> Status:
    """Return 200 if the database is reachable, has this version's schema and has free disk space, else 503."""
    async with services.readiness.lock:  # concurrent requests share one check
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
def get_metrics(user: CurrentUser, services: AppServices) -> Response:
    """Return the counters of this replica's workers, and metrics from the database, which are equal on all replicas.

    The metrics from the database are the numbers of runs and agents, prediction errors, and metrics of the training
    runs in the token's projects.
    """
    registry = CollectorRegistry()
    registry.register(_Stored(services.store, user.principal))
    return Response(services.metrics.render() + generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


_OF_TRAININGS: Final = (
    ("tula_job_step_seconds", "Step time of an active training run.", "step_time_s"),
    (
        "tula_job_predicted_step_seconds",
        "Step time of an active training run as predicted before its start.",
        "predicted_step_time_s",
    ),
    ("tula_job_eta_seconds", "Time until an active training run ends, at its current speed.", "left_s"),
    ("tula_job_spent_usd", "US dollars spent on an active training run, including earlier starts.", "spent_usd"),
    ("tula_job_tokens_per_second", "Tokens per second of an active training run, over all ranks.", "tokens_per_s"),
)


_Values: TypeAlias = Mapping[tuple[str, ...], float | None]
"""The values of a metric, keyed by its label values."""


class _Stored(Collector):
    """Collects metrics from the database; their values are the same on every replica.

    Metrics of training runs are included only for runs that `principal` may see.
    """

    def __init__(self, store: Store, principal: Principal) -> None:
        self._store, self._principal = store, principal

    def collect(self) -> Iterator[Metric]:
        by_state, num_agents, errors = overview(self._store)
        yield _gauge("tula_build_info", "Version of the service.", ["version"], {(__version__,): 1.0})
        yield _gauge("tula_runs", "Runs by state.", ["state"], {(state,): n for state, n in by_state.items()})
        yield _gauge("tula_agents_seen", "Processes that have sent samples of active runs.", [], {(): num_agents})
        recent: _Values = {(str(share),): value for share, value in errors.items()}
        yield _gauge(
            "tula_prediction_error_recent", "Absolute relative error of predicted step times.", ["quantile"], recent
        )
        running = running_trainings(self._store, self._principal)
        for name, about, field in _OF_TRAININGS:
            values: _Values = {(run.job_id, run.job_name, run.run_id): getattr(run, field) for run in running}
            # Prometheus itself adds the label `job` to scraped metrics.
            yield _gauge(name, about, ["job_id", "job_name", "run_id"], values)


def _gauge(name: str, about: str, labels: list[str], values: _Values) -> Metric:
    """Return a metric with one series for each value that is not None."""
    family = GaugeMetricFamily(name, about, labels=labels)
    for key, value in sorted(values.items()):
        if value is not None:
            family.add_metric(key, value)
    return family
