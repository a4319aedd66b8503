"""The trade-off curve: time or cost against global batch, a line per cluster size, with what the choice turns on."""

from __future__ import annotations

import math
from typing import Any

import altair as alt

from tula_service.dashboard.charts.candidates import (
    Quantity,
    cluster_name,
    clusters,
    configuration_name,
    estimate_of,
    landmarks,
    points,
)
from tula_service.dashboard.charts.spec import (
    FAINT,
    HEIGHT,
    PALETTE,
    WIDTH,
    Row,
    Spec,
    Unit,
    finish,
    message,
    time_unit,
)
from tula_wire import Candidate, Job, Recommendation

__all__ = ["tradeoff"]

_DASHES = ([1, 0], [6, 3], [2, 2], [8, 3, 2, 3], [12, 4], [4, 2, 1, 2], [1, 3], [10, 2, 2, 2])
"""Lines differ in dash as well as in colour, for those who cannot tell the colours apart."""


def tradeoff(job: Job, recommendation: Recommendation, quantity: Quantity = "time") -> Spec:
    """Predicted total time or cost (90 % interval as a band) against global batch size, both axes logarithmic."""
    noun = "time" if quantity == "time" else "cost"
    title = f"{job.name}: {noun} against global batch size"
    shown = points(recommendation.candidates, quantity)
    if not shown:
        return message(title, _nothing(recommendation, quantity))
    unit = _unit(shown, quantity)
    rows = [_row(candidate, quantity, unit) for candidate in shown]
    names = clusters(recommendation.candidates)
    positive = all(row["low"] > 0 for row in rows)
    x = alt.X("batch:Q").scale(type="log", base=2, nice=False).title("Global batch size (examples a step)")
    x = x.axis(values=sorted({row["batch"] for row in rows}), format="d", labelOverlap=True)
    y = alt.Y("value:Q").title(f"Total {noun} ({unit.name})")
    y = y.scale(_scale(rows, positive)).axis(labelOverlap=True, grid=True, tickCount=6)
    colour = (
        alt.Color("cluster:N")
        .scale(domain=names, range=[PALETTE[i % len(PALETTE)] for i in range(len(names))])
        .legend(title=None, orient="top", columns=6, symbolOpacity=1, symbolSize=90)
    )
    dash = (
        alt.StrokeDash("cluster:N")
        .scale(domain=names, range=[_DASHES[i % 8] for i in range(len(names))])
        .legend(title=None, orient="top", columns=6, symbolOpacity=1, symbolSize=90)
    )
    allowed = alt.Chart(alt.NamedData("candidates")).transform_filter("datum.excluded === ''")
    refused = alt.Chart(alt.NamedData("candidates")).transform_filter("datum.excluded !== ''")
    tooltip = _tooltip(unit)
    layers = [
        *_limits(job, quantity, rows, unit),
        allowed.mark_area(opacity=0.14, tooltip=None)
        .encode(x=x, y=y, y2="high:Q", color=colour)
        .transform_calculate(value="datum.low"),
        refused.mark_point(shape="cross", size=45, color=FAINT, opacity=0.75).encode(x=x, y=y, tooltip=tooltip),
        allowed.mark_line(strokeWidth=2).encode(x=x, y=y, color=colour, strokeDash=dash),
        allowed.mark_point(size=50, strokeWidth=1.8, filled=False).encode(
            x=x,
            y=y,
            color=colour,
            fill=alt.condition("datum.profiled", colour, alt.value("transparent")),
            tooltip=tooltip,
        ),
        *_landmark_layers(recommendation),
    ]
    chart = alt.layer(*layers).properties(width=WIDTH, height=HEIGHT)
    datasets = {
        "candidates": rows,
        "landmarks": _landmark_rows(recommendation, quantity, unit),
        "knee": _knee_rows(recommendation),
    }
    return finish(chart, title, _subtitle(recommendation), datasets)


def _scale(rows: list[Row], positive: bool) -> alt.Scale:
    if not positive:
        return alt.Scale(type="linear", zero=False)
    # A "nice" logarithmic domain ends at powers of ten and leaves most of the area empty.
    least, most = min(row["low"] for row in rows), max(row["high"] for row in rows)
    return alt.Scale(type="log", domain=[least * 0.9, most * 1.15], nice=False)


def _row(candidate: Candidate, quantity: Quantity, unit: Unit) -> Row:
    estimate = estimate_of(candidate, quantity)
    assert estimate is not None
    configuration = candidate.configuration
    basis = "profiled" if candidate.profiled else "extrapolated" if candidate.extrapolated else "predicted"
    return {
        "batch": candidate.global_batch_size,
        "cluster": cluster_name(configuration),
        "configuration": configuration_name(configuration),
        "value": estimate.value / unit.size,
        "low": estimate.low / unit.size,
        "high": estimate.high / unit.size,
        "profiled": candidate.profiled,
        "basis": basis,
        "excluded": candidate.excluded_by or "",
    }


