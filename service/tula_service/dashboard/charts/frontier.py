"""Time against cost: every candidate as a point, the frontier, and the points that one chooses among."""

from __future__ import annotations

from tula_service.dashboard.charts.candidates import SHAPES, landmarks, line_styles, rings
from tula_service.dashboard.charts.drawing import (
    CROSS,
    axis_between,
    field,
    filled_where,
    finish,
    layer,
    legend,
    message,
    reach,
)
from tula_service.dashboard.charts.style import FAINT, HEIGHT, WIDTH, Row, Spec, time_unit
from tula_service.dashboard.format import duration_interval, money_interval
from tula_wire import Candidate, Configuration, Estimate, Job, Recommendation
from tula_wire.format import cluster_name, configuration, duration, money, percent, size

_TIPS = ("configuration", "time", "cost", "step", "memory", "basis", "excluded")


def frontier(job: Job, recommendation: Recommendation) -> Spec:
    """Total time against cost, both axes logarithmic; node-hours stand for the cost of a job without prices.

    Intervals are drawn as crosses of the frontier and of the named candidates; a tooltip has them of all. `asks` of a
    row are the fields of the page's what-if form that ask about its candidate.
    """
    title = f"{job.name}: time against cost"
    priced = any(each.cost_usd is not None for each in recommendation.candidates)
    drawn = [each for each in recommendation.candidates if each.cost_usd is not None or not priced]
    if not drawn:
        return message(title, "No candidate yet: the first profiling runs bring them.")
    named = _names(recommendation)
    hours = time_unit(each.total_time_s.value for each in drawn)
    rows = [_row(each, priced, hours.size, named.get((each.configuration, each.spot), "")) for each in drawn]
    crossed = [row for row in rows if row["crossed"]]
    ends_x = reach([*(r["x"] for r in rows), *(r["x_low"] for r in crossed), *(r["x_high"] for r in crossed)])
    ends_y = reach([*(r["y"] for r in rows), *(r["y_low"] for r in crossed), *(r["y_high"] for r in crossed)])
    x = field("x:Q", title="Cost (USD)" if priced else "Node-hours", **axis_between(ends_x))
    y = field("y:Q", title=f"Time ({hours.name})", **axis_between(ends_y))
    marked = [{"x": row["x"], "y": row["y"], "label": row["name"]} for row in rows if row["name"]]
    marked.sort(key=lambda row: list(named.values()).index(row["label"]))
    # The points come last: what is drawn over them would keep the pointer from them.
    chart = {
        "layer": [
            rings(marked, x, y),
            {"layer": [*_lines(recommendation, x, y), *_points(recommendation, x, y)]},
        ],
        "resolve": {"scale": dict.fromkeys(("shape", "color", "fill"), "independent")},
        "width": WIDTH,
        "height": HEIGHT,
    }
    nodes_only = "" if priced else "; without prices, node-hours stand for the cost"
    subtitle = "On the line, no other is both faster and cheaper; crosses are 90 % intervals, filled points profiled"
    subtitle += nodes_only
    datasets = {
        "candidates": rows,
        "frontier": [{"x": row["x"], "y": row["y"]} for row in rows if row["best"]],
        "landmarks": marked,
    }
    return finish(chart, title, subtitle, datasets)


def _lines(recommendation: Recommendation, x: Spec, y: Spec) -> list[Spec]:
    names, colours, _ = line_styles(recommendation.candidates)
    colour = field("cluster", scale={"domain": names, "range": colours}, legend=legend(names, lines=False))
    look: Spec = {"where": "datum.crossed", "strokeWidth": 1.4, "opacity": 0.75, "tooltip": None}
    across = {"x": field("x_low:Q"), "x2": {"field": "x_high"}, "y": y, "color": colour}
    along = {"x": x, "y": field("y_low:Q"), "y2": {"field": "y_high"}, "color": colour}
    steps: Spec = {"interpolate": "step-after", "strokeWidth": 2, "color": FAINT, "tooltip": None}
    return [
        layer("frontier", "line", {"x": x, "y": y, "order": field("x:Q")}, **steps),
        layer("candidates", "rule", across, **look),
        layer("candidates", "rule", along, **look),
    ]


def _points(recommendation: Recommendation, x: Spec, y: Spec) -> list[Spec]:
    names, colours, _ = line_styles(recommendation.candidates)
    symbols = legend(names, lines=False)
    colour = field("cluster", scale={"domain": names, "range": colours}, legend=symbols)
    shapes = [SHAPES[place % len(SHAPES)] for place in range(len(names))]
    shape = field("cluster", scale={"domain": names, "range": shapes}, legend=symbols)
    base = {"x": x, "y": y, "tooltip": [field(name, title=name.capitalize()) for name in _TIPS]}
    allowed = base | {"color": colour, "shape": shape, "fill": filled_where("datum.profiled", colour)}
    cross = {"shape": CROSS, "size": 30, "strokeWidth": 1.6, "color": FAINT, "filled": False, "cursor": "pointer"}
    point = {"size": 60, "strokeWidth": 1.8, "filled": False, "opacity": 1, "cursor": "pointer"}
    return [
        layer("candidates", "point", base, where="datum.excluded !== ''", **cross),
        layer("candidates", "point", allowed, where="datum.excluded === ''", **point),
    ]


def _names(recommendation: Recommendation) -> dict[tuple[Configuration, bool], str]:
    found: dict[tuple[Configuration, bool], list[str]] = {}
    for name, candidate in landmarks(recommendation):
        found.setdefault((candidate.configuration, candidate.spot), []).append(name)
    return {key: ", ".join(names) for key, names in found.items()}


def _row(candidate: Candidate, priced: bool, unit_s: float, name: str) -> Row:
    time, cost, configured = candidate.total_time_s, candidate.cost_usd, candidate.configuration
    if cost is None:
        hours = configured.num_nodes / 3600
        cost = Estimate(value=time.value * hours, low=time.low * hours, high=time.high * hours)
    best = not (candidate.excluded_by or candidate.dominated)
    step, memory = candidate.step_time_s, candidate.memory_bytes
    said = f"{money(cost.value)} ({money_interval(cost)})" if priced else f"{cost.value:,.3g} node-hours"
    fits = "" if candidate.memory_fits is None else f", {percent(candidate.memory_fits)} sure to fit"
    asks = [configured.num_nodes, candidate.global_batch_size, configured.instance_type, configured.grad_accum_steps]
    row = {
        "x": cost.value,
        "y": time.value / unit_s,
        "asks": [*asks, candidate.spot],
        "cluster": cluster_name(configured),
        "configuration": configuration(configured),
        "time": f"{duration(time.value)} ({duration_interval(time)})",
        "cost": f"{said}{', spot' if candidate.spot else ''}",
        "step": f"{duration(step.value)} ({duration_interval(step)})",
        "memory": "-" if memory is None else f"{size(memory.value)} a rank{fits}",
        "basis": "profiled" if candidate.profiled else "extrapolated" if candidate.extrapolated else "predicted",
        "excluded": candidate.excluded_by or "",
        "profiled": candidate.profiled,
        "best": best,
        "crossed": best or bool(name),
        "name": name,
    }
    if row["crossed"]:
        ends = {"x_low": cost.low, "x_high": cost.high, "y_low": time.low / unit_s, "y_high": time.high / unit_s}
        row |= ends
    return row
