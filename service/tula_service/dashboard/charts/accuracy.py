"""Draws charts of measured against predicted step times, and of the coverage of prediction intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, median

from tula_service.dashboard.charts import vega
from tula_service.dashboard.charts.vega import FAINT, HEIGHT, PALETTE, Row, Spec
from tula_wire import Configuration, Job, Ledger, LedgerEntry, Run
from tula_wire.format import configuration as describe_configuration
from tula_wire.format import percent

_KINDS = ("inside the interval", "outside the interval", "no interval kept")
_COLOURS, _SHAPES = (PALETTE[2], PALETTE[1], PALETTE[0]), ("circle", "diamond", "square")
_NORMAL = NormalDist()
_Z90 = _NORMAL.inv_cdf(0.95)
_NONE_FOLLOWED = "No training run has followed a recommendation yet.\nTo start one, use tula run."


def accuracy(job: Job, ledger: Ledger, trainings: Sequence[Run] = ()) -> Spec:
    """Return a chart of measured against predicted step times, whose diagonal marks exact predictions.

    Runs in the plan and in `trainings` are included if their step times were predicted before they were measured.
    """
    title = f"{job.name}: predicted against measured"
    rows = {entry.run_id: row for entry in ledger.entries if (row := _entry_row(entry)) is not None}
    for run in [*job.plan, *trainings]:
        if run.id not in rows and run.step_time_s is not None and run.predicted_step_time_s:
            rows[run.id] = _row(run.configuration, run.predicted_step_time_s, run.step_time_s) | {"kind": _KINDS[2]}
    if rows:
        return _agreement(title, list(rows.values()))
    return vega.message(title, "No run with a prediction has been measured yet.")


def accuracy_of_all(entries: Sequence[tuple[str, LedgerEntry]]) -> Spec:
    """Return a chart like that of `accuracy` for the entries of all jobs, each paired with a name for its tooltip."""
    title = "All jobs: predicted against measured"
    named_rows = [(name, row) for name, entry in entries if (row := _entry_row(entry)) is not None]
    rows = [row | {"configuration": f"{name}: {row['configuration']}"} for name, row in named_rows]
    return _agreement(title, rows) if rows else vega.message(title, _NONE_FOLLOWED)


def calibration(entries: Sequence[LedgerEntry]) -> Spec:
    """Return a chart of the coverage of 5 % to 95 % prediction intervals; the diagonal marks exact coverage."""
    title = "All jobs: coverage of prediction intervals"
    scores = [score for entry in entries if (score := _score(entry)) is not None]
    if not scores:
        return vega.message(title, _NONE_FOLLOWED)
    rows = []
    for stated in range(5, 100, 5):
        share = stated / 100
        inside = sum(score <= _NORMAL.inv_cdf(0.5 + share / 2) for score in scores) / len(scores)
        chance = _Z90 * math.sqrt(share * (1 - share) / len(scores))
        rows.append({"stated": share, "inside": inside, "low": max(0, share - chance), "high": min(1, share + chance)})
    percents = {"format": "%", "tickCount": 5}
    x = vega.field("stated:Q", title="Interval stated", scale={"domain": [0, 1]}, axis=percents)
    y = vega.field("inside:Q", title="Measurements inside", scale={"domain": [0, 1]}, axis=percents)
    tips = [
        vega.field("stated:Q", title="Interval", format=".0%"),
        vega.field("inside:Q", title="Inside", format=".1%"),
    ]
    band = {"x": x, "y": vega.field("low:Q"), "y2": {"field": "high"}}
    diagonal = {"x": x, "y": vega.field("stated:Q")}
    point = {"size": 50, "filled": True, "color": PALETTE[0]}
    chart = vega.layered(
        vega.layer("levels", "area", band, opacity=0.2, color=FAINT, tooltip=None),
        vega.layer("levels", "line", diagonal, strokeDash=[5, 4], color=FAINT, tooltip=None),
        vega.layer("levels", "line", {"x": x, "y": y, "tooltip": tips}, color=PALETTE[0], point=point),
        width=HEIGHT + 60,
    )
    count = "1 run" if len(scores) == 1 else f"{len(scores)} runs"
    subtitle = f"{count}; above the grey band, intervals are too wide; below the grey band, they are too narrow"
    return vega.finish(chart, title, subtitle, {"levels": rows})


def _score(entry: LedgerEntry) -> float | None:
    """Return the deviation of the measurement from the prediction in standard deviations, or None if unknown.

    The deviation is computed from logarithms. The standard deviation is derived from the end of the interval on the
    measurement's side.
    """
    predicted, measured = entry.predicted_step_time_s, entry.measured_step_time_s
    if predicted is None or measured is None or not 0 < predicted.low < predicted.value < predicted.high:
        return None
    end = predicted.high if measured >= predicted.value else predicted.low
    return _Z90 * math.log(measured / predicted.value) / math.log(end / predicted.value)


def _agreement(title: str, rows: list[Row]) -> Spec:
    unit = vega.time_unit(max(row["measured"], row["predicted"]) for row in rows)
    for row in rows:
        for name in ("measured", "predicted", "low", "high"):
            row[name] = None if row[name] is None else row[name] / unit.size
    kinds = {row["kind"] for row in rows}
    values = [row[name] for row in rows for name in ("measured", "predicted")]
    least, most = min(values) * 0.9, max(values) * 1.1
    axis = vega.axis_between((least, most))
    x = vega.field("predicted:Q", title=f"Predicted step time ({unit.name})", **axis)
    y = vega.field("measured:Q", title=f"Measured step time ({unit.name})", **axis)
    tips = [
        vega.field("configuration", title="Configuration"),
        vega.field("predicted:Q", format=",.3~g", title="Predicted"),
        vega.field("measured:Q", format=",.3~g", title="Measured"),
        vega.field("error:Q", format="+.1%", title="Error"),
    ]
    drawn = [kind for kind in _KINDS if kind in kinds]
    legend = {"title": None, "orient": "top", "columns": 2, "symbolOpacity": 1, "values": drawn}
    colour = vega.field("kind", scale={"domain": list(_KINDS), "range": list(_COLOURS)}, legend=legend)
    shape = vega.field("kind", scale={"domain": list(_KINDS), "range": list(_SHAPES)}, legend=legend)
    interval = {"x": vega.field("low:Q"), "x2": {"field": "high"}, "y": y, "color": colour}
    point = {"x": x, "y": y, "color": colour, "shape": shape, "tooltip": tips}
    # Intervals are clipped, since those of predictions before any run span a factor of a hundred.
    with_interval: Spec = {"where": "datum.low !== null", "strokeWidth": 1.5, "opacity": 0.6, "clip": True}
    chart = vega.layered(
        vega.layer("agreement", "line", {"x": x, "y": y}, strokeDash=[5, 4], color=FAINT),
        vega.layer("runs", "rule", interval, **with_interval),
        vega.layer("runs", "point", point, filled=True, size=70, opacity=1),
        width=HEIGHT + 60,
    )
    error = median(abs(row["error"]) for row in rows)
    runs = "1 run" if len(rows) == 1 else f"{len(rows)} runs"
    subtitle = f"{runs}, median error {percent(error)}; on the dashed line, predictions are exact"
    line = [{"predicted": least, "measured": least}, {"predicted": most, "measured": most}]
    return vega.finish(chart, title, subtitle, {"runs": rows, "agreement": line})


def _entry_row(entry: LedgerEntry) -> Row | None:
    predicted, measured = entry.predicted_step_time_s, entry.measured_step_time_s
    if measured is None or predicted is None or entry.configuration is None:
        return None
    interval = {"low": predicted.low, "high": predicted.high, "kind": _KINDS[0 if entry.within_interval else 1]}
    return _row(entry.configuration, predicted.value, measured) | interval


def _row(configuration: Configuration, predicted: float, measured: float) -> Row:
    error = measured / predicted - 1
    values = {"predicted": predicted, "low": None, "high": None, "measured": measured, "error": error}
    return {"configuration": describe_configuration(configuration), **values}