def _tooltip(unit: Unit) -> list[Any]:
    number = ",.3~g"
    return [
        alt.Tooltip("configuration:N", title="Configuration"),
        alt.Tooltip("value:Q", title=unit.name, format=number),
        alt.Tooltip("low:Q", title="Low (90 %)", format=number),
        alt.Tooltip("high:Q", title="High (90 %)", format=number),
        alt.Tooltip("basis:N", title="Basis"),
        alt.Tooltip("excluded:N", title="Excluded"),
    ]


def _limits(job: Job, quantity: Quantity, rows: list[Row], unit: Unit) -> list[Any]:
    """Shaded regions that the job's limits forbid; drawn behind everything."""
    limits = job.spec.limits
    shades: list[Any] = []
    top = max(row["high"] for row in rows)
    limit = limits.deadline_s if quantity == "time" else limits.budget_usd
    shade = {"opacity": 0.13, "color": FAINT, "tooltip": None}
    if limit is not None and limit / unit.size < top:
        what = "beyond the deadline" if quantity == "time" else "over budget"
        data = alt.Data(values=[{"value": limit / unit.size, "top": top, "label": what}])
        shades.append(alt.Chart(data).mark_rect(**shade).encode(y="value:Q", y2="top:Q"))
        text = alt.Chart(data).mark_text(align="left", baseline="bottom", dx=4, dy=-4, x=0, fontStyle="italic")
        shades.append(text.encode(y="value:Q", text="label:N"))
    most = max(row["batch"] for row in rows)
    ceiling = limits.max_global_batch_size
    if ceiling is not None and ceiling < most:
        data = alt.Data(values=[{"batch": ceiling, "most": most}])
        shades.append(alt.Chart(data).mark_rect(**shade).encode(x="batch:Q", x2="most:Q"))
    return shades


def _landmark_layers(recommendation: Recommendation) -> list[Any]:
    base = alt.Chart(alt.NamedData("landmarks"))
    knee = alt.Chart(alt.NamedData("knee"))
    layers = [
        base.mark_point(size=220, strokeWidth=2.2, filled=False, color=FAINT).encode(x="batch:Q", y="value:Q"),
        *(
            base.transform_filter(f"datum.side === '{side}'")
            .mark_text(align=side, dx=shift, dy=-11, fontWeight="bold", fontSize=12)
            .encode(x="batch:Q", y="value:Q", text="label:N")
            for side, shift in (("left", 11), ("right", -11))
        ),
    ]
    if recommendation.knee.found and recommendation.knee.global_batch_size:
        layers.append(knee.mark_rule(strokeDash=[4, 4], strokeWidth=1.5, color=FAINT).encode(x="batch:Q"))
        layers.append(
            knee.mark_text(align="left", baseline="top", dx=5, y=2, fontStyle="italic").encode(
                x="batch:Q", text="label:N"
            )
        )
    return layers


def _landmark_rows(recommendation: Recommendation, quantity: Quantity, unit: Unit) -> list[Row]:
    merged: dict[tuple[int, float], Row] = {}
    for name, candidate in landmarks(recommendation):
        estimate = estimate_of(candidate, quantity)
        if estimate is None:
            continue
        place = (candidate.global_batch_size, estimate.value / unit.size)
        if place in merged:
            merged[place]["label"] += f", {name}"
        else:
            merged[place] = {"batch": place[0], "value": place[1], "label": name}
    batches = [candidate.global_batch_size for candidate in recommendation.candidates]
    middle = math.sqrt(min(batches) * max(batches)) if batches else 0.0
    for row in merged.values():
        # Text beyond the right edge would be cut off, or would shrink the plot.
        row["side"] = "left" if row["batch"] <= middle else "right"
    return list(merged.values())


def _knee_rows(recommendation: Recommendation) -> list[Row]:
    if not recommendation.knee.found or not recommendation.knee.global_batch_size:
        return []
    return [{"batch": recommendation.knee.global_batch_size, "label": "knee"}]


def _unit(shown: list[Candidate], quantity: Quantity) -> Unit:
    if quantity == "cost":
        return Unit(1, "USD")
    return time_unit(candidate.total_time_s.value for candidate in shown)


def _subtitle(recommendation: Recommendation) -> str:
    words = {
        "prior": "from what is known of the hardware",
        "transfer": "from similar jobs",
        "profiled": "from profiling",
    }
    return (
        f"Predicted {words[recommendation.basis]}; bands hold 90 %, filled points were profiled, crosses are excluded"
    )


def _nothing(recommendation: Recommendation, quantity: Quantity) -> str:
    if quantity == "cost" and recommendation.candidates:
        return "This job has no prices: set them and its cost is drawn."
    return "No candidate yet: the first profiling runs bring them."
