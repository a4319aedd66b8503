"""Draws charts of a job's candidates: time against cost, time or memory against batch size, and parts of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal

from tula_service.dashboard.charts import vega
from tula_service.dashboard.charts.vega import ALARM, DASHES, FAINT, HEIGHT, PALETTE, WIDTH, Row, Spec, Unit
from tula_service.dashboard.format import duration_interval, money_interval
from tula_wire import DEFAULT_INSTANCE_TYPE, Candidate, Configuration, Estimate, Job, Recommendation
from tula_wire.format import cluster_name, configuration, duration, money, option, percent, size

Quantity = Literal["time", "cost"]
_SHAPES: Final = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross")
_CROSS: Final = {
    "shape": "M-1,-1L1,1M1,-1L-1,1", "size": 30, "strokeWidth": 1.6, "color": FAINT, "filled": False,
}  # fmt: skip
"""The appearance of an excluded candidate."""
_ALLOWED: Final = "datum.excluded === ''"
_EXCLUDED: Final = "datum.excluded !== ''"
_NONE: Final = "There are no candidates before the first profiling runs."
_BASIS: Final = {
    "prior": "from hardware data",
    "transfer": "from similar jobs",
    "probed": "from profiling on one node and a probe of the network",
    "profiled": "from profiling",
}
_PARTS: Final = (
    ("compute_time_s", "compute"),
    ("exposed_comm_time_s", "exposed communication"),
    ("skew_s", "waiting for stragglers"),
    ("input_time_s", "input"),
)
_QUANTITIES: Final = ("time", "cost", "memory")
"""The quantities that an option can change, as names of fields of the option's effect."""
_ENDS: Final = {"value": "Change (%)", "low": "Low (90 %)", "high": "High (90 %)"}
_MOST_BARS: Final = 8
_BAR: Final = 46
"""The height per candidate in points; names are above the bars, so that a narrow chart does not cut them off."""


def named_candidates(recommendation: Recommendation) -> list[tuple[str, Candidate]]:
    """Return each candidate that has a name, such as "recommended" or "knee", with all its names."""
    at_knee = recommendation.knee.configuration
    named = (
        ("recommended", recommendation.chosen),
        ("runner-up", recommendation.runner_up),
        ("least time", recommendation.least_time),
        ("least cost", recommendation.least_cost),
        ("balanced", recommendation.balanced),
        (
            "knee",
            next((candidate for candidate in recommendation.candidates if candidate.configuration == at_knee), None),
        ),
    )
    by_key: dict[tuple[Configuration, bool], tuple[str, Candidate]] = {}
    for name, candidate in named:
        if candidate is not None:
            key = candidate.configuration, candidate.spot
            by_key[key] = (f"{by_key[key][0]}, {name}", candidate) if key in by_key else (name, candidate)
    return list(by_key.values())


