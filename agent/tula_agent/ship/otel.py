"""Records metrics of a training run with OpenTelemetry if the process has configured the SDK; never configures it."""

from __future__ import annotations

import sys
from typing import Any, Final

_METRICS: Final = (
    ("tula.training.step.duration", "Wall-clock time of an optimizer step."),
    (
        "tula.training.communication.exposed.duration",
        "Part of a step's communication time that does not overlap with computation.",
    ),
    ("tula.training.input.wait.duration", "Time that a step waits for data."),
)
"""Name and description of each histogram in seconds. No convention defines names for training metrics yet."""


class OtelMetrics:
    """Records three histograms with the process's own meter provider, if there is one; imports nothing."""

    def __init__(self) -> None:
        self._histograms: list[Any] | None = None

    def record(self, run_id: str, step_time_s: float, exposed_comm_time_s: float | None, input_time_s: float) -> None:
        """Record a step after the warm-up, as measured by the first rank. Exceptions of the SDK are not caught."""
        histograms = self._found()
        attributes = {"tula.run.id": run_id}
        for histogram, value in zip(histograms, (step_time_s, exposed_comm_time_s, input_time_s), strict=False):
            if value is not None:
                histogram.record(value, attributes)

    def _found(self) -> list[Any]:
        """Return the histograms, or an empty list if the process has not yet set a meter provider from the SDK."""
        api, sdk = sys.modules.get("opentelemetry.metrics"), sys.modules.get("opentelemetry.sdk.metrics")
        if self._histograms is None and api is not None and sdk is not None:
            provider = api.get_meter_provider()
            if isinstance(provider, sdk.MeterProvider):
                meter = provider.get_meter("tula_agent")
                self._histograms = [
                    meter.create_histogram(name, unit="s", description=about) for name, about in _METRICS
                ]
        return self._histograms or []
