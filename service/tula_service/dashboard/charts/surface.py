"""The cost surface: what every pair of cluster size and global batch costs, as a heat map with its numbers."""

from __future__ import annotations

import altair as alt

from tula_service.dashboard.charts.candidates import Quantity, line_styles, points, row_of, unit_of
from tula_service.dashboard.charts.drawing import candidate_tooltip, finish, message
from tula_service.dashboard.charts.style import WIDTH, Spec
from tula_wire import Job, Recommendation

_NUMBER = 27
"""Points that a number of four figures takes."""


def cost_surface(job: Job, recommendation: Recommendation) -> Spec:
    """Dollars where prices are known, else time; excluded cells pale, the chosen one framed."""
    priced = any(candidate.cost_usd is not None for candidate in recommendation.candidates)
    quantity: Quantity = "cost" if priced else "time"
    title = f"{job.name}: {quantity} of every configuration"
    drawn = points(recommendation.candidates, quantity)
    if not drawn:
        return message(title, "No candidate yet: the first profiling runs bring them.")
    unit = unit_of(drawn, quantity)
    chosen = recommendation.chosen
    rows = [
        row_of(each, quantity, unit) | {"chosen": chosen is not None and chosen.configuration == each.configuration}
        for each in drawn
    ]
    names, _, _ = line_styles(recommendation.candidates)
    base = alt.Chart(alt.NamedData("candidates")).encode(
        x=alt.X("batch:O").title("Global batch size").axis(labelAngle=0, labelOverlap=True),
        y=alt.Y("cluster:N").sort(list(reversed(names))).title(None),
        tooltip=candidate_tooltip(unit),
    )
    least, most = min(row["value"] for row in rows), max(row["value"] for row in rows)
    logarithmic = least > 0
    # Where viridis, reversed, turns too dark for dark text and dark enough for white (4.5:1).
    turn = least * (most / least) ** 0.57 if logarithmic else least + 0.57 * (most - least)
    scale = {"type": "log" if logarithmic else "linear", "scheme": "viridis", "reverse": True}
    cells = base.mark_rect(cornerRadius=2).encode(
        color=alt.Color("value:Q").scale(**scale).legend(None),
        opacity=alt.condition("datum.excluded !== ''", alt.value(0.25), alt.value(1)),
    )
    frame = base.transform_filter("datum.chosen").mark_rect(filled=False, strokeWidth=3, stroke="#d1670c", tooltip=None)
    # Where cells are narrower than their numbers, those would run into each other: the tooltip has them.
    crowded = f"width < {_NUMBER * len({row['batch'] for row in rows})}"
    opacity = alt.condition(crowded, alt.value(0), alt.value(1))
    numbers = base.mark_text(fontSize=11).encode(text=alt.Text("value:Q").format(",.3~r"), opacity=opacity)
    allowed = numbers.transform_filter("datum.excluded === ''").encode(
        color=alt.condition(f"datum.value < {turn!r}", alt.value("#111"), alt.value("#fff"))
    )
    excluded = numbers.transform_filter("datum.excluded !== ''")
    tall = max(34, min(62, 300 // len(names)))
    chart = alt.layer(cells, frame, allowed, excluded).properties(width=WIDTH, height=alt.Step(tall))
    subtitle = f"Predicted total {quantity} in {unit.name}; the frame is the recommendation, pale cells are excluded"
    return finish(chart, title, subtitle, {"candidates": rows})
