"""Memory of a run by rank and component, beside what the accelerator has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol

from tula_service.dashboard.charts.candidates import configuration_name
from tula_service.dashboard.charts.grammar import alt
from tula_service.dashboard.charts.spec import (
    PALETTE,
    WIDTH,
    Row,
    Spec,
    bytes_unit,
    finish,
    one_at_a_time,
    outlined,
)
from tula_service.dashboard.charts.stacked import stacked
from tula_wire import Run

_PARTS: Final = ("parameters", "gradients", "optimizer", "activations", "batch", "not told apart")
_ALARM: Final = PALETTE[6]


class Reading(Protocol):
    """Peak memory of one rank, bytes; None where a component was not read."""

    @property
    def peak_bytes(self) -> int: ...
    @property
    def parameter_bytes(self) -> int | None: ...
    @property
    def gradient_bytes(self) -> int | None: ...
    @property
    def optimizer_bytes(self) -> int | None: ...
    @property
    def activation_bytes(self) -> int | None: ...
    @property
    def batch_bytes(self) -> int | None: ...
    @property
    def capacity_bytes(self) -> int | None: ...


@one_at_a_time
def rank_memory(run: Run, readings: Mapping[int, Reading]) -> Spec:
    """Stacked components (equation 3) of each rank's peak; `readings` by rank, at least one."""
    sizes = [reading.peak_bytes for reading in readings.values()]
    capacities = [reading.capacity_bytes for reading in readings.values() if reading.capacity_bytes]
    unit = bytes_unit([*sizes, *capacities])
    rows: list[Row] = []
    for rank, reading in sorted(readings.items()):
        for order, (part, size) in enumerate(zip(_PARTS, _split(reading), strict=True)):
            if size > 0:
                row = {"rank": f"rank {rank}", "at": rank, "part": part, "order": order, "value": size / unit.size}
                rows.append(row | {"peak": reading.peak_bytes / unit.size})
    y = alt.Y("rank:N").sort(alt.EncodingSortField(field="at", op="min")).title(None)
    bars = (
        alt.Chart(alt.NamedData("ranks"))
        .mark_bar()
        .encode(
            y=y,
            tooltip=[
                alt.Tooltip("rank:N", title="Rank"),
                alt.Tooltip("part:N", title="Part"),
                alt.Tooltip("value:Q", title=unit.name, format=",.3~g"),
                alt.Tooltip("peak:Q", title=f"Peak ({unit.name})", format=",.3~g"),
            ],
            **stacked(rows, _PARTS, f"Peak memory ({unit.name})"),
        )
    )
    layers: list[Any] = [bars]
    if capacities:
        line = alt.Chart(alt.NamedData("capacity"))
        layers.append(line.mark_rule(strokeDash=[6, 3], strokeWidth=2, color=_ALARM).encode(x="value:Q"))
        text = line.encode(x="value:Q", text="label:N")
        layers += outlined(text, align="right", baseline="top", dx=-5, y=3, fontStyle="italic")
    tall = max(22, min(60, 220 // len(readings)))
    chart = alt.layer(*layers).properties(width=WIDTH, height=alt.Step(tall))
    title = f"{run.id}, {configuration_name(run.configuration)}: memory by rank"
    ceiling = [{"value": min(capacities) / unit.size, "label": "memory of a rank"}] if capacities else []
    subtitle = f"Highest peak of each rank; the greatest is {max(sizes) / unit.size:.3g} {unit.name}"
    return finish(chart, title, subtitle, {"ranks": rows, "capacity": ceiling})


def _split(reading: Reading) -> list[int]:
    """Bytes of each of `_PARTS`; they add up to the peak unless the components alone exceed it."""
    known = [
        reading.parameter_bytes or 0,
        reading.gradient_bytes or 0,
        reading.optimizer_bytes or 0,
        reading.activation_bytes or 0,
        reading.batch_bytes or 0,
    ]
    return [*known, max(0, reading.peak_bytes - sum(known))]
