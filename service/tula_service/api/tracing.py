"""OpenTelemetry traces, if the extra `otel` is installed and `TULA_TRACE` set."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI

from tula_service.settings import SettingsError


def trace(app: FastAPI) -> Callable[[], None]:
    """A span for each request, sent as the `OTEL_` variables say; returns a function that flushes them at shutdown.

    Raises SettingsError without the extra.
    """
    try:
        from opentelemetry import trace as api
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise SettingsError("TULA_TRACE is set but the extra is missing: run `pip install 'tula[otel]'`.") from None
    provider = TracerProvider(resource=Resource.create({"service.name": "tula"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    api.set_tracer_provider(provider)
    FastAPIInstrumentor.instrument_app(app, tracer_provider=provider, excluded_urls="healthz,readyz,metrics")
    return provider.shutdown
