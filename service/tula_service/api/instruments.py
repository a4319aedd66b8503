"""Prometheus instruments of a worker, in a registry per application."""

from __future__ import annotations

import os
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

MULTIPROCESS_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"
"""Set by `tula serve --workers N` before the workers start: a folder through which any worker reports for all."""

_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_ERRORS: Final = (-0.5, -0.25, -0.1, -0.05, -0.02, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0)


class Metrics:
    """One set per application, so that two applications in one process (tests) never share a count."""

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
        self.prediction_error = Histogram(
            "tula_prediction_error", "Measured over predicted step time, minus one.", buckets=_ERRORS, registry=own
        )

    def request(self, method: str, route: str, status: int, took_s: float) -> None:
        """Count one answered request; `route` is the pattern, so that labels stay few."""
        self.requests.labels(method, route, str(status)).inc()
        if status != 429:  # which waits
            self.request_s.labels(route).observe(took_s)

    def render(self) -> bytes:
        """The text that Prometheus reads, of all workers together."""
        if MULTIPROCESS_VARIABLE in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
            return generate_latest(registry)
        return generate_latest(self._registry)
