"""The trade-off curve: time or cost against global batch, a line per cluster size, with what decides the choice."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import altair as alt

from tula_service.dashboard.charts import labels
from tula_service.dashboard.charts.candidates import (
    Quantity,
    estimate_of,
    landmarks,
    line_styles,
    points,
    row_of,
    unit_of,
)
from tula_service.dashboard.charts.drawing import (
    Ends,
    axis_between,
    candidate_tooltip,
    filled_where,
    finish,
    legend,
    message,
    outlined,
    reach,
    share,
)
from tula_service.dashboard.charts.labels import FRAME, Box, box, least_faulty
from tula_service.dashboard.charts.style import FAINT, HEIGHT, WIDTH, Row, Spec, Unit
from tula_wire import Job, Recommendation

_CROSS = "M-1,-1L1,1M1,-1L-1,1"
_RULE_PLACES = (("left", 5, 2), ("right", -5, 2), ("left", 5, 18), ("right", -5, 18))
"""Where a label may stand beside its upright rule: alignment, dx and y, the best place first."""


def tradeoff(job: Job, recommendation: Recommendation, quantity: Quantity = "time") -> Spec:
    """Predicted total time or cost (90 % interval as a band) against global batch size, both axes logarithmic."""
    title = f"{job.name}: {quantity} against global batch size"
    drawn = points(recommendation.candidates, quantity)
    if not drawn:
        return message(title, _nothing(recommendation, quantity))
    unit = unit_of(drawn, quantity)
    rows = [row_of(candidate, quantity, unit) for candidate in drawn]
    names, colours, dashes = line_styles(recommendation.candidates)
    x = alt.X("batch:Q").scale(type="log", base=2, nice=False).title("Global batch size (examples a step)")
    x = x.axis(values=sorted({row["batch"] for row in rows}), format="d", labelOverlap=True)
    y = axis_between(alt.Y("value:Q").title(f"Total {quantity} ({unit.name})"), _ends(rows))
    colour = alt.Color("cluster:N").scale(domain=names, range=colours).legend(legend(names))
    dash = alt.StrokeDash("cluster:N").scale(domain=names, range=dashes).legend(legend(names))
    allowed = alt.Chart(alt.NamedData("candidates")).transform_filter("datum.excluded === ''")
    refused = alt.Chart(alt.NamedData("candidates")).transform_filter("datum.excluded !== ''")
    tooltip = candidate_tooltip(unit)
    ruled, taken = _rule_rows(recommendation, rows)
    marked = _landmark_rows(recommendation, quantity, unit, rows, taken)
    layers = [
        *_limits(job, quantity, rows, unit),
        allowed.mark_area(opacity=0.14, tooltip=None)
        .encode(x=x, y=y, y2="high:Q", color=colour)
        .transform_calculate(value="datum.low"),
        refused.mark_point(shape=_CROSS, size=30, strokeWidth=1.6, color=FAINT, filled=False).encode(
            x=x, y=y, tooltip=tooltip
        ),
        allowed.mark_line(strokeWidth=2).encode(x=x, y=y, color=colour, strokeDash=dash),
        allowed.mark_point(size=50, strokeWidth=1.8, filled=False).encode(
            x=x,
            y=y,
            color=colour,
            fill=filled_where("datum.profiled", colour),
            tooltip=tooltip,
        ),
        *_rule_layers(ruled),
        *labels.layers(alt.X("batch:Q"), alt.Y("value:Q"), marked),
    ]
    chart = alt.layer(*layers).properties(width=WIDTH, height=HEIGHT)
    datasets = {"candidates": rows, "landmarks": marked, "rules": ruled}
    return finish(chart, title, _subtitle(recommendation, rows), datasets)


def _ends(rows: list[Row]) -> Ends:
    """Both ends of the y axis."""
    return reach([row[end] for row in rows for end in ("low", "high")])


def _limits(job: Job, quantity: Quantity, rows: list[Row], unit: Unit) -> list[Any]:
    """Shaded regions that the job's limits forbid; drawn behind everything."""
    limits = job.spec.limits
    shades: list[Any] = []
    bottom, top = _ends(rows)
    limit = limits.deadline_s if quantity == "time" else limits.budget_usd
    shade = {"opacity": 0.13, "color": FAINT, "tooltip": None}
    if limit is not None and limit / unit.size < top:
        what = "beyond the deadline" if quantity == "time" else "over budget"
        data = alt.Data(values=[{"value": max(limit / unit.size, bottom), "top": top, "label": what}])
        shades.append(alt.Chart(data).mark_rect(**shade).encode(y="value:Q", y2="top:Q"))
        text = alt.Chart(data).encode(y="value:Q", text="label:N")
        shades += outlined(text, align="left", baseline="bottom", dx=4, dy=-4, x=0, fontStyle="italic")
    most = max(row["batch"] for row in rows)
    ceiling = limits.max_global_batch_size
    if ceiling is not None and ceiling < most:
        label = f"batch over {ceiling:,}"
        data = alt.Data(
            values=[{"batch": max(ceiling, min(row["batch"] for row in rows)), "most": most, "label": label}]
        )
        shades.append(alt.Chart(data).mark_rect(**shade).encode(x="batch:Q", x2="most:Q"))
        text = alt.Chart(data).encode(x="most:Q", text="label:N")
        shades += outlined(text, align="right", baseline="bottom", dx=-4, y=HEIGHT - 4, fontStyle="italic")
    return shades


