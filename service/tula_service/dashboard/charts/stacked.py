"""Parts that add up to a whole, as stacked bars: how the charts that draw them encode a part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tula_service.dashboard.charts.grammar import alt
from tula_service.dashboard.charts.spec import PALETTE, Row


def stacked(rows: Sequence[Row], parts: Sequence[str], axis: str) -> dict[str, Any]:
    """Length, colour and order for rows of `part`, `order` and `value`, with parts that none of the rows has left out.

    A part keeps its colour whichever others are present, so that two charts beside each other read alike.
    """
    found = {row["part"] for row in rows if row["value"] > 0}
    shown = [(part, PALETTE[place % len(PALETTE)]) for place, part in enumerate(parts) if part in found]
    names, colours = [part for part, _ in shown], [colour for _, colour in shown]
    return {
        "x": alt.X("value:Q").stack("zero").title(axis).axis(tickCount=6),
        "color": alt.Color("part:N")
        .scale(domain=names, range=colours)
        .legend(title=None, orient="top", columns=min(len(names), 3)),
        "order": alt.Order("order:Q"),
    }
