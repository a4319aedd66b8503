"""Training runs of a job side by side, by one column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tula_service.dashboard.charts.drawing import field, finish, layer, legend, message
from tula_service.dashboard.charts.style import DASHES, HEIGHT, PALETTE, WIDTH, Row, Spec
from tula_wire import Job, Run, TelemetrySeries

Over = Literal["epoch", "step"]
_MOST_NAMED = 24
_FEW = 80


@dataclass(frozen=True)
class QualityRun:
    """A training run and the series by which it is judged."""

    run: Run
    series: TelemetrySeries


def quality_chart(job: Job, runs: Sequence[QualityRun], *, logarithmic: bool = False, over: Over = "epoch") -> Spec:
    """One column of several runs over epochs or steps, a colour per method, or per run where no method is named."""
    title = f"{job.name}: training runs"
    drawn = [each for each in runs if any(value is not None for value in each.series.values)]
    if not drawn:
        return message(title, "No training run has reported this yet.")
    column = drawn[0].series.column
    name = column.replace("_", " ")
    listed = {each.run.id: _run_row(each.run) for each in drawn}
    methods = sorted({row["method"] for row in listed.values()})
    rows: list[Row] = [
        {"run": each.run.id, "step": step, "value": float(f"{value:.6g}")}
        for each in drawn
        for step, value in zip(each.series.steps, each.series.values, strict=True)
        if value is not None
    ]
    named = len(methods) <= _MOST_NAMED
    positive = all(row["value"] > 0 for row in rows)
    scale = {"type": "log" if positive else "symlog", "nice": False} if logarithmic else {"zero": False}
    # Points carry the tooltip; only those of few short lines are seen.
    seen = named and len(rows) < _FEW * len(drawn)
    look = {"scale": {"domain": methods, "range": [PALETTE[i % 8] for i in range(len(methods))]}}
    dash = {"scale": {"domain": methods, "range": [list(DASHES[(i + i // 8) % 8]) for i in range(len(methods))]}}
    keyed = {"legend": legend(methods) if named else None}
    encoding = {
        "x": field(f"{over}:Q", title=over.capitalize(), scale={"nice": False}, axis={"tickCount": 10}),
        "y": field("value:Q", title=name.capitalize(), scale=scale),
        "color": field("method:N", **look, **keyed),
        "detail": field("run:N"),
        "tooltip": [
            field("method:N", title="Method"),
            field("batch:Q", title="Global batch"),
            field("epoch:Q", title="Epoch", format=".1f"),
            field("step:Q", title="Step", format=","),
            field("value:Q", title=name.capitalize(), format=",.4~g"),
            field("run:N", title="Run"),
        ],
    }
    if named:
        encoding["strokeDash"] = field("method:N", **dash, **keyed)
    point = {"opacity": 1, "size": 24, "filled": True} if seen else {"opacity": 0, "size": 90}
    lines = layer("points", "line", encoding, strokeWidth=2 if named else 1, opacity=1 if named else 0.7, point=point)
    # Sent once a run, not once a point.
    of_run = {"data": {"name": "runs"}, "key": "run", "fields": ["method", "batch"]}
    epoch = f"(datum.step + 1) * datum.batch / {job.spec.dataset.size}"
    lines["transform"] = [{"lookup": "run", "from": of_run}, {"calculate": epoch, "as": "epoch"}]
    count = "1 training run" if len(drawn) == 1 else f"{len(drawn)} training runs"
    smooth = "; of long series the median of each stretch" if any(each.series.downsampled for each in drawn) else ""
    subtitle = f"{name.capitalize()} of {count}{smooth}{'' if named else '; the pointer names a line'}"
    chart = {**lines, "width": WIDTH, "height": HEIGHT}
    return finish(chart, title, subtitle, {"runs": list(listed.values()), "points": rows})


def _run_row(run: Run) -> Row:
    return {"run": run.id, "method": run.method or run.id, "batch": run.configuration.global_batch_size}