def frontier(job: Job, recommendation: Recommendation) -> Spec:
    """Return a chart of total time against cost on logarithmic axes; without prices, node-hours replace the cost.

    Intervals are drawn as crosses for the frontier and the named candidates; tooltips show them for all candidates. The
    column `asks` contains the values that select the candidate in the page's what-if form.
    """
    title = f"{job.name}: time against cost"
    priced = any(candidate.cost_usd is not None for candidate in recommendation.candidates)
    drawn = [candidate for candidate in recommendation.candidates if candidate.cost_usd is not None or not priced]
    if not drawn:
        return vega.message(title, _NONE)
    names = {(candidate.configuration, candidate.spot): name for name, candidate in named_candidates(recommendation)}
    hours = vega.time_unit(candidate.total_time_s.value for candidate in drawn)
    rows = [
        _frontier_row(candidate, hours, names.get((candidate.configuration, candidate.spot), "")) for candidate in drawn
    ]
    crossed = [row for row in rows if row["crossed"]]

    def across(axis: str) -> Spec:
        ends = [row[end] for row in crossed for end in (f"{axis}_low", f"{axis}_high")]
        return vega.axis_between(vega.reach([*ends, *(row[axis] for row in rows)]))

    x = vega.field("x:Q", title="Cost (USD)" if priced else "Node-hours", **across("x"))
    y = vega.field("y:Q", title=f"Time ({hours.name})", **across("y"))
    marked = [{"x": row["x"], "y": row["y"], "label": row["name"]} for row in rows if row["name"]]
    marked.sort(key=lambda row: list(names.values()).index(row["label"]))
    # The points are drawn last, since anything drawn over them would block the pointer.
    chart = {
        "layer": [_rings(marked, x, y), {"layer": _frontier_layers(recommendation, x, y)}],
        "resolve": {"scale": dict.fromkeys(("shape", "color", "fill"), "independent")},
        "width": WIDTH,
        "height": HEIGHT,
    }
    subtitle = "Line: best trade-offs between time and cost; crosses: 90 % intervals; filled points: profiled"
    if not priced:
        subtitle += "; node-hours replace the cost, since there are no prices"
    best = [{"x": row["x"], "y": row["y"]} for row in rows if row["best"]]
    return vega.finish(chart, title, subtitle, {"candidates": rows, "frontier": best, "landmarks": marked})


def _frontier_layers(recommendation: Recommendation, x: Spec, y: Spec) -> list[Spec]:
    colour, shape = _by_cluster(recommendation.candidates, lines=False)
    along = {"x": vega.field("x_low:Q"), "x2": {"field": "x_high"}, "y": y, "color": colour}
    upright = {"x": x, "y": vega.field("y_low:Q"), "y2": {"field": "y_high"}, "color": colour}
    base = {"x": x, "y": y, "tooltip": _TIPS}
    allowed = base | {"color": colour, "shape": shape, "fill": vega.filled_where("datum.profiled", colour)}
    steps: Spec = {"interpolate": "step-after", "strokeWidth": 2, "color": FAINT, "tooltip": None}
    interval: Spec = {"where": "datum.crossed", "strokeWidth": 1.4, "opacity": 0.75, "tooltip": None}
    point: Spec = {**vega.POINT, "cursor": "pointer"}
    return [
        vega.layer("frontier", "line", {"x": x, "y": y, "order": vega.field("x:Q")}, **steps),
        vega.layer("candidates", "rule", along, **interval),
        vega.layer("candidates", "rule", upright, **interval),
        vega.layer("candidates", "point", base, where=_EXCLUDED, **_CROSS, cursor="pointer"),
        vega.layer("candidates", "point", allowed, where=_ALLOWED, **point),
    ]


def _frontier_row(candidate: Candidate, unit: Unit, name: str) -> Row:
    time, cost, configured = candidate.total_time_s, _cost(candidate), candidate.configuration
    best = not (candidate.excluded_by or candidate.dominated)
    asks = [configured.num_nodes, candidate.global_batch_size, configured.instance_type, configured.grad_accum_steps]
    row = _row(candidate) | {
        "x": cost.value,
        "y": time.value / unit.size,
        "asks": [*asks, candidate.spot, [f"{name}={word}" for name, word in configured.options]],
        "best": best,
        "crossed": best or bool(name),
        "name": name,
    }
    if row["crossed"]:
        row |= {"x_low": cost.low, "x_high": cost.high, "y_low": time.low / unit.size, "y_high": time.high / unit.size}
    return row


