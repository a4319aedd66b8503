"""Builds the application, with its services, routes and middleware, from its settings."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import anyio
import anyio.to_thread
from fastapi import Depends, FastAPI

from tula_service import __version__
from tula_service.api import (
    access,
    docs,
    errors,
    events,
    fabrics,
    jobs,
    ledger,
    operations,
    recommendations,
    runs,
    samples,
    scaling,
    telemetry,
)
from tula_service.api.auth import authorise
from tula_service.api.limits import RequestLimits
from tula_service.api.middleware import RequestMiddleware
from tula_service.api.services import Metrics, Services
from tula_service.dashboard import chart_routes, pages, session, static_files
from tula_service.fits import Fits
from tula_service.settings import Settings, SettingsError
from tula_service.store import Store
from tula_service.store.migrations import check_schema
from tula_service.store.partitions import create_ahead
from tula_service.usecases.access import Access, KnownRuns
from tula_service.usecases.samples import SampleIngest
from tula_service.usecases.telemetry import TelemetryIngest
from tula_wire import routes

_LOG = logging.getLogger("tula.service")
_PARTS: Final = (
    telemetry,  # comes first, since routes are matched in order and agents call this one most often
    samples,
    jobs,
    runs,
    recommendations,
    ledger,
    scaling,
    fabrics,
    events,
    access,
    operations,
    docs,
    chart_routes,
    pages,
)
"""The modules whose routes require authentication."""

AUTH_THREADS: Final = 2
"""Number of threads that look up tokens and nothing else, so that a flood of invalid tokens cannot block other work."""
TOKEN_CACHE_S: Final = 1.0
"""Seconds between checks for tokens that other workers created or revoked.

A revocation may take this long to reach every worker.
"""


def create_app(settings: Settings, *, token_cache_s: float = TOKEN_CACHE_S, fits: Fits | None = None) -> FastAPI:
    """Return the application, connected to a migrated database.

    Unless `fits` has started its process, fits are computed in the service's threads, which delays other requests.

    Raises SchemaMismatch if the database's schema does not match this version.
    """
    store = Store.open(settings.database, connections=settings.threads + AUTH_THREADS, fits=fits)
    check_schema(store.engine)
    known_runs = KnownRuns(store)
    services = Services(
        settings=settings,
        store=store,
        access=Access(store, cache_s=token_cache_s, tokenless_allowed=settings.on_loopback),
        limits=RequestLimits(
            requests_per_minute=settings.requests_per_minute, ingest_per_minute=settings.ingest_per_minute
        ),
        metrics=Metrics(),
        samples=SampleIngest(store, known_runs),
        telemetry=TelemetryIngest(store, known_runs),
        error_page=session.error_page,
        # Half of the threads are reserved for agents' measurements, so that slow requests from other clients cannot
        # delay these measurements.
        ingest_threads=anyio.CapacityLimiter(settings.threads // 2),
        auth_threads=anyio.CapacityLimiter(AUTH_THREADS),
    )

    at_end: list[Callable[[], None]] = [store.close]
    tracer = _tracer() if settings.trace else None
    if tracer is not None:
        at_end.append(tracer.shutdown)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[dict[str, Any]]:
        anyio.to_thread.current_default_thread_limiter().total_tokens = settings.threads - settings.threads // 2
        daily = None
        if not settings.read_only:
            make_partitions = partial(_make_partitions, store)
            # At startup, partitions may be missing, since the service may have been stopped for months.
            await anyio.to_thread.run_sync(make_partitions)
            daily = asyncio.create_task(_every_day(make_partitions))
        yield {"stopping": services.stopping}
        if daily is not None:
            daily.cancel()
        for finish in at_end:
            finish()

    app = FastAPI(
        title="Tula",
        version=__version__,
        summary="Recommends the number of nodes and the global batch size for PyTorch DDP training.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        strict_content_type=False,  # a body without a content type is read as JSON
        redirect_slashes=False,  # a redirect would repeat the Host header of a request that is not yet authorised
        generate_unique_id_function=lambda route: route.name,  # generated clients use operation ids as names
        telemetry={
            "metrics": False,
            "logs": False,
            "tracing": settings.trace,
            "tracer_provider": tracer,
            "exclude": lambda scope: scope["path"] in (routes.HEALTH, routes.READY, routes.METRICS),
        },
    )
    app.state.services = services
    errors.install(app)
    app.add_middleware(RequestMiddleware, services=services)
    for part in _PARTS:
        app.include_router(part.router, dependencies=[Depends(authorise)])
    for router in (operations.open_router, session.router, static_files.router):
        app.include_router(router)
    return app


def _make_partitions(store: Store) -> None:
    """Create the partitions for the coming months; log errors instead of raising them, since a daily retry follows."""
    try:
        create_ahead(store.engine)
    except Exception:
        _LOG.exception("Could not create the partitions for the coming months.")


async def _every_day(work: Callable[[], None]) -> None:
    while True:
        await anyio.sleep(24 * 3600)
        await anyio.to_thread.run_sync(work)


def _tracer() -> Any:
    """Return a tracer provider that exports FastAPI's traces as configured by the `OTEL_` environment variables.

    The provider's `shutdown` method sends the remaining traces. Raises SettingsError if the extra `otel` is not
    installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise SettingsError(
            "TULA_TRACE is set, but the extra `otel` is missing: run `pip install 'tula[otel]'`."
        ) from None
    provider = TracerProvider(resource=Resource.create({"service.name": "tula"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def create_app_from_environment() -> FastAPI:
    """Return the application for a uvicorn worker, with the settings that `tula serve` wrote into the environment."""
    fits = Fits()
    fits.start()
    app = create_app(Settings.read(), fits=fits)
    # A thread that renders a page holds the GIL for one switch interval before another thread can run. With Python's
    # default of 5 ms, a short request would wait for about a dozen such intervals.
    sys.setswitchinterval(0.0005)
    # Modules live as long as the worker. Without gc.freeze(), each full garbage collection would traverse them and stop
    # every thread for 0.1 s.
    gc.freeze()
    return app
