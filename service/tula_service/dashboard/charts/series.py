"""The charts of a run: downsampled telemetry over steps."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isinf
from typing import Any, Final

import altair as alt

from tula_service.dashboard.charts.candidates import configuration_name
from tula_service.dashboard.charts.catalog import SOURCES, Panel, columns_of, panels_of
from tula_service.dashboard.charts.drawing import finish, legend, message, outlined
from tula_service.dashboard.charts.style import FAINT, HEIGHT, PALETTE, WIDTH, Row, Spec, Unit, bytes_unit, time_unit
from tula_wire import Run, ScalingThresholds, TelemetrySeries

_BRUSH: Final = "brush"
"""Name of the selection whose steps the page asks for again, in more points."""
_FEW: Final = 200
"""A series of fewer points is drawn with its points, since a single one has no line."""
_DELTA: Final = 0.5
"""The agent's default when neither the service nor the script sets one (section 5 of the paper)."""
_TREND: Final = "_trend"
_STEP_LABEL: Final = "datum.value % 1 ? '' : format(datum.value, '~s')"
"""Formats each tick separately: the format of the axis would write 0 as 0k beside 200k."""


def run_chart(
    name: str,
    run: Run,
    series: Mapping[str, TelemetrySeries],
    thresholds: ScalingThresholds | None,
    trends: Mapping[str, TelemetrySeries],
    logarithmic: bool,
) -> Spec:
    """See `catalog.run_chart`."""
    noun, panels = panels_of(name)
    title = f"{run.id}, {configuration_name(run.configuration)}: {noun}"
    drawn = [panel for panel in panels if any(_has(series, column) for column in panel.columns)]
    if not drawn:
        return message(title, _nothing(name))
    datasets: dict[str, list[Row]] = {}
    read: list[dict[str, str]] = []
    areas = []
    for panel in drawn:
        columns = tuple(column for column in panel.columns if _has(series, column))
        unit = _unit(panel, [series[column] for column in columns])
        for column in columns:
            datasets[column] = _rows(series[column], unit)
            label = (column.removesuffix("_s").removesuffix("_bytes") if unit.name else column).replace("_", " ")
            read.append({"column": column, "name": label, "unit": unit.name})
            if column in trends:
                datasets[column + _TREND] = _rows(trends[column], unit)
        few = max(len(datasets[column]) for column in columns) < _FEW
        trended = tuple(column for column in columns if column in trends)
        positive = all(row["value"] > 0 for column in columns for row in datasets[column])
        scale = ("log" if positive else "symlog") if logarithmic else "symlog" if panel.logarithmic else "linear"
        areas.append(_Area(panel, columns, trended, unit, few, scale, _levels(panel, unit, run, thresholds)))
    subtitle = _subtitle(list(series.values()), list(trends.values()))
    return finish(_drawing(tuple(areas)), title, subtitle, datasets) | {"usermeta": {"readout": read}}


@dataclass(frozen=True)
class _Area:
    """Everything that the drawing of a panel depends on, except its points."""

    panel: Panel
    columns: tuple[str, ...]
    trended: tuple[str, ...]
    unit: Unit
    few_points: bool
    scale: str
    levels: tuple[tuple[str, float], ...]


@functools.lru_cache(maxsize=256)
def _drawing(areas: tuple[_Area, ...]) -> Spec:
    """The specification without its points, cached: to build and validate it takes longer than to read a million steps.

    Callers share the result and must not change it.
    """
    height = HEIGHT - 80 if len(areas) == 1 else 130
    drawn = [_area(each).properties(width=WIDTH, height=height) for each in areas]
    spec: Spec = (drawn[0] if len(drawn) == 1 else alt.vconcat(*drawn).resolve_scale(x="shared")).to_dict()
    # The selection comes last, so that it exists once however many panels there are.
    first = spec["vconcat"][0] if "vconcat" in spec else spec
    first["layer"][0].setdefault("params", []).append(
        {"name": _BRUSH, "select": {"type": "interval", "encodings": ["x"]}}
    )
    return spec


