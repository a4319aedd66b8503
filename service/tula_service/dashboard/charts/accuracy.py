"""Predicted against measured: every run that had a prediction, beside the line where both agree."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from tula_service.dashboard.charts.candidates import configuration_name
from tula_service.dashboard.charts.drawing import finish, message
from tula_service.dashboard.charts.style import FAINT, HEIGHT, PALETTE, Row, Spec, time_unit
from tula_wire import Configuration, Job, Ledger, Run

_KINDS = ("inside the interval", "outside the interval", "no interval kept")
_SHAPES = ("circle", "diamond", "square")


def accuracy(job: Job, ledger: Ledger, trainings: Sequence[Run] = ()) -> Spec:
    """Step time measured against step time predicted before the run; on the diagonal the prediction was right.

    Runs of the plan and `trainings` count, where a prediction preceded the measurement.
    """
    title = f"{job.name}: predicted against measured"
    rows = _rows(ledger, [*job.plan, *trainings])
    if not rows:
        return message(title, _nothing([*job.plan, *trainings]))
    unit = time_unit(max(row["measured"], row["predicted"]) for row in rows)
    for row in rows:
        for name in ("measured", "predicted", "low", "high"):
            row[name] = None if row[name] is None else row[name] / unit.size
    kinds = {row["kind"] for row in rows}
    values = [row[name] for row in rows for name in ("measured", "predicted")]
    least, most = min(values) * 0.9, max(values) * 1.1
    scale = alt.Scale(type="log", domain=[least, most], nice=False)
    x = alt.X("predicted:Q").scale(scale).title(f"Predicted step time ({unit.name})").axis(tickCount=5)
    y = alt.Y("measured:Q").scale(scale).title(f"Measured step time ({unit.name})").axis(tickCount=5)
    tips = [
        alt.Tooltip("configuration:N", title="Configuration"),
        alt.Tooltip("predicted:Q", format=",.3~g", title="Predicted"),
        alt.Tooltip("measured:Q", format=",.3~g", title="Measured"),
        alt.Tooltip("error:Q", format="+.1%", title="Error"),
    ]
    looks = [
        look for look in zip(_KINDS, (PALETTE[2], PALETTE[1], PALETTE[0]), _SHAPES, strict=True) if look[0] in kinds
    ]
    names, colours, shapes = (list(each) for each in zip(*looks, strict=True))
    colour = alt.Color("kind:N").scale(domain=names, range=colours)
    points = alt.Chart(alt.NamedData("runs"))
    layers = [
        alt.Chart(alt.NamedData("agreement")).mark_line(strokeDash=[5, 4], color=FAINT).encode(x=x, y=y),
        points.transform_filter("datum.low !== null")
        .mark_rule(strokeWidth=1.5, opacity=0.6)
        .encode(x=alt.X("low:Q"), x2="high:Q", y=y, color=colour),
        points.mark_point(filled=True, size=70, opacity=1).encode(
            x=x,
            y=y,
            color=colour.legend(title=None, orient="top", columns=2, symbolOpacity=1),
            shape=alt.Shape("kind:N").scale(domain=names, range=shapes),
            tooltip=tips,
        ),
    ]
    chart = alt.layer(*layers).properties(width=HEIGHT + 60, height=HEIGHT)
    errors = sorted(abs(row["error"]) for row in rows)
    runs = "1 run" if len(rows) == 1 else f"{len(rows)} runs"
    subtitle = f"{runs}, median error {errors[len(errors) // 2]:.1%}; on the dashed line the prediction was right"
    line = [{"predicted": least, "measured": least}, {"predicted": most, "measured": most}]
    return finish(chart, title, subtitle, {"runs": rows, "agreement": line})


def _nothing(runs: Sequence[Run]) -> str:
    if not any(run.step_time_s for run in runs):
        return "No run has been measured yet."
    if any(run.predicted_step_time_s for run in runs):
        return "The runs that have a prediction are not measured yet."
    return "The runs measured so far came before the first fit:\nthere was no prediction to compare them with."


def _rows(ledger: Ledger, runs: Sequence[Run]) -> list[Row]:
    rows: list[Row] = []
    seen = set()
    for entry in ledger.entries:
        predicted = entry.predicted_step_time_s
        if entry.measured_step_time_s is None or predicted is None or entry.configuration is None:
            continue
        seen.add(entry.run_id)
        kind = _KINDS[0 if entry.within_interval else 1]
        interval = (predicted.value, predicted.low, predicted.high)
        rows.append(_row(entry.configuration, interval, entry.measured_step_time_s, kind))
    return rows + [
        _row(run.configuration, (run.predicted_step_time_s, None, None), run.step_time_s, _KINDS[2])
        for run in runs
        if run.id not in seen and run.step_time_s is not None and run.predicted_step_time_s
    ]


def _row(
    configuration: Configuration,
    predicted: tuple[float, float | None, float | None],
    measured: float,
    kind: str,
) -> Row:
    value, low, high = predicted
    return {
        "configuration": configuration_name(configuration),
        "predicted": value,
        "low": low,
        "high": high,
        "measured": measured,
        "error": measured / value - 1,
        "kind": kind,
    }
