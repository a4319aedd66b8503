"""Draws charts of runs: downsampled telemetry by step, memory by rank, and comparisons of training runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isinf
from typing import Final, Literal, NamedTuple

from tula_service.dashboard.charts import vega
from tula_service.dashboard.charts.vega import ALARM, DASHES, HEIGHT, PALETTE, WIDTH, Row, Spec, Unit
from tula_service.domain import MemoryReading
from tula_wire import Job, Run, TelemetrySeries
from tula_wire.format import configuration, size

Over = Literal["epoch", "step"]
_COMPONENTS: Final = ("parameters", "gradients", "optimizer", "activations", "batch", "not attributed")
_MOST_NAMED: Final = 24
"""Maximum number of methods for which a chart has a legend."""
_FEW_A_RUN: Final = 80
_BRUSH: Final = "brush"
"""Name of the selection of steps, for which the page then requests more points."""
_FEW: Final = 200
"""A series with fewer points is drawn with visible points, since a single point is not visible as a line."""
_TREND: Final = "_trend"
_STEP_LABEL: Final = "datum.value % 1 ? '' : format(datum.value, '~s')"
"""An expression that formats each tick separately, since the axis's own format would write 0 as 0k next to 200k."""


class Panel(NamedTuple):
    """A drawing area whose columns share a y axis, which is labelled with `title`."""

    title: str
    columns: tuple[str, ...]
    logarithmic: bool = False


_CHARTS: Final[dict[str, tuple[str, str, tuple[Panel, ...]]]] = {
    "step_time": (
        "step time",
        "The agent reports every step of a training run.",
        (Panel("Step time", ("step_time_s",)), Panel("Wait for the slowest rank", ("skew_s",))),
    ),
    "memory": (
        "memory per rank",
        "The agent reports each rank's peak memory after the first steps.",
        (Panel("Memory", ("memory_bytes",)),),
    ),
    "gradient": (
        "gradient",
        "To measure the gradient, call run.watch(model, optimizer) in the script.",
        (Panel("Norm", ("grad_norm",)), Panel("Variability Δ(G)", ("gradient_variability",), logarithmic=True)),
    ),
    "scale": (
        "gradient scaling",
        "To report gradient scaling, use TulaOptimizer in the script.",
        (Panel("Scale factor", ("scale",)), Panel("Share of scaled steps", ("scaled_share",))),
    ),
    "accuracy": (
        "accuracy",
        "To report the accuracy, call run.log(validation_accuracy=...) in the script.",
        (Panel("Accuracy", ("accuracy", "validation_accuracy")),),
    ),
}
"""The subject of each chart, a hint on how to get its data, and its panels."""
SETTINGS: Final = ("delta", "small_batch_size", "directions", "thresholds_version")
"""Columns (also with the prefix `scripted_`) that have one value, which a page shows as text instead of a chart."""
RUN_CHARTS: Final = ("step_time", "memory", "gradient", "scale", "loss", "accuracy")
_UNITS: Final = {"step_time_s": vega.time_unit, "skew_s": vega.time_unit, "memory_bytes": vega.bytes_unit}


def _chart(name: str) -> tuple[str, str, tuple[Panel, ...]]:
    """Return the entry of `_CHARTS` with this name or, if there is none, an entry for the column with this name."""
    words = name.replace("_", " ")
    source = f"To report this metric, call run.log({name}=...) in the script."
    return _CHARTS.get(name) or (words, source, (Panel(words[:1].upper() + words[1:], (name,)),))


def is_setting(column: str) -> bool:
    """Return True if the column is one of SETTINGS."""
    return column.removeprefix("scripted_") in SETTINGS


def drawn_columns(name: str) -> tuple[str, ...]:
    """Return the telemetry columns that a run's chart shows."""
    return tuple(column for panel in _chart(name)[2] for column in panel.columns)


