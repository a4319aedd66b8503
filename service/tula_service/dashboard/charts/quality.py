"""Training runs of a job side by side, by one column: methods of large-batch training, or runs."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from tula_service.dashboard.charts.catalog import QualityRun, method_name
from tula_service.dashboard.charts.drawing import finish, legend, message
from tula_service.dashboard.charts.style import DASHES, HEIGHT, PALETTE, WIDTH, Row, Spec
from tula_wire import Job


def quality_chart(job: Job, runs: Sequence[QualityRun], logarithmic: bool) -> Spec:
    """See `catalog.quality_chart`."""
    title = f"{job.name}: training runs"
    drawn = [each for each in runs if any(value is not None for value in each.series.values)]
    if not drawn:
        return message(title, "No training run has reported this yet.")
    column = drawn[0].series.column
    rows: list[Row] = []
    for each in drawn:
        examples = each.run.configuration.global_batch_size
        for step, value in zip(each.series.steps, each.series.values, strict=True):
            if value is not None:
                epoch = (step + 1) * examples / job.spec.dataset.size
                run_id = each.run.id
                method = method_name(each.run) if each.run.method else run_id
                rows.append({"run": run_id, "method": method, "epoch": epoch, "value": value, "batch": examples})
    methods = sorted({row["method"] for row in rows})
    few = len(rows) < 80 * len(drawn)
    positive = all(row["value"] > 0 for row in rows)
    scale = {"type": "log" if positive else "symlog", "nice": False} if logarithmic else {"zero": False}
    lines = (
        alt.Chart(alt.NamedData("runs"), width=WIDTH, height=HEIGHT)
        .mark_line(
            strokeWidth=2, point={"opacity": 1, "size": 24, "filled": True} if few else {"opacity": 0, "size": 90}
        )
        .encode(
            x=alt.X("epoch:Q").title("Epoch").scale(nice=False).axis(tickCount=10),
            y=alt.Y("value:Q").title(column.replace("_", " ").capitalize()).scale(**scale),
            color=alt.Color("method:N")
            .scale(domain=methods, range=[PALETTE[i % 8] for i in range(len(methods))])
            .legend(legend(methods)),
            strokeDash=alt.StrokeDash("method:N")
            .scale(domain=methods, range=[list(DASHES[(i + i // 8) % 8]) for i in range(len(methods))])
            .legend(legend(methods)),
            detail="run:N",
            tooltip=[
                alt.Tooltip("method:N", title="Method"),
                alt.Tooltip("batch:Q", title="Global batch"),
                alt.Tooltip("epoch:Q", title="Epoch", format=".1f"),
                alt.Tooltip("value:Q", title=column, format=",.4~g"),
                alt.Tooltip("run:N", title="Run"),
            ],
        )
    )
    count = "1 training run" if len(drawn) == 1 else f"{len(drawn)} training runs"
    smooth = "; of long series the median of each stretch" if any(each.series.downsampled for each in drawn) else ""
    return finish(lines, title, f"{column.replace('_', ' ').capitalize()} of {count}{smooth}", {"runs": rows})
