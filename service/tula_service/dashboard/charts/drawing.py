"""Parts of Vega-Lite that several charts draw: layers, axes, legends, stacked bars, and the finished specification.

A chart is a plain dictionary in the words of https://vega.github.io/vega-lite/docs/; tests hold it to that schema.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tula_service.dashboard.charts.style import FAINT, HEIGHT, PALETTE, WIDTH, Row, Spec, Unit, log_ticks

CROSS: Final = "M-1,-1L1,1M1,-1L-1,1"
"""The shape of an excluded candidate."""
_MANY: Final = 500
"""Of more rows a page draws pixels: a browser takes longer for as many elements of an SVG."""
_TYPES: Final = {"Q": "quantitative", "N": "nominal", "O": "ordinal"}

Ends = tuple[float, float]
"""Least and greatest value of an axis."""


def reach(values: Sequence[float]) -> Ends:
    """Both ends of an axis for these values, with room beyond them where all are positive."""
    least, most = min(values), max(values)
    return (least * 0.9, most * 1.15) if least > 0 else (least, most)


def field(name: str, **more: Any) -> Spec:
    """What a channel encodes: "value:Q" is quantitative, N nominal, O ordinal."""
    name, _, kind = name.partition(":")
    return {"field": name, "type": _TYPES[kind or "N"], **more}


def layer(data: str, mark: str, encoding: Mapping[str, Any], *, where: str = "", **look: Any) -> Spec:
    """A mark for each row of a data set, or of those that pass the expression `where`."""
    transform = {"transform": [{"filter": where}]} if where else {}
    return {"data": {"name": data}, **transform, "mark": {"type": mark, **look}, "encoding": dict(encoding)}


def layered(*layers: Spec, height: Any = HEIGHT, width: int = WIDTH) -> Spec:
    """Layers over each other, the first undermost."""
    return {"layer": list(layers), "width": width, "height": height}


def axis_between(ends: Ends) -> Spec:
    """Scale and axis: logarithmic between two positive ends, else linear; the ticks are round numbers."""
    low, high = ends
    # A logarithmic axis would rule a line for every digit of every power of ten.
    values = log_ticks(low, high) if low > 0 else []
    ticks: dict[str, Any] = {"values": values} if values else {"tickCount": 6}
    # A "nice" logarithmic domain ends at powers of ten and leaves most of the area empty.
    scale = {"type": "log", "domain": [low, high], "nice": False} if low > 0 else {"type": "linear", "zero": False}
    return {"scale": scale, "axis": {"labelOverlap": True, "grid": True, **ticks}}


def legend(names: Sequence[str], *, lines: bool = True) -> Spec:
    """A legend above the chart whose samples are lines or points, in as many columns as such names leave room for."""
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
    """A fill of this colour for the rows that pass an expression, none for the others."""
    return {"condition": {"test": test, **colour}, "value": "transparent"}


def outlined(data: str, encoding: Mapping[str, Any], *, where: str = "", **look: Any) -> list[Spec]:
    """Text that stays readable across lines: behind it the same text, thick, in the background colour."""
    return [layer(data, "text", encoding, where=where, **halo, **look) for halo in ({"style": "halo"}, {})]


def candidate_tooltip(unit: Unit) -> list[Spec]:
    """What a reader sees of a row of `candidates.row_of`."""
    number = ",.3~g"
    return [
        field("configuration", title="Configuration"),
        field("value:Q", title=unit.name, format=number),
        field("low:Q", title="Low (90 %)", format=number),
        field("high:Q", title="High (90 %)", format=number),
        field("basis", title="Basis"),
        field("excluded", title="Excluded"),
    ]


def stacked(rows: Sequence[Row], parts: Sequence[str], axis: str) -> Spec:
    """Length, colour and order for rows of `part`, `order` and `value`, with parts that none of the rows has left out.

    A part has the same colour in every chart, whichever other parts are present.
    """
    found = {row["part"] for row in rows if row["value"] > 0}
    present = [(part, PALETTE[place % len(PALETTE)]) for place, part in enumerate(parts) if part in found]
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
    """The chart with its title and data; the dictionary that it gets stays as it is."""
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
            # A flushed label stands beside its tick: at both ends of the axis, 32 would be read as 40.
            "axis": {"labelLimit": 260, "labelFlush": False},
            "style": {"halo": {"fill": "white", "stroke": "white", "strokeWidth": 4, "strokeJoin": "round"}},
        },
    }


def message(title: str, sentence: str) -> Spec:
    """A specification with a sentence in place of a chart without data."""
    text = layer("message", "text", {"text": field("sentence")}, fontSize=15, lineBreak="\n", color=FAINT)
    spec = finish({**text, "width": WIDTH, "height": 120}, title, "", {"message": [{"sentence": sentence}]})
    return spec | {"usermeta": {"empty": True, "message": sentence}}