def run_chart(
    name: str,
    run: Run,
    series: Mapping[str, TelemetrySeries],
    trends: Mapping[str, TelemetrySeries] | None = None,
    *,
    logarithmic: bool = False,
) -> Spec:
    """Return one of the charts in `RUN_CHARTS`, or a chart of the column `name`; only columns in `series` are drawn.

    A column that has a trend is drawn in a pale colour, with the trend on top.
    """
    trends = trends or {}
    noun, source, panels = _chart(name)
    title = f"{run.id}, {configuration(run.configuration)}: {noun}"
    datasets: dict[str, list[Row]] = {}
    read: list[dict[str, str]] = []
    areas = []
    for panel in panels:
        values = {column: _values(series[column]) for column in panel.columns if column in series}
        columns = [column for column, numbers in values.items() if numbers]
        if not columns:
            continue
        fitting = _UNITS.get(columns[0])
        unit = Unit(1, "") if fitting is None else fitting(values[columns[0]])
        rows = {column: _rows(series[column], unit) for column in columns}
        smooth = {column + _TREND: _rows(trends[column], unit) for column in columns if column in trends}
        for column in columns:
            label = (column.removesuffix("_s").removesuffix("_bytes") if unit.name else column).replace("_", " ")
            read.append({"column": column, "name": label, "unit": unit.name})
        areas.append([*_lines(panel, rows, smooth, unit, logarithmic), *_level(columns[0], unit, run)])
        datasets |= rows | smooth
    if not areas:
        needed = " or ".join(drawn_columns(name))
        return vega.message(title, f"No data has been received yet. {source}\nThis chart shows {needed}.")
    # Only one panel has the selection, since a name of a selection must be unique.
    areas[0][0]["params"] = [{"name": _BRUSH, "select": {"type": "interval", "encodings": ["x"]}}]
    if len(areas) == 1:
        chart = vega.layered(*areas[0], height=HEIGHT - 80)
    else:
        stacked = [vega.layered(*layers, height=130) for layers in areas]
        chart = {"vconcat": stacked, "resolve": {"scale": {"x": "shared"}}}
    subtitle = _subtitle(list(series.values()), list(trends.values()))
    return vega.finish(chart, title, subtitle, datasets) | {"usermeta": {"readout": read}}


def _lines(
    panel: Panel, rows: Mapping[str, list[Row]], smooth: Mapping[str, list[Row]], unit: Unit, logarithmic: bool
) -> list[Spec]:
    """Return layers with a line for each column and, on top of it, the column's trend."""
    positive = all(row["value"] > 0 for points in rows.values() for row in points)
    scale: Spec = {"domain": [0, 1]} if panel.columns == ("scaled_share",) else {"zero": False}
    if logarithmic and positive:
        scale = {"type": "log", "nice": False}
    elif logarithmic or panel.logarithmic:
        scale = {"type": "symlog", "constant": 0.05}
    steps = {"labelExpr": _STEP_LABEL, "tickMinStep": 1, "tickCount": 8}
    x = vega.field("step:Q", title="Step", axis=steps, scale={"zero": False, "nice": False})
    title = panel.title + (f" ({unit.name})" if unit.name else "")
    y = vega.field("value:Q", title=title, axis={"tickCount": 5}, scale=scale)
    colour: Spec = {"value": PALETTE[0]}
    if len(rows) > 1:
        names = list(rows)
        look = {"domain": names, "range": list(PALETTE[: len(names)])}
        colour = vega.field("series", scale=look, legend=vega.legend(names))
    # Points are visible only if there are few, since a thousand would form a thick band.
    few = max(map(len, rows.values())) < _FEW
    layers: list[Spec] = []
    for place, column in enumerate(rows):
        for name in (column, column + _TREND):
            if name in rows or name in smooth:
                pale = name == column and column + _TREND in smooth
                line = vega.layer(
                    name,
                    "line",
                    {"color": colour, "x": x, "y": y},
                    strokeWidth=1 if pale else 2,
                    opacity=0.35 if pale else 1,
                    strokeDash=[6, 3] if place else [1, 0],
                    point={"size": 24, "filled": True} if few else False,
                    clip=True,
                    tooltip=None,
                )
                layers.append(line | {"transform": [{"calculate": f"'{column}'", "as": "series"}]})
    return layers


