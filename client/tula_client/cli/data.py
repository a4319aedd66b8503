"""`tula plot`, `tula export` and `tula import`: charts and tables out, measurements in."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from tula_client._client import Client
from tula_client._errors import MissingExtraError, TulaError, UsageError
from tula_client.cli import csv_samples, format, mlflow_runs
from tula_client.cli.output import JobName, Json, emit
from tula_client.handle import all_runs, find_job
from tula_client.plots import write_file
from tula_client.tables import Row, Table
from tula_wire import Run, RunCreate, RunPatch

Format = Literal["csv", "parquet", "json"]


def add_to(app: typer.Typer) -> None:
    """Give `app` these commands."""
    app.command("plot")(plot)
    app.command("export")(export)
    app.command("import")(import_)


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
    what: Annotated[Table, typer.Option("--table", help="Which table.")] = "candidates",
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


def import_(
    job: JobName,
    file: Annotated[Path, typer.Argument(metavar="FILE.csv", help="One line per step; - reads standard input.")],
    as_json: Json = False,
) -> None:
    """Store steps that were measured without the agent; a repeated import stores nothing twice.

    Columns: num_nodes, local_batch_size, step_time_s; optional: ranks_per_node, grad_accum_steps,
    instance_type, compute_time_s, exposed_comm_time_s, input_time_s, peak_bytes.
    """
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{file} is not UTF-8 text: save it as CSV in UTF-8") from None
    try:
        measured = csv_samples.parse(io.StringIO(text))
    except csv.Error as error:
        raise UsageError(f"{file} is not a CSV file ({error})") from None
    boot_id = "csv-" + hashlib.sha256(text.encode()).hexdigest()[:16]
    with Client() as client:
        found = client.job(find_job(client, job))
        csv_samples.check(measured, found.spec)
        sent = [_send(client, found.id, one, boot_id) for one in measured]
    rows, new = sum(len(one.rows) for one in measured), sum(stored for _, stored in sent)
    configurations = "; ".join(format.configuration(one.configuration) for one in measured)
    text = (
        f"{new} new steps, {rows - new} known before, of {len(sent)} configuration{'s' if len(sent) != 1 else ''}: "
        f"{configurations}."
    )
    plain = {"job_id": found.id, "rows": rows, "new": new, "known": rows - new, "runs": [run.id for run, _ in sent]}
    emit(plain, text, as_json)


def _send(client: Client, job_id: str, one: csv_samples.Measured, boot_id: str) -> tuple[Run, int]:
    """Store the steps of one configuration as a profiling run; (the run, the number of new steps).

    Continues the run of an earlier import of the same file. If not all steps can be stored, cancels the run.
    """
    mark = f"import:{boot_id}"
    earlier = [run for run in all_runs(client, job_id) if run.method == mark and run.configuration == one.configuration]
    run = next((run for run in earlier if run.state in ("claimed", "running", "succeeded")), None)
    if run is None:
        wanted = RunCreate(kind="profile", configuration=one.configuration, method=mark, holder=mark)
        run = client.create_run(job_id, wanted)
    if run.state == "succeeded":
        return run, 0
    try:
        stored = sum(client.send_samples(run.id, batch).stored for batch in one.batches(boot_id))
        return client.patch_run(run.id, RunPatch(state="succeeded", holder=mark)), stored
    except BaseException:
        with contextlib.suppress(TulaError):
            client.patch_run(run.id, RunPatch(state="cancelled", holder=mark, message="Its import did not finish."))
        raise


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
