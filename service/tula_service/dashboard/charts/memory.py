"""Memory of a rank: predicted against local batch size, and measured by rank and component."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tula_service.dashboard.charts import vega
from tula_service.dashboard.charts.vega import PALETTE, Row, Spec
from tula_service.domain import MemoryReading
from tula_wire import DEFAULT_INSTANCE_TYPE, Job, Recommendation, Run
from tula_wire.format import configuration, size

_ALARM: Final = PALETTE[6]
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
    profiled = [c.configuration for c in recommendation.candidates if c.profiled]
    read = {(each.instance_type, each.local_batch_size) for each in profiled}
    ceilings = {c.instance_type: c.memory_bytes_per_rank for c in job.spec.cluster if c.memory_bytes_per_rank}
    unit = vega.bytes_unit([*(e.value for e in found.values()), *ceilings.values()])
    curve: list[Row] = [
        {"type": kind, "batch": batch, "read": (kind, batch) in read} | unit.interval(estimate)
        for (kind, batch), estimate in sorted(found.items())
    ]
    limits: list[Row] = [
        {"value": most / unit.size, "label": "memory of " + ("a rank" if kind == DEFAULT_INSTANCE_TYPE else kind)}
        for kind, most in ceilings.items()
    ]
    over = [run.configuration for run in job.plan if run.state == "out_of_memory"]
    crashes: list[Row] = [
        {
            "batch": each.local_batch_size,
            "value": ceilings.get(each.instance_type, curve[-1]["high"] * unit.size) / unit.size,
            "label": f"out of memory at {each.local_batch_size} a rank",
        }
        for each in over
    ]
    kinds = sorted({row["type"] for row in curve})
    batches = {"values": sorted({row["batch"] for row in curve}), "format": "d", "labelOverlap": True}
    binary = {"type": "log", "base": 2, "nice": False}
    x = vega.field("batch:Q", title="Local batch size (examples a rank and micro-step)", scale=binary, axis=batches)
    y = vega.field("value:Q", title=f"Peak memory ({unit.name})", scale={"zero": True}, axis={"tickCount": 6})
    look = {"domain": kinds, "range": list(PALETTE[: len(kinds)])}
    colour = vega.field("type", scale=look, legend=None if len(kinds) == 1 else vega.legend(kinds))
    heads = {"batch": "Local batch", "value": "Peak", "low": "Low (90 %)", "high": "High (90 %)"}
    tips = [vega.field(f"{name}:Q", format=",.3~g", title=head) for name, head in heads.items()]
    band = {"x": x, "y": vega.field("low:Q"), "y2": {"field": "high"}, "color": colour}
    point = {"x": x, "y": y, "color": colour, "fill": vega.filled_where("datum.read", colour), "tooltip": tips}
    crash = {"x": vega.field("batch:Q"), "y": vega.field("value:Q"), "tooltip": vega.field("label")}
    layers = [
        vega.layer("curve", "area", band, opacity=0.16),
        vega.layer("curve", "line", {"x": x, "y": y, "color": colour}, strokeWidth=2),
        vega.layer("curve", "point", point, size=50, strokeWidth=1.8, filled=False),
        *vega.ruled("ceiling", {"y": vega.field("value:Q")}, color=_ALARM, align="left", x=4, dy=-7),
        vega.layer("crashes", "point", crash, shape="cross", angle=45, size=130, filled=True, color=_ALARM),
    ]
    largest = ", ".join(
        f"{'' if kind == DEFAULT_INSTANCE_TYPE else f'{kind} '}{batch}"
        for kind, batch in sorted(recommendation.max_local_batch_size.items())
    )
    subtitle = "Band holds 90 %, filled points were profiled; the dashed line is the ceiling, a cross an out-of-memory"
    if largest:
        subtitle += f"; largest batch that fits: {largest}"
    datasets = {"curve": curve, "ceiling": limits, "crashes": crashes}
    return vega.finish(vega.layered(*layers), title, subtitle, datasets)


def rank_memory(run: Run, readings: Mapping[int, MemoryReading]) -> Spec:
    """Stacked components (equation 3) of each rank's peak; `readings` by rank, at least one."""
    peaks = [reading.peak_bytes for reading in readings.values()]
    capacities = [reading.capacity_bytes for reading in readings.values() if reading.capacity_bytes]
    unit = vega.bytes_unit([*peaks, *capacities])
    rows: list[Row] = [
        {
            "rank": f"rank {rank}",
            "at": rank,
            "part": part,
            "order": order,
            "value": held / unit.size,
            "peak": reading.peak_bytes / unit.size,
        }
        for rank, reading in sorted(readings.items())
        for order, (part, held) in enumerate(zip(_COMPONENTS, _split(reading), strict=True))
        if held > 0
    ]
    tips = [
        vega.field("rank", title="Rank"),
        vega.field("part", title="Part"),
        vega.field("value:Q", title=unit.name, format=",.3~g"),
        vega.field("peak:Q", title=f"Peak ({unit.name})", format=",.3~g"),
    ]
    y = vega.field("rank", sort={"field": "at", "op": "min"}, title=None)
    bars = {"y": y, "tooltip": tips, **vega.stacked(rows, _COMPONENTS, f"Peak memory ({unit.name})")}
    chart = vega.layered(
        vega.layer("ranks", "bar", bars),
        *vega.ruled("capacity", {"x": vega.field("value:Q")}, color=_ALARM, align="right", baseline="top", dx=-5, y=3),
        height={"step": max(22, min(60, 220 // len(readings)))},
    )
    title = f"{run.id}, {configuration(run.configuration)}: memory by rank"
    ceiling = [{"value": min(capacities) / unit.size, "label": "memory of a rank"}] if capacities else []
    subtitle = f"Highest peak of each rank; the greatest is {size(max(peaks))}"
    return vega.finish(chart, title, subtitle, {"ranks": rows, "capacity": ceiling})


def _split(reading: MemoryReading) -> list[int]:
    """Bytes of each of `_COMPONENTS`; they add up to the peak unless the components alone exceed it."""
    parts = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes", "batch_bytes")
    known = [getattr(reading, part) or 0 for part in parts]
    return [*known, max(0, reading.peak_bytes - sum(known))]
