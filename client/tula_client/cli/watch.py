"""`tula watch` and `tula open`: a job's events as they come, and its page."""

from __future__ import annotations

from typing import Annotated

import typer

from tula_client._client import Client
from tula_client.cli.output import JobName, Json, escaped
from tula_client.handle import find_job
from tula_wire import Event
from tula_wire.text import printable


def add_to(app: typer.Typer) -> None:
    """Give `app` these commands."""
    app.command("watch")(watch)
    app.command("open")(open_)


def watch(job: JobName, as_json: Json = False) -> None:
    """Print each event of a job on one line, from the first on; ends with Ctrl-C. --json prints whole events."""
    with Client() as client:
        for event in client.events(find_job(client, job), last_id=0):
            print(escaped(event.model_dump_json()) if as_json else printable(event_line(event)), flush=True)


def open_(job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="A job's id, or its name.")] = None) -> None:
    """Open the dashboard, or a job's page, in a browser, and print its address."""
    with Client() as client:
        page = client.url + ("/" if job is None else f"/jobs/{find_job(client, job)}")
    print(page)
    typer.launch(page)


def event_line(event: Event) -> str:
    """An event in one line."""
    data, run = event.data, f" {event.run_id}" if event.run_id else ""
    text = next((str(data[name]) for name in ("sentence", "message", "plan_reason", "purpose") if data.get(name)), "")
    state = str(data.get("state", "")).replace("_", " ")
    if not text and not state:
        plain = {name: value for name, value in data.items() if isinstance(value, (str, int, float))}
        text = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in plain.items()) or "changed"
    return f"{event.at.astimezone():%H:%M:%S} {event.kind}{run}: {': '.join(part for part in (state, text) if part)}"
