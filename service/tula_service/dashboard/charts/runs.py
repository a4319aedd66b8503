"""Charts of runs: downsampled telemetry over steps, and training runs of a job side by side by one column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isinf
from typing import Final, Literal

from tula_service.dashboard.charts import vega
from tula_service.dashboard.charts.vega import DASHES, FAINT, HEIGHT, PALETTE, WIDTH, Row, Spec, Unit
from tula_wire import Job, Run, ScalingThresholds, TelemetrySeries
from tula_wire.format import configuration

Over = Literal["epoch", "step"]
_MOST_NAMED: Final = 24
"""Of more methods than these no legend names any."""
_FEW_A_RUN: Final = 80
_BRUSH: Final = "brush"
"""Name of the selection whose steps the page asks for again, in more points."""
_FEW: Final = 200
"""A series of fewer points is drawn with its points, since a single one has no line."""
_DELTA: Final = 0.5
"""The agent's default when neither the service nor the script sets one (section 5 of the paper)."""
_TREND: Final = "_trend"
_STEP_LABEL: Final = "datum.value % 1 ? '' : format(datum.value, '~s')"
"""Formats each tick separately: the format of the axis would write 0 as 0k beside 200k."""


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


def columns_of(name: str) -> tuple[str, ...]:
    """The telemetry columns that a chart of a run draws."""
    return tuple(column for panel in panels_of(name)[1] for column in panel.columns)


def panels_of(name: str) -> tuple[str, tuple[Panel, ...]]:
    """What a chart of a run is of, and its panels. A name that is none of `RUN_CHARTS` is that of a column."""
    words = name.replace("_", " ")
    return PANELS.get(name) or (words, (Panel((name,), words[:1].upper() + words[1:]),))


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
    trends = trends or {}
    noun, panels = panels_of(name)
    title = f"{run.id}, {configuration(run.configuration)}: {noun}"
    drawn = [panel for panel in panels if any(_has(series, column) for column in panel.columns)]
    if not drawn:
        return vega.message(title, _nothing(name))
    datasets: dict[str, list[Row]] = {}
    read: list[dict[str, str]] = []
    areas = []
    for panel in drawn:
        columns = [column for column in panel.columns if _has(series, column)]
        unit = _unit(panel, [series[column] for column in columns])
        rows = {column: _rows(series[column], unit) for column in columns}
        smooth = {column + _TREND: _rows(trends[column], unit) for column in columns if column in trends}
        for column in columns:
            label = (column.removesuffix("_s").removesuffix("_bytes") if unit.name else column).replace("_", " ")
            read.append({"column": column, "name": label, "unit": unit.name})
        layers = _lines(panel, rows, smooth, unit, logarithmic)
        for label, level in _levels(panel, unit, run, thresholds):
            layers += _level(label, level)
        areas.append(vega.layered(*layers, height=HEIGHT - 80 if len(drawn) == 1 else 130))
        datasets |= rows | smooth
    # The selection is of one panel, so that it exists once however many there are.
    areas[0]["layer"][0]["params"] = [{"name": _BRUSH, "select": {"type": "interval", "encodings": ["x"]}}]
    chart = areas[0] if len(areas) == 1 else {"vconcat": areas, "resolve": {"scale": {"x": "shared"}}}
    subtitle = _subtitle(list(series.values()), list(trends.values()))
    return vega.finish(chart, title, subtitle, datasets) | {"usermeta": {"readout": read}}