def _level(column: str, unit: Unit, run: Run) -> list[Spec]:
    """Return layers with a labelled dashed line at the predicted step time."""
    if column != "step_time_s" or not run.predicted_step_time_s:
        return []
    level = run.predicted_step_time_s / unit.size
    rows = [{"value": level, "label": f"predicted {level:.3g} {unit.name}"}]
    return vega.ruled(rows, {"y": vega.field("value:Q")}, align="left", x=4, dy=-7)


def _rows(series: TelemetrySeries, unit: Unit) -> list[Row]:
    """Return the values in `unit`, rounded to six digits; more digits would be invisible but double the chart's size.

    Steps without a value are left out, because Vega draws no line next to a null, so a value logged at every tenth
    step would be invisible. Values too large for a double in this unit are also left out, since JSON has no infinity.
    """
    size = unit.size
    return [
        {"step": step, "value": float(f"{value / size:.6g}")}
        for step, value in zip(series.steps, series.values, strict=True)
        if value is not None and not isinf(value / size)
    ]


def _values(series: TelemetrySeries) -> list[float]:
    return [value for value in series.values if value is not None]


def _subtitle(series: Sequence[TelemetrySeries], trends: Sequence[TelemetrySeries]) -> str:
    reduced = [column for column in series if column.downsampled]
    notes = []
    if reduced:
        notes.append(f"{len(reduced[0].steps):,} of {reduced[0].total_points:,} points, with all peaks and dips")
    if trends:
        notes.append(f"line: median of every {trends[0].total_points // len(trends[0].steps):,} points")
    text = "; ".join(notes)
    return text[:1].upper() + text[1:]


class QualityRun(NamedTuple):
    """A training run with the series by which it is compared."""

    run: Run
    series: TelemetrySeries