def tradeoff(job: Job, recommendation: Recommendation, quantity: Quantity = "time") -> Spec:
    """Return a chart of predicted total time or cost, with 90 % intervals, against global batch size.

    Both axes are logarithmic.
    """
    title = f"{job.name}: {quantity} against global batch size"
    drawn = _best_of_places(recommendation.candidates, quantity)
    if not drawn and quantity == "cost" and recommendation.candidates:
        why = "The job has no prices (cluster.price), or has a price per GB but no measured memory yet."
        return vega.message(title, f"{why}\nThe chart of time against cost shows node-hours instead.")
    if not drawn:
        return vega.message(title, _NONE)
    unit = Unit(1, "USD") if quantity == "cost" else vega.time_unit(estimate.value for _, estimate in drawn)
    rows = [_row(candidate) | unit.interval(estimate) for candidate, estimate in drawn]
    batches = sorted({row["batch"] for row in rows})
    ends = vega.reach([row[end] for row in rows for end in ("low", "high")])
    x = vega.batch_axis("Global batch size (examples per step)", batches)
    y = vega.field("value:Q", title=f"Total {quantity} ({unit.name})", **vega.axis_between(ends))
    colour, dash = _by_cluster(recommendation.candidates, lines=True)
    marked = _marked(recommendation, quantity, unit)
    ruled = _ruled(recommendation, batches)
    base = {"x": x, "y": y, "tooltip": _TIPS}
    chart = vega.layered(
        *_limits(job, quantity, batches, (ends[0] * unit.size, ends[1] * unit.size), unit),
        vega.layer("candidates", "point", base, where=_EXCLUDED, **_CROSS),
        _rings(marked, x, y),
        *vega.predicted("candidates", base, {"color": colour, "strokeDash": dash}, where=_ALLOWED),
        *_rules(ruled),
    )
    basis = _BASIS[recommendation.basis]
    subtitle = f"Predicted {basis}; bands: 90 % intervals; filled points: profiled; crosses: excluded"
    sensible = recommendation.max_sensible_batch_size
    if sensible is not None and not batches[0] <= sensible <= batches[-1]:
        subtitle += f"; largest sensible batch {sensible:,}"  # a rule there would stretch the axis
    return vega.finish(chart, title, subtitle, {"candidates": rows, "landmarks": marked, "rules": ruled})


def _best_of_places(candidates: Sequence[Candidate], quantity: Quantity) -> list[tuple[Candidate, Estimate]]:
    """Return the best candidate for each cluster size and global batch size, in drawing order.

    Allowed candidates take precedence over excluded candidates.
    """
    best: dict[tuple[str, int, int], tuple[Candidate, Estimate]] = {}
    offered = [
        (candidate, estimate) for candidate in candidates if (estimate := _estimate(candidate, quantity)) is not None
    ]
    for candidate, estimate in sorted(offered, key=lambda offer: (offer[0].excluded_by is not None, offer[1].value)):
        c = candidate.configuration
        best.setdefault((c.instance_type, c.num_nodes, candidate.global_batch_size), (candidate, estimate))
    return [best[key] for key in sorted(best)]


def _marked(recommendation: Recommendation, quantity: Quantity, unit: Unit) -> list[Row]:
    return [
        {
            "batch": candidate.global_batch_size,
            "value": estimate.value / unit.size,
            "label": f"{name} (spot)" if candidate.spot else name,
        }
        for name, candidate in named_candidates(recommendation)
        if (estimate := _estimate(candidate, quantity)) is not None
    ]


def _limits(job: Job, quantity: Quantity, batches: Sequence[int], ends: tuple[float, float], unit: Unit) -> list[Spec]:
    """Return layers that shade the regions excluded by the job's limits."""
    limits, (bottom, top) = job.spec.limits, ends
    limit = limits.deadline_s if quantity == "time" else limits.budget_usd
    shades: list[Spec] = []
    if limit is not None and limit < top:
        what = "beyond the deadline" if quantity == "time" else "over budget"
        row = {"value": max(limit, bottom) / unit.size, "end": top / unit.size, "label": what}
        shades += _shade("y", row, "value", align="left", dx=4, dy=-4, x=0)
    most = limits.max_global_batch_size
    if most is not None and most < batches[-1]:
        row = {"value": max(most, batches[0]), "end": batches[-1], "label": f"batch over {most:,}"}
        shades += _shade("x", row, "end", align="right", dx=-4, y=HEIGHT - 4)
    return shades


