"""The application, put together from its settings: services, routes, and the order in which requests meet them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
from fastapi import APIRouter, Depends, FastAPI

from tula_service import __version__, dashboard
from tula_service.api import (
    docs,
    events,
    health,
    jobs,
    ledger,
    metrics,
    predictions,
    problems,
    projects,
    recommendations,
    runs,
    samples,
    scaling,
    telemetry,
    tracing,
)
from tula_service.api.deps import Services, authenticate, error_answers
from tula_service.api.direct import ShortWay
from tula_service.api.edge import Edge
from tula_service.api.metric_set import MULTIPROCESS_VARIABLE, Metrics
from tula_service.api.security import tokens
from tula_service.api.security.limiter import Limiter
from tula_service.settings import Settings
from tula_service.store import Store
from tula_service.store.migrations import check_schema
from tula_service.usecases import watch
from tula_service.usecases.access import Access
from tula_service.usecases.ingest import Ingest
from tula_wire import routes

__all__ = ["create_app", "create_app_from_environment"]


def create_app(settings: Settings) -> FastAPI:
    """The service on an already migrated database. Raises SchemaMismatch when the schema does not fit."""
    # Half of the threads take in what agents send: whatever else is asked for, and however long that takes.
    intake = anyio.CapacityLimiter(settings.threads // 2)
    store = Store.open(settings.database, connections=settings.threads + 1)  # the one more is of telemetry's writer
    check_schema(store.engine)
    counted = Metrics()
    services = Services(
        settings=settings,
        store=store,
        access=Access(store, cache_s=settings.token_cache_s, tokenless_allowed=settings.on_loopback),
        limiter=Limiter(
            requests_per_minute=settings.requests_per_minute,
            ingest_per_minute=settings.ingest_per_minute,
            counts=_shared_counts(settings),
        ),
        metrics=counted,
        ingest=Ingest(store, observers=(watch.observe,), threads=intake),
        intake=intake,
    )

    at_end: list[Callable[[], None]] = [services.ingest.close, services.limiter.close, store.close]

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        anyio.to_thread.current_default_thread_limiter().total_tokens = settings.threads - settings.threads // 2
        yield
        for finish in at_end:
            finish()

    app = FastAPI(
        title="Tula",
        version=__version__,
        summary="How many nodes and which global batch size.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # nothing leaves but what `trace` was asked for
    )
    app.state.services = services
    problems.install(app)
    app.add_middleware(ShortWay, path=routes.RUN_TELEMETRY, endpoint=telemetry.post_telemetry)
    app.add_middleware(dashboard.BrowserSession)
    app.add_middleware(Edge, settings=settings, metrics=counted)
    for router in _routers():  # behind authentication, all of them; straight into the application, since depth costs
        app.include_router(router, dependencies=[Depends(authenticate)], responses=error_answers())
    app.include_router(health.router)
    app.include_router(dashboard.open_router)
    if settings.trace:
        at_end.append(tracing.trace(app))
    return app


def create_app_from_environment() -> FastAPI:
    """What uvicorn's workers call: settings come from the environment that `tula serve` prepared."""
    return create_app(Settings.from_environment(os.environ))


def _shared_counts(settings: Settings) -> Path | None:
    """Where the workers of this replica count requests together; None for one worker, which needs no file."""
    folder = os.environ.get(MULTIPROCESS_VARIABLE)
    return None if settings.workers == 1 or folder is None else Path(folder) / "requests.counts"


def _routers() -> list[APIRouter]:
    return [
        telemetry.router,  # first, since routes are tried in order and nothing is asked for more often
        samples.router,
        jobs.router,
        runs.router,
        recommendations.router,
        predictions.router,
        ledger.router,
        scaling.router,
        events.router,
        projects.router,
        tokens.router,
        metrics.router,
        docs.router,
        dashboard.router,
    ]
