"""Defines the commands of the service: `tula serve`, `tula migrate`, `tula token` and `tula prune`."""

from __future__ import annotations

import json
import logging.config
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import sqlalchemy
import typer
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tula_service.api.services import MULTIPROCESS_VARIABLE
from tula_service.errors import ServiceError
from tula_service.logs import logging_config
from tula_service.settings import Settings, SettingsError
from tula_service.store import Store
from tula_service.store.migrations import check_schema, is_empty, upgrade_schema
from tula_service.usecases.access import Principal, issue_token, revoke_token, token_state, visible_tokens
from tula_service.usecases.jobs import prune_store
from tula_wire import Scope

logger = logging.getLogger("tula")

_OPERATOR = Principal(name="command line", scope="admin")
_DATABASE = typer.Option("--database", help="SQLite file or postgresql+psycopg:// URL. [env: TULA_DATABASE]")
_Database = Annotated[str | None, _DATABASE]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

token = typer.Typer(name="token", help="Create, list and revoke API tokens.", no_args_is_help=True)


def serve(
    database: _Database = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. [env: TULA_HOST]")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 selects a free port. [env: TULA_PORT]")] = None,
    workers: Annotated[int | None, typer.Option(help="Number of worker processes. [env: TULA_WORKERS]")] = None,
    log_format: Annotated[
        str | None, typer.Option(help="json, text or auto (text on a terminal, else json). [env: TULA_LOG_FORMAT]")
    ] = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Reject every change; anyone may see the accuracy page.")
    ] = False,
    migrate: Annotated[
        bool, typer.Option("--migrate", help="Upgrade the schema of an existing database before starting.")
    ] = False,
) -> None:
    """Start the service. A missing SQLite file is created; an older schema is upgraded only with --migrate."""
    given = {"host": host, "port": port, "workers": workers, "log_format": log_format, "read_only": read_only or None}
    with _opened(database, migrate=migrate, create=True, **given) as (settings, store):
        _refuse_strangers_without_a_token(settings, store)
        place = _describe_place(store.engine.url)
        store.close()  # each worker opens its own store
        _refuse_a_taken_port(settings)
        logs = logging_config(settings.log_level, settings.log_format, terminal=sys.stderr.isatty())
        logging.config.dictConfig(logs)
        logger.info("Dashboard: %s. Database: %s.", _dashboard(settings), place)
        os.environ.update(settings.to_environment())
        with _shared_folder(settings):
            uvicorn.run(
                "tula_service.app:create_app_from_environment",
                factory=True,
                host=settings.host,
                port=settings.port,
                workers=settings.workers,
                http=_Protocol,
                access_log=False,
                log_config=logs,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=settings.shutdown_s,
                timeout_worker_healthcheck=15,  # importing a worker's modules may take seconds on a busy machine
                ws="none",  # no route uses WebSockets, and importing their library slows the start
                backlog=2048,
            )


class _Protocol(HttpToolsProtocol):
    """Ends event streams at shutdown, since uvicorn waits for open responses before it runs the lifespan's shutdown."""

    def shutdown(self) -> None:
        self.app_state["stopping"].set()
        super().shutdown()


def migrate(database: _Database = None) -> None:
    """Create or upgrade the database's schema, then exit; run this before starting a new version of the service."""
    with _opened(database, migrate=True):
        typer.echo("The database schema is up to date.")


