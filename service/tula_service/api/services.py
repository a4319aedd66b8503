"""Defines the objects that all requests share, such as thread limiters and metrics; `create_app` creates them."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final, TypeAlias

from anyio import CapacityLimiter
from fastapi import Depends, Request, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from starlette.types import Scope

from tula_service.api.limits import RequestLimits
from tula_service.errors import ServiceError
from tula_service.settings import Settings
from tula_service.store import Store
from tula_service.usecases.access import Access
from tula_service.usecases.samples import SampleIngest
from tula_service.usecases.telemetry import TelemetryIngest
from tula_wire import Problem

MULTIPROCESS_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"
"""The environment variable that names the folder through which workers share their metrics.

`tula serve --workers N` sets this variable, so that any worker can report the metrics of all workers.
"""
_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

ErrorPage: TypeAlias = Callable[[Scope, Problem, Mapping[str, str]], Response | None]
"""A function that renders a problem document as a web page, or returns None if the client is not a browser."""


class Metrics:
    """The application's Prometheus metrics in its own registry, since tests run several applications in one process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        own = self._registry
        self.requests = Counter("tula_requests", "Requests handled.", ["method", "route", "status"], registry=own)
        self.request_s = Histogram("tula_request_seconds", "Response time.", ["route"], buckets=_SECONDS, registry=own)
        self.in_flight = Gauge(
            "tula_requests_in_flight", "Requests in progress.", multiprocess_mode="livesum", registry=own
        )
        self.refused = Counter(
            "tula_requests_refused", "Requests refused because too many were in progress.", registry=own
        )
        self.limited = Counter("tula_requests_limited", "Requests refused by a rate limit.", registry=own)
        self.samples = Counter("tula_samples_stored", "Step samples stored.", registry=own)
        self.step_values = Counter("tula_step_values_stored", "Telemetry values stored.", registry=own)
        self.duplicates = Counter("tula_ingest_duplicates", "Rows or chunks that were already stored.", registry=own)
        self.fits = Counter("tula_fits", "Recommendations computed or taken from the cache.", ["cached"], registry=own)
        self.fit_s = Histogram("tula_fit_seconds", "Time to compute a fit.", buckets=_SECONDS, registry=own)

    def render(self) -> bytes:
        """Return the metrics of all workers in Prometheus's text format."""
        registry = self._registry
        if MULTIPROCESS_VARIABLE in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)


@dataclass
class Readiness:
    """The result of the last database check: the error, if any, and the time of the check in monotonic seconds."""

    checked_at: float = -math.inf
    error: ServiceError | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True)
class Services:
    """The objects that all requests share.

    `ingest_threads` limits the number of threads reserved for requests from agents, and `auth_threads` the number of
    threads that look up tokens. `streams` lists the senders of the open event streams, which end when `stopping` is
    set.
    """

    settings: Settings
    store: Store
    access: Access
    limits: RequestLimits
    metrics: Metrics
    samples: SampleIngest
    telemetry: TelemetryIngest
    error_page: ErrorPage
    ingest_threads: CapacityLimiter
    auth_threads: CapacityLimiter
    readiness: Readiness = field(default_factory=Readiness)
    streams: list[str] = field(default_factory=list)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)


async def _services(request: Request) -> Services:
    """Return the services. The function is async because FastAPI runs plain functions in a thread."""
    services: Services = request.app.state.services
    return services


AppServices = Annotated[Services, Depends(_services)]
"""The type of an endpoint's parameter that receives the application's services."""