def _rule_layers(ruled: list[Row]) -> list[Any]:
    """Vertical rules: the knee, and the batch beyond which, by gradient noise, more examples hardly help a step."""
    base = alt.Chart(alt.NamedData("rules"))
    layers: list[Any] = []
    for place in sorted({row["place"] for row in ruled}):
        align, dx, y = _RULE_PLACES[place]
        rule = base.transform_filter(f"datum.place === {place}").encode(x="batch:Q")
        layers.append(rule.mark_rule(strokeDash=[4, 4], strokeWidth=1.5, color=FAINT))
        layers += outlined(rule.encode(text="label:N"), align=align, baseline="top", dx=dx, y=y, fontStyle="italic")
    return layers


def _landmark_rows(
    recommendation: Recommendation, quantity: Quantity, unit: Unit, rows: list[Row], taken: list[Box]
) -> list[Row]:
    merged: dict[tuple[int, float, str], list[str]] = {}
    # Where a configuration is offered at both prices, the line shows the lower: a landmark beside it says which it is.
    offers = [candidate.configuration for candidate in recommendation.candidates]
    twice = {each for each, count in Counter(offers).items() if count > 1} if quantity == "cost" else set()
    for name, candidate in landmarks(recommendation):
        if name == "knee":
            continue  # ruled over the whole height
        estimate = estimate_of(candidate, quantity)
        if estimate is not None:
            price = (" (spot)" if candidate.spot else " (on demand)") if candidate.configuration in twice else ""
            place = (candidate.global_batch_size, estimate.value / unit.size, price)
            merged.setdefault(place, []).append(name)
    marked: list[Row] = []
    for (batch, value, price), names in merged.items():
        marked.append({"batch": batch, "value": value, "label": labels.of_names(names) + price})
    ends = _ends(rows)
    spots = [(_across(row["batch"], rows), HEIGHT * (1 - share(row["value"], ends))) for row in marked]
    labels.place(marked, spots, taken)
    return marked


def _across(batch: float, rows: list[Row]) -> float:
    """How far to the right of the frame's left end `batch` stands, points."""
    left, right = (math.log2(end(row["batch"] for row in rows)) for end in (min, max))
    return FRAME * (math.log2(batch) - left) / max(right - left, 1e-9)


def _rule_rows(recommendation: Recommendation, rows: list[Row]) -> tuple[list[Row], list[Box]]:
    """What is ruled, each with the place of its label, and where those labels stand."""
    at: dict[float, list[str]] = {}
    if recommendation.knee.found and recommendation.knee.global_batch_size:
        at.setdefault(recommendation.knee.global_batch_size, []).append("knee")
    sensible = recommendation.max_sensible_batch_size
    if sensible is not None and _in_frame(sensible, rows):
        at.setdefault(sensible, []).append("largest sensible batch")
    ruled: list[Row] = []
    taken: list[Box] = []
    lines = [_across(batch, rows) for batch in at]
    for (batch, names), x in zip(at.items(), lines, strict=True):
        label = ", ".join(names)
        boxes = [box(label, align, x + dx, y + 7) for align, dx, y in _RULE_PLACES]
        others = [(line - 1, 0.0, line + 1, float(HEIGHT)) for line in lines if line != x]
        place = least_faulty(boxes, taken, others)
        taken.append(boxes[place])
        ruled.append({"batch": batch, "label": label, "place": place})
    return ruled, taken


def _in_frame(batch: float, rows: list[Row]) -> bool:
    return bool(min(row["batch"] for row in rows) <= batch <= max(row["batch"] for row in rows))


def _subtitle(recommendation: Recommendation, rows: list[Row]) -> str:
    words = {
        "prior": "from what is known of the hardware",
        "transfer": "from similar jobs",
        "probed": "from profiling on one node and a probe of the network",
        "profiled": "from profiling",
    }
    said = (
        f"Predicted {words[recommendation.basis]}; bands hold 90 %, filled points were profiled, crosses are excluded"
    )
    sensible = recommendation.max_sensible_batch_size
    if sensible is None or _in_frame(sensible, rows):
        return said
    return f"{said}; largest sensible batch {sensible:,}"  # outside: a rule would stretch the frame


def _nothing(recommendation: Recommendation, quantity: Quantity) -> str:
    if quantity == "cost" and recommendation.candidates:
        return (
            "This job has no prices (cluster.price), or a price per GB and no memory measured yet:\n"
            "without a cost, time against cost draws node-hours."
        )
    return "No candidate yet: the first profiling runs bring them."
