"""The objects that any request may need, which `create_app` builds once: services, thread limiters and metrics."""

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
"""Variable that `tula serve --workers N` sets: a folder through which one worker reports for all.
"""
_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

ErrorPage: TypeAlias = Callable[[Scope, Problem, Mapping[str, str]], Response | None]
"""Renders a problem as a page for a person in a browser; returns None if a program asked."""


class Metrics:
    """Prometheus instruments, one set per application: two applications in one process (tests) share no counts."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        own = self._registry
        self.requests = Counter("tula_requests", "Requests answered.", ["method", "route", "status"], registry=own)
        self.request_s = Histogram("tula_request_seconds", "Time to answer.", ["route"], buckets=_SECONDS, registry=own)
        self.in_flight = Gauge("tula_requests_in_flight", "In progress.", multiprocess_mode="livesum", registry=own)
        self.refused = Counter("tula_requests_refused", "Refused because too many were in progress.", registry=own)
        self.limited = Counter("tula_requests_limited", "Refused by a token's limit.", registry=own)
        self.samples = Counter("tula_samples_stored", "Step samples stored.", registry=own)
        self.step_values = Counter("tula_step_values_stored", "Telemetry values stored.", registry=own)
        self.duplicates = Counter("tula_ingest_duplicates", "Rows or chunks that were stored before.", registry=own)
        self.fits = Counter("tula_fits", "Recommendations computed or taken from the cache.", ["cached"], registry=own)
        self.fit_s = Histogram("tula_fit_seconds", "Time of a fresh fit.", buckets=_SECONDS, registry=own)

    def render(self) -> bytes:
        """Return the text that Prometheus reads, for all workers together."""
        registry = self._registry
        if MULTIPROCESS_VARIABLE in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)


@dataclass
class Readiness:
    """The last check of the database: its error and its time (monotonic seconds)."""

    checked_at: float = -math.inf
    error: ServiceError | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True)
class Services:
    """Everything that a request may need.

    `ingest_threads` limits the threads reserved for requests from agents, `auth_threads` the threads that look up
    tokens. `streams` has the sender of each open event stream; streams end when `stopping` is set.
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
    """Return the services; async, because FastAPI runs a plain function in a thread."""
    services: Services = request.app.state.services
    return services


AppServices = Annotated[Services, Depends(_services)]
"""The application's services, as an endpoint's parameter."""