def _shade(axis: str, row: Row, named_at: str, **text: Any) -> list[Spec]:
    """Return layers that shade the region from `value` to `end` along an axis, with a label at one end."""
    region = {axis: vega.field("value:Q"), f"{axis}2": {"field": "end"}}
    label = {axis: vega.field(f"{named_at}:Q"), "text": vega.field("label")}
    return [
        vega.layer([row], "rect", region, opacity=0.13, color=FAINT, tooltip=None),
        *vega.outlined([row], label, baseline="bottom", fontStyle="italic", **text),
    ]


def _ruled(recommendation: Recommendation, batches: Sequence[int]) -> list[Row]:
    """Return rows for the knee of the frontier and for the largest sensible batch size.

    Above the largest sensible batch size, additional examples hardly improve a training step.
    """
    at: dict[float, list[str]] = {}
    if recommendation.knee.found and recommendation.knee.global_batch_size:
        at.setdefault(recommendation.knee.global_batch_size, []).append("knee")
    sensible = recommendation.max_sensible_batch_size
    if sensible is not None and batches[0] <= sensible <= batches[-1]:
        at.setdefault(sensible, []).append("largest sensible batch")
    middle = (batches[0] * batches[-1]) ** 0.5
    return [
        {"batch": batch, "label": ", ".join(names), "left": batch > middle, "line": line}
        for line, (batch, names) in enumerate(at.items())
    ]


def _rules(ruled: list[Row]) -> list[Spec]:
    """Return a labelled vertical rule for each row; labels are on separate lines, on the side with more space."""
    layers: list[Spec] = []
    for row in ruled:
        side: dict[str, Any] = {"align": "right", "dx": -5} if row["left"] else {"align": "left", "dx": 5}
        only, at = f"datum.line === {row['line']}", {"x": vega.field("batch:Q")}
        layers += vega.ruled("rules", at, where=only, y=2 + 16 * row["line"], baseline="top", **side)
    return layers


