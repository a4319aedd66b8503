"""`tula watch` and `tula open`: a live view of a job in the terminal, its events as JSON lines, or its page."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from tula_client._client import Client
from tula_client._errors import NotFoundError, ServiceUnavailableError, ServiceUnreachableError, TulaError
from tula_client.cli import format
from tula_client.cli.jobs import job_view
from tula_client.cli.output import JobName, Json, console, emit, escaped
from tula_client.handle import find_job
from tula_wire import Event, Run, TelemetrySeries

BARS = "▁▂▃▄▅▆▇█"
COLUMNS = ("step_time_s", "loss", "grad_norm", "gradient_variability", "validation_accuracy")
RUNS = 8
QUIET_S = 5.0
"""Seconds without an event after which the view is redrawn, as leases and rates change without events."""


def add_to(app: typer.Typer) -> None:
    """Give `app` these commands."""
    app.command("watch")(watch)
    app.command("open")(open_)


def watch(
    job: JobName,
    once: Annotated[bool, typer.Option("--once", help="Print one view and exit.")] = False,
    as_json: Json = False,
) -> None:
    """Show a job live: its plan, its runs, and series of the newest run; ends with the job or with Ctrl-C.

    With --json, prints every event of the job as one line.
    """
    with Client() as client:
        job_id = find_job(client, job)
        if once:
            plain = {"job": client.job(job_id), "runs": client.runs(job_id, limit=RUNS).runs}
            emit(plain, view(client, job_id, ()), as_json)
        elif as_json:
            for event in client.events(job_id, last_id=0):
                print(escaped(event.model_dump_json()), flush=True)
        else:
            live_view(client, job_id)


def open_(job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="A job's id, or its name.")] = None) -> None:
    """Open the dashboard, or a job's page, in a browser, and print its address."""
    with Client() as client:
        page = client.url + ("/" if job is None else f"/jobs/{find_job(client, job)}")
    print(page)
    typer.launch(page)


def view(client: Client, job_id: str, events: Sequence[Event]) -> RenderableType:
    """The job, series of its newest active run, and the last events."""
    job = client.job(job_id)
    runs = client.runs(job_id, limit=RUNS).runs
    parts: list[RenderableType] = [job_view(job, runs)]
    active = next((run for run in runs if run.state == "running"), runs[0] if runs else None)
    if active is not None:
        parts += _series_view(client, active)
    if events:
        parts.append(Text())
        parts += [Text(event_line(event), style="dim") for event in events[-5:]]
    return Group(*parts)


def sparkline(values: Sequence[float | None]) -> str:
    """The shape of a series in one line; a gap is a space."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    span = high - low or 1.0
    return "".join(
        " " if value is None else BARS[min(len(BARS) - 1, int((value - low) / span * len(BARS)))] for value in values
    )


def live_view(client: Client, job_id: str, *, quiet_s: float = QUIET_S) -> None:
    """Redraw the view at each event and every `quiet_s` seconds, until the job has ended."""
    seen: list[Event] = []
    arrived = threading.Event()
    # The stream blocks until an event arrives, so a daemon thread reads it.
    threading.Thread(target=_listen, args=(client, job_id, seen, arrived), daemon=True).start()
    last = view(client, job_id, ())
    with Live(last, console=console(), refresh_per_second=4) as live:
        while True:
            try:
                ended = client.job(job_id).state in ("finished", "archived")
                last = view(client, job_id, seen)
                live.update(last)
                if ended:
                    return
            except NotFoundError:
                return
            except (ServiceUnreachableError, ServiceUnavailableError) as error:
                # Keep the last view, with the reason, until the service is back.
                live.update(Group(last, Text(f"{error}; retrying", style="yellow")))
            arrived.wait(quiet_s)
            arrived.clear()
            time.sleep(min(0.5, quiet_s))  # draw a burst of events once


def _listen(client: Client, job_id: str, seen: list[Event], arrived: threading.Event) -> None:
    # Without the stream the view still polls; when the view ends, it closes the client.
    with contextlib.suppress(TulaError, RuntimeError, OSError):
        for event in client.events(job_id):
            seen.append(event)
            del seen[:-50]
            arrived.set()


def _series_view(client: Client, run: Run) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for name in COLUMNS:
        with contextlib.suppress(NotFoundError):  # a run has the columns that its script logs
            series = client.series(run.id, name, max_points=48)
            if series.values:
                lines.append(Text.assemble((f"{name:<22}", "cyan"), sparkline(series.values), "  ", _last(series)))
    return [Text(), Text(f"Run {run.id} ({run.kind}, {run.state})", style="bold"), *lines] if lines else []


def _last(series: TelemetrySeries) -> str:
    last = next((value for value in reversed(series.values) if value is not None), None)
    if last is None:
        return ""
    text = format.seconds(last) if series.column.endswith("_s") else f"{last:.4g}"
    return f"{text} at step {series.steps[-1]}"


def event_line(event: Event) -> str:
    """An event in one line."""
    data, run = event.data, f" {event.run_id}" if event.run_id else ""
    text = next((str(data[name]) for name in ("sentence", "message", "plan_reason", "purpose") if data.get(name)), "")
    state = str(data.get("state", "")).replace("_", " ")
    if not text and not state:
        plain = {name: value for name, value in data.items() if isinstance(value, (str, int, float))}
        text = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in plain.items()) or "changed"
    return f"{event.at.astimezone():%H:%M:%S} {event.kind}{run}: {': '.join(part for part in (state, text) if part)}"
