"""Parts that several charts draw: legends, outlined text, stacked bars, and the finished specification."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
from altair.utils import schemapi

from tula_service.dashboard.charts.style import FAINT, HEIGHT, PALETTE, WIDTH, Row, Spec, Unit, log_ticks

schemapi.disable_debug_mode()
"""Altair checks each part against the JSON schema of Vega-Lite when it is made: three quarters of a chart's time, and
the same for every job. Tests check the whole specification instead."""

Ends = tuple[float, float]
"""Least and greatest value of an axis."""


def reach(values: Sequence[float]) -> Ends:
    """Both ends of an axis for these values, with room beyond them where all are positive."""
    least, most = min(values), max(values)
    return (least * 0.9, most * 1.15) if least > 0 else (least, most)


def axis_between(channel: Any, ends: Ends) -> Any:
    """The channel with a logarithmic axis between two positive ends, else a linear one; its ticks are round numbers."""
    low, high = ends
    # A logarithmic axis would rule a line for every digit of every power of ten.
    values = log_ticks(low, high) if low > 0 else []
    ticks: dict[str, Any] = {"values": values} if values else {"tickCount": 6}
    # A "nice" logarithmic domain ends at powers of ten and leaves most of the area empty.
    scale = alt.Scale(type="log", domain=[low, high], nice=False) if low > 0 else alt.Scale(type="linear", zero=False)
    return channel.scale(scale).axis(labelOverlap=True, grid=True, **ticks)


def share(value: float, ends: Ends) -> float:
    """How far along such an axis a value stands, 0 to 1."""
    low, high, at = (math.log(each) if ends[0] > 0 else each for each in (*ends, value))
    return (at - low) / max(high - low, 1e-9)


def legend(names: Sequence[str], *, lines: bool = True) -> alt.Legend:
    """A legend above the chart whose samples are lines or points, in as many columns as such names leave room for."""
    longest = max((len(name) for name in names), default=0)
    columns = max(1, min(6, 75 // (longest + 7)))
    return alt.Legend(
        title=None,
        orient="top",
        columns=columns,
        symbolType="stroke" if lines else "circle",
        symbolSize=400 if lines else 70,
        symbolStrokeWidth=2.5,
        symbolOpacity=1,
    )


def filled_where(test: str, colour: alt.Color) -> alt.FillValue:
    """A fill of this colour for the rows that pass an expression, none for the others.

    It is a channel: `alt.condition` makes a dictionary, which Altair checks against the schema of Vega-Lite.
    """
    return alt.FillValue("transparent", condition={"test": test, **colour.to_dict(validate=False)})


def outlined(chart: alt.Chart, **mark: Any) -> list[alt.Chart]:
    """Text that stays readable across lines: behind it the same text, thick, in the background colour."""
    return [chart.mark_text(style="halo", **mark), chart.mark_text(**mark)]


def candidate_tooltip(unit: Unit) -> list[Any]:
    """What a reader sees of a row of `candidates.row_of`."""
    number = ",.3~g"
    return [
        alt.Tooltip("configuration:N", title="Configuration"),
        alt.Tooltip("value:Q", title=unit.name, format=number),
        alt.Tooltip("low:Q", title="Low (90 %)", format=number),
        alt.Tooltip("high:Q", title="High (90 %)", format=number),
        alt.Tooltip("basis:N", title="Basis"),
        alt.Tooltip("excluded:N", title="Excluded"),
    ]


def stacked(rows: Sequence[Row], parts: Sequence[str], axis: str) -> dict[str, Any]:
    """Length, colour and order for rows of `part`, `order` and `value`, with parts that none of the rows has left out.

    A part has the same colour in every chart, whichever other parts are present.
    """
    found = {row["part"] for row in rows if row["value"] > 0}
    present = [(part, PALETTE[place % len(PALETTE)]) for place, part in enumerate(parts) if part in found]
    names, colours = [part for part, _ in present], [colour for _, colour in present]
    return {
        "x": alt.X("value:Q").stack("zero").title(axis).axis(tickCount=6),
        "color": alt.Color("part:N")
        .scale(domain=names, range=colours)
        .legend(title=None, orient="top", columns=min(len(names), 3)),
        "order": alt.Order("order:Q"),
    }


def finish(chart: alt.TopLevelMixin | Spec, title: str, subtitle: str, datasets: Mapping[str, Sequence[Row]]) -> Spec:
    """The chart, or the result of its `to_dict`, as a specification with its data."""
    spec: Spec = dict(chart) if isinstance(chart, dict) else chart.to_dict(validate=False)
    spec["title"] = {"text": title, "subtitle": subtitle, "anchor": "start"}
    spec["description"] = f"{title}. {subtitle}".strip()
    spec["datasets"] = {name: list(rows) for name, rows in datasets.items()}
    spec["config"] = {
        "view": {"continuousWidth": WIDTH, "continuousHeight": HEIGHT, "stroke": None},
        # A flushed label stands beside its tick: at both ends of the axis, 32 would be read as 40.
        "axis": {"labelLimit": 260, "labelFlush": False},
        "style": {"halo": {"fill": "white", "stroke": "white", "strokeWidth": 4, "strokeJoin": "round"}},
    }
    return spec


def message(title: str, sentence: str) -> Spec:
    """A specification with a sentence in place of a chart without data."""
    chart = (
        alt.Chart(alt.NamedData("message"), width=WIDTH, height=120)
        .mark_text(fontSize=15, lineBreak="\n", color=FAINT)
        .encode(text="sentence:N")
    )
    spec = finish(chart, title, "", {"message": [{"sentence": sentence}]})
    spec["usermeta"] = {"empty": True, "message": sentence}
    return spec
