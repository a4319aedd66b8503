"""`tula upload DIR`: sends the requests that agents wrote to disk while the service was unavailable."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from tula_agent.ship.spool import TAKEN, read_records, spool_files
from tula_agent.ship.transport import Transport

_CONFLICT = 409  # the run is no longer in that state; no measurement is lost


@dataclass
class Uploaded:
    """Result of an upload. Sending a row twice is harmless, since the service identifies rows by rank, boot id and
    sequence.
    """

    files: int = 0
    requests: int = 0
    refused: int = 0
    left: int = 0
    why: str = ""


def upload_spool(directory: Path, transport: Transport) -> Uploaded:
    """Send the requests in `directory` in the order in which they were written; delete a file once the service has
    accepted all its requests.

    A file with a refused request is kept, since another service or token may accept it. The upload stops at the first
    request that cannot be delivered.
    """
    done = Uploaded()
    for path in spool_files(directory):
        taken = path
        try:
            if path.suffix != TAKEN:  # the agent's process writes to a new file from now on
                taken = path.rename(path.with_name(f"{path.name}.{secrets.token_hex(4)}{TAKEN}"))
            requests = list(read_records(taken))
        except FileNotFoundError:  # another upload has taken or sent it
            continue
        refused = done.refused
        for request in requests:
            reply = transport.send(request)
            if reply.verdict == "retry":
                done.left += 1
                done.why = reply.detail or f"status {reply.status}"
                return done
            done.requests += 1
            if reply.verdict == "refused" and not (request.method == "PATCH" and reply.status == _CONFLICT):
                done.refused += 1
                done.why = reply.detail or f"status {reply.status}"
        done.files += 1
        if done.refused == refused:
            taken.unlink(missing_ok=True)  # another upload may have sent it too
    return done


def upload(
    directory: Annotated[Path, typer.Argument(help="Directory of the agents' spool files (TULA_SPOOL_DIR).")],
    url: Annotated[str, typer.Option(envvar="TULA_URL", help="Address of the service.")] = "http://127.0.0.1:8321",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Send the measurements that agents stored on disk while the service was unavailable."""
    if not directory.is_dir():
        raise typer.BadParameter(f"{directory} is not a directory: use the job's TULA_SPOOL_DIR")
    transport = Transport(url.rstrip("/"), os.environ.get("TULA_TOKEN"), 30.0)
    try:
        done = upload_spool(directory, transport)
    finally:
        transport.close()
    if as_json:
        typer.echo(json.dumps(asdict(done)))
    else:
        typer.echo(f"Sent {done.requests} requests from {done.files} files.")
        if done.refused:
            remedy = "check TULA_URL and TULA_TOKEN, then upload the requests again or delete their files"
            typer.echo(
                f"{done.refused} request(s) were refused ({done.why}) and remain in {directory}: {remedy}.", err=True
            )
        if done.left:
            typer.echo(f"The service at {url} does not respond ({done.why}): start it and try again.", err=True)
    raise typer.Exit(1 if done.left or done.refused else 0)
