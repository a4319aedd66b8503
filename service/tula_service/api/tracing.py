"""Where FastAPI's OpenTelemetry traces go, if the extra `otel` is installed and `TULA_TRACE` set."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tula_service.settings import SettingsError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider


def tracer_provider() -> TracerProvider:
    """Sends spans as the `OTEL_` variables say, and the last ones at its `shutdown`.

    Raises SettingsError without the extra.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise SettingsError("TULA_TRACE is set but the extra is missing: run `pip install 'tula[otel]'`.") from None
    provider = TracerProvider(resource=Resource.create({"service.name": "tula"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
