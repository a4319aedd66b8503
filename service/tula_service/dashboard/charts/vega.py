"""Parts of Vega-Lite specifications that several charts share, such as colours, units, layers, axes and legends.

A chart is a plain dictionary, as described at https://vega.github.io/vega-lite/docs/; tests validate it with the
Vega-Lite schema.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tula_wire import Estimate

Spec = dict[str, Any]
Row = dict[str, Any]

WIDTH: Final = 640
HEIGHT: Final = 340
FAINT: Final = "#7f8894"
PALETTE: Final = ("#0f83ad", "#d1670c", "#25935a", "#c4559c", "#8a7a10", "#7a72d8", "#cf4f4f", "#5b8a8f")
"""Colours with a luminance of 0.13 to 0.30, which have a contrast of 3:1 on light and dark pages (WCAG 2.1, 1.4.11)."""

ALARM: Final = PALETTE[6]
DASHES: Final = ((1, 0), (6, 3), (2, 2), (8, 3, 2, 3), (12, 4), (4, 2, 1, 2), (1, 3), (10, 2, 2, 2))
"""Dash patterns of lines, for readers who cannot distinguish the colours."""

_MANY: Final = 500
"""Maximum number of rows that a page draws as SVG elements; more rows are drawn on a canvas, which is faster."""
POINT: Final = {"size": 50, "strokeWidth": 1.8, "filled": False, "opacity": 1}
"""The appearance of a candidate's point; an encoding decides whether the point is filled."""
_TYPES: Final = {"Q": "quantitative", "N": "nominal", "O": "ordinal"}

Ends = tuple[float, float]
"""The smallest and the largest value of an axis."""


@dataclass(frozen=True)
class Unit:
    """A unit for display; a quantity in base units is divided by `size` to convert it to this unit."""

    size: float
    name: str

    def interval(self, estimate: Estimate) -> Row:
        """Return the `value`, `low` and `high` of an estimate, converted to this unit."""
        return {name: getattr(estimate, name) / self.size for name in ("value", "low", "high")}


_TIME: Final = (
    Unit(86_400, "days"), Unit(3_600, "hours"), Unit(60, "minutes"), Unit(1, "s"), Unit(1e-3, "ms"), Unit(1e-6, "µs"),
)  # fmt: skip
_BYTES: Final = (Unit(2**30, "GiB"), Unit(2**20, "MiB"), Unit(2**10, "KiB"), Unit(1, "bytes"))


def time_unit(seconds: Iterable[float]) -> Unit:
    """Return the largest unit of time in which the longest of these durations is at least 2."""
    return _fitting(_TIME, seconds)


def bytes_unit(sizes: Iterable[float]) -> Unit:
    """Return the largest binary unit in which the largest of these sizes is at least 2."""
    return _fitting(_BYTES, sizes)


def log_ticks(low: float, high: float) -> list[float]:
    """Return three to nine round numbers between two positive ends, or none if the range is too narrow."""
    for digits in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [float(f"{digit * 10.0**power:.6g}") for power in powers for digit in digits]
        ticks = [value for value in ticks if low <= value <= high]
        if len(ticks) >= 4:
            return ticks
    return ticks if len(ticks) == 3 else []


def _fitting(units: Sequence[Unit], values: Iterable[float]) -> Unit:
    greatest = max((value for value in values), default=0.0)
    return next(
        (unit for unit in units if greatest >= 2 * unit.size), units[-1] if greatest > 0 else Unit(1, units[3].name)
    )


def reach(values: Sequence[float]) -> Ends:
    """Return the ends of an axis for these values, with a margin if all values are positive."""
    least, most = min(values), max(values)
    return (least * 0.9, most * 1.15) if least > 0 else (least, most)


def field(name: str, **more: Any) -> Spec:
    """Return the encoding of a field, such as "value:Q"; Q means quantitative, N nominal and O ordinal."""
    name, _, kind = name.partition(":")
    return {"field": name, "type": _TYPES[kind or "N"], **more}


def layer(data: str | Sequence[Row], mark: str, encoding: Mapping[str, Any], *, where: str = "", **look: Any) -> Spec:
    """Return a layer with a mark for each row for which the expression `where` is true (default: for all rows).

    `data` contains the rows, or is the name of a data set.
    """
    transform = {"transform": [{"filter": where}]} if where else {}
    rows = {"name": data} if isinstance(data, str) else {"values": data}
    return {"data": rows, **transform, "mark": {"type": mark, **look}, "encoding": dict(encoding)}


def layered(*layers: Spec, height: Any = HEIGHT, width: int = WIDTH) -> Spec:
    """Return a chart with these layers, the first of which is at the bottom."""
    return {"layer": list(layers), "width": width, "height": height}


def axis_between(ends: Ends) -> Spec:
    """Return a scale and an axis with round ticks, which are logarithmic if both ends are positive, else linear."""
    low, high = ends
    # By default, a logarithmic axis has a grid line for every digit of every power of ten.
    values = log_ticks(low, high) if low > 0 else []
    ticks: dict[str, Any] = {"values": values} if values else {"tickCount": 6}
    # A "nice" logarithmic domain would end at powers of ten and leave most of the area empty.
    scale = {"type": "log", "domain": [low, high], "nice": False} if low > 0 else {"type": "linear", "zero": False}
    return {"scale": scale, "axis": {"labelOverlap": True, "grid": True, **ticks}}


