"""Time against cost: every candidate as a point, the frontier, and the points that one chooses among."""

from __future__ import annotations

import altair as alt

from tula_service.dashboard.charts import labels
from tula_service.dashboard.charts.candidates import (
    cluster_name,
    configuration_name,
    landmarks,
    line_styles,
)
from tula_service.dashboard.charts.drawing import (
    Ends,
    axis_between,
    filled_where,
    finish,
    legend,
    message,
    reach,
    share,
)
from tula_service.dashboard.charts.style import FAINT, HEIGHT, WIDTH, Row, Spec, time_unit
from tula_service.dashboard.format import duration, duration_interval, money, money_interval, percent, size
from tula_wire import Candidate, Configuration, Estimate, Job, Recommendation

_SHAPES = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross")
_TIPS = ("configuration", "time", "cost", "step", "memory", "basis", "excluded")


def frontier(job: Job, recommendation: Recommendation) -> Spec:
    """Total time against cost, both axes logarithmic; node-hours stand for the cost of a job without prices.

    Intervals are drawn as crosses of the frontier and of the named candidates; a tooltip has them of all.
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
    x = axis_between(alt.X("x:Q").title("Cost (USD)" if priced else "Node-hours"), ends_x)
    y = axis_between(alt.Y("y:Q").title(f"Time ({hours.name})"), ends_y)
    marked = [{"x": row["x"], "y": row["y"], "label": row["name"]} for row in rows if row["name"]]
    taken = [labels.around(_spot(row, ends_x, ends_y)) for row in rows if not row["name"]]
    labels.place(marked, [_spot(row, ends_x, ends_y) for row in marked], taken)
    # The points come last: what is drawn over them would keep the pointer from them.
    chart = alt.layer(*_lines(recommendation, x, y), *labels.layers(x, y, marked), *_points(recommendation, x, y))
    nodes_only = "" if priced else "; without prices, node-hours stand for the cost"
    subtitle = "On the line, no other is both faster and cheaper; crosses are 90 % intervals, filled points profiled"
    subtitle += nodes_only
    datasets = {
        "candidates": rows,
        "frontier": [{"x": row["x"], "y": row["y"]} for row in rows if row["best"]],
        "landmarks": marked,
    }
    return finish(chart.properties(width=WIDTH, height=HEIGHT), title, subtitle, datasets)


def _lines(recommendation: Recommendation, x: alt.X, y: alt.Y) -> list[alt.Chart]:
    names, colours, _ = line_styles(recommendation.candidates)
    colour = alt.Color("cluster:N").scale(domain=names, range=colours).legend(legend(names, lines=False))
    crosses = alt.Chart(alt.NamedData("candidates")).transform_filter("datum.crossed")
    across, along = (crosses.mark_rule(strokeWidth=1.4, opacity=0.75, tooltip=None) for _ in range(2))
    line = alt.Chart(alt.NamedData("frontier"))
    return [
        line.mark_line(interpolate="step-after", strokeWidth=2, color=FAINT, tooltip=None).encode(
            x=x, y=y, order=alt.Order("x:Q")
        ),
        across.encode(x=alt.X("x_low:Q"), x2=alt.X2("x_high:Q"), y=y, color=colour),
        along.encode(x=x, y=alt.Y("y_low:Q"), y2=alt.Y2("y_high:Q"), color=colour),
    ]


def _points(recommendation: Recommendation, x: alt.X, y: alt.Y) -> list[alt.Chart]:
    names, colours, _ = line_styles(recommendation.candidates)
    symbols = legend(names, lines=False)
    colour = alt.Color("cluster:N").scale(domain=names, range=colours).legend(symbols)
    shapes = [_SHAPES[place % len(_SHAPES)] for place in range(len(names))]
    shape = alt.Shape("cluster:N").scale(domain=names, range=shapes).legend(symbols)
    tips = [alt.Tooltip(f"{name}:N", title=name.capitalize()) for name in _TIPS]
    points = alt.Chart(alt.NamedData("candidates")).encode(x=x, y=y, tooltip=tips)
    return [
        points.transform_filter("datum.excluded !== ''").mark_point(
            shape="M-1,-1L1,1M1,-1L-1,1", size=30, strokeWidth=1.6, color=FAINT, filled=False, cursor="pointer"
        ),
        points.transform_filter("datum.excluded === ''")
        .mark_point(size=60, strokeWidth=1.8, filled=False, opacity=1, cursor="pointer")
        .encode(color=colour, shape=shape, fill=filled_where("datum.profiled", colour)),
    ]


def _names(recommendation: Recommendation) -> dict[tuple[Configuration, bool], str]:
    found: dict[tuple[Configuration, bool], list[str]] = {}
    for name, candidate in landmarks(recommendation):
        found.setdefault((candidate.configuration, candidate.spot), []).append(name)
    return {key: labels.of_names(names) for key, names in found.items()}


def _row(candidate: Candidate, priced: bool, unit_s: float, name: str) -> Row:
    time, cost = candidate.total_time_s, candidate.cost_usd
    nodes = candidate.configuration.num_nodes
    if cost is None:
        cost = Estimate(**{end: getattr(time, end) * nodes / 3600 for end in ("value", "low", "high")})
    best = not (candidate.excluded_by or candidate.dominated)
    step, memory = candidate.step_time_s, candidate.memory_bytes
    said = f"{money(cost.value)} ({money_interval(cost)})" if priced else f"{cost.value:,.3g} node-hours"
    fits = "" if candidate.memory_fits is None else f", {percent(candidate.memory_fits)} sure to fit"
    return {
        "x": cost.value,
        "x_low": cost.low,
        "x_high": cost.high,
        "y": time.value / unit_s,
        "y_low": time.low / unit_s,
        "y_high": time.high / unit_s,
        "nodes": nodes,
        "batch": candidate.global_batch_size,
        "cluster": cluster_name(candidate.configuration),
        "configuration": configuration_name(candidate.configuration),
        "time": f"{duration(time.value)} ({duration_interval(time)})",
        "cost": f"{said}{', spot' if candidate.spot else ''}",
        "step": f"{duration(step.value)} ({duration_interval(step)})",
        "memory": "–" if memory is None else f"{size(memory.value)} a rank{fits}",
        "basis": "profiled" if candidate.profiled else "extrapolated" if candidate.extrapolated else "predicted",
        "excluded": candidate.excluded_by or "",
        "profiled": candidate.profiled,
        "best": best,
        "crossed": best or bool(name),
        "name": name,
    }


def _spot(row: Row, ends_x: Ends, ends_y: Ends) -> tuple[float, float]:
    return labels.FRAME * share(row["x"], ends_x), HEIGHT * (1 - share(row["y"], ends_y))