def _area(area: _Area) -> alt.LayerChart:
    panel, columns, unit = area.panel, area.columns, area.unit
    suffix = f" ({unit.name})" if unit.name else ""
    x = alt.X("step:Q").title("Step").axis(labelExpr=_STEP_LABEL, tickMinStep=1, tickCount=8)
    x = x.scale(zero=False, nice=False)
    y = alt.Y("value:Q").title(panel.title + suffix).axis(tickCount=5)
    scales = {"log": {"type": "log", "nice": False}, "symlog": {"type": "symlog", "constant": 0.05}}
    share = {"domain": [0, 1]} if panel.columns == ("scaled_share",) else {"zero": False}
    y = y.scale(**scales.get(area.scale, share))
    # Few points stay visible as points; a thousand would draw one thick band.
    sparse: Any = {"size": 24, "filled": True} if area.few_points else False
    layers: list[Any] = []
    for place, column in enumerate(columns):
        dash = [1, 0] if place == 0 else [6, 3]
        names = [column, column + _TREND] if column in area.trended else [column]
        for name in names:
            base = alt.Chart(alt.NamedData(name)).transform_calculate(series=f"'{column}'")
            pale = name == column and len(names) > 1
            mark = base.mark_line(
                strokeWidth=1 if pale else 2,
                opacity=0.35 if pale else 1,
                strokeDash=dash,
                clip=True,
                point=sparse,
                tooltip=None,
            )
            if len(columns) == 1:
                mark = mark.encode(color=alt.value(PALETTE[0]))
            else:
                scale = alt.Scale(domain=list(columns), range=list(PALETTE[: len(columns)]))
                mark = mark.encode(color=alt.Color("series:N", scale=scale).legend(legend(columns)))
            layers.append(mark.encode(x=x, y=y))
    for label, level in area.levels:
        data = alt.Data(values=[{"value": level, "label": label}])
        layers.append(alt.Chart(data).mark_rule(strokeDash=[5, 4], color=FAINT, strokeWidth=1.5).encode(y="value:Q"))
        text = alt.Chart(data).encode(y="value:Q", text="label:N")
        layers += outlined(text, align="left", x=4, dy=-7, fontStyle="italic")
    return alt.layer(*layers)


def _levels(panel: Panel, unit: Unit, run: Run, thresholds: ScalingThresholds | None) -> tuple[tuple[str, float], ...]:
    if "step_time_s" in panel.columns and run.predicted_step_time_s:
        predicted = run.predicted_step_time_s / unit.size
        return ((f"predicted {predicted:.3g} {unit.name}", predicted),)
    if "gradient_variability" in panel.columns:
        asked = None if thresholds is None else thresholds.delta
        delta = _DELTA if asked is None else asked
        return ((f"δ = {delta:g}{' by default' if asked is None else ''}: sensitive above", delta),)
    return ()


def _unit(panel: Panel, found: Sequence[TelemetrySeries]) -> Unit:
    values = [value for each in found for value in each.values if value is not None]
    if panel.columns in (("step_time_s",), ("skew_s",)):
        return time_unit(values)
    if panel.columns == ("memory_bytes",):
        return bytes_unit(values)
    return Unit(1, "")


def _rows(found: TelemetrySeries, unit: Unit) -> list[Row]:
    """Values to six figures: more cannot be drawn, and half of what a long series sends would be digits.

    Steps without a value are left out: between nulls no line is drawn, and what is logged at every tenth step stands
    between nulls. So is a value beyond what a double holds in this unit: JSON has no infinity.
    """
    size = unit.size
    return [
        {"step": step, "value": float(f"{value / size:.6g}")}
        for step, value in zip(found.steps, found.values, strict=True)
        if value is not None and not isinf(value / size)
    ]


def _has(series: Mapping[str, TelemetrySeries], column: str) -> bool:
    return column in series and any(value is not None for value in series[column].values)


def _subtitle(found: Sequence[TelemetrySeries], trends: Sequence[TelemetrySeries]) -> str:
    reduced = [each for each in found if each.downsampled]
    notes = []
    if reduced:
        notes.append(f"{len(reduced[0].steps):,} of {reduced[0].total_points:,} points, peaks and dips kept")
    if trends:
        notes.append(f"line: median of every {trends[0].total_points // len(trends[0].steps):,}")
    text = "; ".join(notes)
    return text[:1].upper() + text[1:]


def _nothing(name: str) -> str:
    wanted = " or ".join(columns_of(name))
    source = SOURCES.get(name, f"run.log({name}=...) in the training script reports it.")
    return f"Nothing received yet. {source}\nThis chart draws {wanted}."
