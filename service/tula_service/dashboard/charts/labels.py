"""Names beside points: each stands inside the frame and, where it can, over no other name and no other point."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from tula_service.dashboard.charts.drawing import outlined
from tula_service.dashboard.charts.style import FAINT, HEIGHT, Row

FRAME = 440.0
"""Width for which labels are placed, points: a chart of the page is about as wide."""
_PLACES = (("left", 12, -11), ("right", -12, -11), ("left", 12, 15), ("right", -12, 15))
"""Where a label may stand beside its point: alignment, dx and dy, the best place first."""
_LINE = 14
"""Height of a line of a label, points."""
Box = tuple[float, float, float, float]
"""Left, top, right and bottom of a label in the frame, points."""


def of_names(names: Sequence[str]) -> str:
    """Names of one point as its label, two in a line: more would not fit beside it on a phone."""
    return ",\n".join(", ".join(names[first : first + 2]) for first in range(0, len(names), 2))


def place(marked: list[Row], spots: Sequence[tuple[float, float]], taken: Sequence[Box] = ()) -> None:
    """Set `place` and `lines` of each row of `marked`, whose point stands at its spot of the frame.

    Its `label` then covers none of the boxes `taken`, no other label and no other point, where that can be.
    """
    boxes_taken = list(taken)
    for row, (x, y) in zip(marked, spots, strict=True):
        row["lines"] = 1 + row["label"].count("\n")
        boxes = [box(row["label"], align, x + dx, y + _first_line(dy, row["lines"])) for align, dx, dy in _PLACES]
        others = [(a - 8, b - 8, a + 8, b + 8) for a, b in spots if (a, b) != (x, y)]
        row["place"] = least_faulty(boxes, [*boxes_taken, *others])
        boxes_taken.append(boxes[row["place"]])


def layers(x: alt.X, y: alt.Y, marked: Sequence[Row]) -> list[Any]:
    """A ring around each row of the data set `landmarks`, which is `marked`, and its label."""
    base = alt.Chart(alt.NamedData("landmarks")).encode(x=x, y=y)
    drawn: list[Any] = [base.mark_point(size=220, strokeWidth=2.2, filled=False, color=FAINT, tooltip=None)]
    for at, lines in sorted({(row["place"], row["lines"]) for row in marked}):
        align, dx, dy = _PLACES[at]
        text = base.transform_filter(f"datum.place === {at} && datum.lines === {lines}").encode(text="label:N")
        look = {"fontWeight": "bold", "fontSize": 12, "lineHeight": _LINE, "lineBreak": "\n"}
        drawn += outlined(text, align=align, dx=dx, dy=_first_line(dy, lines), **look)
    return drawn


def _first_line(dy: float, lines: int) -> float:
    """Where the first of `lines` lines stands whose last, above the point, or first, below it, stands at `dy`."""
    return dy - _LINE * (lines - 1) if dy < 0 else dy


def around(spot: tuple[float, float]) -> Box:
    """What a point at this spot takes of the frame."""
    return (spot[0] - 4, spot[1] - 4, spot[0] + 4, spot[1] + 4)


def box(label: str, align: str, x: float, y: float) -> Box:
    """Of a label that begins or ends at `x`, the middle of its first line at height `y`."""
    lines = label.split("\n")
    wide, bottom = 6.6 * max(map(len, lines)), y + _LINE * (len(lines) - 0.5)
    return (x - wide if align == "right" else x, y - _LINE / 2, x if align == "right" else x + wide, bottom)


def least_faulty(boxes: Sequence[Box], taken: Sequence[Box], lines: Sequence[Box] = ()) -> int:
    """Which of `boxes` lies best: inside the frame, over none of those `taken` and, if it can be, over no line."""
    faults = [
        (
            # A label beyond the frame is worst: the page narrows the whole drawing until it fits.
            2 * ((each[0] < 0) + (each[2] > FRAME) + (each[3] > HEIGHT))
            + sum(_overlap(each, other) for other in taken),
            sum(_overlap(each, line) for line in lines),
        )
        for each in boxes
    ]
    return faults.index(min(faults))


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
