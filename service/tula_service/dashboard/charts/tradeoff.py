"""The trade-off curve: time or cost against global batch, a line per cluster size, with what decides the choice."""

from __future__ import annotations

from collections import Counter

from tula_service.dashboard.charts.candidates import (
    Quantity,
    estimate_of,
    landmarks,
    line_styles,
    points,
    rings,
    row_of,
    unit_of,
)
from tula_service.dashboard.charts.drawing import (
    CROSS,
    Ends,
    axis_between,
    candidate_tooltip,
    field,
    filled_where,
    finish,
    layer,
    layered,
    legend,
    message,
    outlined,
    reach,
)
from tula_service.dashboard.charts.style import FAINT, HEIGHT, Row, Spec, Unit
from tula_wire import Job, Recommendation


def tradeoff(job: Job, recommendation: Recommendation, quantity: Quantity = "time") -> Spec:
    """Predicted total time or cost (90 % interval as a band) against global batch size, both axes logarithmic."""
    title = f"{job.name}: {quantity} against global batch size"
    drawn = points(recommendation.candidates, quantity)
    if not drawn:
        return message(title, _nothing(recommendation, quantity))
    unit = unit_of(drawn, quantity)
    rows = [row_of(candidate, quantity, unit) for candidate in drawn]
    names, colours, dashes = line_styles(recommendation.candidates)
    batches = {"values": sorted({row["batch"] for row in rows}), "format": "d", "labelOverlap": True}
    binary = {"type": "log", "base": 2, "nice": False}
    x = field("batch:Q", title="Global batch size (examples a step)", scale=binary, axis=batches)
    y = field("value:Q", title=f"Total {quantity} ({unit.name})", **axis_between(_ends(rows)))
    colour = field("cluster", scale={"domain": names, "range": colours}, legend=legend(names))
    dash = field("cluster", scale={"domain": names, "range": dashes}, legend=legend(names))
    allowed = "datum.excluded === ''"
    tooltip = candidate_tooltip(unit)
    marked = _landmark_rows(recommendation, quantity, unit)
    ruled = _rule_rows(recommendation, rows)
    point = {"x": x, "y": y, "color": colour, "fill": filled_where("datum.profiled", colour), "tooltip": tooltip}
    band = {"x": x, "y": field("low:Q"), "y2": {"field": "high"}, "color": colour}
    line = {"x": x, "y": y, "color": colour, "strokeDash": dash}
    cross = {"shape": CROSS, "size": 30, "strokeWidth": 1.6, "color": FAINT, "filled": False}
    chart = layered(
        *_limits(job, quantity, rows, unit),
        layer("candidates", "area", band, where=allowed, opacity=0.14, tooltip=None),
        layer("candidates", "point", {"x": x, "y": y, "tooltip": tooltip}, where="datum.excluded !== ''", **cross),
        layer("candidates", "line", line, where=allowed, strokeWidth=2),
        rings(marked, x, y),
        layer("candidates", "point", point, where=allowed, size=50, strokeWidth=1.8, filled=False),
        *_rule_layers(ruled),
    )
    datasets = {"candidates": rows, "landmarks": marked, "rules": ruled}
    return finish(chart, title, _subtitle(recommendation, rows), datasets)


def _ends(rows: list[Row]) -> Ends:
    """Both ends of the y axis."""
    return reach([row[end] for row in rows for end in ("low", "high")])


def _limits(job: Job, quantity: Quantity, rows: list[Row], unit: Unit) -> list[Spec]:
    """Shaded regions that the job's limits forbid; drawn behind everything."""
    limits = job.spec.limits
    shades: list[Spec] = []
    bottom, top = _ends(rows)
    limit = limits.deadline_s if quantity == "time" else limits.budget_usd
    shade: Spec = {"opacity": 0.13, "color": FAINT, "tooltip": None}
    if limit is not None and limit / unit.size < top:
        what = "beyond the deadline" if quantity == "time" else "over budget"
        data = {"values": [{"value": max(limit / unit.size, bottom), "top": top, "label": what}]}
        y = field("value:Q")
        text: Spec = {"align": "left", "baseline": "bottom", "dx": 4, "dy": -4, "x": 0, "fontStyle": "italic"}
        region = layer("", "rect", {"y": y, "y2": {"field": "top"}}, **shade)
        shades += [{**each, "data": data} for each in (region, *outlined("", {"y": y, "text": field("label")}, **text))]
    most = max(row["batch"] for row in rows)
    ceiling = limits.max_global_batch_size
    if ceiling is not None and ceiling < most:
        label = f"batch over {ceiling:,}"
        start = max(ceiling, min(row["batch"] for row in rows))
        data = {"values": [{"batch": start, "most": most, "label": label}]}
        region = layer("", "rect", {"x": field("batch:Q"), "x2": {"field": "most"}}, **shade)
        text = {"align": "right", "baseline": "bottom", "dx": -4, "y": HEIGHT - 4, "fontStyle": "italic"}
        said = outlined("", {"x": field("most:Q"), "text": field("label")}, **text)
        shades += [{**each, "data": data} for each in (region, *said)]
    return shades


def _rule_rows(recommendation: Recommendation, rows: list[Row]) -> list[Row]:
    """The knee, and the batch beyond which, by gradient noise, more examples hardly help a step."""
    at: dict[float, list[str]] = {}
    if recommendation.knee.found and recommendation.knee.global_batch_size:
        at.setdefault(recommendation.knee.global_batch_size, []).append("knee")
    sensible = recommendation.max_sensible_batch_size
    if sensible is not None and _in_frame(sensible, rows):
        at.setdefault(sensible, []).append("largest sensible batch")
    middle = (min(row["batch"] for row in rows) * max(row["batch"] for row in rows)) ** 0.5
    return [
        {"batch": batch, "label": ", ".join(names), "left": batch > middle, "line": line}
        for line, (batch, names) in enumerate(at.items())
    ]


def _rule_layers(ruled: list[Row]) -> list[Spec]:
    """An upright rule for each row; its name stands on the wider side of it, each in a line of the frame."""
    x = field("batch:Q")
    layers: list[Spec] = []
    for row in ruled:
        only = f"datum.line === {row['line']}"
        layers.append(layer("rules", "rule", {"x": x}, where=only, strokeDash=[4, 4], strokeWidth=1.5, color=FAINT))
        side = {"align": "right", "dx": -5} if row["left"] else {"align": "left", "dx": 5}
        text = {**side, "y": 2 + 16 * row["line"], "baseline": "top", "fontStyle": "italic"}
        layers += outlined("rules", {"x": x, "text": field("label")}, where=only, **text)
    return layers


def _landmark_rows(recommendation: Recommendation, quantity: Quantity, unit: Unit) -> list[Row]:
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
    return [
        {"batch": batch, "value": value, "label": ", ".join(names) + price}
        for (batch, value, price), names in merged.items()
    ]


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