def _lines(
    panel: Panel,
    rows: Mapping[str, list[Row]],
    smooth: Mapping[str, list[Row]],
    unit: Unit,
    logarithmic: bool,
) -> list[Spec]:
    """A line for each column, and over it its trend."""
    positive = all(row["value"] > 0 for found in rows.values() for row in found)
    kind = ("log" if positive else "symlog") if logarithmic else "symlog" if panel.logarithmic else "linear"
    scales: dict[str, Spec] = {
        "log": {"type": "log", "nice": False},
        "symlog": {"type": "symlog", "constant": 0.05},
    }
    share = {"domain": [0, 1]} if panel.columns == ("scaled_share",) else {"zero": False}
    steps = {"labelExpr": _STEP_LABEL, "tickMinStep": 1, "tickCount": 8}
    x = vega.field("step:Q", title="Step", axis=steps, scale={"zero": False, "nice": False})
    title = panel.title + (f" ({unit.name})" if unit.name else "")
    y = vega.field("value:Q", title=title, axis={"tickCount": 5}, scale=scales.get(kind, share))
    colour: Spec = {"value": PALETTE[0]}
    if len(rows) > 1:
        names = list(rows)
        colour = vega.field(
            "series", scale={"domain": names, "range": list(PALETTE[: len(names)])}, legend=vega.legend(names)
        )
    # Few points stay visible as points; a thousand would draw one thick band.
    few = max(map(len, rows.values())) < _FEW
    look: Spec = {"clip": True, "tooltip": None, "point": {"size": 24, "filled": True} if few else False}
    layers: list[Spec] = []
    for place, column in enumerate(rows):
        look["strokeDash"] = [1, 0] if place == 0 else [6, 3]
        for name in (column, column + _TREND):
            if name in rows or name in smooth:
                pale = name == column and column + _TREND in smooth
                line = vega.layer(name, "line", {"color": colour, "x": x, "y": y}, strokeWidth=1 if pale else 2, **look)
                line["mark"]["opacity"] = 0.35 if pale else 1
                layers.append(line | {"transform": [{"calculate": f"'{column}'", "as": "series"}]})
    return layers


def _level(label: str, value: float) -> list[Spec]:
    """A dashed line across the panel, with its label."""
    y = vega.field("value:Q")
    rule = vega.layer("", "rule", {"y": y}, strokeDash=[5, 4], color=FAINT, strokeWidth=1.5)
    text = vega.outlined("", {"y": y, "text": vega.field("label")}, align="left", x=4, dy=-7, fontStyle="italic")
    return [each | {"data": {"values": [{"value": value, "label": label}]}} for each in (rule, *text)]


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
        return vega.time_unit(values)
    if panel.columns == ("memory_bytes",):
        return vega.bytes_unit(values)
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


@dataclass(frozen=True)
class QualityRun:
    """A training run and the series by which it is judged."""

    run: Run
    series: TelemetrySeries


def quality_chart(job: Job, runs: Sequence[QualityRun], *, logarithmic: bool = False, over: Over = "epoch") -> Spec:
    """One column of several runs over epochs or steps, a colour per method, or per run where no method is named."""
    title = f"{job.name}: training runs"
    drawn = [each for each in runs if any(value is not None for value in each.series.values)]
    if not drawn:
        return vega.message(title, "No training run has reported this yet.")
    column = drawn[0].series.column
    name = column.replace("_", " ")
    listed = {each.run.id: _run_row(each.run) for each in drawn}
    methods = sorted({row["method"] for row in listed.values()})
    rows: list[Row] = [
        {"run": each.run.id, "step": step, "value": float(f"{value:.6g}")}
        for each in drawn
        for step, value in zip(each.series.steps, each.series.values, strict=True)
        if value is not None
    ]
    named = len(methods) <= _MOST_NAMED
    positive = all(row["value"] > 0 for row in rows)
    scale = {"type": "log" if positive else "symlog", "nice": False} if logarithmic else {"zero": False}
    # Points carry the tooltip; only those of few short lines are seen.
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
    # Sent once a run, not once a point.
    of_run = {"data": {"name": "runs"}, "key": "run", "fields": ["method", "batch"]}
    epoch = f"(datum.step + 1) * datum.batch / {job.spec.dataset.size}"
    lines["transform"] = [{"lookup": "run", "from": of_run}, {"calculate": epoch, "as": "epoch"}]
    count = "1 training run" if len(drawn) == 1 else f"{len(drawn)} training runs"
    smooth = "; of long series the median of each stretch" if any(each.series.downsampled for each in drawn) else ""
    subtitle = f"{name.capitalize()} of {count}{smooth}{'' if named else '; the pointer names a line'}"
    chart = {**lines, "width": WIDTH, "height": HEIGHT}
    return vega.finish(chart, title, subtitle, {"runs": list(listed.values()), "points": rows})


def _run_row(run: Run) -> Row:
    return {"run": run.id, "method": run.method or run.id, "batch": run.configuration.global_batch_size}
