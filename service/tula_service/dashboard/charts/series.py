"""The charts of a run: its telemetry over steps, already thinned by whoever read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import altair as alt

from tula_service.dashboard.charts.candidates import configuration_name
from tula_service.dashboard.charts.spec import (
    FAINT,
    HEIGHT,
    PALETTE,
    WIDTH,
    Row,
    Spec,
    Unit,
    bytes_unit,
    finish,
    message,
    one_at_a_time,
    time_unit,
)
from tula_wire import Run, ScalingThresholds, TelemetrySeries

__all__ = ["RUN_CHARTS", "columns_of", "run_chart"]

_BRUSH: Final = "brush"
"""Name of the selection whose steps the page asks for again, in more points."""


_SHARE: Final[dict[str, Any]] = {"domain": [0, 1]}


@dataclass(frozen=True)
class _Panel:
    """One drawing area: its columns share a y axis titled `title`."""

    columns: tuple[str, ...]
    title: str
    logarithmic: bool = False


_PANELS: Final[dict[str, tuple[str, tuple[_Panel, ...]]]] = {
    "step_time": ("step time", (_Panel(("step_time_s",), "Step time"),)),
    "memory": ("memory of a rank", (_Panel(("memory_bytes",), "Memory"),)),
    "gradient": (
        "gradient",
        (
            _Panel(("grad_norm",), "Norm"),
            _Panel(("gradient_variability",), "Variability Δ(G)", logarithmic=True),
            _Panel(("scaled_share",), "Share scaled"),
        ),
    ),
    "scale": ("gradient scale factors", (_Panel(("scale",), "Scale factor"),)),
    "loss": ("loss", (_Panel(("loss",), "Loss"),)),
    "accuracy": ("accuracy", (_Panel(("accuracy", "validation_accuracy"), "Accuracy"),)),
}
RUN_CHARTS: Final = tuple(_PANELS)


def columns_of(name: str) -> tuple[str, ...]:
    """The telemetry columns that a chart draws. Raises KeyError for an unknown chart."""
    return tuple(column for panel in _PANELS[name][1] for column in panel.columns)


@one_at_a_time
def run_chart(
    name: str, run: Run, series: Mapping[str, TelemetrySeries], thresholds: ScalingThresholds | None = None
) -> Spec:
    """One of `RUN_CHARTS`; columns missing from `series` are left out. Raises KeyError for another name."""
    noun, panels = _PANELS[name]
    title = f"Run {run.id}: {noun}"
    drawn = [panel for panel in panels if any(_has(series, column) for column in panel.columns)]
    if not drawn:
        wanted = " or ".join(columns_of(name))
        return message(title, f"Nothing received yet: this chart draws {wanted}.")
    datasets: dict[str, list[Row]] = {}
    areas = []
    for panel in drawn:
        columns = [column for column in panel.columns if _has(series, column)]
        unit = _unit(panel, [series[column] for column in columns])
        for column in columns:
            datasets[column] = _rows(series[column], unit)
        points = max(len(datasets[column]) for column in columns)
        height = HEIGHT - 80 if len(drawn) == 1 else 130
        areas.append(_area(panel, columns, unit, points, run, thresholds).properties(width=WIDTH, height=height))
    # The selection comes last, so that it exists once however many panels there are.
    chart = areas[0] if len(areas) == 1 else alt.vconcat(*areas).resolve_scale(x="shared")
    spec = finish(chart, title, _subtitle(run, list(series.values())), datasets)
    first = spec["vconcat"][0] if "vconcat" in spec else spec
    first["layer"][0].setdefault("params", []).append(
        {"name": _BRUSH, "select": {"type": "interval", "encodings": ["x"]}}
    )
    return spec


def _area(
    panel: _Panel, columns: Sequence[str], unit: Unit, points: int, run: Run, thresholds: ScalingThresholds | None
) -> alt.LayerChart:
    suffix = f" ({unit.name})" if unit.name else ""
    x = alt.X("step:Q").title("Step").axis(format="~s", tickMinStep=1, tickCount=8).scale(zero=False, nice=False)
    y = alt.Y("value:Q").title(panel.title + suffix).axis(tickCount=5)
    y = (
        y.scale(type="symlog", constant=0.05)
        if panel.logarithmic
        else y.scale(**_SHARE if panel.columns == ("scaled_share",) else {"zero": False})
    )
    # Few points stay visible as points; a thousand would draw one thick band.
    sparse: Any = {"size": 14, "filled": True} if points < 80 else False
    layers: list[Any] = []
    for place, column in enumerate(columns):
        dash = [1, 0] if place == 0 else [6, 3]
        base = alt.Chart(alt.NamedData(column)).transform_calculate(series=f"'{column}'")
        mark = base.mark_line(strokeWidth=1.4, strokeDash=dash, clip=True, point=sparse)
        if len(columns) == 1:
            mark = mark.encode(color=alt.value(PALETTE[0]))
        else:
            scale = alt.Scale(domain=list(columns), range=list(PALETTE[: len(columns)]))
            mark = mark.encode(color=alt.Color("series:N", scale=scale).legend(title=None, orient="top"))
        tips = [alt.Tooltip("step:Q", title="Step", format=",d"), alt.Tooltip("value:Q", title=column, format=",.4~g")]
        layers.append(mark.encode(x=x, y=y, tooltip=tips))
    for label, level in _levels(panel, unit, run, thresholds):
        data = alt.Data(values=[{"value": level, "label": label}])
        layers.append(alt.Chart(data).mark_rule(strokeDash=[5, 4], color=FAINT, strokeWidth=1.5).encode(y="value:Q"))
        layers.append(
            alt.Chart(data).mark_text(align="left", x=4, dy=-7, fontStyle="italic").encode(y="value:Q", text="label:N")
        )
    return alt.layer(*layers)


def _levels(panel: _Panel, unit: Unit, run: Run, thresholds: ScalingThresholds | None) -> list[tuple[str, float]]:
    if "step_time_s" in panel.columns and run.predicted_step_time_s:
        return [("predicted", run.predicted_step_time_s / unit.size)]
    if "gradient_variability" in panel.columns and thresholds is not None:
        return [(f"δ = {thresholds.delta:g}: sensitive above", thresholds.delta)]
    return []


def _unit(panel: _Panel, found: Sequence[TelemetrySeries]) -> Unit:
    values = [value for each in found for value in each.values if value is not None]
    if panel.columns == ("step_time_s",):
        return time_unit(values)
    if panel.columns == ("memory_bytes",):
        return bytes_unit(values)
    return Unit(1, "")


def _rows(found: TelemetrySeries, unit: Unit) -> list[Row]:
    size = unit.size
    return [
        {"step": step, "value": None if value is None else value / size}
        for step, value in zip(found.steps, found.values, strict=True)
    ]


def _has(series: Mapping[str, TelemetrySeries], column: str) -> bool:
    return column in series and any(value is not None for value in series[column].values)


def _subtitle(run: Run, found: Sequence[TelemetrySeries]) -> str:
    told = configuration_name(run.configuration)
    thinned = [each for each in found if each.downsampled]
    if thinned:
        told += f"; {len(thinned[0].steps):,} of {thinned[0].total_points:,} points, peaks and dips kept"
    return told
