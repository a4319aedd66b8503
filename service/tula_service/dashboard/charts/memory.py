"""Memory against local batch: the prediction with its interval, the ceiling, and every out-of-memory seen."""

from __future__ import annotations

from typing import Any

from tula_service.dashboard.charts.grammar import alt
from tula_service.dashboard.charts.spec import (
    HEIGHT,
    PALETTE,
    WIDTH,
    Row,
    Spec,
    bytes_unit,
    finish,
    legend,
    message,
    outlined,
)
from tula_wire import DEFAULT_INSTANCE_TYPE, Job, Recommendation

ALARM = PALETTE[6]


def memory(job: Job, recommendation: Recommendation) -> Spec:
    """Peak memory of one rank (equation 3, fitted) against local batch size."""
    title = f"{job.name}: memory of a rank"
    found = {
        (c.configuration.instance_type, c.configuration.local_batch_size): c.memory_bytes
        for c in recommendation.candidates
        if c.memory_bytes is not None
    }
    if not found:
        return message(title, "No memory reading yet: the first profiling runs bring them.")
    read = {
        (c.configuration.instance_type, c.configuration.local_batch_size)
        for c in recommendation.candidates
        if c.profiled
    }
    ceilings = {c.instance_type: c.memory_bytes_per_rank for c in job.spec.cluster if c.memory_bytes_per_rank}
    unit = bytes_unit([*(e.value for e in found.values()), *ceilings.values()])
    curve: list[Row] = [
        {
            "type": kind,
            "batch": batch,
            "value": estimate.value / unit.size,
            "low": estimate.low / unit.size,
            "high": estimate.high / unit.size,
            "read": (kind, batch) in read,
        }
        for (kind, batch), estimate in sorted(found.items())
    ]
    limits: list[Row] = [
        {"type": kind, "value": size / unit.size, "label": _ceiling_name(kind)} for kind, size in ceilings.items()
    ]
    crashes: list[Row] = [
        {
            "type": run.configuration.instance_type,
            "batch": run.configuration.local_batch_size,
            "value": ceilings.get(run.configuration.instance_type, curve[-1]["high"] * unit.size) / unit.size,
            "label": f"out of memory at {run.configuration.local_batch_size} a rank",
        }
        for run in job.plan
        if run.state == "out_of_memory"
    ]
    kinds = sorted({row["type"] for row in curve})
    x = (
        alt.X("batch:Q")
        .scale(type="log", base=2, nice=False)
        .title("Local batch size (examples a rank and micro-step)")
    )
    x = x.axis(values=sorted({row["batch"] for row in curve}), format="d", labelOverlap=True)
    y = alt.Y("value:Q").title(f"Peak memory ({unit.name})").scale(zero=True).axis(tickCount=6)
    colour = alt.Color("type:N", legend=None if len(kinds) == 1 else legend(kinds)).scale(
        domain=kinds, range=list(PALETTE[: len(kinds)])
    )
    base = alt.Chart(alt.NamedData("curve"))
    tips = [alt.Tooltip(f"{name}:Q", format=",.3~g", title=head) for name, head in _COLUMNS]
    layers: list[Any] = [
        base.transform_calculate(value="datum.low").mark_area(opacity=0.16).encode(x=x, y=y, y2="high:Q", color=colour),
        base.mark_line(strokeWidth=2).encode(x=x, y=y, color=colour),
        base.mark_point(size=50, strokeWidth=1.8, filled=False).encode(
            x=x,
            y=y,
            color=colour,
            fill=alt.condition("datum.read", colour, alt.value("transparent")),
            tooltip=tips,
        ),
    ]
    if limits:
        line = alt.Chart(alt.NamedData("ceiling"))
        layers.append(line.mark_rule(strokeDash=[6, 3], strokeWidth=2, color=ALARM).encode(y="value:Q"))
        layers += outlined(line.encode(y="value:Q", text="label:N"), align="left", x=4, dy=-7, fontStyle="italic")
    if crashes:
        cross = alt.Chart(alt.NamedData("crashes")).mark_point(
            shape="cross", angle=45, size=130, filled=True, color=ALARM
        )
        layers.append(cross.encode(x="batch:Q", y="value:Q", tooltip="label:N"))
    chart = alt.layer(*layers).properties(width=WIDTH, height=HEIGHT)
    largest = ", ".join(f"{_prefix(kind)}{size}" for kind, size in sorted(recommendation.max_local_batch_size.items()))
    subtitle = "Band holds 90 %, filled points were profiled; the dashed line is the ceiling, a cross an out-of-memory"
    if largest:
        subtitle += f"; largest batch that fits: {largest}"
    return finish(chart, title, subtitle, {"curve": curve, "ceiling": limits, "crashes": crashes})


_COLUMNS = (("batch", "Local batch"), ("value", "Peak"), ("low", "Low (90 %)"), ("high", "High (90 %)"))


def _ceiling_name(kind: str) -> str:
    return "memory of a rank" if kind == DEFAULT_INSTANCE_TYPE else f"memory of {kind}"


def _prefix(kind: str) -> str:
    return "" if kind == DEFAULT_INSTANCE_TYPE else f"{kind} "
