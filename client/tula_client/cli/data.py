"""`tula plot` and `tula export`: charts and tables."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from tula_client._client import Client
from tula_client._errors import MissingExtraError, UsageError
from tula_client.cli import mlflow_runs
from tula_client.cli.output import JobName, Json, emit
from tula_client.plots import write_file
from tula_client.tables import Row, Table

Format = Literal["csv", "parquet", "json"]


def add_to(app: typer.Typer) -> None:
    """Give `app` these commands."""
    app.command("plot")(plot)
    app.command("export")(export)


def plot(
    job: JobName,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write: .png, .svg or .json (Vega-Lite).")],
    chart: Annotated[
        str, typer.Option(help="frontier, tradeoff, memory, step_breakdown, accuracy or quality.")
    ] = "tradeoff",
    quantity: Annotated[Literal["time", "cost"], typer.Option(help="Quantity that the chart tradeoff draws.")] = "time",
    as_json: Json = False,
) -> None:
    """Draw a chart of a job into a file."""
    with Client() as client:
        client.handle(job).plot(chart, output, quantity=quantity)
    emit({"written": str(output)}, f"Wrote {output}.", as_json)


def export(
    job: JobName,
    what: Annotated[Table, typer.Option("--table", help="Which table; telemetry is the first rank's.")] = "candidates",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File: .csv, .parquet or .json.")] = None,
    to: Annotated[
        Literal["mlflow"] | None, typer.Option(help="Write runs to the store in MLFLOW_TRACKING_URI.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a table of a job; without --output, as CSV on standard output. Or its runs `--to mlflow`."""
    if to is not None:
        _export_runs(job, what, output, as_json)
        return
    kind = _format(output, as_json)
    with Client() as client:
        rows = client.handle(job).rows(what)
    if kind == "parquet":
        content = _parquet(rows)
    else:
        content = (_csv(rows) if kind == "csv" else json.dumps(rows, indent=2, allow_nan=False) + "\n").encode()
    if output is None:
        sys.stdout.write(content.decode())
        return
    write_file(output, content)
    text = f"Wrote {len(rows)} row{'s' if len(rows) != 1 else ''} to {output}."
    emit({"written": str(output), "rows": len(rows)}, text, as_json)


def _export_runs(job: str, what: Table, output: Path | None, as_json: bool) -> None:
    if output is not None or what != "candidates":
        raise UsageError("--to mlflow writes the job's runs: leave out --output and --table")
    with Client() as client:
        name, count = mlflow_runs.write(client, job)
    text = f"Wrote {count} run{'s' if count != 1 else ''} to the MLflow experiment {name!r}."
    emit({"experiment": name, "runs": count}, text, as_json)


def _format(output: Path | None, as_json: bool) -> Format:
    if output is None:
        return "json" if as_json else "csv"
    kinds: dict[str, Format] = {".csv": "csv", ".parquet": "parquet", ".json": "json"}
    kind = kinds.get(output.suffix.lower())
    if kind is None:
        raise UsageError(f"--output: {output.name!r} must end in one of {', '.join(kinds)}")
    return kind


def _csv(rows: Sequence[Row]) -> str:
    """RFC 4180 with line feeds only; an empty table has no heading."""
    text = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(text, names, lineterminator="\n")
    if names:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _parquet(rows: Sequence[Row]) -> bytes:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingExtraError("a Parquet file", "notebook") from None
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), buffer)
    return buffer.getvalue()