def memory(job: Job, recommendation: Recommendation) -> Spec:
    """Return a chart of a rank's peak memory, predicted by equation 3, against local batch size.

    The chart is for the recommended options. If there is no recommendation, the first value of each option is used.
    """
    chosen = recommendation.chosen
    options = job.spec.base_options if chosen is None else chosen.configuration.options
    title = ", ".join([f"{job.name}: memory per rank", *(option(name, word) for name, word in options)])
    alike = [c for c in recommendation.candidates if c.configuration.options == options]
    predicted = {
        (c.configuration.instance_type, c.configuration.local_batch_size): c.memory_bytes
        for c in alike
        if c.memory_bytes is not None
    }
    if not predicted:
        return vega.message(title, "There are no memory readings before the first profiling runs.")
    profiled = [c.configuration for c in alike if c.profiled]
    read = {(point.instance_type, point.local_batch_size) for point in profiled}
    ceilings = {c.instance_type: c.memory_bytes_per_rank for c in job.spec.cluster if c.memory_bytes_per_rank}
    unit = vega.bytes_unit([*(e.value for e in predicted.values()), *ceilings.values()])
    curve: list[Row] = [
        {"type": kind, "batch": batch, "profiled": (kind, batch) in read} | unit.interval(estimate)
        for (kind, batch), estimate in sorted(predicted.items())
    ]
    limits: list[Row] = [
        {"value": most / unit.size, "label": "memory of " + ("a rank" if kind == DEFAULT_INSTANCE_TYPE else kind)}
        for kind, most in ceilings.items()
    ]
    ran = [run.configuration for run in job.plan if run.state == "out_of_memory"]
    over = [point for point in ran if point.options == options]
    crashes: list[Row] = [
        {
            "batch": point.local_batch_size,
            "value": ceilings.get(point.instance_type, curve[-1]["high"] * unit.size) / unit.size,
            "label": f"out of memory at {point.local_batch_size} per rank",
        }
        for point in over
    ]
    kinds = sorted({row["type"] for row in curve})
    x = vega.batch_axis("Local batch size (examples per rank and micro-step)", sorted({row["batch"] for row in curve}))
    y = vega.field("value:Q", title=f"Peak memory ({unit.name})", scale={"zero": True}, axis={"tickCount": 6})
    look = {"domain": kinds, "range": list(PALETTE[: len(kinds)])}
    colour = vega.field("type", scale=look, legend=None if len(kinds) == 1 else vega.legend(kinds))
    heads = {"batch": "Local batch", "value": "Peak", "low": "Low (90 %)", "high": "High (90 %)"}
    tips = [vega.field(f"{name}:Q", format=",.3~g", title=head) for name, head in heads.items()]
    crash = {"x": vega.field("batch:Q"), "y": vega.field("value:Q"), "tooltip": vega.field("label")}
    layers = [
        *vega.predicted("curve", {"x": x, "y": y, "tooltip": tips}, {"color": colour}),
        *vega.ruled("ceiling", {"y": vega.field("value:Q")}, color=ALARM, align="left", x=4, dy=-7),
        vega.layer("crashes", "point", crash, shape="cross", angle=45, size=130, filled=True, color=ALARM),
    ]
    largest = ", ".join(
        f"{'' if kind == DEFAULT_INSTANCE_TYPE else f'{kind} '}{batch}"
        for kind, batch in sorted(recommendation.max_local_batch_size.items())
    )
    subtitle = "Band: 90 % interval; filled points: profiled; dashed line: capacity; cross: out of memory"
    if largest:
        subtitle += f"; largest batch that fits: {largest}"
    datasets = {"curve": curve, "ceiling": limits, "crashes": crashes}
    return vega.finish(vega.layered(*layers), title, subtitle, datasets)


def step_breakdown(job: Job, recommendation: Recommendation) -> Spec:
    """Return a chart of the predicted step time of candidates, stacked by part.

    Named candidates come first, then the rest of the frontier, then the fastest remaining candidates.
    """
    title = f"{job.name}: parts of the step time"
    drawn = [candidate for candidate in _interesting(recommendation) if candidate.terms is not None]
    if not drawn:
        return vega.message(
            title, "To split the step time into parts, the model needs runs on at least two cluster sizes."
        )
    unit = vega.time_unit(candidate.step_time_s.value for candidate in drawn)
    named = named_candidates(recommendation)
    labels: list[Row] = []
    rows: list[Row] = []
    for place, candidate in enumerate(drawn):
        name = configuration(candidate.configuration)
        marks = ", ".join(mark for mark, other in named if other.configuration == candidate.configuration)
        labels.append({"place": place, "name": name, "landmarks": marks})
        for order, (term, part) in enumerate(_PARTS):
            value = getattr(candidate.terms, term) / unit.size
            rows.append({"configuration": name, "place": place, "part": part, "order": order, "value": value})
    band = vega.field("place:O", scale={"paddingInner": 0, "paddingOuter": 0}, axis=None)
    tips = [
        vega.field("configuration", title="Configuration"),
        vega.field("part", title="Part"),
        vega.field("value:Q", title=unit.name, format=",.3~g"),
    ]
    bars = {"y": band, "tooltip": tips, **vega.stacked(rows, [part for _, part in _PARTS], f"Step time ({unit.name})")}
    line: Spec = {"align": "left", "baseline": "middle", "x": 2, "fontSize": 11}
    chart = vega.layered(
        vega.layer("parts", "bar", bars, where="datum.value > 0", size=13, yOffset=13),
        *vega.outlined("labels", {"y": band, "text": vega.field("landmarks")}, **line, yOffset=-16, fontWeight="bold"),
        *vega.outlined("labels", {"y": band, "text": vega.field("name")}, **line, yOffset=-3),
        height={"step": _BAR},
    )
    return vega.finish(
        chart, title, "Predicted, for one step at the global batch size shown", {"parts": rows, "labels": labels}
    )


