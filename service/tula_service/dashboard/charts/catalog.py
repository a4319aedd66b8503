"""Which charts exist, the data that each draws, and the functions that draw them by name.

Altair is imported by the first chart that is drawn: it takes a sixth of the service's start.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tula_service.dashboard.charts.candidates import Quantity
from tula_service.dashboard.charts.style import Spec
from tula_service.domain import MemoryReading
from tula_wire import Job, Ledger, LedgerEntry, Recommendation, Run, ScalingThresholds, TelemetrySeries

JOB_CHARTS: Final = ("frontier", "tradeoff", "cost_surface", "memory", "step_breakdown", "accuracy")
SERVICE_CHARTS: Final = ("accuracy", "calibration")

_ALTAIR: Final = threading.Lock()
"""Held while a chart is built. Altair's method syntax keeps the channel being written in a descriptor of the class
(`_PropertySetter`), so two threads would write into each other's charts. Building holds the GIL anyway."""


@dataclass(frozen=True)
class Panel:
    """One drawing area: its columns share a y axis titled `title`."""

    columns: tuple[str, ...]
    title: str
    logarithmic: bool = False


PANELS: Final[dict[str, tuple[str, tuple[Panel, ...]]]] = {
    "step_time": (
        "step time",
        (Panel(("step_time_s",), "Step time"), Panel(("skew_s",), "Wait for the slowest rank")),
    ),
    "memory": ("memory of a rank", (Panel(("memory_bytes",), "Memory"),)),
    "gradient": (
        "gradient",
        (
            Panel(("grad_norm",), "Norm"),
            Panel(("gradient_variability",), "Variability Δ(G)", logarithmic=True),
        ),
    ),
    "scale": (
        "gradient scaling",
        (Panel(("scale",), "Scale factor"), Panel(("scaled_share",), "Share of scaled steps")),
    ),
    "loss": ("loss", (Panel(("loss",), "Loss"),)),
    "accuracy": ("accuracy", (Panel(("accuracy", "validation_accuracy"), "Accuracy"),)),
}
RUN_CHARTS: Final = tuple(PANELS)

SOURCES: Final = {
    "step_time": "The agent reports every step once training runs.",
    "memory": "The agent reports each rank's peak within the first steps.",
    "gradient": "run.watch(model, optimizer) lets the agent measure it.",
    "scale": "A TulaOptimizer reports it.",
    "loss": "run.log(loss=...) in the training script reports it.",
    "accuracy": "run.log(validation_accuracy=...) in the training script reports it.",
}
"""Where a chart's columns come from, for the message while there are none."""

METHOD_NAMES: Final = {
    "lbt": "LBT (plain large batch)",
    "lrs": "LRS (linear learning rate)",
    "lars": "LARS",
    "post_local_sgd": "post-local SGD",
    "ags": "AGS",
    "gain": "gain scaling",
}


@dataclass(frozen=True)
class QualityRun:
    """A training run and the series by which it is judged."""

    run: Run
    series: TelemetrySeries


def method_name(run: Run) -> str:
    """What people call the run's method."""
    return METHOD_NAMES.get(run.method or "", run.method or "no method named")


def job_chart(
    name: str,
    job: Job,
    recommendation: Recommendation,
    ledger: Ledger,
    *,
    quantity: Quantity = "time",
    trainings: Sequence[Run] = (),
) -> Spec:
    """One of `JOB_CHARTS` as a Vega-Lite specification. Raises KeyError for another name."""
    from tula_service.dashboard.charts import accuracy, breakdown, frontier, memory, surface, tradeoff

    with _ALTAIR:
        if name == "tradeoff":
            return tradeoff.tradeoff(job, recommendation, quantity)
        if name == "accuracy":
            return accuracy.accuracy(job, ledger, trainings)
        others = {
            "frontier": frontier.frontier,
            "cost_surface": surface.cost_surface,
            "memory": memory.memory,
            "step_breakdown": breakdown.step_breakdown,
        }
        return others[name](job, recommendation)


def service_chart(name: str, outcomes: Sequence[tuple[str, LedgerEntry]]) -> Spec:
    """One of `SERVICE_CHARTS` of outcomes over all jobs, each with what it is of. Raises KeyError for another name."""
    from tula_service.dashboard.charts import accuracy

    with _ALTAIR:
        if name == "accuracy":
            return accuracy.accuracy_of_all(outcomes)
        return {"calibration": accuracy.calibration}[name]([entry for _, entry in outcomes])


def quality_chart(job: Job, runs: Sequence[QualityRun], *, logarithmic: bool = False) -> Spec:
    """One column of several runs over epochs, a colour per method, or per run where no method is named."""
    from tula_service.dashboard.charts import quality

    with _ALTAIR:
        return quality.quality_chart(job, runs, logarithmic)


def run_chart(
    name: str,
    run: Run,
    series: Mapping[str, TelemetrySeries],
    thresholds: ScalingThresholds | None = None,
    trends: Mapping[str, TelemetrySeries] | None = None,
    *,
    logarithmic: bool = False,
) -> Spec:
    """One of `RUN_CHARTS`, or the column of that name; columns missing from `series` are left out.

    A column with a trend is drawn pale, the trend over it.
    """
    from tula_service.dashboard.charts import series as drawing

    with _ALTAIR:
        return drawing.run_chart(name, run, series, thresholds, trends or {}, logarithmic)


def rank_memory(run: Run, readings: Mapping[int, MemoryReading]) -> Spec:
    """Stacked components (equation 3) of each rank's peak; `readings` by rank, at least one."""
    from tula_service.dashboard.charts import memory

    with _ALTAIR:
        return memory.rank_memory(run, readings)


def columns_of(name: str) -> tuple[str, ...]:
    """The telemetry columns that a chart of a run draws."""
    return tuple(column for panel in panels_of(name)[1] for column in panel.columns)


def panels_of(name: str) -> tuple[str, tuple[Panel, ...]]:
    """What a chart of a run is of, and its panels. A name that is none of `RUN_CHARTS` is that of a column."""
    words = name.replace("_", " ")
    return PANELS.get(name) or (words, (Panel((name,), words[:1].upper() + words[1:]),))