def quality_chart(job: Job, runs: Sequence[QualityRun], *, logarithmic: bool = False, over: Over = "epoch") -> Spec:
    """Return a chart that compares a column of several runs over epochs or steps, with a colour per method (or run).

    If the configurations of the runs differ, the legend also shows the configurations.
    """
    title = f"{job.name}: training runs"
    drawn = [run for run in runs if _values(run.series)]
    if not drawn:
        return vega.message(title, "No training run has reported this metric yet.")
    column = drawn[0].series.column
    name = column.replace("_", " ")
    apart = len({run.configuration for run, _ in drawn}) > 1
    listed: list[Row] = [
        {
            "run": run.id,
            "method": (run.method or run.id)
            + (f": {configuration(run.configuration)}" if apart and run.method else ""),
            "batch": run.configuration.global_batch_size,
        }
        for run, _ in drawn
    ]
    methods = sorted({row["method"] for row in listed})
    rows = [{"run": run.run.id, **row} for run in drawn for row in _rows(run.series, Unit(1, ""))]
    named = len(methods) <= _MOST_NAMED
    positive = all(row["value"] > 0 for row in rows)
    scale = {"type": "log" if positive else "symlog", "nice": False} if logarithmic else {"zero": False}
    # Tooltips belong to points, which are visible only if there are few short lines.
    seen = named and len(rows) < _FEW_A_RUN * len(drawn)
    look = {"scale": {"domain": methods, "range": [PALETTE[i % 8] for i in range(len(methods))]}}
    dash = {"scale": {"domain": methods, "range": [list(DASHES[(i + i // 8) % 8]) for i in range(len(methods))]}}
    keyed = {"legend": vega.legend(methods) if named else None}
    encoding = {
        "x": vega.field(f"{over}:Q", title=over.capitalize(), scale={"nice": False}, axis={"tickCount": 10}),
        "y": vega.field("value:Q", title=name.capitalize(), scale=scale),
        "color": vega.field("method:N", **look, **keyed),
        "detail": vega.field("run:N"),
        "tooltip": [
            vega.field("method:N", title="Method"),
            vega.field("batch:Q", title="Global batch"),
            vega.field("epoch:Q", title="Epoch", format=".1f"),
            vega.field("step:Q", title="Step", format=","),
            vega.field("value:Q", title=name.capitalize(), format=",.4~g"),
            vega.field("run:N", title="Run"),
        ],
    }
    if named:
        encoding["strokeDash"] = vega.field("method:N", **dash, **keyed)
    point = {"opacity": 1, "size": 24, "filled": True} if seen else {"opacity": 0, "size": 90}
    lines = vega.layer(
        "points", "line", encoding, strokeWidth=2 if named else 1, opacity=1 if named else 0.7, point=point
    )
    # Method and batch are sent once per run instead of once per point.
    of_run = {"data": {"name": "runs"}, "key": "run", "fields": ["method", "batch"]}
    epoch = f"(datum.step + 1) * datum.batch / {job.spec.dataset.size}"
    lines["transform"] = [{"lookup": "run", "from": of_run}, {"calculate": epoch, "as": "epoch"}]
    count = "1 training run" if len(drawn) == 1 else f"{len(drawn)} training runs"
    smooth = "; long series are shown as medians" if any(run.series.downsampled for run in drawn) else ""
    subtitle = f"{name.capitalize()} of {count}{smooth}{'' if named else '; point at a line to see its name'}"
    chart = {**lines, "width": WIDTH, "height": HEIGHT}
    return vega.finish(chart, title, subtitle, {"runs": listed, "points": rows})


def rank_memory(run: Run, readings: Mapping[int, MemoryReading]) -> Spec:
    """Return a chart of each rank's peak memory, stacked by component (equation 3).

    `readings` is keyed by rank and must not be empty.
    """
    peaks = [reading.peak_bytes for reading in readings.values()]
    capacities = [reading.capacity_bytes for reading in readings.values() if reading.capacity_bytes]
    unit = vega.bytes_unit([*peaks, *capacities])
    rows: list[Row] = [
        {
            "rank": f"rank {rank}",
            "at": rank,
            "part": part,
            "order": order,
            "value": held / unit.size,
            "peak": reading.peak_bytes / unit.size,
        }
        for rank, reading in sorted(readings.items())
        for order, (part, held) in enumerate(zip(_COMPONENTS, _split(reading), strict=True))
        if held > 0
    ]
    tips = [
        vega.field("rank", title="Rank"),
        vega.field("part", title="Part"),
        vega.field("value:Q", title=unit.name, format=",.3~g"),
        vega.field("peak:Q", title=f"Peak ({unit.name})", format=",.3~g"),
    ]
    y = vega.field("rank", sort={"field": "at", "op": "min"}, title=None)
    bars = {"y": y, "tooltip": tips, **vega.stacked(rows, _COMPONENTS, f"Peak memory ({unit.name})")}
    chart = vega.layered(
        vega.layer("ranks", "bar", bars),
        *vega.ruled("capacity", {"x": vega.field("value:Q")}, color=ALARM, align="right", baseline="top", dx=-5, y=3),
        height={"step": max(22, min(60, 220 // len(readings)))},
    )
    title = f"{run.id}, {configuration(run.configuration)}: memory by rank"
    ceiling = [{"value": min(capacities) / unit.size, "label": "memory of a rank"}] if capacities else []
    subtitle = f"Highest peak of each rank; the highest of all is {size(max(peaks))}"
    return vega.finish(chart, title, subtitle, {"ranks": rows, "capacity": ceiling})


def _split(reading: MemoryReading) -> list[int]:
    """Return the bytes of each of `_COMPONENTS`; they add up to the peak unless the known components exceed it."""
    parts = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes", "batch_bytes")
    sizes = [getattr(reading, part) or 0 for part in parts]
    return [*sizes, max(0, reading.peak_bytes - sum(sizes))]