def options(job: Job, recommendation: Recommendation) -> Spec:
    """Return a chart of the percentage changes in time, cost and memory for each value of an option.

    Changes are relative to the option's first value. Filled points mark values that were launched, hollow points mark
    predictions, and lines show 90 % intervals.
    """
    title = f"{job.name}: effects of options"
    rows: list[Row] = [
        {
            "option": option(effect.option, effect.value),
            "against": option(effect.option, effect.base),
            "quantity": quantity,
            "launched": effect.launched,
            "said": effect.sentence,
            **{end: 100.0 * (getattr(ratio, end) - 1.0) for end in ("value", "low", "high")},
        }
        for effect in recommendation.options
        for quantity in _QUANTITIES
        if (ratio := getattr(effect, quantity)) is not None
    ]
    if not rows:
        none = "No run has been measured yet" if job.spec.options else "The job has no options"
        return vega.message(title, f"{none}. To compare placeholder values, list them under [options].")
    names, drawn = list(dict.fromkeys(row["option"] for row in rows)), {row["quantity"] for row in rows}
    quantities = [quantity for quantity in _QUANTITIES if quantity in drawn]
    at = {
        "y": vega.field("option", title=None, sort=names, axis={"labelLimit": 260}),
        "yOffset": vega.field("quantity", sort=quantities),
    }
    look = {"domain": quantities, "range": [PALETTE[_QUANTITIES.index(quantity)] for quantity in quantities]}
    colour = vega.field("quantity", scale=look, legend=vega.legend(quantities, lines=False))
    value = vega.field("value:Q", title="Change from the current value (%)", axis={"tickCount": 8})
    heads = {"option": "Value", "against": "Compared with", "quantity": "Quantity", "said": "Effect"}
    tips = [
        *(vega.field(name, title=head) for name, head in heads.items()),
        *(vega.field(f"{end}:Q", title=head, format="+.1f") for end, head in _ENDS.items()),
    ]
    base = {"x": value, **at, "color": colour, "tooltip": tips}
    interval = {"x": vega.field("low:Q"), "x2": {"field": "high"}, **at, "color": colour}
    filled = base | {"fill": vega.filled_where("datum.launched", colour)}
    point: Spec = vega.POINT
    chart = vega.layered(
        vega.layer([{"value": 0.0}], "rule", {"x": vega.field("value:Q")}, color=FAINT, tooltip=None),
        vega.layer("effects", "rule", interval, strokeWidth=2, opacity=0.75, tooltip=None),
        vega.layer("effects", "point", filled, **point),
        height={"step": 20, "for": "offset"},
    )
    subtitle = "Time and cost of the whole training, memory per rank at equal batch size; filled points: launched"
    return vega.finish(chart, title, subtitle, {"effects": rows})


def _interesting(recommendation: Recommendation) -> list[Candidate]:
    frontier = set(recommendation.frontier)
    ranked = [candidate for _, candidate in named_candidates(recommendation)]
    rest = sorted(recommendation.candidates, key=lambda candidate: candidate.total_time_s.value)
    ranked += [c for c in rest if c.configuration in frontier]
    ranked += [c for c in rest if c.excluded_by is None]
    return list({candidate.configuration: candidate for candidate in ranked}.values())[:_MOST_BARS]


