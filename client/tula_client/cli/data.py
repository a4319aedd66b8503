"""Implements `tula plot` and `tula export`, which write charts and tables to files and export runs to MLflow."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from tula_client._client import Client, JobHandle
from tula_client._errors import TulaError, UsageError
from tula_client._flows import Row, Table, check_suffix, needs_extra, write_file
from tula_client.cli.output import JobName, Json, emit
from tula_wire import Run
from tula_wire.text import printable_lines

_STATUS = {
    "claimed": "RUNNING",
    "running": "RUNNING",
    "succeeded": "FINISHED",
    "out_of_memory": "FAILED",
    "failed": "FAILED",
    "cancelled": "KILLED",
}
"""Maps the states of a run to MLflow's statuses; pending runs have no status and are not exported."""
_SERIES = ("step_time_s", "compute_time_s", "comm_time_s", "exposed_comm_time_s", "input_time_s", "skew_s")
_TAG = "tula.run_id"
_MOST_METRICS = 1000  # MLflow's limit for one request

Metrics = dict[tuple[Any, Any], Any]
"""Maps a metric's name and step to its value, which may be None."""


def plot(
    job: JobName,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write: .png, .svg or .json (Vega-Lite).")],
    chart: Annotated[
        str, typer.Option(help="One of frontier, tradeoff, memory, step_breakdown, options, accuracy and quality.")
    ] = "tradeoff",
    quantity: Annotated[Literal["time", "cost"], typer.Option(help="Quantity that the tradeoff chart shows.")] = "time",
    as_json: Json = False,
) -> None:
    """Draw a chart of a job and write it to a file."""
    with Client() as client:
        client.handle(job).plot(chart, output, quantity=quantity)
    emit({"written": str(output)}, f"Wrote {output}.", as_json)


def export(
    job: JobName,
    what: Annotated[
        Table, typer.Option("--table", help="Table to write; telemetry covers only the first rank.")
    ] = "candidates",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write: .csv, .parquet or .json.")
    ] = None,
    to: Annotated[
        Literal["mlflow"] | None, typer.Option(help="Write runs to the MLflow store that MLFLOW_TRACKING_URI names.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a table of a job, by default as CSV to standard output, or export its runs with `--to mlflow`."""
    if to is not None:
        _export_runs(job, what, output, as_json)
        return
    kind = ("json" if as_json else "csv") if output is None else check_suffix(output, ".csv", ".parquet", ".json")
    with Client() as client:
        rows = client.handle(job).rows(what)
    if kind == "parquet":
        content = _parquet(rows)
    else:
        content = (_csv(rows) if kind == "csv" else json.dumps(rows, indent=2, allow_nan=False) + "\n").encode()
    if output is None:
        sys.stdout.write(printable_lines(content.decode()))
        return
    write_file(output, content)
    text = f"Wrote {len(rows)} row{'s' if len(rows) != 1 else ''} to {output}."
    emit({"written": str(output), "rows": len(rows)}, text, as_json)


def _export_runs(job: str, what: Table, output: Path | None, as_json: bool) -> None:
    if output is not None or what != "candidates":
        raise UsageError("--to mlflow exports the job's runs: omit --output and --table")
    with Client() as client:
        name, count = _write_mlflow(client.handle(job))
    text = f"Wrote {count} run{'s' if count != 1 else ''} to the MLflow experiment {name!r}."
    emit({"experiment": name, "runs": count}, text, as_json)


def _csv(rows: Sequence[Row]) -> str:
    """Return the rows as CSV (RFC 4180) with LF line endings; an empty table has no header."""
    text = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(text, names, lineterminator="\n")
    if names:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _parquet(rows: Sequence[Row]) -> bytes:
    with needs_extra("a Parquet file"):
        import pyarrow
        import pyarrow.parquet
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), buffer)
    return buffer.getvalue()


def _write_mlflow(handle: JobHandle) -> tuple[str, int]:
    """Export to MLflow every run that has started; return the name of the experiment and the number of runs.

    The experiment has the name of the job. Runs from an earlier export are updated. Raises `MissingExtraError` if
    MLflow is not installed, and `TulaError` if MLflow fails.
    """
    with needs_extra("an export to MLflow", "mlflow"):
        import mlflow
    name, measured = handle.status().name, _measured(handle)
    predicted = {
        candidate.configuration: candidate for candidate in handle.recommendation().candidates if not candidate.spot
    }
    runs = [run for run in reversed(handle.runs()) if run.state in _STATUS]
    try:
        store = mlflow.MlflowClient()
        existing = store.get_experiment_by_name(name)
        experiment = store.create_experiment(name) if existing is None else existing.experiment_id
        for run in runs:
            single = {"mean_step_time_s": run.step_time_s, "predicted_step_time_s": run.predicted_step_time_s}
            for column in ("memory_bytes", "cost_usd", "total_time_s"):
                estimate = getattr(predicted.get(run.configuration), column, None)
                single[f"predicted_{column}"] = estimate and estimate.value
            _write_run(store, experiment, run, measured[run.id] | {(key, 0): value for key, value in single.items()})
    except Exception as error:  # MLflow, its database and the network raise many types of exception
        raise TulaError(f"the runs could not be written to MLflow: {' '.join(str(error).split())}") from error
    return name, len(runs)


def _measured(handle: JobHandle) -> defaultdict[str, Metrics]:
    """Return the measurements and logged values of each run's first rank, by run id."""
    by_run: defaultdict[str, Metrics] = defaultdict(dict)
    for row in handle.rows("samples"):
        if row["rank"] == 0:
            by_run[str(row["run_id"])] |= {(name, row["step"]): row[name] for name in _SERIES}
    for row in handle.rows("telemetry"):
        by_run[str(row["run_id"])][row["column"], row["step"]] = row["value"]
    return by_run


def _write_run(store: Any, experiment: str, run: Run, metrics: Metrics) -> None:
    from mlflow.entities import Metric, Param

    existing = store.search_runs([experiment], f"tags.`{_TAG}` = '{run.id}'", max_results=1)
    start = int((run.started_at or run.created_at).timestamp() * 1000)
    id = (existing[0] if existing else store.create_run(experiment, start, {_TAG: run.id}, run.id)).info.run_id
    about = {"job_id": run.job_id, "kind": run.kind, "state": run.state, "method": run.method, "message": run.message}
    for key, value in about.items():
        if value is not None:
            store.set_tag(id, f"tula.{key}", value)
    at = run.configuration
    params = at.as_json() | {"world_size": at.world_size, "global_batch_size": at.global_batch_size}
    params |= params.pop("options")
    store.log_batch(id, params=[Param(key, str(value)) for key, value in params.items()])
    points = [Metric(key, float(value), start, step) for (key, step), value in metrics.items() if value is not None]
    for first in range(0, len(points), _MOST_METRICS):
        store.log_batch(id, metrics=points[first : first + _MOST_METRICS])
    status = _STATUS[run.state]
    if status == "RUNNING":
        store.update_run(id, status)
    else:
        store.set_terminated(id, status, int(run.finished_at.timestamp() * 1000) if run.finished_at else None)