def batch_axis(title: str, batches: Sequence[int]) -> Spec:
    """Return the encoding of the field `batch` on a logarithmic axis, with a tick at each of `batches`."""
    ticks = {"values": batches, "format": "d", "labelOverlap": True}
    return field("batch:Q", title=title, scale={"type": "log", "base": 2, "nice": False}, axis=ticks)


def predicted(data: str, base: Spec, look: Spec, *, where: str = "") -> list[Spec]:
    """Return layers with `value` as a line, `low` to `high` as a band, and a point for each row.

    Points of rows that are `profiled` are filled.
    """
    band = {"x": base["x"], "y": field("low:Q"), "y2": {"field": "high"}, "color": look["color"]}
    line = {"x": base["x"], "y": base["y"], **look}
    fill = filled_where("datum.profiled", look["color"])
    return [
        layer(data, "area", band, where=where, opacity=0.14, tooltip=None),
        layer(data, "line", line, where=where, strokeWidth=2),
        layer(data, "point", {**base, "color": look["color"], "fill": fill}, where=where, **POINT),
    ]


def legend(names: Sequence[str], *, lines: bool = True) -> Spec:
    """Return a legend of lines or points above the chart, with as many columns as fit for these names."""
    longest = max((len(name) for name in names), default=0)
    return {
        "title": None,
        "orient": "top",
        "columns": max(1, min(6, 75 // (longest + 7))),
        "symbolType": "stroke" if lines else "circle",
        "symbolSize": 400 if lines else 70,
        "symbolStrokeWidth": 2.5,
        "symbolOpacity": 1,
    }


def filled_where(test: str, colour: Spec) -> Spec:
    """Return an encoding that fills marks with this colour where the expression `test` is true, and nowhere else."""
    return {"condition": {"test": test, **colour}, "value": "transparent"}


def outlined(data: str | Sequence[Row], encoding: Mapping[str, Any], *, where: str = "", **look: Any) -> list[Spec]:
    """Return layers with text on an outline in the background colour, so that the text remains readable over lines."""
    return [layer(data, "text", encoding, where=where, **halo, **look) for halo in ({"style": "halo"}, {})]


def ruled(
    data: str | Sequence[Row], at: Mapping[str, Any], *, where: str = "", color: str = FAINT, **text: Any
) -> list[Spec]:
    """Return layers with a dashed line across the chart and a `label` for each row."""
    label = {**at, "text": field("label")}
    return [
        layer(data, "rule", at, where=where, strokeDash=[5, 4], strokeWidth=1.5, color=color),
        *outlined(data, label, where=where, fontStyle="italic", **text),
    ]


def stacked(rows: Sequence[Row], parts: Sequence[str], axis: str) -> Spec:
    """Return encodings for stacked bars, for rows with `part`, `order` and `value`.

    The legend contains only parts that occur. A part has the same colour in every chart.
    """
    drawn = {row["part"] for row in rows if row["value"] > 0}
    present = [(part, PALETTE[place % len(PALETTE)]) for place, part in enumerate(parts) if part in drawn]
    names, colours = [part for part, _ in present], [colour for _, colour in present]
    return {
        "x": field("value:Q", stack="zero", title=axis, axis={"tickCount": 6}),
        "color": field(
            "part",
            scale={"domain": names, "range": colours},
            legend={"title": None, "orient": "top", "columns": min(len(names), 3)},
        ),
        "order": field("order:Q"),
    }


def finish(chart: Spec, title: str, subtitle: str, datasets: Mapping[str, Sequence[Row]]) -> Spec:
    """Return the complete specification of a chart, with its title, data and configuration."""
    many = sum(map(len, datasets.values())) > _MANY
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        **chart,
        "title": {"text": title, "subtitle": subtitle, "anchor": "start"},
        "description": f"{title}. {subtitle}".strip(),
        "datasets": {name: list(rows) for name, rows in datasets.items()},
        "usermeta": {"renderer": "canvas" if many else "svg"},
        "config": {
            "view": {"continuousWidth": WIDTH, "continuousHeight": HEIGHT, "stroke": None},
            # With labelFlush, the labels at both ends of the axis would be next to their ticks and be misread.
            "axis": {"labelLimit": 260, "labelFlush": False},
            "style": {"halo": {"fill": "white", "stroke": "white", "strokeWidth": 4, "strokeJoin": "round"}},
        },
    }


def message(title: str, sentence: str) -> Spec:
    """Return a specification that displays a sentence in place of a chart without data."""
    text = layer("message", "text", {"text": field("sentence")}, fontSize=15, lineBreak="\n", color=FAINT)
    spec = finish({**text, "width": WIDTH, "height": 120}, title, "", {"message": [{"sentence": sentence}]})
    return spec | {"usermeta": {"empty": True, "message": sentence}}