def _by_cluster(candidates: Iterable[Candidate], *, lines: bool) -> tuple[Spec, Spec]:
    """Return two encodings by instance type and number of nodes: the colour, and the dash of lines or shape of points.

    The colour shows the number of nodes. If there are several instance types, the dash shows the instance type;
    otherwise, it also shows the number of nodes, for readers who cannot distinguish the colours. Each cluster has its
    own shape.
    """
    seen = {(c.configuration.instance_type, c.configuration.num_nodes): c.configuration for c in candidates}
    types, sizes = sorted({kind for kind, _ in seen}), sorted({size for _, size in seen})
    names, colours, looks = [], [], []
    for at, (kind, nodes) in enumerate(sorted(seen)):
        place = sizes.index(nodes)
        names.append(cluster_name(seen[kind, nodes]))
        colours.append(PALETTE[place % len(PALETTE)])
        dash = DASHES[(place if len(types) == 1 else types.index(kind)) % len(DASHES)]
        looks.append(list(dash) if lines else _SHAPES[at % len(_SHAPES)])
    named = vega.legend(names, lines=lines)
    return (
        vega.field("cluster", scale={"domain": names, "range": colours}, legend=named),
        vega.field("cluster", scale={"domain": names, "range": looks}, legend=named),
    )


def _rings(marked: Sequence[Row], x: Spec, y: Spec) -> Spec:
    """Return a layer with a large symbol at each point of the data set `landmarks`, and a legend for `marked`."""
    labels = [row["label"] for row in marked]
    shapes = [_SHAPES[place % len(_SHAPES)] for place in range(len(labels))]
    named = vega.legend(labels, lines=False) | {"orient": "bottom", "symbolSize": 120, "labelLimit": 0}
    shape = vega.field("label", scale={"domain": labels, "range": shapes}, legend=named)
    encoding = {"x": x, "y": y, "shape": shape}
    return vega.layer(
        "landmarks", "point", encoding, size=300, strokeWidth=2.2, filled=False, color=FAINT, tooltip=None
    )


def _estimate(candidate: Candidate, quantity: Quantity) -> Estimate | None:
    """Return the total time in seconds or the cost in dollars; the cost is None if there are no prices."""
    return candidate.total_time_s if quantity == "time" else candidate.cost_usd


def _cost(candidate: Candidate) -> Estimate:
    """Return the cost in dollars or, if there are no prices, in node-hours."""
    hours, time = candidate.configuration.num_nodes / 3600, candidate.total_time_s
    return candidate.cost_usd or Estimate(value=time.value * hours, low=time.low * hours, high=time.high * hours)


_TIPS: Final = [
    vega.field(name, title=name.capitalize())
    for name in ("configuration", "time", "cost", "step", "memory", "basis", "excluded")
]


def _row(candidate: Candidate) -> Row:
    """Return a candidate as a row of chart data; tooltips show the fields in `_TIPS`."""
    time, cost, step, memory = candidate.total_time_s, _cost(candidate), candidate.step_time_s, candidate.memory_bytes
    said = f"{money(cost.value)} ({money_interval(cost)})" if candidate.cost_usd else f"{cost.value:,.3g} node-hours"
    fits = "" if candidate.memory_fits is None else f", fits with {percent(candidate.memory_fits)} probability"
    return {
        "batch": candidate.global_batch_size,
        "cluster": cluster_name(candidate.configuration),
        "configuration": configuration(candidate.configuration),
        "time": f"{duration(time.value)} ({duration_interval(time)})",
        "cost": f"{said}{', spot' if candidate.spot else ''}",
        "step": f"{duration(step.value)} ({duration_interval(step)})",
        "memory": "-" if memory is None else f"{size(memory.value)} per rank{fits}",
        "basis": "profiled" if candidate.profiled else "extrapolated" if candidate.extrapolated else "predicted",
        "excluded": candidate.excluded_by or "",
        "profiled": candidate.profiled,
    }


CANDIDATE_CHARTS: Final[dict[str, Callable[[Job, Recommendation], Spec]]] = {
    "frontier": frontier, "tradeoff": tradeoff, "memory": memory, "step_breakdown": step_breakdown,
    "options": options,
}  # fmt: skip
"""The functions that draw a job's candidates, keyed by the names of the charts."""
