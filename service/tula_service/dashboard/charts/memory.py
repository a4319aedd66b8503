"""Memory of a rank: predicted against local batch size, and measured by rank and component."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tula_service.dashboard.charts import vega
from tula_service.dashboard.charts.vega import PALETTE, Row, Spec
from tula_service.domain import MemoryReading
from tula_wire import DEFAULT_INSTANCE_TYPE, Job, Recommendation, Run
from tula_wire.format import configuration

ALARM: Final = PALETTE[6]
_COMPONENTS: Final = ("parameters", "gradients", "optimizer", "activations", "batch", "not attributed")


def memory(job: Job, recommendation: Recommendation) -> Spec:
    """Peak memory of one rank (equation 3, fitted) against local batch size."""
    title = f"{job.name}: memory of a rank"
    found = {
        (c.configuration.instance_type, c.configuration.local_batch_size): c.memory_bytes
        for c in recommendation.candidates
        if c.memory_bytes is not None
    }
    if not found:
        return vega.message(title, "No memory reading yet: the first profiling runs bring them.")
    read = {
        (c.configuration.instance_type, c.configuration.local_batch_size)
        for c in recommendation.candidates
        if c.profiled
    }
    ceilings = {c.instance_type: c.memory_bytes_per_rank for c in job.spec.cluster if c.memory_bytes_per_rank}
    unit = vega.bytes_unit([*(e.value for e in found.values()), *ceilings.values()])
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
    batches = {"values": sorted({row["batch"] for row in curve}), "format": "d", "labelOverlap": True}
    binary = {"type": "log", "base": 2, "nice": False}
    x = vega.field("batch:Q", title="Local batch size (examples a rank and micro-step)", scale=binary, axis=batches)
    y = vega.field("value:Q", title=f"Peak memory ({unit.name})", scale={"zero": True}, axis={"tickCount": 6})
    look = {"domain": kinds, "range": list(PALETTE[: len(kinds)])}
    colour = vega.field("type", scale=look, legend=None if len(kinds) == 1 else vega.legend(kinds))
    tips = [vega.field(f"{name}:Q", format=",.3~g", title=head) for name, head in _COLUMNS]
    band = {"x": x, "y": vega.field("low:Q"), "y2": {"field": "high"}, "color": colour}
    point = {"x": x, "y": y, "color": colour, "fill": vega.filled_where("datum.read", colour), "tooltip": tips}
    layers = [
        vega.layer("curve", "area", band, opacity=0.16),
        vega.layer("curve", "line", {"x": x, "y": y, "color": colour}, strokeWidth=2),
        vega.layer("curve", "point", point, size=50, strokeWidth=1.8, filled=False),
    ]
    if limits:
        layers += _ceiling("ceiling", {"y": vega.field("value:Q")}, align="left", x=4, dy=-7)
    if crashes:
        crash = {"x": vega.field("batch:Q"), "y": vega.field("value:Q"), "tooltip": vega.field("label")}
        layers.append(
            vega.layer("crashes", "point", crash, shape="cross", angle=45, size=130, filled=True, color=ALARM)
        )
    chart = vega.layered(*layers)
    largest = ", ".join(f"{_prefix(kind)}{size}" for kind, size in sorted(recommendation.max_local_batch_size.items()))
    subtitle = "Band holds 90 %, filled points were profiled; the dashed line is the ceiling, a cross an out-of-memory"
    if largest:
        subtitle += f"; largest batch that fits: {largest}"
    return vega.finish(chart, title, subtitle, {"curve": curve, "ceiling": limits, "crashes": crashes})


_COLUMNS = (("batch", "Local batch"), ("value", "Peak"), ("low", "Low (90 %)"), ("high", "High (90 %)"))


def _ceiling(data: str, at: Spec, **text: Any) -> list[Spec]:
    """A dashed line with its label."""
    return [
        vega.layer(data, "rule", at, strokeDash=[6, 3], strokeWidth=2, color=ALARM),
        *vega.outlined(data, at | {"text": vega.field("label")}, fontStyle="italic", **text),
    ]


def _ceiling_name(kind: str) -> str:
    return "memory of a rank" if kind == DEFAULT_INSTANCE_TYPE else f"memory of {kind}"


def _prefix(kind: str) -> str:
    return "" if kind == DEFAULT_INSTANCE_TYPE else f"{kind} "


def rank_memory(run: Run, readings: Mapping[int, MemoryReading]) -> Spec:
    """Stacked components (equation 3) of each rank's peak; `readings` by rank, at least one."""
    sizes = [reading.peak_bytes for reading in readings.values()]
    capacities = [reading.capacity_bytes for reading in readings.values() if reading.capacity_bytes]
    unit = vega.bytes_unit([*sizes, *capacities])
    rows: list[Row] = []
    for rank, reading in sorted(readings.items()):
        for order, (part, size) in enumerate(zip(_COMPONENTS, _split(reading), strict=True)):
            if size > 0:
                row = {"rank": f"rank {rank}", "at": rank, "part": part, "order": order, "value": size / unit.size}
                rows.append(row | {"peak": reading.peak_bytes / unit.size})
    tips = [
        vega.field("rank", title="Rank"),
        vega.field("part", title="Part"),
        vega.field("value:Q", title=unit.name, format=",.3~g"),
        vega.field("peak:Q", title=f"Peak ({unit.name})", format=",.3~g"),
    ]
    y = vega.field("rank", sort={"field": "at", "op": "min"}, title=None)
    bars = {"y": y, "tooltip": tips, **vega.stacked(rows, _COMPONENTS, f"Peak memory ({unit.name})")}
    layers = [vega.layer("ranks", "bar", bars)]
    if capacities:
        layers += _ceiling("capacity", {"x": vega.field("value:Q")}, align="right", baseline="top", dx=-5, y=3)
    chart = vega.layered(*layers, height={"step": max(22, min(60, 220 // len(readings)))})
    title = f"{run.id}, {configuration(run.configuration)}: memory by rank"
    ceiling = [{"value": min(capacities) / unit.size, "label": "memory of a rank"}] if capacities else []
    subtitle = f"Highest peak of each rank; the greatest is {max(sizes) / unit.size:.3g} {unit.name}"
    return vega.finish(chart, title, subtitle, {"ranks": rows, "capacity": ceiling})


def _split(reading: MemoryReading) -> list[int]:
    """Bytes of each of `_COMPONENTS`; they add up to the peak unless the components alone exceed it."""
    known = [
        reading.parameter_bytes or 0,
        reading.gradient_bytes or 0,
        reading.optimizer_bytes or 0,
        reading.activation_bytes or 0,
        reading.batch_bytes or 0,
    ]
    return [*known, max(0, reading.peak_bytes - sum(known))]