def prune(
    database: _Database = None,
    older_than_days: Annotated[
        float | None, typer.Option(help="Delete jobs that were archived more than this many days ago.")
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Delete; without this flag, only print what would be deleted.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Delete jobs that were archived long ago, old events and old telemetry, and finish interrupted deletions."""
    with _opened(database) as (settings, store):
        days = settings.retention_days if older_than_days is None else older_than_days
        done = prune_store(
            store,
            older_than=timedelta(days=days),
            actor=_OPERATOR,
            dry_run=not yes,
            telemetry_older_than=timedelta(days=settings.telemetry_days) if settings.telemetry_days else None,
            archive=settings.archive,
        )
    if as_json:
        deleted = {"jobs": done.job_ids, "events": done.num_events, "telemetry": done.telemetry, "deleted": yes}
        typer.echo(json.dumps(deleted))
        return
    months = f" and {len(done.telemetry)} months of telemetry" if done.telemetry else ""
    text = f"{'Deleted' if yes else 'Would delete'} {len(done.job_ids)} jobs and {done.num_events} events{months}."
    typer.echo(text + ("" if yes else " Add --yes to delete them."))


@token.command("create")
def token_create(
    name: Annotated[str, typer.Argument(help="Name of the token, such as its user or its purpose.")],
    scope: Annotated[str, typer.Option(help="Scope of the token: agent, read, user or admin.")] = "user",
    project: Annotated[
        str | None, typer.Option(help="Project of a read or user token (default: the default project).")
    ] = None,
    job: Annotated[str | None, typer.Option(help="Id of the job to which an agent token is bound.")] = None,
    expires_in_days: Annotated[
        float | None, typer.Option(min=0.0, help="Lifetime in days (default: the token does not expire).")
    ] = None,
    database: _Database = None,
    as_json: _Json = False,
) -> None:
    """Create a token and print its secret, which is never shown again."""
    with _opened(database, create=True) as (_, store):
        if scope not in get_args(Scope):
            raise SettingsError(f"--scope is {scope!r}: use agent, read, user or admin.")
        issued = issue_token(
            store,
            _OPERATOR,
            name=name,
            scope=cast(Scope, scope),
            project=project,
            job_id=job,
            expires_in_s=None if expires_in_days is None else expires_in_days * 86_400,
        )
    if as_json:
        typer.echo(json.dumps({"id": issued.token.id, "scope": scope, "secret": issued.secret}))
        return
    typer.echo(issued.secret)
    typer.echo(f"Created token {issued.token.id} ({scope}). Save its secret now: it is not shown again.", err=True)


@token.command("list")
def token_list(database: _Database = None, as_json: _Json = False) -> None:
    """List tokens, newest first, without their secrets."""
    with _opened(database) as (_, store):
        rows = [
            {
                "id": token.id,
                "name": token.name,
                "scope": token.scope,
                "project": token.project,
                "job": token.job_id,
                "state": token_state(token, store.now()),
                "last_used_at": token.last_used_at.isoformat() if token.last_used_at else None,
            }
            for token in visible_tokens(store, _OPERATOR)
        ]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    for row in rows:
        typer.echo("  ".join(str(value if value is not None else "-") for value in row.values()))


@token.command("revoke")
def token_revoke(token_id: str, database: _Database = None, as_json: _Json = False) -> None:
    """Revoke a token permanently."""
    with _opened(database) as (_, store):
        revoke_token(store, _OPERATOR, token_id)
    typer.echo(json.dumps({"id": token_id, "state": "revoked"}) if as_json else f"Revoked {token_id}.")


@contextmanager
def _opened(
    database: str | None, *, migrate: bool = False, create: bool = False, **flags: Any
) -> Iterator[tuple[Settings, Store]]:
    """After upgrading the schema (`migrate`) or creating it in an empty database (`create`), yield settings and store.

    If a ServiceError or SettingsError is raised here or in the caller's block, print it and exit with code 2.
    """
    try:
        settings = Settings.read(database=database, **flags)
        with closing(Store.open(settings.database)) as store:
            if migrate or (create and is_empty(store.engine)):
                upgrade_schema(store.engine)
            check_schema(store.engine)
            yield settings, store
    except (ServiceError, SettingsError) as error:
        typer.echo(f"tula: {error}", err=True)
        raise typer.Exit(2) from error


def _refuse_strangers_without_a_token(settings: Settings, store: Store) -> None:
    """Raise SettingsError if other machines could reach the service before the first token has been created."""
    with store.reading() as tx:
        if not settings.on_loopback and not tx.tokens.ever_made():
            raise SettingsError(
                f"The service cannot listen on {settings.host} until a token exists: first run `tula token create "
                "NAME --scope admin` with the same --database."
            )


def _dashboard(settings: Settings) -> str:
    """Return the dashboard's address or, if uvicorn selects a free port, a reference to uvicorn's log line."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{settings.port}/" if settings.port else "on the port that the next line shows"


def _describe_place(url: sqlalchemy.URL) -> str:
    """Return the path of a SQLite database, or the URL of another database without its password."""
    return str(Path(url.database or "").absolute()) if url.get_backend_name() == "sqlite" else url.render_as_string()


@contextmanager
def _shared_folder(settings: Settings) -> Iterator[None]:
    """Create a temporary folder for sharing metrics between several workers, unless the environment names a folder."""
    if settings.workers == 1 or MULTIPROCESS_VARIABLE in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="tula-workers-", ignore_cleanup_errors=True) as folder:
        os.environ[MULTIPROCESS_VARIABLE] = folder
        yield


def _refuse_a_taken_port(settings: Settings) -> None:
    """Raise SettingsError if another process listens on the port, since uvicorn would only log this error."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            raise SettingsError(
                f"Cannot listen on {settings.host}:{settings.port} ({error.strerror}): use another --host or --port."
            ) from error
